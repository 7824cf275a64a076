"""Query scores against what the paper's published code gives ("paper") and against plain loops ("exact").

Each entry of the files is for the top value neurons of its own kind and number. The values belong to unprocessed
weights. Processed weights are compared where they keep them: all of tiny-llama (RMSNorm, no value bias), and MLP
value neurons of a LayerNorm model under "exact", where keys are centred either way (see test_query_against_loop.py).
"""

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import tl_neuron_attr as na

TINY = 2e-5
# A share is a ratio; where a key hardly meets its stream, rounding grows. The attention neuron L3H3D6@1 (cosine 6e-3)
# leaves the published float32 value 2.2e-5 from the same computation in float64.
PUBLISHED_RATIO = 3e-5
SMOLLM2 = 1e-4

ENTRIES = ("query_mlp_neurons", "query_layers_of_attn", "query_layers_of_mlp")


@functools.cache
def values(model: str, convention: str) -> dict[str, Any]:
    return json.loads((zoo.DATA / model / f"{convention}.json").read_text())


def cases() -> list[tuple[str, str, str, str]]:
    """Every entry of the tiny models' files with every backend that keeps it."""
    found = []
    for model, convention in (("tiny-gpt2", "paper"), ("tiny-gpt2", "exact"), ("tiny-llama", "paper")):
        for entry in ENTRIES:
            for backend in zoo.BACKENDS:
                kept = backend in zoo.UNPROCESSED or model == "tiny-llama"
                kept = kept or (convention == "exact" and entry == "query_layers_of_mlp")
                if kept and entry in values(model, convention):
                    found.append((model, convention, entry, backend))
    return found


def check(trace: Any, expected: dict[str, Any], tolerance: float) -> None:
    [kind] = [kind for kind in ("mlp", "attn") if f"of_top_{kind}" in expected]
    value = na.value_neurons(trace, kind, k=expected[f"of_top_{kind}"])
    if "neurons" in expected:
        check_neurons(trace, value, expected["neurons"], tolerance)
    else:
        layers = na.query_layers(trace, value)
        close(layers.embed, expected["embed"], tolerance)
        close(layers.attn, expected["attn"], tolerance)
        close(layers.mlp, expected["mlp"], tolerance)


def check_neurons(trace: Any, value: Any, rows: list[list], tolerance: float) -> None:
    """Each neuron's own score, and the ranking. Nothing reads the last layer: zeros, in "exact" files only."""
    last = trace.model.cfg.n_layers - 1
    own = {na.MLPNeuron(*row[:-1]): row[-1] for row in rows}
    assert not any(score for neuron, score in own.items() if neuron.layer == last)
    ranked = na.query_neurons(
        trace, value, k=len(rows), layers=None if last in {n.layer for n in own} else range(last)
    )
    close(ranked.scores, [row[-1] for row in rows], tolerance)
    for neuron, score in zip(ranked.ids, ranked.scores.tolist(), strict=True):
        # A neuron that is not in the file can only be one that ties with the last.
        assert abs(score - own.get(neuron, rows[-1][-1])) < tolerance, neuron
    unseen = na.query_neurons(trace, value, k=10**6, layers=[last])
    assert len(unseen) == unseen.n_neurons and not unseen.scores.any()


def close(found: Any, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(found, dtype=np.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("model", "convention", "entry", "backend"), cases())
def test_tiny(model: str, convention: str, entry: str, backend: str) -> None:
    """In float32, but for one entry: there a neuron with a cosine of 6e-4 (L1N49) has a share of 4.9 nats, so the
    float32 forward passes of two backends differ by 3e-4. That one is compared in float64."""
    expected = values(model, convention)
    ill = (model, convention, entry) == ("tiny-gpt2", "exact", "query_layers_of_mlp")
    case = zoo.case(model, backend, torch.float64 if ill else torch.float32)
    trace = na.trace(case.model, expected["tokens"], convention=convention)
    assert trace.target.positive == (expected["target"],)
    ratio = (model, convention, entry) == ("tiny-gpt2", "paper", "query_layers_of_attn")
    check(trace, expected[entry], PUBLISHED_RATIO if ratio else TINY)


def test_the_files_hold_what_is_compared() -> None:
    compared = {(model, convention, entry) for model, convention, entry, _ in cases()}
    assert len(compared) == 8
    for model, convention in (("tiny-gpt2", "paper"), ("tiny-gpt2", "exact"), ("tiny-llama", "paper")):
        held = {entry for entry in values(model, convention) if entry.startswith("query")}
        assert held == {entry for m, c, entry in compared if (m, c) == (model, convention)}


DEMO_BACKENDS = tuple(["bridge"] * zoo.BRIDGE + ["hooked"] * zoo.HOOKED)


@functools.cache
def demo_trace(backend: str) -> Any:
    return na.trace(na.load_demo_model(backend=backend), values("smollm2", "paper")["tokens"], convention="paper")


@pytest.mark.parametrize("backend", DEMO_BACKENDS)
@pytest.mark.parametrize("entry", ["query_mlp_neurons", "query_layers_of_attn"])
def test_smollm2(backend: str, entry: str) -> None:
    expected, trace = values("smollm2", "paper"), demo_trace(backend)
    assert trace.target.positive == (expected["target"],)
    check(trace, expected[entry], SMOLLM2)
