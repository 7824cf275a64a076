"""Exact scores of vectors added to bases, and the bound that precedes them.

With ``p = softmax(z(base))``, ``u = W_U' N(w)`` and ``m = E_p[u]``, the score of ``a w`` at a base (Eq. 13) is

    ``S = a (u_t - m) - log E_p[exp(a (u - m))]``                           a token ``t``
    ``S = a (u_a - u_b)``                                                   ``Contrast(a, b)``
    ``S = log sum_B p(b | B) exp(a (u_b - m)) - log E_p[exp(a (u - m))]``   ``AnyOf(B)``

The last term is computed as ``log1p(E_p[expm1(a (u - m))])``, which keeps the full precision of small scores.
It is never negative (Jensen), so what precedes it bounds the score from one vector per base and option,
``a (u_b - m) = a <g_b, N(w)>`` with ``g_b = W_U[:, b] - W_U p``. A contrast attains it
(``g = W_U[:, a] - W_U[:, b]``). Behind a soft cap the change ``D`` of the capped logits takes the place of ``a u``,
and ``m = E_p[slope u]`` only shifts both terms (:mod:`tl_neuron_attr.capped`). The vocabulary is passed in blocks so
that a memory budget holds whatever its width.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.products import MIN_ROWS, along, product, slices

# Entries of one pass of elementwise work that measured fastest on processors.
_CACHED_ENTRIES = 2**18


def changes(
    bases: Bases,
    base_of: Int[Tensor, " direction"],
    directions: Float[Tensor, "direction d_model"],
    rows: Int[Tensor, " vector"],
    coefficient: Float[Tensor, " vector"],
) -> Float[Tensor, " vector"]:
    """Exact ``S`` (nats) of vectors ``coefficient[i] * w[rows[i]]``, each at the base of its direction.

    ``directions`` are ``N(w)``; several vectors may share one, whose product with the vocabulary is then
    computed once.
    """
    n_vectors, missing = len(rows), max(0, 2 - len(rows))
    rows = torch.cat([rows, rows.new_zeros(missing)])
    coefficient = torch.cat([coefficient, coefficient.new_zeros(missing)])
    missing = max(0, MIN_ROWS - len(directions))
    directions = torch.cat([directions, directions.new_zeros(missing, directions.shape[1])])
    base_of = torch.cat([base_of, base_of.new_zeros(missing)])
    return _Scored(bases, base_of, directions, rows, coefficient).scores()[:n_vectors]


class _Scored:
    """:func:`changes` of at least two vectors along enough directions that every score rounds alike."""

    def __init__(self, bases: Bases, base_of: Tensor, directions: Tensor, rows: Tensor, coefficient: Tensor) -> None:
        self.bases, self.readout, self.base_of = bases, bases.readout, base_of
        self.directions, self.rows, self.coefficient = directions, rows, coefficient

    def scores(self) -> Float[Tensor, " vector"]:
        target, cap = self.readout.target, self.readout.cap
        options = self.readout.unembedded(target.positive)
        if target.is_linear and cap is None:
            against = self.readout.unembedded(target.negative)
            return (self.directions * (options - against)).sum(-1)[self.rows] * self.coefficient
        moved = along(self.directions, options)
        if target.is_linear:
            against = along(self.directions, self.readout.unembedded(target.negative))
            return (self._moved(self.bases.positive, moved) - self._moved(self.bases.negative, against))[:, 0]
        mean = (self.directions * self.bases.expected[self.base_of]).sum(-1)
        if cap is None:
            shift = mean[self.rows] * self.coefficient
            moved = (moved - mean[:, None])[self.rows] * self.coefficient[:, None]
            grown = self._growth(mean, shift)
        else:
            shift = (mean[self.rows] * self.coefficient).clamp(-2 * cap.c, 2 * cap.c)
            moved = self._moved(self.bases.positive, moved) - shift[:, None]
            grown = self._growth(mean, shift)
        if len(target.positive) == 1:
            return moved[:, 0] - grown
        before = torch.log_softmax(self.bases.log_p, -1)[self.base_of[self.rows]]
        return torch.logsumexp(before + moved, -1) - grown

    def _moved(self, z: Float[Tensor, "base token"], u: Float[Tensor, "direction token"]) -> Tensor:
        """How capped logits of a few tokens change."""
        moved = u[self.rows] * self.coefficient[:, None]
        cap = self.readout.cap
        return moved if cap is None else cap.change(z[self.base_of[self.rows]], moved)

    def _growth(self, mean: Float[Tensor, " direction"], shift: Float[Tensor, " vector"]) -> Tensor:
        """``log E_p[exp(D - shift)]`` of every vector, ``D = a u`` without a cap."""
        rows, coefficient, cap = self.rows, self.coefficient, self.readout.cap
        excess = torch.zeros_like(coefficient)
        for block in self.readout.blocks(len(self.directions)):
            u = product(self.directions, self.readout.W_U[:, block])
            if cap is None:
                u = u.sub_(mean[:, None])
            for part in self._parts(len(rows), u.shape[1]):
                base_of = self.base_of[rows[part]]
                x = u[rows[part]].mul_(coefficient[part, None])
                if cap is not None:
                    x = cap.change(self.bases.z_rows(base_of, block), x).sub_(shift[part, None])
                excess[part] += x.expm1_().mul_(self.bases.p_rows(base_of, block)).sum(-1)
        # Where a shifted logit moves by more than a float's exponent holds, the plain sum is inf or NaN. Behind a
        # cap, large vectors move most logits further down than the shift: the sum loses its digits beside -1.
        far = (~(excess.isfinite() & (excess > -0.5))).nonzero()[:, 0]
        grown = torch.log1p(excess)
        for part in far.split(self.readout.directions_at_once()):
            grown[part] = self._log_growth(part) - shift[part]
        return grown

    def _log_growth(self, part: Int[Tensor, " some"]) -> Float[Tensor, " some"]:
        """``log E_p[exp(D)]`` in log space, for vectors so large that their exponentials overflow."""
        rows, coefficient = self.rows[part], self.coefficient[part]
        grown = torch.full_like(coefficient, -torch.inf)
        for block in self.readout.blocks(len(rows)):
            moved = product(self.directions[rows], self.readout.W_U[:, block]).mul_(coefficient[:, None])
            x = self.bases.log_p_rows(self.base_of[rows], block, moved)
            grown = torch.logaddexp(grown, torch.logsumexp(x, -1))
        return grown

    def _parts(self, rows: int, width: int) -> Iterator[slice]:
        """Slices of the vectors scored against one block, small enough for a processor's cache."""
        budget = self.readout.memory_budget // (8 * self.readout.itemsize)
        step = min(budget, max(_CACHED_ENTRIES, 4 * width)) // max(width, 1)
        # Parts of nearly equal length: a sum over one row alone would round in another order than among others.
        n_parts = -(-rows // max(1, step))
        yield from slices(rows, -(-rows // n_parts))
