"""The tables over many prompts from a sweep's files: the same as from traces, without a model and without PyTorch."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import zoo
from guards import as_users_run_it
from sweep_prompts import LINES, write

import tl_neuron_attr as na

KINDS: tuple[Any, ...] = ("mlp", "attn")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep with two types and one bad line, and the traces of the same prompts with their types."""
    model = zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    out = tmp_path_factory.mktemp("sweep")
    path = write(out / "p.jsonl", [*LINES[:4], "not json", *LINES[4:]])
    na.sweep(
        model, path, out / "out", k=12, query=True, part_size=4, leading_space=False, batch_size=1, progress=False
    )
    given = [(line["type"], na.trace(model, line["prompt"], line["answer"])) for line in LINES]
    return na.load_sweep(out / "out"), given


def same(found: pandas.DataFrame, expected: pandas.DataFrame) -> None:
    pandas.testing.assert_frame_equal(found, expected, check_dtype=False, atol=1e-4)


def test_layers(swept: Any) -> None:
    found, given = swept
    same(found.layer_means(), na.layer_means(given))
    same(found.layer_sums(), na.layer_sums(given))
    assert found.layer_sums()["n_prompts"].tolist() == [7, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_histograms(swept: Any, kind: Any) -> None:
    found, given = swept
    rankings = [(type_, na.value_neurons(trace, kind, k=12)) for type_, trace in given]
    same(found.layer_histogram(kind), na.layer_histogram(rankings))
    same(found.layer_histogram(kind, 7), na.layer_histogram(rankings, 7))
    with pytest.raises(ValueError, match=r"n_layers=1, but a ranked neuron is in layer \d: give at least"):
        found.layer_histogram(kind, 1)


@pytest.mark.parametrize(("kind", "by_source"), [("mlp", False), ("attn", False), ("attn", True)])
def test_shared_neurons_and_overlaps(swept: Any, kind: Any, by_source: bool) -> None:
    found, given = swept
    n_shared = 0
    for k, share in ((12, 0.2), (5, 0.0), (12, 0.5)):
        rankings = [(type_, na.value_neurons(trace, kind, k=12)) for type_, trace in given]
        expected = na.shared_neurons(rankings, k, share, by_source=by_source)
        own = found.shared_neurons(kind, k, share, by_source=by_source)
        assert own.sets() == expected.sets()
        assert own.n_prompts == expected.n_prompts == {"a": 7, "b": 4}
        assert (own.k, own.columns) == (k, expected.columns)
        same(na.overlap(own.sets()), na.overlap(expected.sets()))
        n_shared += sum(map(len, own.groups.values()))
    assert n_shared > 10
    assert found.shared_neurons(kind).k == 12


def test_query_neurons_have_the_same_tables(swept: Any) -> None:
    found, given = swept
    rankings = [
        (type_, na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=12)) for type_, trace in given
    ]
    same(found.layer_histogram("mlp", role="query"), na.layer_histogram(rankings))
    assert found.shared_neurons("mlp", role="query").sets() == na.shared_neurons(rankings, 12).sets()


def test_top_heads(swept: Any) -> None:
    found, given = swept
    for fraction in (0.01, 0.4, 1.0):
        assert found.top_heads(fraction) == na.top_heads(given, fraction)


def test_bad_arguments(swept: Any, tmp_path: Path) -> None:
    found, _ = swept
    for call, told in (
        (lambda: found.shared_neurons("mlp", 13), "k=13, but the sweep kept the top 12: give up to 12"),
        (lambda: found.shared_neurons("mlp", 0), "k is 0: ask for 1 or more"),
        (lambda: found.shared_neurons("mlp", 3, 1.0), r"share=1\.0: give a share of the prompts"),
        (lambda: found.top_heads(0.0), r"fraction=0\.0: give a share of all heads above 0"),
        (lambda: found.neurons("mpl"), "unknown kind 'mpl'"),
        (lambda: found.neurons("mlp", role="key"), "unknown role 'key'"),
    ):
        with as_users_run_it(), pytest.raises(ValueError, match=told):
            call()
    na.sweep(zoo.case("gpt2", zoo.BACKENDS[0]).model, ["t5"], tmp_path / "out", k=3, progress=False)
    with pytest.raises(ValueError, match=r"this sweep has no query neurons: sweep with query=True \(--query\)"):
        na.load_sweep(tmp_path / "out").neurons("mlp", role="query")


