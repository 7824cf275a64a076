"""The exact top neurons without scoring every neuron.

Every score has an upper bound that costs one inner product (:mod:`tl_neuron_attr.readout`): with ``q = N*(g)``
carried back through the frozen norm, the bound of a neuron with output row ``w`` and coefficient ``a`` is
``a <q, w>``, so the bounds of a whole layer are one matrix-vector product, and all source positions of an
attention neuron share it. Neurons are scored exactly in descending order of the bound; when the ``k``-th best
exact score reaches the next bound, no neuron left can enter, and the result *is* the dense top ``k``.

Bounds are raised by a slack that covers their own rounding and that of the scores, so that rounding never
drops a neuron; equal scores are ordered by id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.model_view import UnsupportedModelError
from tl_neuron_attr.neurons import AttnNeuron, Kind, MLPNeuron
from tl_neuron_attr.readout import Bases, Readout
from tl_neuron_attr.results import RankedNeurons
from tl_neuron_attr.writes import base, coefficients, coefficients_at, directions

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

# After the first k, candidates are scored this many at a time: enough for an efficient matrix product, few
# enough that the tightening threshold saves most of the rest.
_CHUNK = 64
_SCAN_LIMIT = 8192


def chosen_layers(trace: "Trace", kind: Kind, layers: Sequence[int] | None) -> list[int]:
    """The layers asked for (all by default), sorted; an error for those that do not exist or have no neurons."""
    n_layers = trace.view.n_layers
    chosen = list(range(n_layers)) if layers is None else sorted(set(layers))
    wrong = [layer for layer in chosen if isinstance(layer, bool) or not 0 <= layer < n_layers]
    if wrong or not chosen:
        raise ValueError(
            f"layers={list(layers or [])}: name at least one layer, each from 0 to {n_layers - 1} "
            f"({trace.view.name} has {n_layers})"
        )
    if kind == "mlp":
        for layer in chosen:
            refusal = trace.view.mlp_refusal(layer)
            if refusal is not None:
                raise UnsupportedModelError(f"{refusal} (name dense layers with layers=[...])")
    return chosen


def top_neurons(
    trace: "Trace", readout: Readout, kind: Kind, layers: Sequence[int], k: int, method: str
) -> RankedNeurons:
    """The ``k`` best neurons of ``layers`` by exact score; see :func:`tl_neuron_attr.value.value_neurons`."""
    pool = _Pool(trace, readout, kind, layers)
    found = _Found(k)
    limit = k
    while True:
        place, bound = pool.best(found.threshold, limit)
        step = min(max(_CHUNK, found.wanted()), readout.directions_at_once())
        for start in range(0, len(place), step):
            if bound[start] < found.threshold:
                break
            part = place[start : start + step]
            found.add(part, pool.score(part))
        if len(place) < limit:
            break
        limit = _SCAN_LIMIT
    flat, scores = found.ranked()
    return RankedNeurons(
        kind=kind,
        ids=pool.ids(flat),
        scores=scores,
        coefficients=pool.coefficients_of(flat),
        method=method,
        n_evaluated=found.n_evaluated,
        n_neurons=pool.size * len(layers),
        provenance=trace.provenance,
    )


class _Found:
    """Exact scores so far and the ``k``-th best of them."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.n_evaluated = 0
        self.threshold = -torch.inf
        self._flat = torch.empty(0, dtype=torch.int64)
        self._scores = torch.empty(0)

    def wanted(self) -> int:
        """How many more neurons are needed before there is a threshold at all."""
        return max(0, self.k - self.n_evaluated)

    def add(self, flat: Tensor, scores: Tensor) -> None:
        self.n_evaluated += len(flat)
        flat, scores = torch.cat([self._flat, flat]), torch.cat([self._scores.to(scores), scores])
        by_id = flat.argsort()
        order = by_id[scores[by_id].argsort(descending=True, stable=True)][: self.k]
        self._flat, self._scores = flat[order], scores[order]
        if len(self._scores) == self.k:
            self.threshold = float(self._scores[-1])

    def ranked(self) -> tuple[Int[Tensor, " rank"], Float[Tensor, " rank"]]:
        return self._flat, self._scores


@dataclass(frozen=True)
class _Scored:
    """What bounds of one layer need: coefficients ``[row, source]`` and rows' bound directions."""

    layer: int
    q: Float[Tensor, "option d_model"]


