"""Everything the package says of one trace, as plain data that compares."""

from typing import Any

import pytest
import torch

import tl_neuron_attr as na

KINDS = ("mlp", "attn")


def everything(trace: Any, other: Any) -> dict[str, Any]:
    """Every number and name that the package gives of a trace (and of its difference from another)."""
    n_layers, found = trace.view.n_layers, dict[str, Any]()
    rankings = []
    layers = na.layer_scores(trace)
    found |= {"attn layers": layers.attn, "mlp layers": layers.mlp, "heads": na.head_scores(trace).scores}
    found["positions"] = na.position_scores(trace, 1, 2)
    for kind in KINDS:
        dense, value = na.value_scores(trace, kind), na.value_neurons(trace, kind, k=6)
        found |= {f"{kind} scores": dense.scores, f"{kind} coefficients": dense.coefficients}
        rankings += [value, na.compare(trace, other, kind, k=4)]
        asked = na.query_layers(trace, value)
        found |= {f"query of {kind}": asked.attn, f"query of {kind} mlp": asked.mlp, "embed": asked.embed}
        for query_kind in KINDS:
            query = na.query_neurons(trace, value, query_kind, k=4)
            rankings.append(query)
            found[f"links {kind} {query_kind}"] = na.links(trace, value, query).to_dict("list")
        early = na.value_neurons(trace, kind, k=3, layers=[0])
        for name, moved in (
            ("", na.promoted_tokens(trace, early, k=4)),
            ("heads ", na.promoted_tokens(trace, query, k=4)),
        ):
            found[f"promoted {name}{kind}"] = (moved.up, moved.down)
        moved = na.through_head(trace, early, n_layers - 1, 1, k=4)
        found[f"through a head {kind}"] = (moved.up, moved.down)
    for i, ranked in enumerate(rankings):
        found |= {f"ranked {i}": ranked.table(), f"ranked {i} scores": ranked.scores}
        found |= {f"ranked {i} coefficients": ranked.coefficients, f"ranked {i} ids": ranked.ids}
    return found | {"provenance": trace.provenance.tokens, "log_prob": trace.target_log_prob}


def same(found: Any, expected: Any, where: str = "", tolerance: float = 1e-6) -> None:
    """Equal to the tolerance, names and ids identical, tensors without a graph, of one kind and place."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape), where
        assert not found.requires_grad, where
        assert not found.numel() or (found - expected).abs().max() <= tolerance * max(1.0, expected.abs().max()), (
            where
        )
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=tolerance, rel=tolerance), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            same(found[key], expected[key], f"{where} {key}", tolerance)
    elif isinstance(expected, list | tuple) and type(expected) in (list, tuple):
        assert len(found) == len(expected), where
        for a, b in zip(found, expected, strict=True):
            same(a, b, where, tolerance)
    else:
        assert found == expected, where
