"""Settings of the session that change how operations are computed change nothing here; low precision, every call.

Under autocast products are rounded to bfloat16, a default dtype makes tensors of another width, inference mode and
gradient mode change what can be differentiated: the numbers are those of a session without any of these.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import guards
import pytest
import torch
import zoo
from whole import KINDS, everything, same

import tl_neuron_attr as na
from tl_neuron_attr import tolerance

PROMPT, OTHER = list(zoo.TOKENS), [5, 17, 9, 8, 63, 21, 33]


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


# Low precision


def floats(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor and number of a result."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, float):
        yield torch.tensor(tree, dtype=torch.float64)
    elif isinstance(tree, dict | list | tuple):
        for leaf in tree.values() if isinstance(tree, dict) else tree:
            yield from floats(leaf)


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [(*case, torch.bfloat16) for case in guards.FEW] + [("llama_gqa", b, torch.float16) for b in zoo.BACKENDS],
    ids=str,
)
def test_every_call_in_low_precision(name: str, backend: str, dtype: torch.dtype) -> None:
    """Exactly float32 arithmetic on the weights and activations as they are; nothing is converted in place."""
    hf = zoo.hf_model(name)
    model, wide = zoo.plain(hf, backend, dtype), zoo.plain(hf, backend, dtype).to(torch.float32)
    caches = [
        model.run_with_cache(torch.tensor([p]), names_filter=na.required_hooks(model))[1] for p in (PROMPT, OTHER)
    ]
    with guards.unchanged(model):
        traces = [na.trace(model, p, 11, cache=c) for p, c in zip((PROMPT, OTHER), caches, strict=True)]
        found = everything(*traces)
        ablated = effects(na.trace(model, PROMPT, 11), model)
    assert {t.dtype for t in floats(found)} <= {torch.float32, torch.float64}
    assert all(t.isfinite().all() for t in floats(found))
    assert all(t.isfinite().all() for t in floats(ablated))
    with mock.patch.dict(tolerance.TOLERANCE, {torch.float32: tolerance.TOLERANCE[dtype]}):
        widened = [{hook: cache[hook].float() for hook in na.required_hooks(model)} for cache in caches]
        exact = everything(*(na.trace(wide, p, 11, cache=c) for p, c in zip((PROMPT, OTHER), widened, strict=True)))
    # The model's own log-probability is of its precision; ratios of query scores round in their last digits.
    assert found.pop("log_prob") == pytest.approx(exact.pop("log_prob"), abs=0.1)
    same(found, exact, tolerance=1e-5)
    own = na.trace(zoo.plain(zoo.clone(hf, dtype).float(), backend, torch.float32), PROMPT, 11)
    for kind in KINDS:  # all ten are the same where this was written; rounding may swap the last with the next
        low, high = na.value_neurons(traces[0], kind, k=10), na.value_neurons(own, kind, k=10)
        assert low.ids[0] == high.ids[0]
        assert len(set(low.ids) & set(high.ids)) >= 9
    # Differences of log-probabilities of some ten nats, each rounded to eight bits by the model: 0.04.
    changes = [na.ablation_effect(t, na.Layer(1, "mlp")).of("log_prob").change for t in (traces[0], own)]
    assert changes[0] == pytest.approx(changes[1], abs=0.1)


@functools.cache
def hopeless(name: str) -> Any:
    """Token 11 has a log-probability of about -85 after the prompt: p ~ 1e-37, at the end of what float32 holds."""
    hf = zoo.clone(zoo.hf_model(name), torch.float32)
    with torch.no_grad():
        out = hf(torch.tensor([PROMPT]), output_hidden_states=True)
        final, log_z = out.hidden_states[-1][0, -1], out.logits[0, -1].logsumexp(-1)
        hf.get_output_embeddings().weight[11] = (log_z - 85) * final / final.square().sum()
        if hf.get_output_embeddings().bias is not None:
            hf.get_output_embeddings().bias[11] = 0
    return hf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "backend"), list(zip(("gpt2", "llama_gqa") * 2, zoo.BACKENDS, strict=False)))
def test_a_hopeless_target(name: str, backend: str, dtype: torch.dtype) -> None:
    """Every number is finite, and the float64 model's up to what its type rounds; a set of one is the token."""
    model = zoo.plain(hopeless(name), backend, dtype)
    trace, other = na.trace(model, PROMPT, 11), na.trace(model, OTHER, 11)
    found, alone = everything(trace, other), na.trace(model, PROMPT, na.AnyOf([11]))
    assert trace.target_log_prob == pytest.approx(-85, abs=3)
    assert all(t.isfinite().all() for t in floats(found))
    same(na.layer_scores(alone).mlp, found["mlp layers"])
    same(na.value_scores(alone, "attn").scores, found["attn scores"])
    exact = na.trace(zoo.build(hopeless(name), backend, torch.float64), PROMPT, 11)
    allowed = 1e-4 if dtype is torch.float32 else 0.02
    for kind in KINDS:
        scores, true = na.value_scores(trace, kind).scores, na.value_scores(exact, kind).scores
        assert (scores - true).abs().max() <= allowed * true.abs().max()
