"""The package against what the paper's published code gives ("paper") and against plain loops ("exact").

The values belong to unprocessed weights. Processed weights keep layers and MLP neurons, not attention neurons (their
value constants are folded away, see test_against_loop.py), so those backends are compared in what they keep.
"""

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import tl_neuron_attr as na

TINY = [
    (model, convention, backend)
    for model, convention in (("tiny-gpt2", "paper"), ("tiny-gpt2", "exact"), ("tiny-llama", "paper"))
    for backend in zoo.BACKENDS
]


@functools.cache
def values(model: str, convention: str) -> dict[str, Any]:
    return json.loads((zoo.DATA / model / f"{convention}.json").read_text())


@functools.cache
def tiny_trace(model: str, convention: str, backend: str) -> Any:
    expected = values(model, convention)
    return na.trace(zoo.case(model, backend).model, expected["tokens"], convention=convention)


def close(found: torch.Tensor, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=tolerance)


def check_layers(trace: Any, expected: dict[str, Any], tolerance: float) -> None:
    layers = na.layer_scores(trace)
    close(layers.attn, expected["layer_scores"]["attn"], tolerance)
    close(layers.mlp, expected["layer_scores"]["mlp"], tolerance)


def check_mlp(trace: Any, expected: dict[str, Any], tolerance: float) -> None:
    rows = expected["mlp_neurons"]
    scores = na.value_scores(trace, "mlp").scores
    close(torch.stack([scores[layer, neuron] for layer, neuron, _ in rows]), [r[-1] for r in rows], tolerance)
    ranked = na.value_neurons(trace, "mlp", k=len(rows))
    assert len(ranked) == len(rows)
    close(ranked.scores, [r[-1] for r in rows], tolerance)
    check_names([(n.layer, n.neuron) for n in ranked.ids], ranked.scores, rows, tolerance)


def check_heads(trace: Any, expected: dict[str, Any], tolerance: float) -> None:
    rounding = 5e-5 if expected["convention"] == "paper" else 0.0  # four places
    close(na.head_scores(trace).scores, expected["head_scores"], tolerance + rounding)
    if "position_scores" in expected:
        where = expected["position_scores"]
        close(na.position_scores(trace, where["layer"], where["head"]), where["scores"], tolerance)


def check_attn(trace: Any, expected: dict[str, Any], tolerance: float) -> None:
    rows = expected["attn_neurons"]
    scores = na.value_scores(trace, "attn").scores
    found = torch.stack([scores[layer, source, head, dim] for layer, head, dim, source, _ in rows])
    close(found, [r[-1] for r in rows], tolerance)
    ranked = na.value_neurons(trace, "attn", k=len(rows))
    assert len(ranked) == len(rows)
    close(ranked.scores, [r[-1] for r in rows], tolerance)
    names = [(n.layer, n.head, n.dim, n.source) for n in ranked.ids]
    check_names(names, ranked.scores, rows, tolerance)


def check_names(names: list[tuple], scores: torch.Tensor, rows: list[list], tolerance: float) -> None:
    """The same neurons, each with its own score; only near ties at the cut may differ."""
    own = {tuple(row[:-1]): row[-1] for row in rows}
    last = rows[-1][-1]
    for name, score in zip(names, scores.tolist(), strict=True):
        if name in own:
            assert abs(score - own[name]) < tolerance
        else:
            assert abs(score - last) < tolerance, f"{name} is not among the reference's"


@pytest.mark.parametrize(("model", "convention", "backend"), TINY)
def test_tiny(model: str, convention: str, backend: str) -> None:
    expected, trace = values(model, convention), tiny_trace(model, convention, backend)
    assert trace.target.positive == (expected["target"],)
    check_layers(trace, expected, 2e-5)
    check_mlp(trace, expected, 2e-5)
    if backend in zoo.UNPROCESSED:
        check_heads(trace, expected, 2e-5)
        check_attn(trace, expected, 2e-5)


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_tiny_sums_and_log_probability(backend: str) -> None:
    expected, trace = values("tiny-gpt2", "exact"), tiny_trace("tiny-gpt2", "exact", backend)
    own = zoo.log_probs(zoo.case("tiny-gpt2", backend).model, expected["tokens"])[-1, expected["target"]]
    assert abs(own.item() - expected["log_prob"]) < 2e-5
    # Sums over 512 and 896 neurons: rounding adds up.
    assert abs(na.value_scores(trace, "mlp").scores.sum().item() - expected["mlp_sum"]) < 1e-4
    if backend in zoo.UNPROCESSED:
        assert abs(na.value_scores(trace, "attn").scores.sum().item() - expected["attn_sum"]) < 1e-4


DEMO_BACKENDS = tuple(["bridge"] * zoo.BRIDGE + ["hooked"] * zoo.HOOKED)


@functools.cache
def demo_trace(backend: str) -> Any:
    expected = values("smollm2", "paper")
    model = na.load_demo_model(backend=backend)
    return na.trace(model, expected["tokens"], convention="paper")


@pytest.mark.parametrize("backend", DEMO_BACKENDS)
def test_smollm2(backend: str) -> None:
    expected, trace = values("smollm2", "paper"), demo_trace(backend)
    assert trace.target.positive == (expected["target"],)
    check_layers(trace, expected, 1e-4)
    check_heads(trace, expected, 1e-4)
    check_mlp(trace, expected, 1e-4)
    check_attn(trace, expected, 1e-4)


@pytest.mark.parametrize("backend", DEMO_BACKENDS)
@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_smollm2_sums(backend: str, kind: str) -> None:
    """Over 46,080 and 86,400 neurons, so 1e-3 of sums up to 120: 1e-7 a neuron."""
    expected = values("smollm2", "paper")["sums"]
    scores = na.value_scores(demo_trace(backend), kind).scores.double()
    assert abs(scores.sum().item() - expected[kind]) < 1e-3
    assert abs(scores.clamp(min=0).sum().item() - expected[f"{kind}_positive"]) < 1e-3
