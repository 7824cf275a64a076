"""Settings of the session that change how operations are computed change nothing here; low precision, every call.

Under autocast products are rounded to bfloat16, a default dtype makes tensors of another width, inference mode and
gradient mode change what can be differentiated: the numbers are those of a session without any of these.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import guards
import pytest
import torch
import zoo
from whole import everything, same

import tl_neuron_attr as na

PROMPT, OTHER = list(zoo.TOKENS), [5, 17, 9, 8, 63, 21, 33]
LOW = [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def effects(trace: Any, model: Any) -> list[Any]:
    """Ablations of each mode; with random draws, whose seed must not depend on settings either."""
    named = [na.MLPNeuron(0, 3), na.AttnNeuron(1, 2, 5, 1), na.Head(0, 1)]
    modes = ["zero", na.mean_activations(model, [PROMPT, OTHER[:4]]), na.resample(model, OTHER)]
    found = [na.ablation_effect(trace, named, mode, controls=2) for mode in modes]
    found.append(na.ablation_effect(trace, named, scope="source"))
    curve = na.ablation_curve(trace, na.value_neurons(trace, "mlp", k=3), sizes=[1, 3], progress=False)
    return [[effect.table(), effect.controls.log_prob] for effect in found] + [[o.log_prob for o in curve.after]]


def whole(model: Any) -> tuple[dict[str, Any], list[Any]]:
    trace = na.trace(model, PROMPT, 11)
    assert not any(t.requires_grad for t in (trace.log_probs, trace.resid_final, *trace.resid_pre))
    return everything(trace, na.trace(model, OTHER, 11)), effects(trace, model)


@functools.cache
def usual(name: str, backend: str) -> tuple[dict[str, Any], list[Any]]:
    return whole(guards.warm(zoo.case(name, backend)).model)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_settings(name: str, backend: str, setting: str) -> None:
    """The weights of these models require gradients, and the usual numbers are made with gradient mode on."""
    model, expected = zoo.case(name, backend).model, usual(name, backend)
    with SETTINGS[setting](), guards.unchanged(model):
        found = whole(model)
        same(found, expected)
