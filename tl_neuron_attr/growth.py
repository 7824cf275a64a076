"""The normaliser's growth ``log E_p[exp(D - shift)]`` of vectors added to bases, ``D = a u`` without a soft cap.

It is ``log1p(E_p[expm1(D - shift)])``, an exponential for every token of every vector (:class:`Exponentials`), which
keeps the full precision of small scores; where vectors share their lines, those that are small enough are taken from
sums that serve all of a line (:mod:`tl_neuron_attr.moments`). Either way the vocabulary is passed once, in blocks,
and every direction is multiplied once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Reading
from tl_neuron_attr.moments import Moments
from tl_neuron_attr.products import product

# Entries of one pass of elementwise work that measured fastest on processors.
_CACHED_ENTRIES = 2**18
# Vectors whose exponentials overflow are scored so many at a time; there are few of them.
_FAR = 64


@dataclass(frozen=True, eq=False)
class Lines:
    """Vectors ``coefficient * w`` on lines, each a direction ``N(w)`` at a base of ``reading``.

    ``mean`` is ``m`` of a line, ``reach`` a bound of its ``|u - m|``. ``small`` says which vectors are taken from
    their lines' moments; ``None`` is none of them.
    """

    directions: Float[Tensor, "direction d_model"]
    reading: Reading
    direction_of: Int[Tensor, " line"]
    base_of: Int[Tensor, " line"]
    mean: Float[Tensor, " line"]
    reach: Float[Tensor, " line"]
    line: Int[Tensor, " vector"]
    coefficient: Float[Tensor, " vector"]
    shift: Float[Tensor, " vector"]
    small: Bool[Tensor, " vector"] | None

    def grown(self) -> Float[Tensor, " vector"]:
        """The growth (nats) of every vector."""
        if self.small is None:
            return self._together(Exponentials(self, None), None)[0]
        small, large = self.small.nonzero()[:, 0], (~self.small).nonzero()[:, 0]
        lines, line = torch.unique(self.line[small], return_inverse=True)
        lines = _not_one(lines)
        moments = Moments(self.coefficient[small] * self.reach[self.line[small]], self.reach[lines], line)
        of_large, of_small = self._together(Exponentials(self, _not_one(large)), (moments, lines))
        found = torch.empty_like(self.coefficient)
        found[large], found[small] = of_large[: len(large)], of_small
        return found

    def _together(
        self, exponentials: "Exponentials", shared: tuple[Moments, Int[Tensor, " line"]] | None
    ) -> tuple[Tensor, Tensor]:
        readout = self.reading.readout
        for block in readout.blocks(len(self.directions)):
            u = product(self.directions, readout.W_U[:, block])
            exponentials.add(u, block)
            if shared is not None:
                moments, lines = shared
                for part in self.parts(len(lines), u.shape[1]):
                    own = lines[part]
                    away = u.index_select(0, self.direction_of[own]).sub_(self.mean[own, None])
                    moments.add(part, away, self.reading.p_rows(self.base_of[own], block))
        return exponentials.grown(), self.shift[:0] if shared is None else shared[0].grown()

    def parts(self, rows: int, width: int) -> Iterator[slice]:
        """Slices of the rows that are worked on against one block, small enough for a processor's cache."""
        readout = self.reading.readout
        budget = readout.memory_budget // (8 * readout.itemsize)
        wanted = max(_CACHED_ENTRIES, 4 * width) if self.directions.device.type == "cpu" else budget
        step = min(budget, wanted) // max(width, 1)
        # Parts of nearly equal length: a sum over one row alone would round in another order than among others.
        n_parts = -(-rows // max(1, step))
        yield from (slice(i * rows // n_parts, (i + 1) * rows // n_parts) for i in range(n_parts))


def _not_one(rows: Int[Tensor, " row"]) -> Int[Tensor, " _"]:
    """One row twice: its sum alone would round in another order than among others."""
    return rows.repeat(2) if len(rows) == 1 else rows


class Exponentials:
    """An exponential for every token of each of these vectors."""

    def __init__(self, lines: Lines, which: Int[Tensor, " vector"] | None) -> None:
        self._lines, self._readout = lines, lines.reading.readout
        line, self._shift, coefficient = lines.line, lines.shift, lines.coefficient
        if which is not None:
            line, self._shift, coefficient = line[which], self._shift[which], coefficient[which]
        self._direction_of, self._base_of = lines.direction_of[line], lines.base_of[line]
        self._mean, self._coefficient = lines.mean[line, None], coefficient[:, None]
        self._excess = torch.zeros_like(self._shift)

    def add(self, u: Float[Tensor, "direction token"], block: slice) -> None:
        """What some tokens contribute."""
        cap, reading, excess = self._readout.cap, self._lines.reading, self._excess
        for part in self._lines.parts(len(excess), u.shape[1]):
            x, base_of = u.index_select(0, self._direction_of[part]), self._base_of[part]
            if cap is None:
                x = x.sub_(self._mean[part]).mul_(self._coefficient[part])
            else:
                x = cap.change(reading.z_rows(base_of, block), x.mul_(self._coefficient[part]))
                x = x.sub_(self._shift[part, None])
            excess[part] += x.expm1_().mul_(reading.p_rows(base_of, block)).sum(-1)

    def grown(self) -> Float[Tensor, " vector"]:
        """The growth (nats), once all tokens were added."""
        # Where a shifted logit moves by more than a float's exponent holds, the plain sum is inf or NaN. Behind a
        # cap, large vectors move most logits further down than the shift: the sum loses its digits beside -1.
        excess = self._excess
        far = (~(excess.isfinite() & (excess > -0.5))).nonzero()[:, 0]
        grown = torch.log1p(excess)
        for part in far.split(_FAR) if len(far) else ():  # of nothing, split gives one part of nothing
            grown[part] = self._log_growth(part) - self._shift[part]
        return grown

    def _log_growth(self, part: Int[Tensor, " some"]) -> Float[Tensor, " some"]:
        """``log E_p[exp(D)]`` in log space, for vectors so large that their exponentials overflow."""
        n, base_of, readout = len(part), self._base_of[part], self._readout
        reading = self._lines.reading
        grown = self._coefficient.new_full((n,), -torch.inf)
        both = torch.cat([self._lines.directions[self._direction_of[part]], reading.inputs[base_of]])
        for block in readout.blocks(2 * _FAR):
            u, z = product(both, readout.W_U[:, block]).split([n, n])
            if readout.constant is not None:
                z = z + readout.constant[block]
            logits = readout.capped(z + u * self._coefficient[part])
            grown = torch.logaddexp(grown, torch.logsumexp(logits - reading.log_z[base_of, None], -1))
        return grown
