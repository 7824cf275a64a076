"""What each neuron, head and source position adds to the residual stream at the predicting position.

An MLP neuron ``n`` writes ``post_n * W_out[n]``. An attention neuron ``(head, dim, source)`` writes
``pattern[head, dest, source] * value[source, kv(head), dim] * W_O[head, dim]`` with ``kv(head) = head //
(n_heads // n_kv_heads)``: the direction does not depend on the source, only the coefficient does. A hook on
``hook_z`` may have taken some of it away (:mod:`tl_neuron_attr.sources`). Flat order is the order of
identities: ``neuron``, or ``(head, dim, source)``.

Where the block normalises or multiplies a sublayer's output before adding it (:mod:`tl_neuron_attr.post`), every
vector goes through that map with its scale frozen: :func:`added` gives it, :func:`directions` are the rows before it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.neurons import Kind, MLPNeuron, Neuron, kind_of
from tl_neuron_attr.post import FrozenPost
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
    pos: Int[Tensor, " pos"] | None = None,
) -> Float[Tensor, "pos neuron"]:
    """The coefficients of some neurons of a layer, without the others', at ``pos`` or the predicting position.

    ``row`` counts directions as :func:`directions` does. An attention neuron's is zero before its source.
    """
    view = trace.view
    at = torch.tensor([trace.position]) if pos is None else pos
    if kind == "mlp":
        post = _post(trace, layer)
        return post[at.to(post.device)][:, row.to(post.device)].to(view.compute_dtype)
    pattern, value = trace.pattern[layer], trace.value[layer]
    head, dim = row // view.d_head, row % view.d_head
    here, there = pattern.device, value.device
    attended = pattern[head.to(here), at.to(here)[:, None], source.to(here)].to(view.compute_dtype)
    kv_head = head // (view.n_heads // view.n_kv_heads)
    weight = attended * value[source.to(there), kv_head.to(there), dim.to(there)].to(attended)
    factor = kept(trace, layer, pos)
    if factor is None:
        return weight
    return weight * factor[:, head.to(factor.device), dim.to(factor.device)].to(weight)


def coefficient(trace: "Trace", neuron: Neuron, pos: int) -> Float[Tensor, ""]:
    """The coefficient of one neuron at one position."""
    source = 0 if isinstance(neuron, MLPNeuron) else neuron.source
    one = [torch.tensor([number]) for number in (_row(trace, neuron), source, pos)]
    return coefficients_at(trace, kind_of(neuron), neuron.layer, *one)[0, 0]


def added(trace: "Trace", kind: Kind, layer: int, pos: Int[Tensor, " pos"] | None = None) -> FrozenPost:
    """What becomes of a sublayer's output before it is added, frozen at the predicting position or at ``pos``."""
    found = trace.view.block(layer).post(kind)
    if found.is_identity:
        return FrozenPost(found, None)
    at = torch.tensor([trace.position]) if pos is None else pos
    frozen = found.at(output(trace, kind, layer, at))
    return frozen if pos is not None or frozen.scale is None else FrozenPost(found, frozen.scale[0])


def output(trace: "Trace", kind: Kind, layer: int, pos: Int[Tensor, " pos"]) -> Float[Tensor, "pos d_model"]:
    """What a sublayer hands on, output bias included, before any norm or multiplier behind it."""
    acts = trace.z[layer] if kind == "attn" else _post(trace, layer)
    return _through(trace, kind, layer, acts[pos.to(acts.device)])


def handed_on(traces: "Sequence[Trace]", kind: Kind, layer: int) -> Float[Tensor, "trace d_model"]:
    """:func:`output` of several traces of one model, each at its predicting position."""
    acts = [(trace.z[layer] if kind == "attn" else _post(trace, layer))[trace.position] for trace in traces]
    return _through(traces[0], kind, layer, torch.stack(acts))


def _through(trace: "Trace", kind: Kind, layer: int, acts: Float[Tensor, "row ..."]) -> Float[Tensor, "row d_model"]:
    """Heads' or neurons' activations through a sublayer's output map."""
    block, own = trace.view.block(layer), acts.to(trace.view.compute_dtype).flatten(1)
    made = own @ directions(trace, kind, layer).to(own)
    bias = block.b_O if kind == "attn" else block.b_out
    return made if bias is None else made + bias.to(made)


def directions(trace: "Trace", kind: Kind, layer: int) -> Float[Tensor, "row d_model"]:
    """The output row of every direction of a layer, in the model's own precision (no copy where it has none).

    What it adds to the stream is that row through :func:`added`.
    """
    return trace.view.W_O(layer).flatten(0, 1) if kind == "attn" else trace.view.W_out(layer)


def n_directions(trace: "Trace", kind: Kind, layer: int) -> int:
    """How many directions a layer has: its heads' dimensions, or its MLP neurons."""
    acts = trace.z[layer] if kind == "attn" else _post(trace, layer)
    return acts[0].numel()


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
    factor = kept(trace, layer)
    return weight if factor is None else weight * factor[0, ..., None]


def rows_of(trace: "Trace", neurons: Sequence[Neuron], pos: int) -> Float[Tensor, "neuron d_model"]:
    """What a coefficient of one of each neuron adds at ``pos``, float32 or better, on the unembedding's device."""
    view = trace.view
    rows = torch.empty(len(neurons), view.d_model, dtype=view.compute_dtype, device=view.W_U.device)
    places: list[tuple[Kind, int]] = [(kind_of(n), n.layer) for n in neurons]
    for kind, layer in dict.fromkeys(places):
        mine = [i for i, at in enumerate(places) if at == (kind, layer)]
        all_rows = directions(trace, kind, layer)
        row = torch.tensor([_row(trace, neurons[i]) for i in mine], device=all_rows.device)
        made = added(trace, kind, layer, torch.tensor([pos])).linear(all_rows[row].to(view.compute_dtype))
        rows[torch.tensor(mine, device=rows.device)] = made.to(rows.device)
    return rows


def _row(trace: "Trace", neuron: Neuron) -> int:
    return neuron.neuron if isinstance(neuron, MLPNeuron) else neuron.head * trace.view.d_head + neuron.dim


def head_vectors(trace: "Trace", layer: int) -> Float[Tensor, "head d_model"]:
    """What each head adds (``hook_z`` through ``W_O``): the sum of its neurons, without the attention output bias."""
    z = trace.z[layer][trace.position].to(trace.view.compute_dtype)
    return added(trace, "attn", layer).linear(torch.einsum("hd,hdm->hm", z, trace.view.W_O(layer).to(z)))


def position_vectors(trace: "Trace", layer: int, head: int) -> Float[Tensor, "source d_model"]:
    """What one head brings from each source position."""
    moved = attn_coefficients(trace, layer)[head]
    return added(trace, "attn", layer).linear(moved.T @ trace.view.W_O(layer)[head].to(moved))


def source_vectors(trace: "Trace", layer: int) -> Float[Tensor, "source d_model"]:
    """What all heads of a layer together bring from each source position, without the attention output bias."""
    moved = attn_coefficients(trace, layer)
    rows = torch.einsum("hds,hdm->sm", moved, trace.view.W_O(layer).to(moved))
    return added(trace, "attn", layer).linear(rows)


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
