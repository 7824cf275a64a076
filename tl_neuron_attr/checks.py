"""Honest numbers: what must hold before any score is shown, checked at every trace.

At the predicting position, for each layer ``l`` with stream ``h``, attention output ``A``, MLP output ``F``:

1. *Readout*: the frozen readout of the final residual gives the model's own log-probabilities.
2. *Writes*: ``P(sum_heads z_head W_O + b_O) = A``, and ``P(sum_n post_n W_out[n] + b_out) = F``, with ``P`` what the
   block makes of an output before adding it (:mod:`tl_neuron_attr.post`). (That ``z`` is what pattern and values give
   is confirmed where it is divided among sources, :mod:`tl_neuron_attr.sources`.)
3. *Stream*: ``h + A + F = `` the next layer's ``h``.

Gaps are relative to the size of what is compared and allowed up to the rounding of the model's own precision.
A larger gap raises :class:`UnsupportedModelError` naming layer, component and size. Traces of one model are checked
together, row by row: each layer's weights are read once for all of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.readout import Readout
from tl_neuron_attr.tolerance import TOLERANCE
from tl_neuron_attr.writes import handed_on

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def check_traces(traces: "Sequence[Trace]") -> None:
    """Raise :class:`UnsupportedModelError` where a trace's readout, writes or stream do not add up.

    The traces are of one model.
    """
    _check_stream(traces)
    for layer in range(traces[0].view.n_layers):
        for trace in traces:
            _check_shapes(trace, layer)
        _check_writes(traces, layer)
    _check_readout(traces)


def _check_readout(traces: "Sequence[Trace]") -> None:
    readouts = Readout.of_each(traces, convention="exact")
    final = [readout.direction(trace.resid_final) for readout, trace in zip(readouts, traces, strict=True)]
    ours = torch.log_softmax(readouts[0].logits_of_few(torch.stack(final)), -1)
    model = torch.stack([trace.log_probs for trace in traces])
    _compare(traces, ours, model, "final norm and unembedding", "the model's own log-probabilities")


def _check_writes(traces: "Sequence[Trace]", layer: int) -> None:
    attn = torch.stack([trace.attn_out[layer][trace.position] for trace in traces])
    what = "what attention adds (hook_attn_out)"
    _compare(traces, _sublayer(traces, "attn", layer), attn, f"heads of layer {layer}", what)
    if traces[0].post[layer] is not None:
        mlp = torch.stack([_at(trace, trace.mlp_out[layer]) for trace in traces])
        what = "what the MLP adds (hook_mlp_out)"
        _compare(traces, _sublayer(traces, "mlp", layer), mlp, f"MLP neurons of layer {layer}", what)


def _sublayer(traces: "Sequence[Trace]", kind: Kind, layer: int) -> Float[Tensor, "trace d_model"]:
    """What neurons or heads plus the bias add to the stream at the predicting positions."""
    made = handed_on(traces, kind, layer)
    return traces[0].view.block(layer).post(kind).at(made).added(made)


def _check_shapes(trace: "Trace", layer: int) -> None:
    z, W_O = trace.z[layer].shape[-2:], trace.view.W_O(layer).shape[:2]
    heads = trace.value[layer].shape[-2]
    if heads != trace.view.n_kv_heads:
        raise UnsupportedModelError(
            f"layer {layer} of {trace.view.name} has values (hook_v) of {heads} heads where {trace.view.n_kv_heads} "
            f"were expected, so which value belongs to which query head is unknown; use standard grouped attention"
        )
    if z != W_O or trace.value[layer].shape[-1] != W_O[1]:
        raise UnsupportedModelError(
            f"layer {layer} of {trace.view.name}: heads hand on vectors of shape {list(z)} and values have width "
            f"{trace.value[layer].shape[-1]}, but W_O has shape {list(W_O)} of heads and dimensions, so they are not "
            f"the attention neurons' (latent attention, say); use a model with standard attention"
        )
    post = trace.post[layer]
    if post is not None and post.shape[-1] != (rows := trace.view.W_out(layer).shape[0]):
        raise UnsupportedModelError(
            f"layer {layer} of {trace.view.name}: hook_post has width {post.shape[-1]} but W_out has {rows} rows, so "
            f"its entries are not the MLP's neurons; attribute attention only"
        )


def _check_stream(traces: "Sequence[Trace]") -> None:
    n_layers = traces[0].view.n_layers
    for layer in range(n_layers):
        before = torch.stack([_at(trace, trace.resid_pre[layer]) for trace in traces])
        total = before + torch.stack([_at(trace, trace.attn_out[layer]) for trace in traces]).to(before)
        if traces[0].mlp_out[layer] is not None:
            total = total + torch.stack([_at(trace, trace.mlp_out[layer]) for trace in traces]).to(before)
        last = layer == n_layers - 1
        after = [trace.resid_final if last else trace.resid_pre[layer + 1][trace.position] for trace in traces]
        part = f"residual stream of layer {layer}"
        _compare(traces, total, torch.stack(after), part, "pre + attention + MLP = post")


def _at(trace: "Trace", rows: Tensor | None) -> Float[Tensor, " d_model"]:
    if rows is None:
        raise UnsupportedModelError(f"{trace.view.name} recorded no MLP output where neurons were recorded")
    return rows[trace.position].to(trace.view.compute_dtype)


def _compare(
    traces: "Sequence[Trace]", ours: Float[Tensor, "trace _"], model: Float[Tensor, "trace _"], part: str, what: str
) -> None:
    view = traces[0].view
    tolerance, model = TOLERANCE[view.dtype], model.to(ours)
    size = torch.maximum(ours.abs().amax(-1), model.abs().amax(-1))
    gap = (ours - model).abs().amax(-1)
    wrong = ~(gap <= tolerance * size.clamp(min=1e-6))  # also true for NaN
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise UnsupportedModelError(
            f"{part} of {view.name} ({type(view.model).__name__}): rebuilt values differ from {what} by "
            f"{float(gap[first]):.3g} where the largest is {float(size[first]):.3g} (allowed: {tolerance:g} of it), "
            f"so scores would be wrong; remove hooks that edit this part, or report the model's architecture"
        )
