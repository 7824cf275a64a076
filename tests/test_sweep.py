"""Sweeps on tiny models: what is in the files, which prompts have no result, and what is refused."""

import dataclasses
import importlib.metadata
import io
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from sweep_prompts import LINES, files, write
from test_precision_memory import Memory, wide

import tl_neuron_attr as na
from tl_neuron_attr import batching, sweep_parts, sweep_store

BACKEND = zoo.BACKENDS[0]
# Query scores divide by what a key meets of its stream; in one prompt of a random model that is so little that value
# scores of about one become query scores of 109, and rounding grows as much.
RATIO = 1e-3


@pytest.fixture
def model() -> Any:
    return zoo.case("gpt2", BACKEND).model


def swept(model: Any, prompts: Any, out: Path, **options: Any) -> na.SweepOutcome:
    usual = {"k": 9, "part_size": 4, "batch_size": 3, "progress": False, "leading_space": False}
    return na.sweep(model, prompts, out, **{**usual, **options})


# What is in the files


@pytest.mark.parametrize("backend", zoo.UNPROCESSED)
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_rows_are_what_each_prompt_gives_alone(name: str, backend: str, tmp_path: Path) -> None:
    model = zoo.case(name, backend).model
    done = swept(model, write(tmp_path / "p.jsonl"), tmp_path / "out", query=True)
    assert (done.n_prompts, done.n_new, done.errors, done.errors_file) == (len(LINES), len(LINES), (), None)
    found = na.load_sweep(tmp_path / "out")
    prompts = found.prompts().set_index("prompt")
    tables = {
        "mlp": found.neurons("mlp"),
        "attn": found.neurons("attn"),
        "query": found.neurons("mlp", role="query"),
        "layers": found.layers(),
        "heads": found.heads(),
    }
    own = {name: dict(list(frame.groupby("prompt"))) for name, frame in tables.items()}
    for number, line in enumerate(LINES):
        trace = na.trace(model, line["prompt"], line["answer"])
        row = prompts.loc[number]
        assert (row["line"], row["text"], row["type"]) == (number + 1, line["prompt"], line["type"])
        assert list(row["tokens"]) == trace.tokens.tolist()
        assert tuple(row["str_tokens"]) == trace.str_tokens
        assert (row["position"], row["target"]) == (trace.position, trace.target.label)
        assert row["target_log_prob"] == pytest.approx(trace.target_log_prob, abs=1e-5)
        predicted = int(trace.log_probs.argmax())
        assert (row["predicted_id"], row["predicted"]) == (predicted, f"t{predicted}")
        assert (
            row["target_rank"]
            == trace.log_probs.argsort(descending=True).tolist().index(trace.target.token_ids[0]) + 1
        )
        mlp, attn = na.value_neurons(trace, "mlp", k=9), na.value_neurons(trace, "attn", k=30)
        assert (row["n_mlp"], row["n_attn"]) == (mlp.n_neurons, attn.n_neurons)
        query = na.query_neurons(trace, attn, k=9)
        for name_, ranked in (("mlp", mlp), ("attn", attn.top(9)), ("query", query)):
            frame = own[name_][number]
            assert frame["rank"].tolist() == list(range(1, 10))
            for column, values in ranked.table().items():
                if isinstance(values[0], float):
                    rel = RATIO if name_ == "query" else 0.0
                    assert frame[column].tolist() == pytest.approx(list(values), abs=1e-4, rel=rel)
                else:
                    assert frame[column].tolist() == list(values)
        layers, heads = na.layer_scores(trace), na.head_scores(trace).scores
        assert own["layers"][number]["attn"].tolist() == pytest.approx(layers.attn.tolist(), abs=1e-5)
        assert own["layers"][number]["mlp"].tolist() == pytest.approx(layers.mlp.tolist(), abs=1e-5)
        assert own["heads"][number]["score"].tolist() == pytest.approx(heads.flatten().tolist(), abs=1e-5)
        assert own["heads"][number][["layer", "head"]].values.tolist() == [
            [i, j] for i in range(heads.shape[0]) for j in range(heads.shape[1])
        ]


