"""`tl-neuron-attr evaluate`: what it prints, writes and refuses, on the embedded model, loaded once."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import tl_neuron_attr as na
from tl_neuron_attr import cli_evaluate, models
from tl_neuron_attr.cli import app, main

pytestmark = pytest.mark.any_release

FILE = """prompt,answer,type
The capital of France is,Paris,capital
The capital of Italy is,Rome,capital
Two and two
The month after June is,July,month
The month after May is,Antidisestablishment,month
The capital of Spain is,Madrid,capital
The month after July is,Paris,month
"""
METHODS = ("log_prob_increase", "norm")


@pytest.fixture(scope="module")
def demo_model() -> Any:
    return models.load_demo_model()


@pytest.fixture
def demo(demo_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The embedded model, loaded once, and a file of prompts; the names and backends that were asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(models, "load_demo_model", lambda backend=None: asked.append(backend) or demo_model)
    monkeypatch.setattr(models, "load_model", lambda *given: asked.append(given) or demo_model)
    path = tmp_path / "mine.csv"
    path.write_text(FILE)
    return SimpleNamespace(model=demo_model, asked=asked, path=str(path), folder=tmp_path)


def evaluated(demo: SimpleNamespace, *more: str) -> Any:
    given = ["evaluate", "--prompts", demo.path, "--methods", ",".join(METHODS), *more]
    return CliRunner(**_SEPARATE).invoke(app, given)


# click 8.2 always keeps the two streams apart; before, they must be told to be.
try:
    CliRunner(mix_stderr=False)  # type: ignore[call-arg]
    _SEPARATE = {"mix_stderr": False}
except TypeError:
    _SEPARATE = {}


def test_the_table_is_what_the_library_finds_and_fits_80_columns(demo: SimpleNamespace) -> None:
    result = evaluated(demo, "--json", str(demo.folder / "found.json"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("Zeroing the top 10 MLP neurons of SmolLM2-135M-Instruct by each method, 4")
    prompts, _ = na.read_prompts(demo.path)
    check = na.check_answers(demo.model, prompts, progress=False)
    found = na.compare_methods(demo.model, check.answerable, METHODS, progress=False)
    assert [one.answer for one in check.answerable] == [" Paris", " Rome", " July", " Madrid"]
    for row in found.rows:
        assert any(line.split()[:2] == [row.name, f"{row.mrr.value:.3f}"] for line in lines)
    one = found.of("log_prob_increase").log_prob
    wanted = (
        f"{one.value:.3f} {one.low:.3f} to {one.high:.3f} {one.fall:.3f} {one.fall_low:.3f} to {one.fall_high:.3f}"
    )
    assert f"log_prob_increase {wanted}" in [" ".join(line.split()) for line in lines]
    rows = [" ".join(line.split()) for line in lines]
    counts = check.counts().set_index("type")
    for name, of_type in (("capital", counts.loc["capital"]), ("month", counts.loc["month"]), ("all", counts.sum())):
        assert " ".join(map(str, [name, *of_type, of_type["answerable"]])) in rows
    assert "all 6 4 1 1 0 4" in rows
    back = na.MethodComparison.from_json(demo.folder / "found.json")
    assert back.neurons == found.neurons
    assert back.rows[1:3] != found.rows[1:3]  # seconds
    assert [row.mrr for row in back.rows] == [row.mrr for row in found.rows]


def test_bad_lines_are_named_and_progress_goes_to_standard_error(demo: SimpleNamespace) -> None:
    result = evaluated(demo)
    assert "mine.csv, line 4: 1 fields where the header names 3" in result.stderr
    assert "the answer ' Antidisestablishment' of 'The month after May is' is not one token" in result.stderr
    assert "comparing methods" in result.stderr and "comparing methods" not in result.stdout
    quiet = evaluated(demo, "--no-progress")
    assert quiet.stderr.count("\n") == 2
    seconds = quiet.stdout.index("\nSeconds")
    assert quiet.stdout[:seconds] == result.stdout[:seconds]


def test_json_instead_of_the_table_a_limit_a_seed_and_types(demo: SimpleNamespace) -> None:
    options = ("--json", "-", "--limit", "1", "--types", "capital", "--seed", "4", "--k", "3", "--backend", "bridge")
    first, again = (json.loads(evaluated(demo, *options, "--model", "tiny").stdout) for _ in range(2))
    assert demo.asked == [("tiny", "bridge")] * 2
    del first["seconds"], again["seconds"]
    assert first == again
    assert (first["k"], first["seed"], first["methods"]) == (3, 4, list(METHODS))
    assert [one["type"] for one in first["prompts"]] == ["capital"]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is an error: what is refused here is refused before any work."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_demo_model", refuse)
    monkeypatch.setattr(models, "load_model", refuse)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input ends with."""
    code = main(["evaluate", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1
    assert err.startswith("tl-neuron-attr: error: ")
    return err.removeprefix("tl-neuron-attr: error: ").rstrip("\n")


BAD = {
    "k": (["--k", "0"], "--k is 0: ask for 1 or more"),
    "limit": (["--limit", "-1"], "--limit is -1: ask for 1 or more"),
    "batch": (["--batch-size", "0"], "--batch-size is 0: ask for 1 or more"),
    "type": (
        ["--types", "capital,fruit"],
        "types=['capital', 'fruit']: choose one or more of language, capital, country, colour, number, month",
    ),
    "no type": (["--types", " ,"], "--types is ' ,': give names with commas between, or leave it out for all"),
    "twice": (
        ["--methods", "norm,norm"],
        "method 'norm' is given twice: each is one row, so compare its options in two calls",
    ),
    "no file": (["--prompts", "none.csv"], "cannot read none.csv: No such file or directory"),
    "folder": (["--json", "."], "cannot write .: it is a folder; give a file name"),
    "no folder": (["--json", "none/out.json"], "cannot write none/out.json: there is no folder none"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("no_model")
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[name]
    assert refused(capsys, *arguments) == message


@pytest.mark.usefixtures("no_model")
def test_all_methods_are_those_of_the_table() -> None:
    assert [na.methods_table().name.tolist(), list(na.METHODS)] == [cli_evaluate._methods(["all"])] * 2


def test_an_unknown_method_or_type_lists_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, "--methods", "nrom").startswith("unknown method 'nrom': choose one of log_prob_increase, ")
    path = tmp_path / "mine.csv"
    path.write_text("prompt,answer,type\nThe capital of France is,Paris,capital\n")
    line = refused(capsys, "--prompts", str(path), "--types", "month")
    assert line == f"no prompt of {path} has the type 'month': its types are 'capital'"
    path.write_text("prompt,answer\n")
    assert refused(capsys, "--prompts", str(path)) == f"{path} holds no prompt that can be used"


def test_prompts_that_the_model_does_not_answer_end_in_one_line(
    demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(demo.path).write_text("prompt,answer\nThe capital of France is,zebra\n")
    line = refused(capsys, "--prompts", demo.path, "--no-progress")
    assert line == (
        "the model answers none of the prompts, so nothing can be compared: AnswerCheck(1 prompts, "
        "SmolLM2-135M-Instruct: 0 answerable, 0 not one token, 1 not in the top 10, 0 below another word)"
    )


def test_help_shows_an_example_and_imports_nothing_heavy() -> None:
    result = CliRunner().invoke(app, ["evaluate", "--help"])
    assert result.exit_code == 0
    assert "tl-neuron-attr evaluate --types capital,month --limit 20" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
