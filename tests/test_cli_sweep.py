"""`tl-neuron-attr sweep`: what it prints, writes and refuses, and its exit codes; on a tiny model."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from sweep_prompts import LINES, files, write
from test_cli_evaluate import _SEPARATE
from typer.testing import CliRunner

import tl_neuron_attr as na
from tl_neuron_attr import cli_sweep, models, sweep_store
from tl_neuron_attr.cli import app, main

pytestmark = pytest.mark.any_release

USUAL = ("--k", "5", "--part-size", "4", "--no-leading-space")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A tiny model in the embedded one's place, and a file of prompts; what was asked for."""
    asked: list[Any] = []
    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    monkeypatch.setattr(models, "load_demo_model", lambda backend=None: asked.append(backend) or model)
    monkeypatch.setattr(models, "load_model", lambda *given: asked.append(given) or model)
    path, out = write(tmp_path / "p.jsonl", LINES[:6]), tmp_path / "out"
    return SimpleNamespace(model=model, asked=asked, path=path, out=out)


def swept(demo: SimpleNamespace, *more: str) -> Any:
    return CliRunner(**_SEPARATE).invoke(app, ["sweep", str(demo.path), "--out", str(demo.out), *USUAL, *more])


def test_it_writes_what_the_library_writes_and_goes_on(demo: SimpleNamespace) -> None:
    result = swept(demo, "--query", "--batch-size", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{demo.out}: 6 of 6 prompts have a result"
    assert lines[1].startswith("this run: 6 prompts in ") and lines[1].endswith(" prompts a second")
    assert "sweep" not in result.stderr  # no terminal, no progress
    options = {"k": 5, "part_size": 4, "leading_space": False, "query": True, "batch_size": 2}
    na.sweep(demo.model, demo.path, demo.out.with_name("library"), progress=False, **options)
    assert files(demo.out) == files(demo.out.with_name("library"))
    again = swept(demo, "--query", "--batch-size", "3", "--json", "-")
    record = json.loads(again.stdout)
    assert (again.exit_code, record["n_prompts"], record["n_new"], record["errors"]) == (0, 6, 0, [])
    (demo.out / "neurons" / "part-00001.parquet").unlink()
    assert "this run: 2 prompts in" in swept(demo, "--query", "--batch-size", "2").stdout
    assert files(demo.out) == files(demo.out.with_name("library"))


def test_prompts_without_a_result_give_exit_code_3(demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    write(demo.path, [LINES[0], "not json", {"prompt": "t5", "answer": "zebra"}])
    for _ in range(2):
        result = swept(demo)
        assert result.exit_code == 3
        assert result.stdout.splitlines()[:2] == [
            f"{demo.out}: 1 of 3 prompts have a result",
            f"2 without one, named in {demo.out / 'errors.jsonl'}",
        ]
    named = [json.loads(line) for line in (demo.out / "errors.jsonl").read_text().splitlines()]
    assert [error["line"] for error in named] == [2, 3]
    (demo.out / "errors.jsonl").unlink()
    whole = sweep_store.write_whole

    def full(path: Path, data: bytes) -> None:
        if path.name == "errors.jsonl":
            raise OSError(28, "No space left on device", str(path))
        whole(path, data)

    monkeypatch.setattr(sweep_store, "write_whole", full)
    told = swept(demo)
    assert told.exit_code == 3
    assert f"{demo.path}, line 2: not JSON" in told.stderr
    assert "2 without one, named above" in told.stdout


def test_the_model_asked_for(demo: SimpleNamespace) -> None:
    assert (
        swept(demo, "--model", "tiny", "--backend", "hooked", "--convention", "paper", "--mix-lengths").exit_code == 0
    )
    assert demo.asked == [("tiny", "hooked")]
    assert na.load_sweep(demo.out).settings["convention"] == "paper"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input ends with."""
    code = main(["sweep", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("tl-neuron-attr: error: ").rstrip("\n")


def test_bad_input_is_one_line_before_a_model_is_loaded(
    demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(demo).exit_code == 0
    demo.asked.clear()
    capsys.readouterr()
    path, out = str(demo.path), str(demo.out)
    other = write(demo.path.with_name("other.jsonl"), LINES[1:7])
    for given, told in {
        (path, "--out", out, *USUAL, "--k", "6"): "k was 5 and is now 6",
        (path, "--out", out, *USUAL, "--query"): "query was False and is now True",
        (path, "--out", out, *USUAL, "--convention", "paper"): "convention was 'exact' and is now 'paper'",
        (str(other), "--out", out, *USUAL): "prompts was sha256:",
        (path, "--out", out, "--k", "0"): "--k is 0: ask for 1 or more",
        (path, "--out", out, "--batch-size", "0"): "--batch-size is 0: ask for 1 or more",
        (path, "--out", path): f"cannot write {path}: it is a file; give a folder",
        (path, "--out", out, "--json", "none/x.json"): "cannot write none/x.json: there is no folder none",
        ("none.jsonl", "--out", out): "cannot read none.jsonl: No such file or directory",
        ("none.txt", "--out", out): "none.txt ends in '.txt': prompts come as .jsonl, one JSON object a line, or",
        (path,): "Missing option '--out'",
    }.items():
        assert told in refused(capsys, *given)
    assert demo.asked == []


def test_a_folder_that_cannot_be_written_is_one_line(
    demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (demo.out).mkdir()
    (demo.out / "thesis.tex").write_text("")
    told = refused(capsys, str(demo.path), "--out", str(demo.out))
    assert told == f"{demo.out} holds 'thesis.tex' but no manifest of a sweep: give a new or an empty folder"
    told = refused(capsys, str(demo.path), "--out", str(demo.path / "under"))
    assert told == f"cannot write {demo.path / 'under'}: Not a directory"


@pytest.mark.parametrize("command", ["sweep", "summary"])
def test_help_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: tl-neuron-attr {command} " in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_defaults_are_the_librarys() -> None:
    """The command names them without importing what is slow."""
    command, library = (inspect.signature(call).parameters for call in (cli_sweep.sweep, na.sweep))
    for name in ("k", "query", "batch_size", "part_size", "leading_space", "progress"):
        assert command[name].default == library[name].default
    assert command["memory_budget"].default * 2**20 == library["memory_budget"].default