def test_results_do_not_depend_on_batches_and_budgets(model: Any, tmp_path: Path) -> None:
    options = [
        {"batch_size": 1},
        {"batch_size": 4},
        {"batch_size": 4, "mix_lengths": True},
        {"memory_budget": 2**20, "batch_size": 16},
    ]
    found = []
    for i, option in enumerate(options):
        swept(model, [line["prompt"] for line in LINES], tmp_path / str(i), query=True, **option)
        found.append(na.load_sweep(tmp_path / str(i)))
    first = found[0]
    for other in found[1:]:
        for name in ("prompts", "layers", "heads"):
            own, same = getattr(first, name)(), getattr(other, name)()
            assert own.columns.tolist() == same.columns.tolist()
            for column in own.select_dtypes("number"):
                assert same[column].tolist() == pytest.approx(own[column].tolist(), abs=1e-4, nan_ok=True)
        for kind, role in (("mlp", "value"), ("attn", "value"), ("mlp", "query")):
            own, same = first.neurons(kind, role=role), other.neurons(kind, role=role)
            ids = [c for c in own.columns if c not in ("score", "coefficient")]
            assert own[ids].values.tolist() == same[ids].values.tolist()
            rel = RATIO if role == "query" else 0.0
            assert same["score"].tolist() == pytest.approx(own["score"].tolist(), abs=1e-4, rel=rel)


