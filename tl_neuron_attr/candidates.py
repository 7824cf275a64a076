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
from tl_neuron_attr.joint import along_rows, score_together
from tl_neuron_attr.logits import Cap
from tl_neuron_attr.neurons import Kind, Neuron, kind_of
from tl_neuron_attr.numbering import Numbering, chosen_layers
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
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
        self, trace: "Trace", readout: Readout, kind: Kind, layers: Sequence[int], bases: Bases | None = None
    ) -> None:
        """``bases`` are what the layers' vectors are added to, where they were read out before."""
        self.trace, self.readout, self.layers = trace, readout, list(layers)
        self.kind: Kind = kind
        self.bases = Bases.of(readout, base_vectors(trace, readout, kind, layers)) if bases is None else bases
        self._behind = [added(trace, kind, layer) for layer in layers]
        self._read: dict[int, tuple[Tensor, Tensor]] = {}
        self.numbering = Numbering.of(trace, kind, layers)

    # ---- bounds ---------------------------------------------------------------------------------------

    def upper(self, index: int) -> Float[Tensor, " neuron"]:
        """Upper bounds of the scores of layer ``layers[index]``, on the CPU."""
        return self.bound(index).cpu()

    def bound(self, index: int) -> Float[Tensor, " neuron"]:
        """:meth:`upper` on the unembedding's device."""
        if self.readout.cap is not None:
            return self._capped(index, self.readout.cap).upper().flatten()
        gained, slack, _ = self._gained(index)
        return gained.add_(slack).flatten().to(self.readout.W_U.device)

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
        along, length = self._read.pop(index, None) or along_rows(self, index, [self.reads(index)])[0]
        coefficient = coefficients(self.trace, self.kind, self.layers[index]).to(along.device)
        rounding = 16 * torch.finfo(self.readout.dtype).eps
        scale = length * (rounding * self.reads(index).norm(dim=-1).max().to(length.device))
        return coefficient, along, coefficient.abs().mul_(scale[:, None]).add_(rounding)

    def given(self, index: int, read: tuple[Tensor, Tensor]) -> None:
        """Take what :func:`~tl_neuron_attr.joint.along_rows` read of a layer for this pool among others."""
        self._read[index] = read

    def reads(self, index: int) -> Float[Tensor, "option d_model"]:
        """``q``, what the bound reads of a layer's rows."""
        return self._behind[index].adjoint(self.readout.adjoint(self.bases.g[index]))

    # ---- exact scores ---------------------------------------------------------------------------------

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        """Exact scores, on the CPU; neurons that share a direction share its vocabulary product."""
        return score_together([(self, number)])[0]

    def plain_directions(self, index: int, row: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
        """Directions of rows of a layer, without what is the prompt's own (:meth:`weights`)."""
        rows = directions(self.trace, self.kind, self.layers[index])
        chosen = rows[row.to(rows.device)].to(self.readout.dtype)
        return self.readout.plain_direction(self._behind[index].plain(chosen))

    def weights(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        """Coefficients of plain directions, on the CPU: a neuron's own over the prompt's frozen scales."""
        device, ones = self.readout.W_U.device, torch.ones(1, dtype=self.readout.dtype)
        scales = [ones if post.scale is None else post.scale.to(ones.dtype) for post in self._behind]
        scale = torch.cat([one.reshape(1).to(device) for one in scales]) * self.readout.scale
        return coefficients_of(self.trace, self.numbering, number) / scale.cpu()[self.numbering.places(number)[0]]


def base_vectors(
    trace: "Trace", readout: Readout, kind: Kind, layers: Sequence[int]
) -> Float[Tensor, "layer d_model"]:
    """What the vectors of each layer are added to, on the unembedding's device."""
    return torch.stack([base(trace, kind, layer).to(readout.W_U.device) for layer in layers])


def coefficients_of(
    trace: "Trace", numbering: Numbering, number: Int[Tensor, " candidate"]
) -> Float[Tensor, " candidate"]:
    """Coefficients of numbered neurons, on the CPU."""
    index, row, source = numbering.places(number)
    order, counts = index.argsort(stable=True), torch.bincount(index, minlength=len(numbering.layers)).tolist()
    device = trace.view.W_U.device
    at = torch.stack([row, source])[:, order].to(device)
    parts = [
        coefficients_at(trace, numbering.kind, layer, rows, sources)[0].to(device)
        for layer, (rows, sources) in zip(numbering.layers, at.split(counts, 1), strict=True)
        if len(rows)
    ]
    out = torch.empty(len(index), dtype=trace.view.compute_dtype)
    out[order] = torch.cat([out[:0].to(device), *parts]).cpu()
    return out
