"""Keys of value neurons: the direction of the residual stream that activates each of them.

A neuron's activation is read from a residual stream ``x`` through a norm, ``N(x) = gain * (x - m(x)) / s``, so
its key in the residual stream is its input column carried back through the norm (``s`` cancels in a ratio):

=================================  =======================================================  =======================
value neuron                       key ``k``                                                stream
=================================  =======================================================  =======================
attention ``(l, head, dim, src)``  ``gain * W_V[l, kv(head)][:, dim]``                      before block ``l``, src
MLP ``(l, n)``, plain              ``gain * W_in[l][:, n]``                                 MLP's input, ``dest``
MLP, gated, ``"linearised"``       ``gain * (act'(g) u W_gate[:, n] + act(g) W_in[:, n])``  same
MLP, gated, ``"gate"``, ``"in"``   ``gain * W_gate[:, n]``, ``gain * W_in[:, n]``           same
=================================  =======================================================  =======================

Under ``"exact"`` keys of LayerNorm models are centred, ``k - m(k)``, as the norm centres its input; under
``"paper"`` they are not. The MLP's input is the stream with the same layer's attention, or without it in a
parallel block; which one is decided on numbers: the activation rebuilt from it must be the model's own, else
:class:`UnsupportedModelError`. A value that attention clips (OLMo) keeps the key that it has before clipping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.activations import Activation
from tl_neuron_attr.block_view import MLPInputs
from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.neurons import AttnNeuron, MLPNeuron, Neuron
from tl_neuron_attr.norms import Norm
from tl_neuron_attr.tolerance import ROUNDING, TOLERANCE
from tl_neuron_attr.writes import attn_added

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

Key: TypeAlias = Literal["linearised", "gate", "in"]


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of value neurons that read one stream: layer ``layer`` at position ``pos``.

    ``reads_attn`` tells whether the stream holds the same layer's attention output.
    """

    neurons: tuple[Neuron, ...]
    layer: int
    pos: int
    reads_attn: bool
    stream: Float[Tensor, " d_model"]
    keys: Float[Tensor, "neuron d_model"]


def keys_of(trace: "Trace", neurons: Sequence[Neuron], key: Key = "linearised") -> list[Keys]:
    """Keys of value neurons, grouped by the stream they read, in the compute precision of the trace.

    Raises :class:`ValueError` for an unknown ``key``, :class:`UnsupportedModelError` where a neuron's own
    activation is not what its input column makes of the stream.
    """
    if key not in get_args(Key):
        raise ValueError(f'unknown key {key!r}: choose "linearised", "gate" or "in"')
    trace.view.check_unchanged()
    groups: dict[tuple[str, int, int], list[Neuron]] = {}
    for neuron in neurons:
        pos = neuron.source if isinstance(neuron, AttnNeuron) else trace.position
        groups.setdefault((type(neuron).__name__, neuron.layer, pos), []).append(neuron)
    return [
        _attn_keys(trace, layer, pos, [n for n in group if isinstance(n, AttnNeuron)])
        if name == AttnNeuron.__name__
        else _mlp_keys(trace, layer, [n for n in group if isinstance(n, MLPNeuron)], key)
        for (name, layer, pos), group in groups.items()
    ]


