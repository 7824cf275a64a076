"""What attention brings from each source position, and scores of any vectors added to the stream before a block.

A head's output is a sum over source positions; what one of them brings is scored at base ``h`` like the head itself
(:mod:`tl_neuron_attr.value`), and so is what all heads of a layer bring from it together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.bases import Bases
from tl_neuron_attr.neurons import Head
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.scoring import Vectors, changes_together
from tl_neuron_attr.writes import position_vectors, source_vectors, stream_before

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

# Vectors of several layers that are scored together: few enough to hold, enough to be quick.
_ROWS_AT_ONCE = 1024


@without_autocast
def position_scores(
    trace: "Trace", layer: int, head: int, *, memory_budget: int = DEFAULT_MEMORY_BUDGET
) -> Float[Tensor, " source"]:
    """Score of what one head brings from each source position, at base ``h`` (nats).

    Raises :class:`ValueError` for a layer or head that the model does not have.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> int(na.position_scores(trace, layer=23, head=4).argmax())
        3
    """
    _check_head(trace, layer, head)
    return sources_of(trace, [Head(layer, head)], memory_budget)[0]


@without_autocast
def sources_of(trace: "Trace", heads: Sequence[Head], memory_budget: int) -> list[Float[Tensor, " source"]]:
    """:func:`position_scores` of several heads at once."""
    for each in heads:
        _check_head(trace, each.layer, each.head)
    readout = Readout.of(trace, memory_budget=memory_budget)
    vectors = [position_vectors(trace, each.layer, each.head) for each in heads]
    return [scores.cpu() for scores in added_to_stream(trace, readout, [each.layer for each in heads], vectors)]


@without_autocast
def source_scores(trace: "Trace", *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> Float[Tensor, "layer source"]:
    """Score of what all heads of a layer together bring from each source position, at base ``h`` (nats).

    A layer's scores do not add up to that of the layer, whose target is not linear in what is added (for a
    ``Contrast`` they do, up to the output bias). Summed over layers they say which tokens attention has drawn on.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> int(na.source_scores(trace)[23].argmax())
        3
    """
    readout = Readout.of(trace, memory_budget=memory_budget)
    layers = range(trace.view.n_layers)
    at_once = max(1, _ROWS_AT_ONCE // (trace.position + 1))
    scores: list[Tensor] = []
    for start in layers[::at_once]:
        chunk = layers[start : start + at_once]
        vectors = [source_vectors(trace, layer) for layer in chunk]
        scores += added_to_stream(trace, readout, list(chunk), vectors)
    return torch.stack(scores).cpu()


def _check_head(trace: "Trace", layer: int, head: int) -> None:
    chosen_layers(trace, "attn", [layer])
    if not 0 <= head < trace.view.n_heads:
        raise ValueError(f"head {head} is out of range: {trace.view.name} has heads 0 to {trace.view.n_heads - 1}")


def added_to_stream(
    trace: "Trace", readout: Readout, layers: Sequence[int], added_by: Sequence[Tensor]
) -> list[Float[Tensor, " vector"]]:
    """Scores of vectors added to the stream before each of ``layers``; one tensor of vectors for each layer."""
    device = readout.W_U.device
    bases = Bases.of(readout, torch.stack([stream_before(trace, layer).to(device) for layer in layers]))
    return list(added_at([bases], [added_by])[0].split([len(v) for v in added_by]))


def added_at(
    bases: Sequence[Bases], added_by: Sequence[Sequence[Float[Tensor, "_ d_model"]]]
) -> list[Float[Tensor, " vector"]]:
    """Scores of vectors added to the bases of several prompts; one tensor of vectors for each base of each prompt.

    The prompts' bases are of one reading.
    """
    readout, device = bases[0].readout, bases[0].readout.W_U.device
    each = [torch.cat([v.to(device) for v in own]) for own in added_by]
    vectors = torch.cat([own.readout.direction(moved) for own, moved in zip(bases, each, strict=True)])
    counts = [torch.tensor([len(v) for v in own]) for own in added_by]
    base_of = torch.cat([torch.arange(len(count)).repeat_interleave(count) for count in counts])
    prompt = torch.arange(len(bases)).repeat_interleave(torch.tensor([len(moved) for moved in each]))
    scores: list[Tensor] = []
    for chunk in torch.arange(len(vectors)).split(readout.directions_at_once()):
        whole = torch.arange(len(chunk), device=device)
        asked, sizes = torch.unique_consecutive(prompt[chunk], return_counts=True)
        parts = zip(
            asked.tolist(), whole.split(sizes.tolist()), base_of[chunk].to(device).split(sizes.tolist()), strict=True
        )
        own = [
            Vectors(bases[i], at, direction, torch.arange(len(at), device=device), vectors.new_ones(len(at)))
            for i, direction, at in parts
        ]
        scores += changes_together(vectors[chunk[0] : chunk[-1] + 1], own)
    return list(torch.cat(scores).split([len(moved) for moved in each]))
