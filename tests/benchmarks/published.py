"""What the published notebooks compute, plainly: every neuron's vector is added to its base and read out, one layer
and one source position after the other; scores are gathered in Python lists and sorted.

Written from the definitions (Eq. 13 of Yu and Ananiadou); all it takes of the package is a trace's activations.
"""

from typing import Any

import torch


def log_probs(view: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of rows of the residual stream, the final norm's scale frozen."""
    return torch.log_softmax((x * view["gain"] / view["scale"]) @ view["W_U"], -1)


def readout_of(trace: Any) -> dict[str, Any]:
    """Weights and scale of an RMSNorm model's readout."""
    norm, final = trace.view.final_norm, trace.resid_final
    return {"gain": norm.gain, "scale": (final.square().mean() + norm.eps).sqrt(), "W_U": trace.view.W_U}


def mlp_scores(trace: Any, layers: range) -> list[tuple[float, int, int]]:
    """(score, layer, neuron), best first."""
    view, target, dest = readout_of(trace), trace.target.positive[0], trace.position
    scores: list[tuple[float, int, int]] = []
    for layer in layers:
        base = trace.resid_pre[layer][dest] + trace.attn_out[layer][dest]
        before = log_probs(view, base)[target]
        vectors = trace.post[layer][dest][:, None] * trace.view.W_out(layer)
        after = log_probs(view, base + vectors)[:, target]
        scores += [(score, layer, neuron) for neuron, score in enumerate((after - before).tolist())]
    return sorted(scores, reverse=True)


def attn_scores(trace: Any, layers: range, sources: range) -> list[tuple[float, int, int, int, int]]:
    """(score, layer, head, dim, source), best first."""
    view, target, dest = readout_of(trace), trace.target.positive[0], trace.position
    _n_heads, d_head, group = trace.view.n_heads, trace.view.d_head, trace.view.n_heads // trace.view.n_kv_heads
    scores: list[tuple[float, int, int, int, int]] = []
    for layer in layers:
        base = trace.resid_pre[layer][dest]
        before = log_probs(view, base)[target]
        for source in sources:
            value = trace.value[layer][source].repeat_interleave(group, 0)
            weight = trace.pattern[layer][:, dest, source, None] * value
            vectors = (weight[..., None] * trace.view.W_O(layer)).flatten(0, 1)
            after = (log_probs(view, base + vectors)[:, target] - before).tolist()
            scores += [(s, layer, i // d_head, i % d_head, source) for i, s in enumerate(after)]
    return sorted(scores, reverse=True)


def query_scores(trace: Any, neurons: Any, scores: list[float], n_layers: int) -> list[tuple[float, int, int]]:
    """(score, layer, neuron) of MLP neurons that activate attention neurons, one value neuron after the other."""
    view = trace.view
    found: list[tuple[float, int, int]] = []
    for layer in range(n_layers):
        totals = torch.zeros(view.W_out(layer).shape[0], device=view.W_out(layer).device)
        for neuron, score in zip(neurons, scores, strict=True):
            if neuron.layer <= layer:
                continue
            block = view.block(neuron.layer)
            key = block.W_V[neuron.head // (view.n_heads // view.n_kv_heads)][:, neuron.dim] * block.attn_norm.gain
            stream = trace.resid_pre[neuron.layer][neuron.source]
            vectors = trace.post[layer][neuron.source][:, None] * view.W_out(layer)
            totals += score * (vectors @ key) / (stream @ key)
        found += [(s, layer, i) for i, s in enumerate(totals.tolist())]
    return sorted(found, reverse=True)