def _attn_keys(trace: "Trace", layer: int, pos: int, neurons: list[AttnNeuron]) -> Keys:
    block, view = trace.view.block(layer), trace.view
    stream = trace.resid_pre[layer][pos].to(view.compute_dtype)
    kv_head = torch.tensor([n.head // (view.n_heads // view.n_kv_heads) for n in neurons])
    dim = torch.tensor([n.dim for n in neurons])
    columns = block.W_V[kv_head, :, dim].to(stream)
    bias = None if block.b_V is None else block.b_V[kv_head, dim].to(stream)
    norm = block.attn_norm
    made = view.clipped(_affine(_normalised(norm, stream), columns.T, bias))
    value = trace.value[layer][pos, kv_head, dim].to(made)
    _confirm(trace, made, value, f"values of attention neurons of layer {layer}")
    return Keys(tuple(neurons), layer, pos, False, stream, _through(trace, norm, columns))


def _mlp_keys(trace: "Trace", layer: int, neurons: list[MLPNeuron], key: Key) -> Keys:
    block, post = trace.view.block(layer), trace.post[layer]
    if post is None:
        raise UnsupportedModelError(trace.view.mlp_refusal(layer) or f"layer {layer} has no MLP neurons")
    index = torch.tensor([n.neuron for n in neurons])
    inputs, norm = block.mlp_inputs, block.mlp_norm
    before = trace.resid_pre[layer][trace.position].to(trace.view.compute_dtype)
    after = before + attn_added(trace, layer).to(before)
    own = post[trace.position, index].to(before)
    streams = {True: (after, _normalised(norm, after)), False: (before, _normalised(norm, before))}
    act, reads_attn = _closest(inputs, streams, index, own, ROUNDING[trace.view.dtype])
    stream, x = streams[reads_attn]
    _confirm(trace, _activations(inputs, act, x, index), own, f"activations of MLP neurons of layer {layer}")
    columns = _mlp_columns(inputs, act, x, index, key)
    return Keys(tuple(neurons), layer, trace.position, reads_attn, stream, _through(trace, norm, columns))


def _closest(
    inputs: MLPInputs, streams: dict[bool, tuple[Tensor, Tensor]], index: Tensor, own: Tensor, rounding: float
) -> tuple[Activation, bool]:
    """The activation function and stream (with the layer's attention or without) that give the model's activations.

    The declared function is believed up to rounding; others count only where it is further off than that.
    """
    found: list[tuple[float, Activation, bool]] = []
    for act in inputs.acts:
        for reads_attn, (_, x) in streams.items():
            found.append((_gap(_activations(inputs, act, x, index), own), act, reads_attn))
        if min(gap for gap, _, _ in found) <= rounding:
            break
    _, act, reads_attn = min(found, key=lambda each: each[0])
    return act, reads_attn


def _mlp_columns(
    inputs: MLPInputs, activation: Activation, x: Tensor, index: Tensor, key: Key
) -> Float[Tensor, "neuron d_model"]:
    """Input columns, or for a gated MLP the one that ``key`` names."""
    W_pre = inputs.W_pre[:, index].to(x).T
    if inputs.W_linear is None or key == "gate":
        return W_pre
    W_linear = inputs.W_linear[:, index].to(x).T
    if key == "in":
        return W_linear
    pre = _affine(x, W_pre.T, None if inputs.b_pre is None else inputs.b_pre[index])
    linear = _affine(x, W_linear.T, None if inputs.b_linear is None else inputs.b_linear[index])
    with torch.inference_mode(False), torch.enable_grad():
        leaf = pre.clone().requires_grad_()
        act = activation(leaf)
        [slope] = torch.autograd.grad(act.sum(), leaf)
    return (slope * linear)[:, None] * W_pre + act.detach()[:, None] * W_linear


def _activations(inputs: MLPInputs, act: Activation, x: Tensor, index: Tensor) -> Float[Tensor, " neuron"]:
    def columns(weight: Tensor, bias: Tensor | None) -> Tensor:
        return _affine(x, weight[:, index].to(x), None if bias is None else bias[index])

    with torch.no_grad():
        post = act(columns(inputs.W_pre, inputs.b_pre))
    if inputs.W_linear is not None:
        post = post * columns(inputs.W_linear, inputs.b_linear)
    return post if inputs.after is None else post + inputs.after[index].to(post)


def _normalised(norm: Norm, stream: Tensor) -> Tensor:
    x = norm.linear(stream, norm.scale(stream))
    return x if norm.bias is None else x + norm.bias.to(x)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else x @ weight + bias.to(x)


def _through(trace: "Trace", norm: Norm, columns: Tensor) -> Tensor:
    """Input columns carried back through the norm, its scale left out; centred only under ``"exact"``."""
    k = columns if norm.gain is None else columns * norm.gain.to(columns)
    return k - k.mean(-1, keepdim=True) if norm.centred and trace.convention == "exact" else k


def _gap(made: Tensor, own: Tensor) -> float:
    return float((made - own).abs().amax() / own.abs().amax().clamp(min=1e-6))


def _confirm(trace: "Trace", made: Tensor, own: Tensor, what: str) -> None:
    gap, allowed = _gap(made, own), 10 * TOLERANCE[trace.view.dtype]
    if not gap <= allowed:
        raise UnsupportedModelError(
            f"{what} of {trace.view.name}: rebuilt from the residual stream they differ from the model's own by "
            f"{gap:.3g} of the largest (allowed: {allowed:g}), so query scores would be wrong; remove hooks that "
            f"edit this part, or report the model's architecture"
        )
