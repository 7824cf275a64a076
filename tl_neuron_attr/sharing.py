"""Neurons that prompts of one type have in common, counted from plain numbers: no model and no PyTorch.

A neuron is shared by a type if it is among the top ``k`` in more than ``share`` of the type's prompts. Prompts differ
in length, so an attention neuron is ``(layer, head, dim)``: it counts once for a prompt, with the sum of its scores,
whatever the source positions it is ranked at. Under ``by_source`` it is ``(layer, head, dim, source)``.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tl_neuron_attr.neurons import ID_COLUMNS, AttnNeuron, Kind, MLPNeuron, Neuron

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
    """Neurons that the prompts of each type share, most shared first.

    Make it with :func:`shared_neurons`, or from a sweep's files.
    """

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


def check_share(share: float) -> float:
    """Raise :class:`ValueError` for a share outside 0 up to, but not including, 1."""
    if not 0 <= share < 1:
        raise ValueError(f"share={share}: give a share of the prompts from 0 up to, but not including, 1")
    return share


def count_shared(
    rankings: Iterable[tuple[str, Sequence[Sequence[int]], Sequence[float]]],
    kind: Kind,
    k: int,
    share: float,
    by_source: bool,
) -> SharedNeurons:
    """The shared neurons, from the type, the ids' coordinates and the scores of each prompt's top ``k``."""
    width = len(ID_COLUMNS[kind]) - (kind == "attn" and not by_source)
    n_prompts: dict[str, int] = {}
    scores: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for type_, ids, values in rankings:
        n_prompts[type_] = n_prompts.get(type_, 0) + 1
        own: dict[tuple[int, ...], float] = {}
        for coordinates, score in zip(ids, values, strict=True):
            unit = tuple(coordinates[:width])
            own[unit] = own.get(unit, 0.0) + score
        for unit, score in own.items():
            scores.setdefault(type_, {}).setdefault(unit, []).append(score)
    groups: dict[str, tuple[SharedUnit, ...]] = {}
    for type_, count in n_prompts.items():
        found = [
            SharedUnit(unit, len(each), sum(each) / len(each))
            for unit, each in scores.get(type_, {}).items()
            if len(each) > share * count
        ]
        groups[type_] = tuple(sorted(found, key=lambda f: (-f.n_prompts, -f.score, f.unit)))
    return SharedNeurons(kind, by_source, k, share, n_prompts, groups)


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
