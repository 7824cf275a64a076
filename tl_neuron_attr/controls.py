"""Random neurons to compare an ablation with: as many as the set has, from the same layers, none of the set.

Layers differ in how much any of their neurons matters, so a control that ignores the layer flatters every method.
A draw takes, uniformly and without replacement, from each layer as many MLP neurons, entries ``(head, dim)`` of the
heads, or under ``scope="source"`` entries ``(head, dim, source)``, as the set has there, from those not in the set.
Draws depend on the seed only, not on how they are batched.
"""

from collections.abc import Collection

import torch

from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.ranking import integers
from tl_neuron_attr.selection import FromSource, Selection, mlp_width


def draw_controls(view: ModelView, selection: Selection, n: int, generator: torch.Generator) -> list[Selection]:
    """``n`` independent draws; :class:`ValueError` where a layer has too few other neurons."""
    return [_draw(view, selection, generator) for _ in range(n)]


def _draw(view: ModelView, selection: Selection, generator: torch.Generator) -> Selection:
    mlp = {
        layer: frozenset(_others(mlp_width(view, layer), units, len(units), f"MLP of layer {layer}", generator))
        for layer, units in selection.mlp.items()
    }
    entries = view.n_heads * view.d_head
    attn = {
        layer: frozenset(_others(entries, units, len(units), f"heads of layer {layer}", generator))
        for layer, units in selection.attn.items()
    }
    sources: dict[int, frozenset[FromSource]] = {}
    for layer, units in selection.sources.items():
        drawn: set[FromSource] = set()
        for dest in sorted({unit.dest for unit in units}):
            drawn |= _draw_sources(view, selection, layer, dest, generator)
        sources[layer] = frozenset(drawn)
    return Selection(mlp, attn, sources)


def _draw_sources(
    view: ModelView, selection: Selection, layer: int, dest: int, generator: torch.Generator
) -> set[FromSource]:
    """Single sources of one destination; entries ablated as a whole have no share left to draw."""
    n_sources = dest + 1
    taken = {
        (unit.head * view.d_head + unit.dim) * n_sources + unit.source
        for unit in selection.sources[layer]
        if unit.dest == dest
    }
    whole = selection.attn.get(layer, frozenset())
    excluded = taken | {entry * n_sources + source for entry in whole for source in range(n_sources)}
    total = view.n_heads * view.d_head * n_sources
    drawn = _others(total, excluded, len(taken), f"heads and sources of layer {layer}", generator)
    found: set[FromSource] = set()
    for place in drawn:
        entry, source = divmod(place, n_sources)
        found.add(FromSource(*divmod(entry, view.d_head), source, dest))
    return found


def _others(total: int, taken: Collection[int], n: int, what: str, generator: torch.Generator) -> list[int]:
    """``n`` of ``total`` that are not ``taken``."""
    free = total - len(taken)
    if free < n:
        raise ValueError(
            f"controls draw as many neurons from each layer as the set has there, none of the set: {n} are wanted "
            f"from the {what}, but only {free} of its {total} are not in the set; ask for fewer neurons or no "
            f"controls"
        )
    order = integers(torch.randperm(total, generator=generator))
    return [place for place in order if place not in taken][:n]
