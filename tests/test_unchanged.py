"""Scores of a trace whose model has changed since would be of no model at all: refused, whatever way it changed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import zoo
from torch import nn

import tl_neuron_attr as na
from tl_neuron_attr.unchanged import Weights

TARGET = 42


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_weights_rounded_after_the_trace(backend: str) -> None:
    """Old activations with rounded weights are off by a thousandth, which nobody would see."""
    model = zoo.build(zoo.hf_model("llama"), backend)
    trace = na.trace(model, list(zoo.TOKENS), TARGET)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="changed since the trace was made"):
        na.layer_scores(trace)


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_weights_edited_after_the_trace(backend: str) -> None:
    """Scores of old activations with new weights would describe no model at all."""
    model = zoo.build(zoo.hf_model("llama"), backend)
    trace = na.trace(model, list(zoo.TOKENS), TARGET)
    values = na.value_neurons(trace, "mlp", k=5)
    named = {"W_out": trace.view.block(1).W_out, "W_U": trace.view.W_U}
    for calls, name in ((1, "W_out"), (2, "W_U")):
        with torch.no_grad():
            owner = next(p for p in model.parameters() if p.data_ptr() == named[name].data_ptr())
            owner.mul_(2.0)
        for call in (
            lambda: na.layer_scores(trace),
            lambda: na.value_neurons(trace, "mlp", k=5),
            lambda: na.query_neurons(trace, values, "attn", k=5),
        ):
            with pytest.raises(ValueError, match="changed since the trace was made"):
                call()
        again = na.trace(model, list(zoo.TOKENS), TARGET)
        assert calls and na.layer_scores(again).mlp.isfinite().all()


def replaced(owner: nn.Module, name: str) -> None:
    """Another parameter, edited as often as the one before."""
    before = owner._parameters[name]
    assert before is not None
    made = nn.Parameter(before.detach() * 2)
    with torch.no_grad():
        while made._version < before._version:
            made.add_(0)
    owner._parameters[name] = made


def given_data(owner: nn.Module, name: str) -> None:
    """Other data for the same parameter, which PyTorch does not count as an edit."""
    before = owner._parameters[name]
    assert before is not None
    before.data = before.data * 2


def owner_of(model: nn.Module, weight: torch.Tensor) -> tuple[nn.Module, str]:
    """The first module that holds a weight, and its name there."""
    for root in (getattr(model, "original_model", None), model):
        for module in [] if root is None else root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.data_ptr() == weight.data_ptr():
                    return module, name
    raise LookupError


@pytest.mark.parametrize("change", [replaced, given_data])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_weights_given_after_the_trace(backend: str, change: Callable[[nn.Module, str], None]) -> None:
    model = zoo.build(zoo.hf_model("llama"), backend)
    trace = na.trace(model, list(zoo.TOKENS), TARGET)
    na.layer_scores(trace)
    change(*owner_of(model, trace.view.block(1).W_out))
    with pytest.raises(ValueError, match="changed since the trace was made"):
        na.layer_scores(trace)


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_blocks_exchanged_after_the_trace(backend: str) -> None:
    model = zoo.build(zoo.hf_model("llama"), backend)
    trace = na.trace(model, list(zoo.TOKENS), TARGET)
    wrapped = getattr(model, "original_model", model)
    blocks = next(module for module in wrapped.modules() if isinstance(module, nn.ModuleList))
    blocks[0], blocks[1] = blocks[1], blocks[0]
    with pytest.raises(ValueError, match="changed since the trace was made"):
        na.layer_scores(trace)


def test_a_move_is_no_change() -> None:
    """As if the weights had been elsewhere when they were looked at."""
    model = nn.Linear(3, 2)
    weights = Weights(model)
    weights._seen = [replace(seen, device=torch.device("meta"), address=0) for seen in weights._seen]
    assert weights.are_still_of(model)
