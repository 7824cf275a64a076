"""Identities: what a score belongs to.

A neuron is one row of a sublayer's output matrix. An MLP neuron is named by its layer and its place in
``d_mlp``. An attention neuron is one dimension of one head's value vector, read from one source position, so
it has four coordinates. Heads and layers are sums of neurons and have names of their own:

====================  ===============  ==================================================
class                 printed          meaning
====================  ===============  ==================================================
:class:`MLPNeuron`    ``L8N123``       layer 8, neuron 123
:class:`AttnNeuron`   ``L9H8D17@3``    layer 9, head 8, dimension 17, source position 3
:class:`Head`         ``L9H8``         layer 9, head 8
:class:`Layer`        ``L9.attn``      the attention (or ``.mlp``) sublayer of layer 9
====================  ===============  ==================================================

``str`` gives the label and :func:`parse` reads it back. All four are frozen, hashable and ordered by their
coordinates, first to last; identities of different classes are never equal.
"""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, cast

Kind: TypeAlias = Literal["mlp", "attn"]

ID_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "mlp": ("layer", "neuron"),
    "attn": ("layer", "head", "dim", "source"),
}


def check_kind(kind: str) -> Kind:
    """Return ``kind`` if it is ``"mlp"`` or ``"attn"``; raise :class:`ValueError` for anything else.

    >>> check_kind("mlp")
    'mlp'
    """
    if kind not in ("mlp", "attn"):
        raise ValueError(f'unknown kind {kind!r}: the kinds are "mlp" and "attn"')
    return kind


def check_count(name: str, value: int) -> int:
    """Return ``value`` as an integer of 1 or more; raise :class:`ValueError` for less."""
    count = operator.index(value)
    if count < 1:
        raise ValueError(f"{name} is {value}: ask for 1 or more")
    return count


class _Identity:
    """Checks shared by the four identities, and a hash that tells their classes apart."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            if field.name == "kind":
                check_kind(value)
                continue
            try:
                number = operator.index(value)
            except TypeError:
                number = -1
            if number < 0:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} is {value!r}: it must be an integer of 0 or more "
                    f"(count from the start; negative indices have no meaning in a name)"
                )
            object.__setattr__(self, field.name, number)


@dataclass(frozen=True, order=True, slots=True)
class MLPNeuron(_Identity):
    """Neuron ``neuron`` (0 to ``d_mlp - 1``) of the MLP of layer ``layer``.

    >>> str(MLPNeuron(8, 123))
    'L8N123'
    """

    layer: int
    neuron: int

    def __hash__(self) -> int:
        return hash(("MLPNeuron", self.layer, self.neuron))

    def __str__(self) -> str:
        return f"L{self.layer}N{self.neuron}"


@dataclass(frozen=True, order=True, slots=True)
class AttnNeuron(_Identity):
    """Dimension ``dim`` (0 to ``d_head - 1``) of query head ``head`` in layer ``layer``, read at ``source``.

    >>> str(AttnNeuron(9, 8, 17, 3))
    'L9H8D17@3'
    """

    layer: int
    head: int
    dim: int
    source: int

    def __hash__(self) -> int:
        return hash(("AttnNeuron", self.layer, self.head, self.dim, self.source))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}D{self.dim}@{self.source}"


@dataclass(frozen=True, order=True, slots=True)
class Head(_Identity):
    """Query head ``head`` of layer ``layer``: the sum of its attention neurons.

    >>> str(Head(9, 8))
    'L9H8'
    """

    layer: int
    head: int

    def __hash__(self) -> int:
        return hash(("Head", self.layer, self.head))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, order=True, slots=True)
class Layer(_Identity):
    """The sublayer ``kind`` (``"mlp"`` or ``"attn"``) of layer ``layer``, output bias included.

    >>> str(Layer(9, "attn"))
    'L9.attn'
    """

    layer: int
    kind: Kind

    def __hash__(self) -> int:
        return hash(("Layer", self.layer, self.kind))

    def __str__(self) -> str:
        return f"L{self.layer}.{self.kind}"


Neuron: TypeAlias = MLPNeuron | AttnNeuron
# One, or several as a ranking or any iterable; a label such as "L8N123" stands for its neuron.
GivenNeurons: TypeAlias = Neuron | str | Iterable[Neuron | str]

_LABEL = re.compile(
    r"L(?P<layer>[0-9]+)"
    r"(?:N(?P<neuron>[0-9]+)|H(?P<head>[0-9]+)(?:D(?P<dim>[0-9]+)@(?P<source>[0-9]+))?|\.(?P<kind>mlp|attn))"
)


def kind_of(neuron: Neuron) -> Kind:
    """``"mlp"`` or ``"attn"``.

    >>> kind_of(MLPNeuron(8, 123))
    'mlp'
    """
    return "mlp" if isinstance(neuron, MLPNeuron) else "attn"


def neurons_of(given: object) -> tuple[Neuron, ...]:
    """The neurons that :data:`GivenNeurons` names, in their order.

    Raises :class:`ValueError` for anything else.

    >>> neurons_of(["L8N123", AttnNeuron(9, 8, 17, 3)])
    (MLPNeuron(layer=8, neuron=123), AttnNeuron(layer=9, head=8, dim=17, source=3))
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    each = cast("Iterable[object]", given) if several else [given]
    found = [parse(one) if isinstance(one, str) else one for one in each]
    for one in found:
        if not isinstance(one, MLPNeuron | AttnNeuron):
            raise ValueError(
                f"{one!r} of type {type(one).__name__} is no neuron: give ranked neurons, MLPNeuron, AttnNeuron, "
                f"their labels (L8N123, L9H8D17@3), or an iterable of these"
            )
    return tuple(cast("list[Neuron]", found))


def parse(label: str) -> MLPNeuron | AttnNeuron | Head | Layer:
    """Read a printed label back: ``parse(str(identity)) == identity``.

    Raises :class:`ValueError` for any other text, spaces included.

    >>> parse("L9H8D17@3")
    AttnNeuron(layer=9, head=8, dim=17, source=3)
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ValueError(
            f"cannot read {label!r} as a neuron, head or layer: a label is one of the forms "
            "L8N123 (MLP neuron), L9H8D17@3 (attention neuron), L9H8 (head), L9.mlp or L9.attn (layer), "
            "without spaces"
        )
    part = match.groupdict()
    layer = int(part["layer"])
    if part["kind"] is not None:
        return Layer(layer, check_kind(part["kind"]))
    if part["neuron"] is not None:
        return MLPNeuron(layer, int(part["neuron"]))
    if part["dim"] is not None:
        return AttnNeuron(layer, int(part["head"]), int(part["dim"]), int(part["source"]))
    return Head(layer, int(part["head"]))
