"""Numbers for neurons: every neuron of some layers counted through in the order of their ids."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.neurons import AttnNeuron, Kind, MLPNeuron, Neuron, kind_of
from tl_neuron_attr.writes import n_directions

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def chosen_layers(trace: "Trace", kind: Kind, layers: Sequence[int] | None) -> list[int]:
    """The layers asked for (all by default), sorted; an error for those that do not exist or have no neurons."""
    return checked_layers(trace.view, kind, layers)


def checked_layers(view: ModelView, kind: Kind, layers: Sequence[int] | None) -> list[int]:
    """:func:`chosen_layers` of a model."""
    n_layers = view.n_layers
    chosen = list(range(n_layers)) if layers is None else sorted(set(layers))
    wrong = [layer for layer in chosen if isinstance(layer, bool) or not 0 <= layer < n_layers]
    if wrong or not chosen:
        raise ValueError(
            f"layers={list(layers or [])}: name at least one layer, each from 0 to {n_layers - 1} "
            f"({view.name} has {n_layers})"
        )
    if kind == "mlp":
        for layer in chosen:
            refusal = view.mlp_refusal(layer)
            if refusal is not None:
                raise UnsupportedModelError(f"{refusal} (name dense layers with layers=[...])")
    return chosen


def place(trace: "Trace", neuron: Neuron) -> tuple[int, int, Kind]:
    """Row, source and kind of a neuron; :class:`ValueError` for one that the model or prompt does not have."""
    kind = kind_of(neuron)
    chosen_layers(trace, kind, [neuron.layer])
    view = trace.view
    if isinstance(neuron, AttnNeuron):
        limits = {"head": view.n_heads, "dim": view.d_head, "source": trace.position + 1}
        row, source = neuron.head * view.d_head + neuron.dim, neuron.source
    else:
        limits = {"neuron": n_directions(trace, kind, neuron.layer)}
        row, source = neuron.neuron, 0
    for name, limit in limits.items():
        if getattr(neuron, name) >= limit:
            raise ValueError(f"{neuron} does not exist here: {name} runs from 0 to {limit - 1}")
    return row, source, kind


@dataclass(frozen=True)
class Numbering:
    """Layer after layer, row after row (``neuron``, or ``head`` and ``dim``), source after source."""

    kind: Kind
    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    n_sources: int
    d_head: int

    @staticmethod
    def of(trace: "Trace", kind: Kind, layers: Sequence[int]) -> "Numbering":
        """The numbering of all neurons of ``layers`` in one trace."""
        n_sources = trace.position + 1 if kind == "attn" else 1
        sizes = tuple(n_directions(trace, kind, layer) * n_sources for layer in layers)
        return Numbering(kind, tuple(layers), sizes, n_sources, trace.view.d_head)

    def places(
        self, number: Int[Tensor, " neuron"]
    ) -> tuple[Int[Tensor, " neuron"], Int[Tensor, " neuron"], Int[Tensor, " neuron"]]:
        """Which layer (as an index of ``layers``), row and source each number stands for."""
        starts = torch.tensor([0, *accumulate(self.sizes)])
        index = torch.searchsorted(starts, number, right=True) - 1
        neuron = number - starts[index]
        return index, neuron // self.n_sources, neuron % self.n_sources

    def numbers(self, trace: "Trace", neurons: Sequence[Neuron]) -> Int[Tensor, " neuron"]:
        """The numbers of given neurons of this kind; :class:`ValueError` for one that does not exist."""
        starts = [0, *accumulate(self.sizes)]
        out: list[int] = []
        for neuron in neurons:
            row, source, _ = place(trace, neuron)
            out.append(starts[bisect_right(self.layers, neuron.layer) - 1] + row * self.n_sources + source)
        return torch.tensor(out, dtype=torch.int64)

    def ids(self, number: Int[Tensor, " neuron"]) -> tuple[Neuron, ...]:
        """The identities that numbers stand for."""
        index, row, source = (t.tolist() for t in self.places(number))
        if self.kind == "mlp":
            return tuple(MLPNeuron(self.layers[i], r) for i, r in zip(index, row, strict=True))
        d_head = self.d_head
        return tuple(
            AttnNeuron(self.layers[i], r // d_head, r % d_head, s) for i, r, s in zip(index, row, source, strict=True)
        )
