"""Honest numbers: what must hold before any score is shown, checked at every trace.

At the predicting position, for each layer ``l`` with stream ``h``, attention output ``A``, MLP output ``F``:

1. *Readout*: the frozen readout of the final residual gives the model's own log-probabilities.
2. *Writes*: ``P(sum_heads z_head W_O + b_O) = A``, and ``P(sum_n post_n W_out[n] + b_out) = F``, with ``P`` what the
   block makes of an output before adding it (:mod:`tl_neuron_attr.post`). (That ``z`` is what pattern and values give
   is confirmed where it is divided among sources, :mod:`tl_neuron_attr.sources`.)
3. *Stream*: ``h + A + F = `` the next layer's ``h``.

Gaps are relative to the size of what is compared and allowed up to the rounding of the model's own precision.
A larger gap raises :class:`UnsupportedModelError` naming layer, component and size.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.readout import Readout
from tl_neuron_attr.tolerance import TOLERANCE
from tl_neuron_attr.writes import added, output

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def check_trace(trace: "Trace") -> None:
    """Raise :class:`UnsupportedModelError` where readout, writes or stream do not add up."""
    tolerance = TOLERANCE[trace.view.dtype]
    _check_stream(trace, tolerance)
    _check_writes(trace, tolerance)
    _check_readout(trace, tolerance)


def _check_readout(trace: "Trace", tolerance: float) -> None:
    readout = Readout.of(trace, convention="exact")
    ours = torch.log_softmax(readout.logits_of_one(trace.resid_final), -1)
    _compare(
        trace,
        ours,
        trace.log_probs,
        tolerance,
        "final norm and unembedding",
        "the model's own log-probabilities",
    )


def _check_writes(trace: "Trace", tolerance: float) -> None:
    for layer in range(trace.view.n_layers):
        _check_heads(trace, layer)
        heads, attn = _sublayer(trace, "attn", layer), trace.attn_out[layer][trace.position]
        _compare(trace, heads, attn, tolerance, f"heads of layer {layer}", "what attention adds (hook_attn_out)")
        if trace.post[layer] is not None:
            _check_width(trace, layer)
            neurons, mlp = _sublayer(trace, "mlp", layer), _at(trace, trace.mlp_out[layer])
            part, what = f"MLP neurons of layer {layer}", "what the MLP adds (hook_mlp_out)"
            _compare(trace, neurons, mlp, tolerance, part, what)


def _sublayer(trace: "Trace", kind: Kind, layer: int) -> Tensor:
    """What neurons or heads plus the bias add to the stream at the predicting position."""
    at = torch.tensor([trace.position])
    return added(trace, kind, layer).added(output(trace, kind, layer, at)[0])


def _check_heads(trace: "Trace", layer: int) -> None:
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


def _check_width(trace: "Trace", layer: int) -> None:
    width, rows = cast("Tensor", trace.post[layer]).shape[-1], trace.view.W_out(layer).shape[0]
    if width != rows:
        raise UnsupportedModelError(
            f"layer {layer} of {trace.view.name}: hook_post has width {width} but W_out has {rows} rows, so its "
            f"entries are not the MLP's neurons; attribute attention only"
        )


def _check_stream(trace: "Trace", tolerance: float) -> None:
    for layer in range(trace.view.n_layers):
        before = _at(trace, trace.resid_pre[layer])
        total = before + _at(trace, trace.attn_out[layer]).to(before)
        mlp = trace.mlp_out[layer]
        if mlp is not None:
            total = total + _at(trace, mlp).to(before)
        last = layer == trace.view.n_layers - 1
        after = trace.resid_final if last else trace.resid_pre[layer + 1][trace.position]
        _compare(
            trace,
            total,
            after,
            tolerance,
            f"residual stream of layer {layer}",
            "pre + attention + MLP = post",
        )


def _at(trace: "Trace", rows: Tensor | None) -> Tensor:
    if rows is None:
        raise UnsupportedModelError(f"{trace.view.name} recorded no MLP output where neurons were recorded")
    return rows[trace.position].to(trace.view.compute_dtype)


def _compare(trace: "Trace", ours: Tensor, model: Tensor, tolerance: float, part: str, what: str) -> None:
    model = model.to(ours)
    size = float(torch.maximum(ours.abs().amax(), model.abs().amax()))
    gap = float((ours - model).abs().amax())
    if not gap <= tolerance * max(size, 1e-6):  # also true for NaN
        raise UnsupportedModelError(
            f"{part} of {trace.view.name} ({type(trace.model).__name__}): rebuilt values differ from {what} by "
            f"{gap:.3g} where the largest is {size:.3g} (allowed: {tolerance:g} of it), so scores would be wrong; "
            f"remove hooks that edit this part, or report the model's architecture"
        )
