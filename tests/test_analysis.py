"""The tables over many prompts, against plain loops on tiny models."""

import re
from typing import Any

import pandas
import pytest
import torch
import zoo
from guards import as_users_run_it, unchanged

import tl_neuron_attr as na
from tl_neuron_attr.ranking import Provenance

PROMPTS = ([5, 17, 42, 8, 63], [9, 9, 71], [3, 14, 15, 92, 65, 35, 8], [7, 81, 2], [20, 33, 54, 8])
TARGETS = (11, 30, 11, 7, 52)
TYPES = ("a", "b", "a", "b", "a")

FEW = [pytest.param(case, id="-".join(case)) for case in zoo.CASES if case[0] in ("gpt2", "llama_gqa")]


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """The cases for what does not depend on the architecture."""
    return zoo.case(*request.param)


def pairs(model: Any) -> list[tuple[str, na.Trace]]:
    traces = na.trace_batch(model, PROMPTS, TARGETS, progress=False)
    return list(zip(TYPES, traces, strict=True))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Sums and histograms


def test_layers_by_type_are_means_of_layer_scores(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    means = na.layer_means(iter(given))
    sums = na.layer_sums(iter(given)).set_index("type")
    assert means.columns.tolist() == ["type", "layer", "attn", "mlp"]
    assert sums["n_prompts"].to_dict() == {"a": 3, "b": 2}
    for type_ in "ab":
        scores = [na.layer_scores(trace) for own, trace in given if own == type_]
        for kind in ("attn", "mlp"):
            rows = means[means["type"] == type_]
            for layer in range(len(scores[0].attn)):
                expected = mean([getattr(s, kind)[layer].item() for s in scores])
                assert rows.set_index("layer")[kind][layer] == pytest.approx(expected, abs=1e-6)
            total = mean([sum(getattr(s, kind).tolist()) for s in scores])
            assert sums[kind][type_] == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_neuron_sums_by_sorting_every_score(few: zoo.ZooCase, kind: Any) -> None:
    given = pairs(few.model)
    sums = na.neuron_sums(iter(given), kind, top=[7, 3, 10**6], tolerance=0.0).set_index("type")
    for tolerance in (10.0, 0.5, 0.01):
        near = na.neuron_sums(iter(given), kind, top=[7], tolerance=tolerance).set_index("type")
        off = (near - sums)[["all", "positive", "top_7"]].abs().max()
        assert off["all"] <= tolerance + 1e-4
        assert off["positive"] <= tolerance + 1e-4
        assert off["top_7"] < 1e-5
    assert (near - sums)["all"].abs().max() > 0  # some neurons were left to their bounds
    assert sums.columns.tolist() == ["n_prompts", "all", "positive", "top_7", "top_3", "top_1000000"]
    for type_ in "ab":
        traces = [trace for own, trace in given if own == type_]
        ordered = [sorted(na.value_scores(t, kind).scores.flatten().tolist(), reverse=True) for t in traces]
        for name, take in (
            ("all", lambda s: s),
            ("positive", lambda s: [x for x in s if x > 0]),
            ("top_7", lambda s: s[:7]),
            ("top_3", lambda s: s[:3]),
            ("top_1000000", lambda s: s),
        ):
            assert sums[name][type_] == pytest.approx(mean([sum(take(s)) for s in ordered]), abs=1e-4), name
        exact = mean([na.value_neurons(t, kind, k=7).scores.sum().item() for t in traces])
        assert sums["top_7"][type_] == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_histogram_counts_the_ranked_neurons_of_each_layer(few: zoo.ZooCase, kind: Any) -> None:
    ranked = [(type_, na.value_neurons(trace, kind, k=9)) for type_, trace in pairs(few.model)]
    found = na.layer_histogram(iter(ranked), n_layers=5)
    assert found.columns.tolist() == ["type", "layer", "neurons", "share", "score"]
    for type_ in "ab":
        rows = found[found["type"] == type_].set_index("layer")
        assert rows.index.tolist() == [0, 1, 2, 3, 4]
        own = [r for t, r in ranked if t == type_]
        for layer in range(5):
            n = sum(neuron.layer == layer for r in own for neuron in r)
            score = sum(s for r in own for i, s in zip(r, r.scores.tolist(), strict=True) if i.layer == layer)
            assert rows["neurons"][layer] == pytest.approx(n / len(own))
            assert rows["share"][layer] == pytest.approx(n / (9 * len(own)))
            assert rows["score"][layer] == pytest.approx(score / len(own), abs=1e-5)
    shorter = na.layer_histogram(ranked)
    last = max(neuron.layer for _, r in ranked for neuron in r)
    assert len(shorter) == 2 * (last + 1)
    with pytest.raises(ValueError, match=f"n_layers={last}, but a ranked neuron is in layer {last}: give at least"):
        na.layer_histogram(ranked, n_layers=last)


def test_neuron_sums_refuses_a_negative_tolerance(few: zoo.ZooCase) -> None:
    with pytest.raises(ValueError, match=r"tolerance=-0\.1: give how far off a sum may be in nats, 0 or more"):
        na.neuron_sums(pairs(few.model), "mlp", tolerance=-0.1)


# What is shared


def ranking(kind: str, coordinates: list[tuple[int, ...]], n_neurons: int = 100) -> na.RankedNeurons:
    """A ranking worked out by hand: scores 5, 4, 3, ..."""
    origin = Provenance("m", "x", (0, 1, 2, 3), ("a", "b", "c", "d"), 3, "'t'", (1,), "exact", -1.0)
    make = na.MLPNeuron if kind == "mlp" else na.AttnNeuron
    scores = torch.arange(5.0, 5.0 - len(coordinates), -1)
    ids = tuple(make(*c) for c in coordinates)
    return na.RankedNeurons(kind, ids, scores, scores, "log_prob_increase", 9, n_neurons, origin)


def test_shared_mlp_neurons_are_in_more_than_half_of_the_prompts() -> None:
    given = [
        ("a", ranking("mlp", [(0, 1), (1, 2), (1, 3), (0, 9)])),
        ("a", ranking("mlp", [(0, 2), (1, 2), (0, 1), (0, 9)])),
        ("b", ranking("mlp", [(1, 2), (0, 1), (0, 3)])),
        ("b", ranking("mlp", [(0, 3), (0, 5), (0, 7)])),
        ("a", ranking("mlp", [(0, 1), (0, 5), (0, 8)])),
        ("a", ranking("mlp", [(0, 1), (0, 6), (1, 2)])),
    ]
    found = na.shared_neurons(iter(given), k=3)
    assert found.n_prompts == {"a": 4, "b": 2}
    # (0, 1): scores 5, 3, 5, 5; (1, 2): 4, 4, 3; (0, 9) is only fourth; in b, one of two is not more than half
    assert found.to_frame().values.tolist() == [
        ["a", 0, 1, 4, 1.0, 4.5],
        ["a", 1, 2, 3, 0.75, 11 / 3],
        ["b", 0, 3, 2, 1.0, 4.0],
    ]
    assert found.ids("a") == [na.MLPNeuron(0, 1), na.MLPNeuron(1, 2)]
    assert found.sets() == {"a": {(0, 1), (1, 2)}, "b": {(0, 3)}}
    assert na.shared_neurons(given, k=3, share=0.75).sets()["a"] == {(0, 1)}
    assert na.shared_neurons(given, k=3, share=0.0).sets()["b"] == {(1, 2), (0, 1), (0, 3), (0, 5), (0, 7)}


def test_attention_neurons_are_shared_whatever_their_source_or_by_source() -> None:
    given = [
        ("a", ranking("attn", [(0, 1, 2, 3), (0, 1, 2, 0), (1, 0, 0, 1)])),
        ("a", ranking("attn", [(1, 0, 0, 2), (0, 1, 2, 3), (0, 0, 0, 0)])),
    ]
    found = na.shared_neurons(given, k=3)
    assert found.to_frame().columns.tolist() == ["type", "layer", "head", "dim", "n_prompts", "share", "score"]
    # (0, 1, 2) has 5 + 4 in the first prompt and 4 in the second; (1, 0, 0) 3 and 5
    assert [(u.unit, u.n_prompts, u.score) for u in found.groups["a"]] == [((0, 1, 2), 2, 6.5), ((1, 0, 0), 2, 4.0)]
    assert found.ids("a") == [na.AttnNeuron(0, 1, 2, 0), na.AttnNeuron(1, 0, 0, 0)]
    apart = na.shared_neurons(given, k=3, by_source=True)
    assert apart.sets() == {"a": {(0, 1, 2, 3)}}
    assert apart.ids("a") == [na.AttnNeuron(0, 1, 2, 3)]
    assert "source" in apart.to_frame().columns


def test_shared_neurons_refuses_short_rankings_and_shares() -> None:
    few = [("a", ranking("mlp", [(0, 1), (1, 2)]))]
    with pytest.raises(
        ValueError, match=re.escape("a ranking of a has 2 neurons, k=3: rank with value_neurons(k=3)")
    ):
        na.shared_neurons(few, k=3)
    whole = [("a", ranking("mlp", [(0, 1), (1, 2)], n_neurons=2))]
    assert na.shared_neurons(whole, k=3).sets() == {"a": {(0, 1), (1, 2)}}
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"share={share}: give a share of the prompts from 0 up to, but not"):
            na.shared_neurons(few, k=2, share=share)


