"""Rankings of several prompts computed together are those of each alone: ids, order, scores, coefficients."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import zoo

import tl_neuron_attr as na
from tl_neuron_attr import joint, together
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.together import value_neurons_of

# Caps, norms behind sublayers and multipliers are where a prompt's own scales enter.
FAMILIES = [(n, b) for n, b in zoo.FAMILY_CASES if n in ("gpt2", "llama_gqa", "gemma2", "olmo2", "granite")]
PROMPTS = [[5, 17, 42, 8], [5, 17, 9, 8, 63], [1, 2], [42]]
TARGETS = [None, 7, na.Contrast(5, 60), na.AnyOf([4, 18, 71])]
KINDS = ("mlp", "attn")


def traces(model: Any) -> list[Any]:
    """Prompts of several lengths, targets of every sort, both conventions."""
    made = [na.trace(model, prompt, target) for prompt, target in zip(PROMPTS, TARGETS, strict=True)]
    return [*made, na.trace(model, PROMPTS[0], 11, convention="paper"), na.trace(model, PROMPTS[1], 3, position=2)]


def same(found: Any, alone: Any, rounding: float) -> None:
    assert found.ids == alone.ids
    assert found.scores.tolist() == pytest.approx(alone.scores.tolist(), abs=rounding)
    assert torch.equal(found.coefficients, alone.coefficients)
    assert (found.kind, found.method, found.n_neurons) == (alone.kind, alone.method, alone.n_neurons)
    assert found.provenance == alone.provenance


@pytest.mark.parametrize(("name", "backend"), FAMILIES)
def test_equals_each_alone(name: str, backend: str) -> None:
    asked = traces(zoo.case(name, backend, torch.float64).model)
    for budget in (2**30, 2**20):
        found = value_neurons_of(asked, KINDS, k=25, memory_budget=budget)
        for one, (trace, kind) in zip(found, itertools.product(asked, KINDS), strict=True):
            same(one, na.value_neurons(trace, kind, k=25), 1e-12)


def test_in_float32_and_of_a_subset_of_layers(case: zoo.ZooCase) -> None:
    asked = traces(case.model)
    for one, trace in zip(value_neurons_of(asked, "attn", k=30, layers=[1]), asked, strict=True):
        alone = na.value_neurons(trace, "attn", k=30, layers=[1])
        assert one.scores.tolist() == pytest.approx(alone.scores.tolist(), abs=2e-6)
        assert len(set(one.ids) - set(alone.ids)) <= 1


def test_of_two_models() -> None:
    """Traces of different models are answered each by its own weights, in the order given."""
    models = [zoo.case("llama_gqa", backend, torch.float64).model for backend in zoo.BACKENDS[:2]]
    asked = [na.trace(model, prompt, 7) for prompt in PROMPTS[:2] for model in models]
    for one, trace in zip(value_neurons_of(asked, "mlp", k=9), asked, strict=True):
        same(one, na.value_neurons(trace, "mlp", k=9), 1e-12)


def test_vectors_that_overflow() -> None:
    """Neurons so large that exponentials overflow, in more prompts than are scored in log space at a time."""
    case = zoo.plain(zoo.hf_model("llama_gqa"), zoo.UNPROCESSED[0], torch.float32)
    with torch.no_grad():
        ModelView(case).W_out(1)[:7] *= 1e4
    asked = [na.trace(case, prompt, 7) for prompt in PROMPTS[:3]]
    for one, trace in zip(value_neurons_of(asked, "mlp", k=40), asked, strict=True):
        alone, dense = na.value_neurons(trace, "mlp", k=40), na.value_scores(trace, "mlp")
        assert one.scores.isfinite().all()
        assert one.ids == alone.ids
        assert torch.allclose(one.scores, alone.scores, rtol=1e-5, atol=2e-6)
        own = [dense.scores[n.layer, n.neuron].item() for n in one.ids]
        assert one.scores.tolist() == pytest.approx(own, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direction_is_multiplied_once(kind: Any) -> None:
    """Whatever prompts and source positions it is a candidate of."""
    model = zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    asked = [na.trace(model, [5, 17, 42, 8, other], 7) for other in (3, 4, 6, 9)]
    multiplied: list[int] = []

    def counted(directions: Any, each: Any) -> Any:
        multiplied.append(len(directions))
        return whole(directions, each)

    whole = joint.changes_together
    with mock.patch.object(joint, "changes_together", counted):
        found = value_neurons_of(asked, kind, k=400)
    rows = set()
    for ranked in found:
        rows |= {(n.layer, n.neuron) if kind == "mlp" else (n.layer, n.head, n.dim) for n in ranked.ids}
    evaluated = sum(ranked.n_evaluated for ranked in found)
    n_rows = 2 * (model.cfg.d_mlp if kind == "mlp" else model.cfg.n_heads * model.cfg.d_head)
    assert len(rows) <= sum(multiplied) <= len(multiplied) * n_rows
    assert sum(multiplied) < evaluated / 2


def test_as_many_together_as_the_budget_holds() -> None:
    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    asked = [na.trace(model, prompt, 7) for prompt in PROMPTS]
    sizes: list[int] = []

    def counted(questions: Any, bases: Any) -> Any:
        sizes.append(len(questions))
        return whole(questions, bases)

    whole = together.found_at
    with mock.patch.object(together, "found_at", counted), mock.patch.object(together, "_bytes", lambda q: 100):
        value_neurons_of(asked, "mlp", k=3, memory_budget=2**20)
        assert sizes == [4]
        sizes.clear()
        with mock.patch.object(together, "_bytes", lambda q: 2**18):
            value_neurons_of(asked, "mlp", k=3, memory_budget=2**20)
        assert sizes == [2, 2]
        sizes.clear()
        with mock.patch.object(together, "_bytes", lambda q: 2**30):
            value_neurons_of(asked, "mlp", k=3, memory_budget=2**20)
        assert sizes == [1, 1, 1, 1], "one that does not fit goes alone"


def test_bad_input() -> None:
    trace = na.trace(zoo.case("gpt2", zoo.BACKENDS[0]).model, [5, 17], 7)
    with pytest.raises(ValueError, match=r"k is 0|k=0"):
        value_neurons_of([trace], "mlp", k=0)
    with pytest.raises(ValueError, match=r"layers=\[9\]"):
        value_neurons_of([trace], "mlp", layers=[9])
    assert value_neurons_of([], "mlp") == []