class _Pool:
    """All neurons of the chosen layers, numbered in the order of their ids."""

    def __init__(self, trace: "Trace", readout: Readout, kind: Kind, layers: Sequence[int]) -> None:
        self.trace, self.readout = trace, readout
        self.kind: Kind = kind
        vectors = [base(trace, kind, layer).to(readout.W_U.device) for layer in layers]
        self.bases: Bases = readout.bases(torch.stack(vectors))
        q = readout.adjoint(self.bases.g)
        self.layers = [_Scored(layer, q[i]) for i, layer in enumerate(layers)]
        self.n_sources = trace.position + 1 if kind == "attn" else 1
        self.size = len(directions(trace, kind, layers[0])) * self.n_sources
        self._done: list[list[Tensor]] = [[] for _ in layers]
        held = self.size * len(layers) * readout.dtype.itemsize <= readout.memory_budget // 4
        self._held = [self._bounds(i) for i in range(len(layers))] if held else None

    # ---- bounds ---------------------------------------------------------------------------------------

    def _bounds(self, index: int) -> Float[Tensor, " neuron"]:
        """Upper bound of every score of a layer, raised by the rounding that bound and score may carry."""
        scored = self.layers[index]
        coefficient = coefficients(self.trace, self.kind, scored.layer)
        rows = directions(self.trace, self.kind, scored.layer)
        q = scored.q.to(rows.device)
        along, length = self._projected(rows, q)
        bound = coefficient * along[:, :1]
        for option in range(1, along.shape[1]):
            bound = torch.maximum(bound, coefficient * along[:, option, None])
        rounding = 16 * torch.finfo(self.readout.dtype).eps
        slack = length * (rounding * q.norm(dim=-1).max())
        return bound.addcmul_(coefficient.abs(), slack[:, None]).add_(rounding).flatten().cpu()

    def _projected(self, rows: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """``<q, w>`` and the length of every row, a slice at a time where the rows must be converted."""
        step = max(1, self.readout.memory_budget // (16 * q.dtype.itemsize * rows.shape[1]))
        pieces = [
            (part @ q.T, part.norm(dim=-1))
            for part in (rows[s : s + step].to(q.dtype) for s in range(0, len(rows), step))
        ]
        return torch.cat([along for along, _ in pieces]), torch.cat([length for _, length in pieces])

    def best(self, threshold: float, limit: int) -> tuple[Int[Tensor, " candidate"], Float[Tensor, " candidate"]]:
        """The ``limit`` unscored neurons with the highest bounds, at least ``threshold``, best first."""
        place, bound = torch.empty(0, dtype=torch.int64), torch.empty(0)
        for index in range(len(self.layers)):
            bounds = self._bounds(index) if self._held is None else self._held[index]
            for done in self._done[index]:
                bounds[done] = -torch.inf
            value, best = bounds.topk(min(limit, len(bounds)))
            kept = (value >= threshold) & (value > -torch.inf)
            place = torch.cat([place, best[kept] + index * self.size])
            bound = torch.cat([bound.to(value), value[kept]])
            if len(place) > limit:
                order = bound.argsort(descending=True, stable=True)[:limit]
                place, bound = place[order], bound[order]
        order = bound.argsort(descending=True, stable=True)
        return place[order], bound[order]

    # ---- exact scores ---------------------------------------------------------------------------------

    def score(self, flat: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        """Exact scores of neurons given by number; those that share a direction share its vocabulary product."""
        layer_of, neuron = flat // self.size, flat % self.size
        distinct, place = torch.unique(flat // self.n_sources, return_inverse=True)
        rows_per_layer = self.size // self.n_sources
        base_of, row = distinct // rows_per_layer, distinct % rows_per_layer
        device = self.readout.W_U.device
        vectors = torch.empty(len(distinct), self.trace.view.d_model, dtype=self.readout.dtype, device=device)
        for index in base_of.unique().tolist():
            mine = base_of == index
            rows = directions(self.trace, self.kind, self.layers[index].layer)
            vectors[mine.to(device)] = self.readout.direction(rows[row[mine].to(rows.device)])
            self._done[index].append(neuron[layer_of == index])
        weight = self.coefficients_of(flat).to(device)
        return self.readout.changes(self.bases, base_of.to(device), vectors, place.to(device), weight).cpu()

    def coefficients_of(self, flat: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        """The coefficients of neurons given by number."""
        out = torch.empty(len(flat), dtype=self.readout.dtype)
        for index in (flat // self.size).unique().tolist():
            mine = flat // self.size == index
            neuron = flat[mine] % self.size
            row, source = neuron // self.n_sources, neuron % self.n_sources
            out[mine] = coefficients_at(self.trace, self.kind, self.layers[index].layer, row, source).cpu()
        return out

    def ids(self, flat: Int[Tensor, " rank"]) -> tuple[MLPNeuron, ...] | tuple[AttnNeuron, ...]:
        """Identities of neurons given by number."""
        layers = [self.layers[i].layer for i in (flat // self.size).tolist()]
        neuron = flat % self.size
        if self.kind == "mlp":
            return tuple(MLPNeuron(layer, n) for layer, n in zip(layers, neuron.tolist(), strict=True))
        source, row = (neuron % self.n_sources).tolist(), neuron // self.n_sources
        head, dim = (row // self.trace.view.d_head).tolist(), (row % self.trace.view.d_head).tolist()
        return tuple(AttnNeuron(*place) for place in zip(layers, head, dim, source, strict=True))
