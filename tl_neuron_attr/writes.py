"""What each neuron, head and source position adds to the residual stream at the predicting position.

An MLP neuron ``n`` writes ``post_n * W_out[n]``. An attention neuron ``(head, dim, source)`` writes
``pattern[head, dest, source] * value[source, kv(head), dim] * W_O[head, dim]`` with ``kv(head) = head //
(n_heads // n_kv_heads)``: the direction does not depend on the source, only the coefficient does. A hook on
``hook_z`` may have taken some of it away (:mod:`tl_neuron_attr.sources`). Flat order is the order of
identities: ``neuron``, or ``(head, dim, source)``.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.neurons import Kind, MLPNeuron, Neuron
from tl_neuron_attr.sources import kept, values

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def coefficients(trace: "Trace", kind: Kind, layer: int) -> Float[Tensor, "row source"]:
    """Coefficient of every neuron of a layer: rows are directions, ``source`` has one column for an MLP."""
    if kind == "attn":
        return attn_coefficients(trace, layer).flatten(0, 1)
    return mlp_coefficients(trace, layer)[:, None]


def coefficients_at(
    trace: "Trace",
    kind: Kind,
    layer: int,
    row: Int[Tensor, " neuron"],
    source: Int[Tensor, " neuron"],
    pos: Int[Tensor, " pos"],
) -> Float[Tensor, "pos neuron"]:
    """The coefficients of some neurons of a layer at the positions ``pos``, without the others'.

    ``row`` counts directions as :func:`directions` does. An attention neuron's is zero before its source.
    """
    view = trace.view
    if kind == "mlp":
        post = _post(trace, layer)
        return post[pos.to(post.device)][:, row.to(post.device)].to(view.compute_dtype)
    pattern, value = trace.pattern[layer], trace.value[layer]
    row, source, pos = row.cpu(), source.cpu(), pos.cpu()  # index tensors of any device
    head, dim = row // view.d_head, row % view.d_head
    attended = pattern[head, pos[:, None], source].to(view.compute_dtype)
    weight = attended * value[source, head // (view.n_heads // view.n_kv_heads), dim].to(attended)
    factor = kept(trace, layer, pos)
    return weight if factor is None else weight * factor[:, head, dim].to(weight)


def coefficient(trace: "Trace", neuron: Neuron, pos: int) -> Float[Tensor, ""]:
    """The coefficient of one neuron at one position."""
    mlp = isinstance(neuron, MLPNeuron)
    row, source = (neuron.neuron, 0) if mlp else (neuron.head * trace.view.d_head + neuron.dim, neuron.source)
    one = [torch.tensor([number]) for number in (row, source, pos)]
    return coefficients_at(trace, "mlp" if mlp else "attn", neuron.layer, *one)[0, 0]


def directions(trace: "Trace", kind: Kind, layer: int) -> Float[Tensor, "row d_model"]:
    """The output row of every direction of a layer, in the model's own precision (no copy where it has none)."""
    return trace.view.W_O(layer).flatten(0, 1) if kind == "attn" else trace.view.W_out(layer)


def mlp_coefficients(trace: "Trace", layer: int) -> Float[Tensor, " d_mlp"]:
    """``hook_post`` at the predicting position, float32 or better."""
    return _post(trace, layer)[trace.position].to(trace.view.compute_dtype)


def _post(trace: "Trace", layer: int) -> Float[Tensor, "pos d_mlp"]:
    post = trace.post[layer]
    if post is None:
        raise ValueError(trace.view.mlp_refusal(layer) or f"layer {layer} has no MLP neurons")
    return post


def attn_coefficients(trace: "Trace", layer: int) -> Float[Tensor, "head d_head source"]:
    """``pattern[head, dest, source] * value[source, kv(head), dim]``, as far as ``hook_z`` kept it."""
    pattern = trace.pattern[layer][:, trace.position].to(trace.view.compute_dtype)
    weight = pattern[:, None, :] * values(trace, layer).to(pattern.device)
    factor = kept(trace, layer, torch.tensor([trace.position]))
    return weight if factor is None else weight * factor[0, ..., None]


def row_of(trace: "Trace", neuron: Neuron) -> Float[Tensor, " d_model"]:
    """The output row of one neuron: its ``W_out`` row or its dimension of ``W_O``, float32 or better."""
    if isinstance(neuron, MLPNeuron):
        return trace.view.W_out(neuron.layer)[neuron.neuron].to(trace.view.compute_dtype)
    return trace.view.W_O(neuron.layer)[neuron.head, neuron.dim].to(trace.view.compute_dtype)


def head_vectors(trace: "Trace", layer: int) -> Float[Tensor, "head d_model"]:
    """What each head adds (``hook_z`` through ``W_O``): the sum of its neurons, without the attention output bias."""
    z = trace.z[layer][trace.position].to(trace.view.compute_dtype)
    return torch.einsum("hd,hdm->hm", z, trace.view.W_O(layer).to(z))


def position_vectors(trace: "Trace", layer: int, head: int) -> Float[Tensor, "source d_model"]:
    """What one head brings from each source position."""
    moved = attn_coefficients(trace, layer)[head]
    return moved.T @ trace.view.W_O(layer)[head].to(moved)


def attn_added(trace: "Trace", layer: int) -> Float[Tensor, " d_model"]:
    """What the attention of a layer really added (output bias included), float32 or better."""
    return trace.attn_out[layer][trace.position].to(trace.view.compute_dtype)


def stream_before(trace: "Trace", layer: int) -> Float[Tensor, " d_model"]:
    """The residual stream before block ``layer``; ``n_layers`` gives the stream after the last block."""
    final = layer == trace.view.n_layers
    stream = trace.resid_final if final else trace.resid_pre[layer][trace.position]
    return stream.to(trace.view.compute_dtype)


def base(trace: "Trace", kind: Kind, layer: int) -> Float[Tensor, " d_model"]:
    """What the vectors of a layer are added to: ``h`` for attention, ``h + A`` for the MLP (Eq. 13)."""
    before = stream_before(trace, layer)
    return before if kind == "attn" else before + attn_added(trace, layer).to(before.device)
