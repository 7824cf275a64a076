"""What prompts of one type have in common, and what types have in common with each other.

A neuron is shared by a type if it is among the top ``k`` in more than ``share`` of the type's prompts (300 and one
half in the paper). Prompts differ in length, so by default an attention neuron is ``(layer, head, dim)``: it counts
once for a prompt, with the sum of its scores, whatever the source positions it is ranked at. Under ``by_source`` it
is ``(layer, head, dim, source)``, which compares prompts of one template and length.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tl_neuron_attr.analysis import TypedRankings, TypedTraces, typed
from tl_neuron_attr.neurons import AttnNeuron, Head, Kind, MLPNeuron, Neuron
from tl_neuron_attr.ranking import ID_COLUMNS, check_count, floats
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.value import head_scores

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]


@dataclass(frozen=True, slots=True)
class SharedUnit:
    """One neuron of a type: its coordinates, in how many prompts it is, and its mean score there (nats)."""

    unit: tuple[int, ...]
    n_prompts: int
    score: float


@dataclass(frozen=True, repr=False)
class SharedNeurons:
    """Neurons that the prompts of each type share, most shared first; make it with :func:`shared_neurons`."""

    kind: Kind
    by_source: bool
    k: int
    share: float
    n_prompts: Mapping[str, int]
    groups: Mapping[str, tuple[SharedUnit, ...]]

    @property
    def columns(self) -> tuple[str, ...]:
        """The coordinates' names: ``layer, neuron`` or ``layer, head, dim``, with ``source`` under ``by_source``."""
        names = ID_COLUMNS[self.kind]
        return names if self.kind == "mlp" or self.by_source else names[:-1]

    def sets(self) -> dict[str, frozenset[tuple[int, ...]]]:
        """The coordinates of each type's neurons, for :func:`overlap`."""
        return {type_: frozenset(found.unit for found in group) for type_, group in self.groups.items()}

    def ids(self, type_: str) -> list[Neuron]:
        """A type's neurons as identities, to ablate (which without ``scope="source"`` is every source).

        Where sources were not told apart, the identity of an attention neuron has source 0, which has no meaning.
        """
        if self.kind == "mlp":
            return [MLPNeuron(*found.unit) for found in self.groups[type_]]
        return [AttnNeuron(*(*found.unit, 0)[:4]) for found in self.groups[type_]]

    def to_frame(self) -> "pandas.DataFrame":
        """One row a type and neuron: type, its coordinates, ``n_prompts``, ``share`` of the type's, ``score``."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        names = ["type", *self.columns, "n_prompts", "share", "score"]
        rows = [
            (type_, *found.unit, found.n_prompts, found.n_prompts / self.n_prompts[type_], found.score)
            for type_, group in self.groups.items()
            for found in group
        ]
        return pandas.DataFrame(rows, columns=pandas.Index(names))

    def __repr__(self) -> str:
        told = ", ".join(f"{type_} {len(group)}" for type_, group in self.groups.items())
        return f"SharedNeurons({self.kind}, top {self.k} in more than {self.share:.0%} of prompts: {told})"


def shared_neurons(
    rankings: TypedRankings, k: int = 300, share: float = 0.5, *, by_source: bool = False
) -> SharedNeurons:
    """The neurons among the top ``k`` in more than ``share`` of a type's prompts.

    Args:
        rankings: pairs of a type and a ranking of one prompt, read once.
        k: how many of each ranking to take; each must have as many, or all of its model's neurons.
        share: of a type's prompts, from 0 up to, but not including, 1.
        by_source: whether attention neurons at different source positions are different (see the module).

    Raises:
        ValueError: no rankings, those of several models or kinds, one of fewer than ``k`` neurons, ``share`` outside
            its range.

    Example:
        >>> import tl_neuron_attr as na
        >>> prompts = ["The capital of France is", "The capital of Italy is"]
        >>> traces = na.trace_batch(na.load_demo_model(), prompts, [" Paris", " Rome"], progress=False)
        >>> found = na.shared_neurons((("capital", na.value_neurons(t, "mlp", k=100)) for t in traces), k=100)
        >>> found.columns, 0 < len(found.groups["capital"]) < 100
        (('layer', 'neuron'), True)
    """
    k = check_count("k", k)
    if not 0 <= share < 1:
        raise ValueError(f"share={share}: give a share of the prompts from 0 up to, but not including, 1")
    kind: Kind = "mlp"
    n_prompts: dict[str, int] = {}
    scores: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for type_, ranked in typed(rankings):
        kind = ranked.kind
        if len(ranked) < min(k, ranked.n_neurons):
            raise ValueError(f"a ranking of {type_} has {len(ranked)} neurons, k={k}: rank with value_neurons(k={k})")
        n_prompts[type_] = n_prompts.get(type_, 0) + 1
        names = ID_COLUMNS[kind] if kind == "mlp" or by_source else ID_COLUMNS[kind][:-1]
        own: dict[tuple[int, ...], float] = {}
        best = ranked.top(k)
        for neuron, score in zip(best.ids, floats(best.scores), strict=True):
            unit = tuple(int(getattr(neuron, name)) for name in names)
            own[unit] = own.get(unit, 0.0) + score
        for unit, score in own.items():
            scores.setdefault(type_, {}).setdefault(unit, []).append(score)
    groups: dict[str, tuple[SharedUnit, ...]] = {}
    for type_, count in n_prompts.items():
        found = [
            SharedUnit(unit, len(each), sum(each) / len(each))
            for unit, each in scores[type_].items()
            if len(each) > share * count
        ]
        groups[type_] = tuple(sorted(found, key=lambda f: (-f.n_prompts, -f.score, f.unit)))
    return SharedNeurons(kind, by_source, k, share, n_prompts, groups)


def top_heads(
    traces: TypedTraces, fraction: float = 0.01, *, memory_budget: int = DEFAULT_MEMORY_BUDGET
) -> dict[str, tuple[Head, ...]]:
    """For each type the heads with the highest mean score: that fraction of all heads (rounded down, at least one).

    Raises :class:`ValueError` for no traces, those of several models, or a fraction outside 0 to 1.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> [str(head) for head in na.top_heads([("capital", trace)])["capital"]]
        ['L23H4', 'L29H1']
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: give a share of all heads above 0, up to 1")
    sums: dict[str, Tensor] = {}
    for type_, trace in typed(traces):
        scores = head_scores(trace, memory_budget=memory_budget).scores.double()
        sums[type_] = sums.get(type_, torch.zeros_like(scores)) + scores
    found: dict[str, tuple[Head, ...]] = {}
    for type_, summed in sums.items():
        n_heads = summed.shape[1]
        count = max(1, math.floor(fraction * summed.numel() + 1e-9))
        order = summed.flatten().sort(descending=True, stable=True).indices[:count].tolist()
        found[type_] = tuple(Head(*divmod(place, n_heads)) for place in order)
    return found


def overlap(sets: Mapping[str, Iterable[Hashable]]) -> "pandas.DataFrame":
    """How many members each two sets have in common, by name; the diagonal holds the sets' own sizes.

    Takes what :func:`top_heads` returns, :meth:`SharedNeurons.sets`, or any sets by name.

    Raises :class:`ValueError` for no sets.

    Example:
        >>> import tl_neuron_attr as na
        >>> na.overlap({"capital": [na.Head(3, 1), na.Head(5, 2)], "country": [na.Head(5, 2)]}).values.tolist()
        [[2, 1], [1, 1]]
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    if not sets:
        raise ValueError("no sets are given: name at least one, e.g. from top_heads or shared_neurons(...).sets()")
    members = {name: set(given) for name, given in sets.items()}
    rows = [[len(one & other) for other in members.values()] for one in members.values()]
    names = list(members)
    return pandas.DataFrame(rows, index=pandas.Index(names), columns=pandas.Index(names))
