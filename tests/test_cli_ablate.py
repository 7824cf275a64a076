"""`tl-neuron-attr ablate`: what it prints, writes and refuses, on the embedded model, loaded once."""

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import typer

import tl_neuron_attr as na
from tl_neuron_attr import cli_ablate, models, serialise
from tl_neuron_attr.cli import main
from tl_neuron_attr.cli_support import deliver

PROMPT = "The capital of France is"
LABELS = ("L27N846", "L23H4", "L29H1D46@4")


@pytest.fixture(scope="module")
def demo_model() -> Any:
    return models.load_demo_model()


@pytest.fixture
def demo(demo_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(models, "load_demo_model", lambda backend=None: print("Loaded") or demo_model)
    return demo_model


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_demo_model", refuse)
    monkeypatch.setattr(models, "load_model", refuse)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input ends with."""
    code = main(["ablate", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("tl-neuron-attr: error: ")
    return line.removeprefix("tl-neuron-attr: error: ")


def test_the_table_is_what_the_library_finds_and_fits_80_columns(demo: Any, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "effect.json"
    arguments = ["ablate", PROMPT, *LABELS, "--target", " Paris", "--controls", "5", "--seed", "3"]
    assert main([*arguments, "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "Loaded" in err and "Loaded" not in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert all(len(line) <= 80 for line in out.splitlines())
    trace = na.trace(demo, PROMPT, " Paris")
    ids = [na.MLPNeuron(27, 846), na.Head(23, 4), na.AttnNeuron(29, 1, 46, 4)]
    effect = na.ablation_effect(trace, ids, controls=5, seed=3)
    assert path.read_text(encoding="utf-8").rstrip("\n") == effect.to_json()
    assert lines[0] == f"'{PROMPT}' -> ' Paris'"
    assert f"Ablating {', '.join(LABELS)}" in lines
    fell = effect.of("log_prob")
    assert fell.change < -0.5
    assert fell.rank_among_controls == 1
    start = "log-probability (nats)"
    assert f"{start} {fell.before:.4f} {fell.after:.4f} {fell.change:+.4f} {fell.percent:+.1f}" in lines
    among = f"{fell.control_change:+.4f} {fell.control_min:+.4f} {fell.control_max:+.4f} {fell.z:.1f} 1 of 6"
    assert f"{start} {among}" in lines
    assert "The change among 5 draws of as many random neurons of the same layers" in lines
    ranks = effect.of("rank")
    assert any(line.startswith(f"rank {ranks.before:.0f} {ranks.after:.0f} {ranks.change:+.0f} ") for line in lines)


@pytest.mark.parametrize(
    ("given", "mode"),
    [("zero", na.Zero()), ("scale=-2", na.Scale(-2)), ("set=0.5", na.SetTo(0.5)), ("resample=", None)],
)
def test_modes_are_those_of_the_library(demo: Any, capsys: Any, given: str, mode: Any) -> None:
    other = "The capital of Italy is"
    if mode is None:
        given, mode = given + other, na.resample(demo, other)
    assert main(["ablate", PROMPT, "L27N846", "--mode", given, "--controls", "0", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    effect = na.ablation_effect(na.trace(demo, PROMPT), na.MLPNeuron(27, 846), mode)
    assert record["after"]["log_prob"] == effect.after.log_prob.tolist()
    assert record["protocol"]["mode"] == str(mode)
    assert record["controls"]["log_prob"] == []


def test_without_controls_there_is_one_table(demo: Any, capsys: Any) -> None:
    assert main(["ablate", PROMPT, "L27.mlp", "--controls", "0"]) == 0
    out = capsys.readouterr().out
    assert "random" not in out and "log-probability (nats)" in out


def test_a_source_alone_and_another_position(demo: Any, capsys: Any) -> None:
    arguments = ["ablate", PROMPT, "L23H4D38@3", "--scope", "source", "--controls", "0", "--json", "-"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    effect = na.ablation_effect(na.trace(demo, PROMPT), na.AttnNeuron(23, 4, 38, 3), scope="source")
    assert record["after"]["log_prob"] == effect.after.log_prob.tolist()
    assert main(["ablate", PROMPT, "L23H4", "--position", "2", "--controls", "0", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"][0]["position"] == 2


def test_the_heading_is_what_the_model_had_read(demo: Any, capsys: Any) -> None:
    assert main(["ablate", PROMPT, "L23H4", "--position", "-3", "--controls", "0"]) == 0
    assert capsys.readouterr().out.startswith("'The capital of' -> ")
    assert main(["explain", PROMPT, "--position", "2", "--k", "1"]) == 0
    assert capsys.readouterr().out.startswith("'The capital of' -> ")


class FullDisk(io.StringIO):
    """Standard output on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ablate", "--help"]])
def test_standard_output_that_cannot_be_written_is_one_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert main(arguments) == 2
    line = "tl-neuron-attr: error: cannot write to standard output: No space left on device\n"
    assert capsys.readouterr().err == line


class Infinite:
    """A result that strict JSON cannot hold."""

    def to_json(self, path: str | None = None) -> str:
        return serialise.dump({"value": math.inf}, path)


@pytest.mark.parametrize("json_", ["-", "file.json"])
def test_a_result_that_json_cannot_hold_is_one_line(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as ended:
        deliver(Infinite(), json_, lambda: "told")
    assert ended.value.exit_code == 2
    assert "a value is NaN or infinite, which strict JSON cannot hold" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_is_not_markup(demo: Any, capsys: Any) -> None:
    assert main(["ablate", "[bold]Paris[/bold] [/]", "L2N3", "--controls", "0"]) == 0
    assert capsys.readouterr().out.startswith("'[bold]Paris[/bold] [/]' -> ")


MODES = "choose zero, scale=FACTOR (such as scale=2), set=VALUE (such as set=0.5) or resample=PROMPT"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "L1N2"], "the prompt is empty: give the text whose next token it is about"),
        (["x", "L1M2"], "cannot read 'L1M2' as a neuron, head or layer: a label is one of the forms L8N123"),
        (["x", "L1N2", "l1n3"], "cannot read 'l1n3'"),
        (["x"], "Missing argument"),
        (["x", "L1N2", "--controls", "-1"], "--controls is -1: give the number of random draws, 0 or more"),
        (
            ["x", "L1N2", "--controls", "10001"],
            "--controls is 10001: each draw runs the model once more, so the most",
        ),
        (["x", "L1N2", "--mode", "mean"], f"--mode is 'mean': {MODES}"),
        (["x", "L1N2", "--mode", "zero=1"], f"--mode is 'zero=1': {MODES}"),
        (["x", "L1N2", "--mode", "resample="], f"--mode is 'resample=': {MODES}"),
        (["x", "L1N2", "--mode", "scale=two"], "--mode is 'scale=two': after scale= comes a number, such as scale=2"),
        (["x", "L1N2", "--mode", "set=nan"], "--mode is 'set=nan': after set= comes a number, such as set=2"),
        (["x", "L1N2", "--scope", "mine"], "Invalid value for '--scope'"),
        (["x", "L1N2", "--json", "{tmp}/a/b"], "cannot write {tmp}/a/b: there is no folder {tmp}/a"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    capsys: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert refused(capsys, *arguments).startswith(message.replace("{tmp}", str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["L99N1"], "L99N1 is not in SmolLM2-135M-Instruct: it has layers 0 to 29"),
        (["L1N2", "--target", " Paris is"], "target ' Paris is' is 2 tokens (' Paris', ' is')"),
        (["L27.mlp"], "controls draw as many neurons from each layer as the set has there"),
        (["L1H2D3@9", "--scope", "source"], "L1H2D3@9 reads position 9"),
        (["L29H1D46@5"], "L29H1D46@5: the prompt has 5 tokens, so source runs from 0 to 4"),
        (["L1N2", "--mode", "resample=a"], "--mode resample='a': it has 1 token, the prompt 5"),
        (["L1N2", "--mode", "scale=1e300"], "predictions are NaN"),
        (["L1N2", "--mode", "set=1e39"], "set to 1e+39 is past what torch.float32 holds"),
        (["L1N2", "--seed", str(2**64)], "seed is 18446744073709551616: give an integer of 64 bits"),
    ],
)
def test_what_only_the_model_can_refuse(demo: Any, capsys: Any, arguments: list[str], message: str) -> None:
    line = refused(capsys, PROMPT, *arguments)
    assert message in line
    if arguments == ["L27.mlp"]:
        assert line.endswith("ask for fewer neurons or no controls")


def test_help_shows_an_example(capsys: Any) -> None:
    assert main(["ablate", "--help"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(f"Example: {cli_ablate.EXAMPLE}")