def test_prompts_of_like_length_run_together_and_as_many_as_the_budget_allows(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    make = batching.rows_of

    def counted(*given: Any) -> Any:
        rows = make(*given)
        together = rows.together
        rows.together = lambda batch: sizes.append(len(batch)) or together(batch)
        return rows

    monkeypatch.setattr(sweep_parts, "rows_of", counted)
    prompts = [line["prompt"] for line in LINES]
    swept(model, prompts, tmp_path / "a", part_size=11, batch_size=4)
    assert sizes == [2, 4, 4]  # of 5, 4 (five of them: one is left to run alone) and 3 tokens
    sizes.clear()
    swept(model, prompts, tmp_path / "mixed", part_size=11, batch_size=4, mix_lengths=True)
    assert sizes == [4, 4, 3]  # 5, 5, 4, 4 tokens, 4, 4, 4, 3 and 3, 3, 3
    sizes.clear()
    swept(model, prompts, tmp_path / "b", part_size=11, batch_size=4, memory_budget=2**20)
    assert max(sizes) == 4
    monkeypatch.setattr(sweep_parts.PartRunner, "_fitting", lambda self, length: 2)
    sizes.clear()
    swept(model, prompts, tmp_path / "c", part_size=11, batch_size=4)
    assert sizes == [2] * 5


@pytest.mark.any_release
def test_memory_stays_under_its_budget(tmp_path: Path) -> None:
    """Of a model with a wide vocabulary: logits of all prompts of the part at once would be more than the budget."""
    budget, prompts = 2**26, [[3 + i, *range(5, 24)] for i in range(20)]
    assert budget < 4 * 20 * 20 * 50_000
    memory = Memory()
    wide_model = wide(zoo.UNPROCESSED[0], torch.float32)
    memory.of(lambda: swept(wide_model, prompts, tmp_path / "out", part_size=20, batch_size=20, memory_budget=budget))
    assert 0 < memory.peak <= budget, f"{memory.peak / 2**20:.0f} of {budget / 2**20:.0f} MiB"


def test_lists_of_ids_knowledge_prompts_targets_and_bos(model: Any, tmp_path: Path) -> None:
    prompts = [[0, 5, 27], torch.tensor([[0, 9, 4]]), na.KnowledgePrompt("t5 t27", "t8", "x"), "t5 t27", "t5 t27"]
    swept(model, prompts, tmp_path / "a", targets=[None, 7, None, "t3", na.AnyOf(["t3", "t4"])], prepend_bos=True)
    frame = na.load_sweep(tmp_path / "a").prompts()
    assert [list(ids) for ids in frame["tokens"]] == [[0, 5, 27], [0, 9, 4], [0, 5, 27], [0, 5, 27], [0, 5, 27]]
    assert [list(ids) for ids in frame["target_ids"]] == [[frame["predicted_id"][0]], [7], [8], [3], [3, 4]]
    assert frame["text"].isna().tolist() == [True, True, False, False, False]
    assert frame["type"].tolist() == ["", "", "x", "", ""]
    assert frame["line"].isna().all()


# Prompts without a result


BAD = [
    "not json",
    LINES[0],
    {"prompt": "t5 t6", "answer": "t7 t8"},
    LINES[1],
    "",
    {"prompt": " ".join(["t5"] * 60)},
    {"answer": "t5"},
    LINES[2],
    {"prompt": "t5 t6", "answer": "zebra"},
    LINES[3],
]


def test_prompts_without_a_result_are_named_with_their_lines(model: Any, tmp_path: Path) -> None:
    done = swept(model, write(tmp_path / "p.jsonl", BAD), tmp_path / "out", part_size=3)
    assert done.errors_file == tmp_path / "out" / "errors.jsonl"
    named = [json.loads(line) for line in done.errors_file.read_text().splitlines()]
    assert named == [dataclasses.asdict(error) for error in done.errors]
    assert [(error["prompt"], error["line"], error["kind"]) for error in named] == [
        (0, 1, "unreadable"),
        (2, 3, "target"),
        (4, 6, "prompt"),
        (5, 7, "unreadable"),
        (7, 9, "target"),
    ]
    assert named[0]["error"] == "not JSON: Expecting value at place 1 of the line"
    assert named[1]["error"].startswith("target 't7 t8' is 2 tokens ('t7', 't8')")
    assert named[2]["error"].endswith("tokens, the model's context holds 32: shorten the prompt")
    assert named[3]["error"] == "there is no prompt"
    found = na.load_sweep(tmp_path / "out")
    assert found.prompts()["line"].tolist() == [2, 4, 8, 10]
    assert found.errors()["line"].tolist() == [1, 3, 6, 7, 9]
    again = swept(model, tmp_path / "p.jsonl", tmp_path / "out", part_size=3)
    assert (again.n_new, again.errors) == (0, done.errors)


def test_a_prompt_that_fails_on_the_way_costs_itself_only(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [line["prompt"] for line in LINES]
    swept(model, prompts, tmp_path / "whole")
    cut = batching.traces_of

    def failing(*given: Any) -> Any:
        if any(one.prompt == prompts[2] for one in given[3]):
            raise na.UnsupportedModelError("the numbers of this one do not fit together")
        return cut(*given)

    monkeypatch.setattr(batching, "traces_of", failing)
    done = swept(model, prompts, tmp_path / "out")
    assert [(e.prompt, e.kind, e.error) for e in done.errors] == [
        (2, "model", "the numbers of this one do not fit together")
    ]
    whole, found = (na.load_sweep(tmp_path / name).neurons("attn") for name in ("whole", "out"))
    whole = whole[whole["prompt"] != 2]
    assert found["prompt"].tolist() == whole["prompt"].tolist()
    assert found["score"].tolist() == pytest.approx(whole["score"].tolist(), abs=1e-4)


def test_what_memory_does_not_hold_at_once_runs_alone(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = sweep_parts.overviews
    prompts = [line["prompt"] for line in LINES]

    def small(traces: Any, *rest: Any, **options: Any) -> Any:
        if len(traces) > 1 or traces[0].prompt == prompts[3]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return rank(traces, *rest, **options)

    monkeypatch.setattr(sweep_parts, "overviews", small)
    done = swept(model, prompts, tmp_path / "out")
    assert [(error.prompt, error.kind) for error in done.errors] == [(3, "memory")]
    assert na.load_sweep(tmp_path / "out").prompts()["prompt"].tolist() == [0, 1, 2, *range(4, 11)]


def test_what_is_no_prompts_fault_ends_the_run_and_the_next_goes_on(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [line["prompt"] for line in LINES]
    swept(model, prompts, tmp_path / "whole")

    def broken(traces: Any, *rest: Any, **options: Any) -> Any:
        if traces[0].prompt == prompts[9]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return rank(traces, *rest, **options)

    rank = sweep_parts.overviews
    with monkeypatch.context() as patch:
        patch.setattr(sweep_parts, "overviews", broken)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            swept(model, prompts, tmp_path / "out", batch_size=1)
    done = swept(model, prompts, tmp_path / "out", batch_size=3)
    assert (done.n_new, done.errors) == (3, ())


def test_warnings_of_query_scores_are_kept_with_their_prompt(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = sweep_parts.query_neurons

    def warned(trace: Any, *given: Any, **options: Any) -> Any:
        if trace.prompt == LINES[1]["prompt"]:
            warnings.warn("L0N1 hardly meets its stream", na.TinyDenominatorWarning, stacklevel=1)
        return query(trace, *given, **options)

    monkeypatch.setattr(sweep_parts, "query_neurons", warned)
    swept(model, [line["prompt"] for line in LINES[:3]], tmp_path / "out", query=True)
    told = na.load_sweep(tmp_path / "out").prompts()["warning"].tolist()
    assert told[1] == "L0N1 hardly meets its stream"
    assert [isinstance(one, str) for one in told] == [False, True, False]


# Refused


def other_weights() -> Any:
    return zoo.plain(zoo.hf_model("gpt2", seed=3), BACKEND, torch.float32)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"k": 8}, "k was 9 and is now 8"),
    "query": ({"query": True}, "query was False and is now True"),
    "convention": ({"convention": "paper"}, "convention was 'exact' and is now 'paper'"),
    "part size": ({"part_size": 5}, "part_size was 4 and is now 5"),
    "space": ({"leading_space": True}, "leading_space was False and is now True"),
    "bos": ({"prepend_bos": False}, "prepend_bos was None and is now False"),
    "prompts": ({"prompts": ["t5 t6", "t7 t9"]}, "prompts was 'sha256:"),
    "target": ({"targets": ["t4", None]}, "prompts was 'sha256:"),
    "fewer": ({"prompts": ["t5 t6"]}, "n_prompts was 2 and is now 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_by_name(name: str, model: Any, tmp_path: Path) -> None:
    swept(model, ["t5 t6", "t7 t8"], tmp_path / "out")
    before = files(tmp_path / "out")
    changed, told = CHANGES[name]
    prompts = changed.get("prompts", ["t5 t6", "t7 t8"])
    told = told.replace("'sha256:", "sha256:")
    with pytest.raises(na.SweepError) as caught:
        swept(model, prompts, tmp_path / "out", **{key: v for key, v in changed.items() if key != "prompts"})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'out'} was begun with other settings: ")
    assert told in message
    assert message.endswith("Give what it was begun with to go on, or another folder to begin anew")
    assert files(tmp_path / "out") == before


def test_another_model_precision_or_version_is_refused_by_name(model: Any, tmp_path: Path) -> None:
    prompts = ["t5 t6", "t7 t8"]
    out = tmp_path / "out"
    swept(model, prompts, out)
    hf = zoo.hf_model("gpt2")
    others = {
        "weights was sha256:": other_weights(),
        "dtype was 'float32' and is now 'bfloat16'": zoo.plain(hf, BACKEND, torch.bfloat16),
    }
    for told, other in others.items():
        with pytest.raises(na.SweepError) as caught:
            swept(other, prompts, out)
        assert told in str(caught.value)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (out / "manifest.json").write_text(json.dumps(manifest))
    now = re.escape(importlib.metadata.version("torch"))
    with pytest.raises(na.SweepError, match=f"version of torch was '1.0' and is now '{now}'"):
        swept(model, prompts, out)


def test_folders_that_are_not_of_a_sweep(model: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(na.SweepError, match=r"holds 'thesis.tex' but no manifest of a sweep: give a new or an empty"):
        swept(model, ["t5"], tmp_path / "mine")
    with pytest.raises(na.SweepError, match=r"holds no manifest\.json: give the folder that a sweep wrote"):
        na.load_sweep(tmp_path / "mine")
    swept(model, ["t5"], tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["schema_version"] = 2
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(na.SweepError, match=r"version 2 of tl_neuron_attr\.sweep: this release reads version 1"):
        na.load_sweep(tmp_path / "out")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"k": 0}, "k is 0: ask for 1 or more"),
    "batch": ({"batch_size": 0}, "batch_size is 0: ask for 1 or more"),
    "part": ({"part_size": 0}, "part_size is 0: ask for 1 or more"),
    "budget": ({"memory_budget": 1000}, r"memory_budget=1000 bytes: give at least one MiB"),
    "convention": ({"convention": "papre"}, "unknown convention 'papre'"),
    "none": ({"prompts": []}, "there are no prompts: give at least one"),
    "string": ({"prompts": "The capital"}, "prompts is 'The capital': give a list of prompts, or the path of a file"),
    "targets": ({"targets": ["t5", "t6"]}, "targets must be a list of one for each of the 1 prompts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_leave_no_folder(name: str, model: Any, tmp_path: Path) -> None:
    changed, told = WRONG[name]
    options = {"prompts": ["t5"], **changed}
    from guards import as_users_run_it

    with as_users_run_it(), pytest.raises(ValueError, match=told):
        swept(model, options.pop("prompts"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_terminals_only_and_has_a_switch(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, str] = {}
    for name, stream, progress in (
        ("on", Terminal(), True),
        ("off", Terminal(), False),
        ("pipe", io.StringIO(), True),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        swept(model, write(tmp_path / "p.jsonl", BAD), tmp_path / name, progress=progress)
        shown[name] = stream.getvalue()
    assert shown["off"] == shown["pipe"] == ""
    assert "sweep: 100%" in shown["on"] and "9/9" in shown["on"] and "prompt/s" in shown["on"]
    assert "errors=5" in shown["on"]
    assert sweep_store.read_manifest(tmp_path / "on") == sweep_store.read_manifest(tmp_path / "off")
