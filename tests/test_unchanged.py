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


def owner_of(model: nn.Module, weight: torch.Tensor) -> tuple[dict[str, nn.Parameter], str]:
    """Where a weight is held first, and its name there."""
    for root in (getattr(model, "original_model", None), model):
        for module in [] if root is None else root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.data_ptr() == weight.data_ptr():
                    return module._parameters, name
    raise LookupError


def rounded(model: nn.Module, weight: torch.Tensor) -> None:
    """Scores are off by a thousandth then, which nobody would see."""
    model.to(torch.bfloat16)


def edited(model: nn.Module, weight: torch.Tensor) -> None:
    held, name = owner_of(model, weight)
    with torch.no_grad():
        held[name].mul_(2.0)


def replaced(model: nn.Module, weight: torch.Tensor) -> None:
    """Another parameter, edited as often as the one before."""
    held, name = owner_of(model, weight)
    made = nn.Parameter(held[name].detach() * 2)
    with torch.no_grad():
        while made._version < held[name]._version:
            made.add_(0)
    held[name] = made


def given_data(model: nn.Module, weight: torch.Tensor) -> None:
    """Other data for the same parameter, which PyTorch does not count as an edit."""
    held, name = owner_of(model, weight)
    held[name].data = held[name].data * 2


def exchanged(model: nn.Module, weight: torch.Tensor) -> None:
    """Two blocks, each in the other's place."""
    wrapped = getattr(model, "original_model", model)
    blocks = next(module for module in wrapped.modules() if isinstance(module, nn.ModuleList))
    blocks[0], blocks[1] = blocks[1], blocks[0]


WHOLE = [(rounded, "W_out"), (exchanged, "W_out")]  # changes of every weight


@pytest.mark.parametrize(
    ("change", "which"), [*[(edit, w) for edit in (edited, replaced, given_data) for w in ("W_out", "W_U")], *WHOLE]
)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_changed_after_the_trace(backend: str, change: Callable[[nn.Module, torch.Tensor], None], which: str) -> None:
    model = zoo.build(zoo.hf_model("llama"), backend)
    trace = na.trace(model, list(zoo.TOKENS), TARGET)
    values = na.value_neurons(trace, "mlp", k=5)
    change(model, trace.view.W_U if which == "W_U" else trace.view.block(1).W_out)
    for call in (
        lambda: na.layer_scores(trace),
        lambda: na.value_neurons(trace, "mlp", k=5),
        lambda: na.query_neurons(trace, values, "attn", k=5),
    ):
        with pytest.raises(ValueError, match="changed since the trace was made"):
            call()


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_a_new_trace_of_edited_weights(backend: str) -> None:
    model = zoo.build(zoo.hf_model("llama"), backend)
    before = na.layer_scores(na.trace(model, list(zoo.TOKENS), TARGET))
    edited(model, na.trace(model, list(zoo.TOKENS), TARGET).view.W_U)
    after = na.layer_scores(na.trace(model, list(zoo.TOKENS), TARGET))
    assert after.mlp.isfinite().all() and not torch.allclose(after.mlp, before.mlp)


def elsewhere(model: nn.Module) -> Weights:
    """As if the weights had been on another device when they were looked at."""
    weights = Weights(model)
    weights._seen = [replace(seen, device=torch.device("meta"), address=0) for seen in weights._seen]
    return weights


def test_a_move_is_no_change() -> None:
    model = nn.Linear(3, 2)
    assert elsewhere(model).are_still_of(model)


def test_changes_on_a_move() -> None:
    model = nn.Linear(3, 2)
    weights = elsewhere(model)
    model.weight.data = model.weight.data.to(torch.bfloat16)
    assert not weights.are_still_of(model)
    weights = elsewhere(model)
    model.weight = nn.Parameter(model.weight.detach())
    assert not weights.are_still_of(model)
