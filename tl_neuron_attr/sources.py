"""How a head's output divides among source positions, also where a hook has edited it.

``hook_z`` is what a head really hands on: ``z[pos, head, dim] = sum_source pattern[head, pos, source] *
value[source, kv(head), dim]``, and the terms of the sum are its attention neurons' coefficients. A hook on
``hook_z`` (an ablation, say) changes ``z`` behind pattern and values. Where it has set ``z`` to zero, every term is
zero; where it has multiplied a dimension by one factor at every position, so are the terms. Any other edit (a mean, a
value of another prompt) says nothing about sources: layers, heads and MLP neurons keep their scores, but attention
neurons of that layer are refused, naming the head.
"""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.tolerance import TOLERANCE

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


# What `kept` has found at predicting positions, by layer: a ranking asks for it several times, and no trace changes.
_AT_END: "WeakKeyDictionary[Trace, dict[int, Tensor | None]]" = WeakKeyDictionary()


def values(trace: "Trace", layer: int) -> Float[Tensor, "head d_head source"]:
    """The values each query head reads, float32 or better: grouped heads share those of their key-value head."""
    view = trace.view
    grouped = trace.value[layer].to(view.compute_dtype).permute(1, 2, 0)
    return grouped.repeat_interleave(view.n_heads // view.n_kv_heads, dim=0)


def kept(
    trace: "Trace", layer: int, pos: Int[Tensor, " pos"] | None = None
) -> Float[Tensor, "pos head d_head"] | None:
    """The factor that an edit of ``hook_z`` has put on every term at the positions ``pos``; ``None`` without an edit.

    Without ``pos`` it is that of the predicting position, looked for once in each trace. Raises
    :class:`UnsupportedModelError`, naming the head, where what was handed on is no multiple of the terms' sum.
    """
    if pos is not None:
        return _kept(trace, layer, pos)
    found = _AT_END.setdefault(trace, {})
    if layer not in found:
        found[layer] = _kept(trace, layer, torch.tensor([trace.position]))
    return found[layer]


def _kept(trace: "Trace", layer: int, pos: Tensor) -> Tensor | None:
    made, own = _made(trace, layer, pos)
    size = torch.maximum(made.abs().amax(), own.abs().amax())
    zeroed = _zeroed(trace, layer, pos, made, own)
    edited = ~((made - own).abs() <= TOLERANCE[trace.view.dtype] * size) & ~zeroed
    if not bool((zeroed | edited).any()):
        return None
    factor = torch.where(zeroed, 0.0, 1.0).to(made)
    return torch.where(edited, _factor(trace, layer, edited.any(0)), factor) if bool(edited.any()) else factor


def _zeroed(trace: "Trace", layer: int, pos: Tensor, made: Tensor, own: Tensor) -> Bool[Tensor, "pos head d_head"]:
    """Exactly zero where the terms do not cancel (to rounding), or at every position although there are terms."""
    zero = own == 0
    if not bool(zero.any()):
        return zero
    pattern = trace.pattern[layer][:, pos.to(trace.pattern[layer].device)].to(made)
    mass = torch.einsum("hps,hds->phd", pattern.abs(), values(trace, layer).abs().to(made))
    everywhere = (trace.z[layer][: trace.position + 1] == 0).all(0).to(zero.device)
    cancelled = made.abs() <= 32 * torch.finfo(made.dtype).eps * mass
    return zero & (mass > 0) & (everywhere | ~cancelled)


def _made(trace: "Trace", layer: int, pos: Tensor) -> tuple[Tensor, Tensor]:
    """What pattern and values give, and what was handed on: both ``[pos, head, d_head]``."""
    pattern = trace.pattern[layer]
    attended = pattern[:, pos.to(pattern.device)].to(trace.view.compute_dtype)
    made = torch.einsum("hps,hds->phd", attended, values(trace, layer).to(attended.device))
    return made, trace.z[layer][pos.to(trace.z[layer].device)].to(made)


def _factor(trace: "Trace", layer: int, edited: Bool[Tensor, "head d_head"]) -> Float[Tensor, "head d_head"]:
    """One factor for every edited dimension, the same at every position of the prompt, or an error."""
    made, own = _made(trace, layer, torch.arange(trace.position + 1))
    factor = (made * own).sum(0) / made.square().sum(0).clamp(min=torch.finfo(made.dtype).tiny)
    gap = torch.where(edited, (own - factor * made).abs().amax(0), 0.0)
    size = float(torch.maximum(made.abs().amax(), own.abs().amax()))
    if len(made) < 2 or not float(gap.amax()) <= TOLERANCE[trace.view.dtype] * size:
        head = int(edited.any(-1).nonzero()[0]) if len(made) < 2 else int(gap.amax(-1).argmax())
        raise UnsupportedModelError(
            f"L{layer}H{head} of {trace.view.name}: what the head hands on (hook_z) is not what pattern and "
            f"values give, nor a multiple of it, so how it divides among source positions is not defined; attribute "
            f"other layers with layers=[...], or layers, heads and MLP neurons, or edit hook_pattern or hook_v"
        )
    return factor
