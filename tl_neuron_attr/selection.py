"""What to ablate: identities of every kind, freely mixed, as sets of units for each hook point.

==========================  ==================  ============================================================
identity                    hook point          units
==========================  ==================  ============================================================
``MLPNeuron(l, n)``         ``mlp.hook_post``   entry ``n``
``Layer(l, "mlp")``         ``mlp.hook_post``   all entries (the output bias stays)
``AttnNeuron(l, h, d, s)``  ``attn.hook_z``     entry ``(h, d)`` of the query head, all sources together
``Head(l, h)``              ``attn.hook_z``     entries ``(h, 0)`` to ``(h, d_head - 1)``
``Layer(l, "attn")``        ``attn.hook_z``     all entries (the output bias stays)
==========================  ==================  ============================================================

Under ``scope="source"`` an attention neuron is only what its source brings to one destination position,
``pattern[h, dest, s] * value[s, kv(h), d]``, a unit of its own. ``hook_z`` is per *query* head, so under grouped
query attention one head's units leave the heads that share its keys and values alone.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.neurons import AttnNeuron, Head, Layer, MLPNeuron, parse
from tl_neuron_attr.ranking import RankedNeurons

Identity: TypeAlias = MLPNeuron | AttnNeuron | Head | Layer
Neurons: TypeAlias = RankedNeurons | MLPNeuron | AttnNeuron | Head | Layer | str | Iterable[Any]
Named: TypeAlias = tuple[Identity, int | None]
_Unit = TypeVar("_Unit")
Scope: TypeAlias = Literal["neuron", "source"]


class FromSource(NamedTuple):
    """What one source position brings to one destination in one dimension of a head."""

    head: int
    dim: int
    source: int
    dest: int


@dataclass(frozen=True)
class Selection:
    """Units by layer: MLP neurons, entries of ``hook_z`` as ``head * d_head + dim``, and single sources."""

    mlp: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    attn: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    sources: dict[int, frozenset[FromSource]] = field(default_factory=dict[int, frozenset[FromSource]])

    def __len__(self) -> int:
        return sum(len(units) for part in (self.mlp, self.attn, self.sources) for units in part.values())


def check_scope(scope: str) -> Scope:
    """Return ``scope`` if it is ``"neuron"`` or ``"source"``; raise :class:`ValueError` for anything else."""
    if scope not in get_args(Scope):
        raise ValueError(f'unknown scope {scope!r}: choose "neuron" (all sources) or "source" (its own source only)')
    return scope  # type: ignore[return-value]  # the line above is the check


def identities(neurons: object) -> Iterator[Named]:
    """Every identity, in the order given, with the predicting position that a ranking knows of it.

    A label stands for what it names. Raises :class:`ValueError` for anything that is neither an identity nor a
    collection of them.
    """
    if isinstance(neurons, RankedNeurons):
        yield from ((neuron, neurons.provenance.position) for neuron in neurons)
    elif isinstance(neurons, MLPNeuron | AttnNeuron | Head | Layer):
        yield neurons, None
    elif isinstance(neurons, str):
        yield parse(neurons), None
    elif not isinstance(neurons, Iterable):
        way_out = "its .top(k) is a ranking" if hasattr(neurons, "top") else "or their labels, such as L8N123"
        raise ValueError(
            f"cannot ablate {neurons!r} of type {type(neurons).__name__}: give ranked neurons, MLPNeuron, "
            f"AttnNeuron, Head, Layer, or an iterable of these ({way_out})"
        )
    else:
        for item in neurons:
            yield from identities(item)


def select(
    view: ModelView, named: Iterable[Named], scope: Scope = "neuron", dests: Sequence[int] | None = None
) -> Selection:
    """The units of :func:`identities`. ``dests`` are the destinations under ``scope="source"``; ``None`` is the
    predicting position of the ranking that the neuron is from.

    Raises :class:`ValueError` for an empty set, an identity outside the model, and under ``scope="source"`` a
    neuron without a known destination or whose source comes after it; :class:`UnsupportedModelError` for a layer
    without MLP neurons.
    """
    mlp: dict[int, set[int]] = {}
    attn: dict[int, set[int]] = {}
    sources: dict[int, set[FromSource]] = {}
    width = functools.cache(functools.partial(mlp_width, view))
    for identity, predicting in named:
        layer = identity.layer
        _in_range(view, identity, "layer", layer, view.n_layers)
        if isinstance(identity, MLPNeuron):
            _in_range(view, identity, "neuron", identity.neuron, width(layer))
            mlp.setdefault(layer, set()).add(identity.neuron)
        elif isinstance(identity, Layer) and identity.kind == "mlp":
            mlp.setdefault(layer, set()).update(range(width(layer)))
        elif isinstance(identity, Layer):
            attn.setdefault(layer, set()).update(range(view.n_heads * view.d_head))
        else:
            _in_range(view, identity, "head", identity.head, view.n_heads)
            first = identity.head * view.d_head
            if isinstance(identity, Head):
                attn.setdefault(layer, set()).update(range(first, first + view.d_head))
                continue
            _in_range(view, identity, "dim", identity.dim, view.d_head)
            if scope == "neuron":
                attn.setdefault(layer, set()).add(first + identity.dim)
            else:
                sources.setdefault(layer, set()).update(_from_source(identity, predicting, dests))
    chosen = Selection(_frozen(mlp), _frozen(attn), _frozen(sources))
    if not len(chosen):
        raise ValueError("no neuron is given: name at least one to ablate")
    return chosen


def mlp_width(view: ModelView, layer: int) -> int:
    """How many MLP neurons a layer has; raises :class:`UnsupportedModelError` where they are not defined."""
    refusal = view.mlp_refusal(layer)
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    return view.W_out(layer).shape[0]


def _frozen(part: dict[int, set[_Unit]]) -> dict[int, frozenset[_Unit]]:
    return {layer: frozenset(part[layer]) for layer in sorted(part)}


def _from_source(neuron: AttnNeuron, predicting: int | None, dests: Sequence[int] | None) -> Iterator[FromSource]:
    if dests is None and predicting is None:
        raise ValueError(
            f'{neuron} under scope="source" needs the position that its source writes to: give positions=[...], or '
            f"the ranked result itself, which knows the predicting position"
        )
    chosen = [predicting] if dests is None else dests
    for dest in chosen:
        if dest is None or neuron.source > dest:
            raise ValueError(
                f"{neuron} reads position {neuron.source}, which position {dest} cannot see: a source comes before "
                f"the position it writes to, or is that position"
            )
        yield FromSource(neuron.head, neuron.dim, neuron.source, dest)


def _in_range(view: ModelView, identity: Identity, what: str, value: int, count: int) -> None:
    if value >= count:
        raise ValueError(f"{identity} is not in {view.name}: it has {what}s 0 to {count - 1}")
