"""What one reading of several prompts gives is, to the last bit, what each function gives of each prompt alone."""

from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from test_together import FAMILIES, traces

import tl_neuron_attr as na
from tl_neuron_attr import checks, positions, together
from tl_neuron_attr.overview import overviews


def alone(trace: Any, k: int) -> tuple[Any, Any, Any, Any]:
    ranked = [na.value_neurons(trace, kind, k=k) for kind in ("mlp", "attn")]
    return na.layer_scores(trace), na.head_scores(trace), *ranked


@pytest.mark.parametrize(("name", "backend"), FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_equals_each_alone(name: str, backend: str, dtype: torch.dtype) -> None:
    asked = traces(zoo.case(name, backend, dtype).model)
    exact = dtype == torch.float32  # libraries round float64 products by the rows beside them
    rounding = 0.0 if exact else 1e-12
    for found, trace in zip(overviews(asked, k=25), asked, strict=True):
        layers, heads, mlp, attn = alone(trace, 25)
        for own, other in ((found.layers.attn, layers.attn), (found.layers.mlp, layers.mlp)):
            assert torch.allclose(own, other, rtol=0, atol=rounding)
        assert found.heads.scores.shape == heads.scores.shape
        assert torch.allclose(found.heads.scores, heads.scores, rtol=0, atol=rounding)
        for own, other in ((found.mlp, mlp), (found.attn, attn)):
            assert own.ids == other.ids
            assert torch.allclose(own.scores, other.scores, rtol=0, atol=rounding)
            assert torch.equal(own.coefficients, other.coefficients)
            assert (own.n_neurons, own.method) == (other.n_neurons, other.method)
        assert found.layers.provenance == found.heads.provenance == found.mlp.provenance == trace.provenance


def test_in_turns_where_the_budget_holds_fewer() -> None:
    asked = traces(zoo.case("llama_gqa", zoo.BACKENDS[0]).model)
    whole = overviews(asked, k=9)
    with mock.patch.object(together, "_bytes", lambda question: 2**17):
        parts = overviews(asked, k=9, memory_budget=2**20)
    for one, other in zip(parts, whole, strict=True):
        assert one.mlp.ids == other.mlp.ids
        assert one.attn.ids == other.attn.ids
        assert torch.equal(one.heads.scores, other.heads.scores)
        assert torch.equal(one.layers.attn, other.layers.attn)


def test_heads_in_more_chunks_than_prompts() -> None:
    """Chunks of vectors end within a prompt, within a layer, and hold several prompts."""
    asked = traces(zoo.case("llama_gqa", zoo.BACKENDS[0]).model)
    whole = [found.heads.scores for found in overviews(asked, k=3)]
    for at_once in (1, 3, 7, 1000):
        with mock.patch.object(positions.Readout, "directions_at_once", lambda self, n=at_once: n):
            for found, scores in zip(overviews(asked, k=3), whole, strict=True):
                assert torch.equal(found.heads.scores, scores)


def test_of_two_models_and_of_none() -> None:
    models = [zoo.case(name, zoo.BACKENDS[0]).model for name in ("llama_gqa", "gpt2")]
    asked = [na.trace(model, [5, 17, 42], 7) for model in (*models, models[0])]
    found = overviews(asked, k=4)
    for one, trace in zip(found, asked, strict=True):
        assert one.mlp.ids == na.value_neurons(trace, "mlp", k=4).ids
        assert torch.equal(one.layers.mlp, na.layer_scores(trace).mlp)
    assert overviews([], k=4) == []
    with pytest.raises(ValueError, match=r"k is 0|k=0"):
        overviews(asked, k=0)


def test_the_vocabulary_is_read_for_all_bases_at_once() -> None:
    asked = [na.trace(zoo.case("llama_gqa", zoo.BACKENDS[0]).model, [5, 17, other], 7) for other in (3, 4, 6)]
    with mock.patch.object(together.Bases, "of_each", wraps=together.Bases.of_each) as read:
        overviews(asked, k=5)
    assert read.call_count == 1


@pytest.mark.parametrize("field", ["attn_out", "z", "post", "log_probs", "resid_pre"])
def test_a_trace_that_does_not_add_up_is_found_among_others(field: str) -> None:
    """Traces are checked together; a fault in any of them, and in no other, is an error with its own size."""
    model = zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    made = [na.trace(model, prompt, 7) for prompt in ([5, 17, 42], [5, 9], [1, 2, 3, 4])]
    checks.check_traces(made)
    wrong = getattr(made[1], field)
    changed = wrong + 0.5 if field == "log_probs" else (wrong[0], wrong[1] + 0.5)
    object.__setattr__(made[1], field, changed)
    with pytest.raises(na.UnsupportedModelError, match="differ from"):
        checks.check_traces(made)
    with pytest.raises(na.UnsupportedModelError) as alone_error:
        checks.check_traces(made[1:2])
    with pytest.raises(na.UnsupportedModelError) as among_error:
        checks.check_traces(made)
    assert str(among_error.value).split("rebuilt")[0] == str(alone_error.value).split("rebuilt")[0]
    checks.check_traces([made[0], made[2]])
