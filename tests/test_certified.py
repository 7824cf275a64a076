"""Scores to a tolerance: every one of them within it, most of them without being evaluated."""

import functools
from typing import Any

import pytest
import torch
import zoo

import tl_neuron_attr as na

FAMILIES = [
    (n, b) for n, b in zoo.FAMILY_CASES if n in ("gpt2", "llama_gqa", "gemma2", "olmo2", "granite", "attn_only")
]
TARGETS = [None, na.Contrast(5, 60), na.AnyOf([4, 18, 71])]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("name", "backend"), FAMILIES)
def test_within_the_tolerance(name: str, backend: str, target: Any) -> None:
    case = zoo.case(name, backend)
    trace = na.trace(case.model, list(case.tokens), target)
    for kind in ("attn",) if name == "attn_only" else ("mlp", "attn"):
        exact = na.value_scores(trace, kind)
        evaluated = []
        for tolerance in (1e-5, 1e-3, 1e-1):
            for budget in (2**30, 2**20):
                found = na.value_scores(trace, kind, tolerance=tolerance, memory_budget=budget)
                # Rounding of float32 scores of a few nats comes on top.
                assert (found.scores - exact.scores).abs().max() <= tolerance + 3e-6
                assert torch.equal(found.coefficients, exact.coefficients)
            evaluated.append(found.n_evaluated)
        assert evaluated == sorted(evaluated, reverse=True)
        assert evaluated[-1] < exact.n_evaluated
        if isinstance(target, na.Contrast):
            assert evaluated[1:] == [0, 0]


def test_a_subset_of_layers(case: zoo.ZooCase) -> None:
    trace = na.trace(case.model, list(case.tokens), 42)
    found, exact = (na.value_scores(trace, "attn", layers=[1], tolerance=t) for t in (1e-3, 0.0))
    assert found.layers == exact.layers == (1,)
    assert (found.scores - exact.scores).abs().max() <= 1e-3 + 3e-6


def test_a_ranking_of_them_is_not_taken_for_an_exact_one() -> None:
    """Query scores weigh by exact value scores, so those of a certified ranking are computed again."""
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens), 42)
    rough = na.value_scores(trace, "mlp", tolerance=0.1).top(5)
    assert rough.method == "log_prob_increase_within_0.1"
    assert rough.to_frame().shape[0] == 5
    by_ids = na.query_neurons(trace, list(rough.ids), k=5)
    assert torch.equal(na.query_neurons(trace, rough, k=5).scores, by_ids.scores)


@pytest.mark.parametrize("tolerance", [-1e-3, float("nan")])
def test_what_is_no_tolerance(tolerance: float) -> None:
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens), 42)
    with pytest.raises(ValueError, match="give the largest error in nats, or 0 for exact scores"):
        na.value_scores(trace, "mlp", tolerance=tolerance)


@functools.cache
def demo() -> Any:
    return na.trace(na.load_demo_model(), "The capital of France is", " Paris")


if not (zoo.HOOKED and zoo.BRIDGE):  # a while; the other releases are enough

    @pytest.mark.parametrize(("kind", "layer"), [("mlp", 27), ("attn", 23)])
    @pytest.mark.any_release
    def test_demo_model(kind: Any, layer: int) -> None:
        """One percent or so of the neurons are scored; one layer of them is compared with its exact scores."""
        found = na.value_scores(demo(), kind, tolerance=1e-3)
        assert found.n_evaluated < found.scores.numel() / 30
        exact = na.value_scores(demo(), kind, layers=[layer])
        assert (found.scores[layer] - exact.scores[0]).abs().max() <= 1e-3 + 3e-6