def test_what_is_printed_of_it(swept: Any) -> None:
    found, _ = swept
    shown = repr(found)
    assert re.fullmatch(r"SweepFiles\(.*/out, .+, top 12, 12 of 12 prompts\)", shown)
    assert found.neurons("attn").columns.tolist() == [
        *("prompt", "role", "kind", "rank", "layer", "head", "dim", "source"),
        *("score", "coefficient", "source_token"),
    ]
    assert found.neurons("mlp", role="query").columns.tolist() == [
        *("prompt", "role", "kind", "rank", "layer", "neuron", "score", "coefficient", "pos"),
    ]
    prompts = found.prompts()
    assert prompts["line"].tolist() == [1, 2, 3, 4, *range(6, 13)]
    assert all(prompts[name].dtype.kind == "i" for name in ("prompt", "position", "predicted_id", "n_mlp"))


WITHOUT = """
import sys
for name in ("torch", "transformer_lens", "transformers", "accelerate"):
    sys.modules[name] = None  # importing it is an error
import tl_neuron_attr as na
found = na.load_sweep(sys.argv[1])
frames = [found.prompts(), found.errors(), found.layers(), found.heads(), found.neurons("attn"), found.neurons()]
frames += [found.layer_means(), found.layer_sums(), found.layer_histogram("attn"), found.neurons("mlp", role="query")]
shared = found.shared_neurons("mlp", share=0.0)
frames += [shared.to_frame(), na.overlap(shared.sets())]
assert all(len(frame) for frame in frames)
assert found.top_heads()
from tl_neuron_attr.cli import main
code = main(["summary", sys.argv[1], "--k", "5", "--share", "0.2"])
assert code == 0, code
"""


def test_reading_needs_neither_torch_nor_a_model(swept: Any) -> None:
    found, _ = swept
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(found.folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(na.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"12 of 12 prompts done, {len(found.prompts())} have a result"
    assert 'query neurons: load_sweep(DIR).neurons("mlp", role="query")' in lines
    assert all(len(line) <= 80 for line in lines)
    sums = found.layer_sums().set_index("type")
    heads = {type_: " ".join(map(str, best[:2])) for type_, best in found.top_heads().items()}
    prompts = found.prompts()
    for type_, n in (("a", 7), ("b", 4)):
        own = prompts[prompts["type"] == type_]
        row = f"{type_} {n} 0 {own['target_log_prob'].mean():.3f} {(own['target_rank'] == 1).mean():.0%} "
        row += f"{sums['attn'][type_]:.3f} {sums['mlp'][type_]:.3f} {heads[type_]}"
        assert row in [" ".join(line.split()) for line in lines]
    for kind, name in (("mlp", "MLP"), ("attn", "attention")):
        shared = found.shared_neurons(kind, 5, 0.2)
        at = lines.index(f"Shared: {name} neurons in the top 5 of more than 20% of the prompts")
        assert [line.split()[:2] for line in lines[at + 3 : at + 5]] == [
            [type_, str(len(group))] for type_, group in shared.groups.items()
        ]


def test_the_summary_as_json(swept: Any, tmp_path: Path) -> None:
    from tl_neuron_attr.cli import main

    found, _ = swept
    assert main(["summary", str(found.folder), "--json", str(tmp_path / "s.json")]) == 0
    record = json.loads((tmp_path / "s.json").read_text())
    assert record["settings"] == found.settings
    assert record["layer_sums"] == found.layer_sums().to_dict("records")
    assert record["layer_histogram"]["attn"] == found.layer_histogram("attn").to_dict("records")
    assert record["shared_neurons"]["mlp"] == found.shared_neurons("mlp").to_frame().to_dict("records")
    assert record["top_heads"]["a"] == [str(head) for head in found.top_heads()["a"]]
    assert record["prompts"][0]["results"] == 7


def test_a_sweep_without_results_has_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tl_neuron_attr.cli import main

    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    na.sweep(model, write(tmp_path / "p.jsonl", ["not json"]), tmp_path / "out", progress=False)
    capsys.readouterr()
    assert main(["summary", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "has no results yet (1 prompts without one): run sweep first" in err
    assert main(["summary", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("holds no manifest.json: give the folder that a sweep wrote\n")