def test_top_heads_are_those_of_the_mean_score(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    for fraction in (0.01, 0.3, 1.0):
        found = na.top_heads(iter(given), fraction)
        for type_ in "ab":
            scores = [na.head_scores(trace).scores for own, trace in given if own == type_]
            n_layers, n_heads = scores[0].shape
            ordered = sorted(
                (-mean([s[layer, head].item() for s in scores]), layer, head)
                for layer in range(n_layers)
                for head in range(n_heads)
            )
            count = max(1, int(fraction * n_layers * n_heads))
            assert found[type_] == tuple(na.Head(layer, head) for _, layer, head in ordered[:count])
    with pytest.raises(ValueError, match=r"fraction=0\.0: give a share of all heads above 0, up to 1"):
        na.top_heads(given, 0.0)


def test_overlap_is_the_size_of_each_intersection() -> None:
    sets = {"a": [1, 2, 3, 3], "b": (2, 3, 4), "c": frozenset({9})}
    expected = [[3, 2, 0], [2, 3, 0], [0, 0, 1]]
    found = na.overlap(sets)
    pandas.testing.assert_frame_equal(found, pandas.DataFrame(expected, list("abc"), list("abc")))
    with pytest.raises(ValueError, match="no sets are given"):
        na.overlap({})


# Ablations


def outcome(trace: na.Trace, neurons: Any) -> tuple[float, float, float]:
    """Reciprocal rank, probability, log-probability of a run of one row."""
    with na.ablating(trace.model, neurons), torch.no_grad():
        log_probs = trace.model(trace.tokens[None])[0, -1].double().log_softmax(-1)
    own = log_probs[trace.target.positive[0]]
    return 1 / (1 + int((log_probs > own).sum())), own.exp().item(), own.item()


METRICS = ("reciprocal_rank", "probability", "log_prob")


def check_table(frame: pandas.DataFrame, given: list[Any], sets: Any) -> None:
    """Every row of a table against runs one by one; ``sets(trace)`` has the neurons by name."""
    rows = frame.set_index(["type", "ablated", "metric"])
    for type_ in "ab":
        own = [trace for name, trace in given if name == type_]
        for name in sets(own[0]):
            before = [outcome_untouched(trace) for trace in own]
            after = [outcome(trace, sets(trace)[name]) for trace in own]
            for place, metric in enumerate(METRICS):
                row = rows.loc[(type_, name, metric)]
                old, new = mean([b[place] for b in before]), mean([a[place] for a in after])
                assert row["n_prompts"] == len(own)
                assert row["before"] == pytest.approx(old, abs=1e-5)
                assert row["after"] == pytest.approx(new, abs=3e-5)
                assert row["percent"] == pytest.approx(100 * (new - old) / abs(old), abs=2e-2)


def outcome_untouched(trace: na.Trace) -> tuple[float, float, float]:
    with torch.no_grad():
        log_probs = trace.model(trace.tokens[None])[0, -1].double().log_softmax(-1)
    own = log_probs[trace.target.positive[0]]
    return 1 / (1 + int((log_probs > own).sum())), own.exp().item(), own.item()


def test_heads_of_each_type_ablated_in_every_prompt(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    heads = na.top_heads(given, 0.2)
    with unchanged(few.model):
        table = na.ablate_type_heads(iter(given), heads)
    frame = table.to_frame()
    assert len(frame) == 2 * 2 * 4
    check_table(frame, given, lambda trace: heads)
    rows = frame.set_index(["type", "ablated", "metric"])["percent"]
    against = table.own_against_other().set_index("metric")
    for metric in METRICS:
        own = mean([rows["a", "a", metric], rows["b", "b", metric]])
        other = mean([rows["a", "b", metric], rows["b", "a", metric]])
        assert against["own"][metric] == pytest.approx(own)
        assert against["other"][metric] == pytest.approx(other)
    assert set(frame["n_neurons"]) == {len(heads["a"]) * given[0][1].view.d_head}
    assert "AblationTable(" in repr(table)


def test_value_neurons_of_each_prompt_ablated_together(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    table = na.ablate_value_neurons(iter(given), n_attn=6, n_mlp=4, controls=5, seed=1)

    def sets(trace: na.Trace) -> dict[str, Any]:
        return {"value neurons": [na.value_neurons(trace, "attn", k=6), na.value_neurons(trace, "mlp", k=4)]}

    frame = table.to_frame()
    check_table(frame, given, sets)
    entries = [
        len({(n.layer, n.head, n.dim) for n in na.value_neurons(trace, "attn", k=6)}) + 4 for _, trace in given
    ]
    a = [n for n, type_ in zip(entries, TYPES, strict=True) if type_ == "a"]
    assert frame[frame["type"] == "a"]["n_neurons"].iloc[0] == pytest.approx(mean([float(n) for n in a]))
    assert frame["control_change"].notna().all()
    row = frame[frame["metric"] == "log_prob"].iloc[0]
    assert row["control_percent"] == pytest.approx(100 * row["control_change"] / abs(row["before"]))

    # The prompts of both types together, and the same seed again.
    whole = table.overall().set_index("metric")
    for place, metric in enumerate(METRICS):
        after = mean([outcome(trace, sets(trace)["value neurons"])[place] for _, trace in given])
        assert whole["after"][metric] == pytest.approx(after, abs=3e-5)
    assert whole["n_prompts"].tolist() == [5] * 4
    again = na.ablate_value_neurons(given, n_attn=6, n_mlp=4, controls=5, seed=1)
    pandas.testing.assert_frame_equal(again.to_frame(), frame)
    only_mlp = na.ablate_value_neurons(given, n_attn=0, n_mlp=4, controls=0)
    assert set(only_mlp.to_frame()["n_neurons"]) == {4}
    assert only_mlp.to_frame()["control_percent"].isna().all()


def test_query_neurons_of_shallow_layers_ablated(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    n_layers = given[0][1].view.n_layers

    def sets(trace: na.Trace) -> dict[str, Any]:
        value = na.value_neurons(trace, "attn", k=5)
        return {"query neurons": na.query_neurons(trace, value, "mlp", k=8, layers=range(max(1, n_layers // 2)))}

    table = na.ablate_query_neurons(given, k=8, n_value=5, shallow=0.5, controls=2)
    check_table(table.to_frame(), given, sets)
    assert set(table.to_frame()["n_neurons"]) == {8}
    with pytest.raises(ValueError, match=r"shallow=0\.0: give a share of all layers above 0, up to 1"):
        na.ablate_query_neurons(given, shallow=0.0)


# What they refuse


def test_nothing_and_mixtures_are_refused(few: zoo.ZooCase) -> None:
    given = pairs(few.model)
    empty = "there is nothing to average: give at least one pair of a type and a trace or ranking"
    for function in (
        na.layer_sums,
        na.layer_means,
        na.top_heads,
        na.layer_histogram,
        na.shared_neurons,
        na.ablate_value_neurons,
    ):
        with pytest.raises(ValueError, match=re.escape(empty)):
            function(iter([]))
    with as_users_run_it(), pytest.raises(ValueError, match="is not a pair of a type and a trace or ranking: zip"):
        na.layer_sums([given[0][1]])  # type: ignore[list-item]
    kinds = [("a", na.value_neurons(given[0][1], kind, k=3)) for kind in ("mlp", "attn")]
    with pytest.raises(ValueError, match="is not of the kind of the first one"):
        na.shared_neurons(kinds, k=3)
    with pytest.raises(ValueError, match="no heads are given"):
        na.ablate_type_heads(given, {})
    other = zoo.build(zoo.hf_model(few.name), few.backend)
    mixed = [given[0], ("a", na.trace(other, [5, 6], 3))]
    with pytest.raises(ValueError, match="results of several models"):
        na.layer_sums(mixed)
