"""All neurons of some layers of one trace: their bounds, exact scores, coefficients and names.

With ``q = P*(N*(g))`` carried back through the frozen norms (``P`` what becomes of a sublayer's output before it
is added, :mod:`tl_neuron_attr.post`), a neuron with output row ``w`` and coefficient ``a`` has the upper bound
``a <q, w>`` (:mod:`tl_neuron_attr.scoring`), so the bounds of a layer are one matrix-vector product, and all source
positions of an attention neuron share it. Behind a soft cap the bounds are those of :mod:`tl_neuron_attr.capped`.

For a set of tokens the bound is ``log sum_b p(b | B) exp(a <q_b, w>)``, the score's first term itself. A lower bound
is the upper one less what the vector's spread over the vocabulary can cost
(:mod:`tl_neuron_attr.spread`). Both are widened by a slack for their own rounding and that of the scores.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.capped import CappedBounds
from tl_neuron_attr.logits import Cap
from tl_neuron_attr.neurons import Kind, Neuron, kind_of
from tl_neuron_attr.numbering import Numbering, chosen_layers
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.scoring import changes
from tl_neuron_attr.spread import Spread
from tl_neuron_attr.writes import added, base, coefficients, coefficients_at, directions

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def scores_of(
    trace: "Trace", neurons: Sequence[Neuron], *, memory_budget: int = DEFAULT_MEMORY_BUDGET
) -> Float[Tensor, " neuron"]:
    """Exact value scores (nats) of given neurons of either kind; :class:`ValueError` for one that does not exist."""
    readout = Readout.of(trace, memory_budget=memory_budget)
    scores = torch.empty(len(neurons), dtype=readout.dtype)
    kinds: tuple[Kind, ...] = ("mlp", "attn")
    for kind in kinds:
        mine = [i for i, neuron in enumerate(neurons) if kind_of(neuron) == kind]
        if mine:
            layers = chosen_layers(trace, kind, [neurons[i].layer for i in mine])
            group = Candidates(trace, readout, kind, layers)
            scores[mine] = group.score(group.numbering.numbers(trace, [neurons[i] for i in mine]))
    return scores


class Candidates:
    """The neurons of ``layers``; see the module's docstring for the bounds."""

    def __init__(
        self, trace: "Trace", readout: Readout, kind: Kind, layers: Sequence[int], *, alone: bool = False
    ) -> None:
        """``alone`` adds the vectors to zero instead of their layers' bases."""
        self.trace, self.readout, self.layers = trace, readout, list(layers)
        self.kind: Kind = kind
        if alone:
            vectors = torch.zeros(len(layers), trace.view.d_model, dtype=readout.dtype, device=readout.W_U.device)
        else:
            vectors = torch.stack([base(trace, kind, layer).to(readout.W_U.device) for layer in layers])
        self.bases = Bases.of(readout, vectors)
        self._behind = [added(trace, kind, layer) for layer in layers]
        self.numbering = Numbering.of(trace, kind, layers)

    # ---- bounds ---------------------------------------------------------------------------------------

    def upper(self, index: int) -> Float[Tensor, " neuron"]:
        """Upper bounds of the scores of layer ``layers[index]``, on the CPU."""
        if self.readout.cap is not None:
            return self._capped(index, self.readout.cap).upper().flatten().cpu()
        gained, slack, _ = self._gained(index)
        return gained.add_(slack).flatten().cpu()

    def lower(self, index: int) -> Float[Tensor, " neuron"]:
        """Lower bounds of the scores of layer ``layers[index]``, on the CPU."""
        return self.interval(index)[0]

    def interval(self, index: int) -> tuple[Float[Tensor, " neuron"], Float[Tensor, " neuron"]]:
        """Lower and upper bounds of the scores of layer ``layers[index]``, on the CPU."""
        if self.readout.cap is not None:
            bounds = self._capped(index, self.readout.cap)
            return bounds.lower().flatten().cpu(), bounds.upper().flatten().cpu()
        gained, slack, coefficient = self._gained(index)
        lower = gained - slack
        if not self.readout.target.is_linear:
            w = self._direction(index, directions(self.trace, self.kind, self.layers[index]))
            lower = lower.sub_(self._spread.loss(index, w, coefficient.to(w.device)).to(lower.device))
        return lower.flatten().cpu(), gained.add_(slack).flatten().cpu()

    def _gained(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """What precedes the loss in a score, its slack, and coefficients: each ``[row, source]``."""
        coefficient, along, slack = self._bound_parts(index)
        if along.shape[1] == 1:
            return coefficient * along, slack, coefficient
        share = torch.log_softmax(self.bases.log_p[index], -1).to(along)
        gained = torch.full_like(coefficient, -torch.inf)
        for option in range(along.shape[1]):
            gained = torch.logaddexp(gained, share[option] + coefficient * along[:, option, None])
        # Every sum rounds once more, beside what it sums.
        return gained, slack + along.shape[1] * torch.finfo(gained.dtype).eps * (1 + gained.abs()), coefficient

    def _capped(self, index: int, cap: Cap) -> CappedBounds:
        coefficient = coefficients(self.trace, self.kind, self.layers[index])
        w = self._direction(index, directions(self.trace, self.kind, self.layers[index]))
        return CappedBounds(self.bases, self._spread, cap, index, w, coefficient.to(w.device))

    def _direction(self, index: int, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        """``N`` of what rows of a layer add to the stream."""
        return self.readout.direction(self._behind[index].linear(rows.to(self.readout.dtype)))

    @cached_property
    def _spread(self) -> Spread:
        return Spread(self.bases)

    def _bound_parts(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients ``[row, source]``, ``<q, w>`` ``[row, option]`` and slack ``[row, source]``."""
        rows = directions(self.trace, self.kind, self.layers[index])
        coefficient = coefficients(self.trace, self.kind, self.layers[index]).to(rows.device)
        q = self._behind[index].adjoint(self.readout.adjoint(self.bases.g[index])).to(rows.device)
        step = max(1, self.readout.memory_budget // (16 * q.dtype.itemsize * rows.shape[1]))
        along: list[Tensor] = []
        length: list[Tensor] = []
        for part in rows.split(step):
            w = part.to(q.dtype)
            along.append(w @ q.T)
            length.append(w.square().sum(-1).sqrt())
        rounding = 16 * torch.finfo(self.readout.dtype).eps
        scale = torch.cat(length) * (rounding * q.norm(dim=-1).max())
        return coefficient, torch.cat(along), coefficient.abs().mul_(scale[:, None]).add_(rounding)

    # ---- exact scores ---------------------------------------------------------------------------------

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        """Exact scores, on the CPU; neurons that share a direction share its vocabulary product."""
        index, row, _ = self.numbering.places(number)
        key = index * max(self.numbering.sizes) + row
        _, first, inverse = _unique(key)
        index_of, row_of = index[first], row[first]
        device = self.readout.W_U.device
        vectors = torch.empty(len(first), self.trace.view.d_model, dtype=self.readout.dtype, device=device)
        for i in index_of.unique().tolist():
            mine = index_of == i
            rows = directions(self.trace, self.kind, self.layers[i])
            vectors[mine.to(device)] = self._direction(i, rows[row_of[mine].to(rows.device)])
        weight = coefficients_of(self.trace, self.numbering, number).to(device)
        return changes(self.bases, index_of.to(device), vectors, inverse.to(device), weight).cpu()


def coefficients_of(
    trace: "Trace", numbering: Numbering, number: Int[Tensor, " candidate"]
) -> Float[Tensor, " candidate"]:
    """Coefficients of numbered neurons, on the CPU."""
    index, row, source = numbering.places(number)
    out = torch.empty(len(index), dtype=trace.view.compute_dtype)
    dest = torch.tensor([trace.position])
    for i in index.unique().tolist():
        mine = index == i
        out[mine] = coefficients_at(trace, numbering.kind, numbering.layers[i], row[mine], source[mine], dest)[
            0
        ].cpu()
    return out


def _unique(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct values, the first place of each, and where each entry's value stands among them."""
    distinct, inverse = torch.unique(key, return_inverse=True)
    first = torch.full((len(distinct),), len(key)).scatter_reduce(0, inverse, torch.arange(len(key)), "amin")
    return distinct, first, inverse
