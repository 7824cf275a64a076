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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.products import MIN_ROWS, along, product, slices

# Entries of one pass of elementwise work that measured fastest on processors.
_CACHED_ENTRIES = 2**18
# Vectors whose exponentials overflow are scored so many at a time; there are few of them.
_FAR = 64


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors ``coefficient * w`` of one prompt; each is on a line, a direction ``N(w)`` at a base.

    Lines name their bases among ``bases`` and their directions among those that they are scored with; ``line`` names
    the vectors' lines.
    """

    bases: Bases
    base_of: Int[Tensor, " line"]
    direction_of: Int[Tensor, " line"]
    line: Int[Tensor, " vector"]
    coefficient: Float[Tensor, " vector"]


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
    own = torch.arange(len(directions), device=directions.device)
    return changes_together(directions, [Vectors(bases, base_of, own, rows, coefficient)])[0]


def changes_together(
    directions: Float[Tensor, "direction d_model"], each: Sequence[Vectors]
) -> list[Float[Tensor, " _"]]:
    """Exact ``S`` (nats) of several prompts' vectors along the same directions, each multiplied once.

    The prompts' bases are of one reading.
    """
    directions = _at_least(directions, MIN_ROWS)
    asked = [_Asked(vectors, directions) for vectors in each]
    curved = [one for one in asked if not one.is_linear]
    if curved:
        grown = _Growth(directions, curved).grown()
        for one, own in zip(curved, grown.split([len(one.coefficient) for one in curved]), strict=True):
            one.grown = own
    return [one.scores()[: len(vectors.line)] for one, vectors in zip(asked, each, strict=True)]


class _Asked:
    """One prompt's vectors, at least two of them on at least two lines, so that every score rounds alike."""

    def __init__(self, vectors: Vectors, directions: Tensor) -> None:
        self.bases, self.readout = vectors.bases, vectors.bases.readout
        self.line, self.coefficient = _at_least(vectors.line, 2), _at_least(vectors.coefficient, 2)
        self.base_of, self.direction_of = _at_least(vectors.base_of, 2), _at_least(vectors.direction_of, 2)
        self.grown: Tensor | None = None
        self.is_linear = self.readout.target.is_linear
        self._directions = directions
        if not self.is_linear:
            self.mean = (self._own() * self.bases.expected[self.base_of]).sum(-1)
            self.shift = self.mean[self.line] * self.coefficient
            if self.readout.cap is not None:
                self.shift = self.shift.clamp(-2 * self.readout.cap.c, 2 * self.readout.cap.c)

    def scores(self) -> Float[Tensor, " vector"]:
        target, cap = self.readout.target, self.readout.cap
        own, options = self._own(), self.readout.unembedded(target.positive)
        if target.is_linear and cap is None:
            against = self.readout.unembedded(target.negative)
            return (own * (options - against)).sum(-1)[self.line] * self.coefficient
        moved = along(own, options)
        if target.is_linear:
            against = along(own, self.readout.unembedded(target.negative))
            return (self._moved(self.bases.positive, moved) - self._moved(self.bases.negative, against))[:, 0]
        if self.grown is None:
            raise RuntimeError("the normaliser's growth was not computed")
        if cap is None:
            moved = (moved - self.mean[:, None])[self.line] * self.coefficient[:, None]
        else:
            moved = self._moved(self.bases.positive, moved) - self.shift[:, None]
        if len(target.positive) == 1:
            return moved[:, 0] - self.grown
        before = torch.log_softmax(self.bases.log_p, -1)[self.base_of[self.line]]
        return torch.logsumexp(before + moved, -1) - self.grown

    def _own(self) -> Float[Tensor, "line d_model"]:
        """The lines' directions."""
        return self._directions[self.direction_of]

    def _moved(self, z: Float[Tensor, "base token"], u: Float[Tensor, "line token"]) -> Tensor:
        """How capped logits of a few tokens change."""
        moved = u[self.line] * self.coefficient[:, None]
        cap = self.readout.cap
        return moved if cap is None else cap.change(z[self.base_of[self.line]], moved)


class _Growth:
    """``log E_p[exp(D - shift)]`` of every vector of several prompts, ``D = a u`` without a cap."""

    def __init__(self, directions: Tensor, asked: Sequence[_Asked]) -> None:
        self.directions, self.reading = directions, asked[0].bases.reading
        self.readout = self.reading.readout
        self.direction_of = torch.cat([one.direction_of[one.line] for one in asked])
        self.base_of = torch.cat([(one.base_of + one.bases.start)[one.line] for one in asked])
        self.mean = torch.cat([one.mean[one.line] for one in asked])[:, None]
        self.shift = torch.cat([one.shift for one in asked])
        self.coefficient = torch.cat([one.coefficient for one in asked])[:, None]

    def grown(self) -> Float[Tensor, " vector"]:
        cap, excess = self.readout.cap, torch.zeros_like(self.shift)
        for block in self.readout.blocks(len(self.directions)):
            u = product(self.directions, self.readout.W_U[:, block])
            for part in self._parts(len(excess), u.shape[1]):
                x, base_of = u.index_select(0, self.direction_of[part]), self.base_of[part]
                if cap is None:
                    x = x.sub_(self.mean[part]).mul_(self.coefficient[part])
                else:
                    x = cap.change(self.reading.z_rows(base_of, block), x.mul_(self.coefficient[part]))
                    x = x.sub_(self.shift[part, None])
                excess[part] += x.expm1_().mul_(self.reading.p_rows(base_of, block)).sum(-1)
        # Where a shifted logit moves by more than a float's exponent holds, the plain sum is inf or NaN. Behind a
        # cap, large vectors move most logits further down than the shift: the sum loses its digits beside -1.
        far = (~(excess.isfinite() & (excess > -0.5))).nonzero()[:, 0]
        grown = torch.log1p(excess)
        for part in far.split(_FAR):
            grown[part] = self._log_growth(part) - self.shift[part]
        return grown

    def _log_growth(self, part: Int[Tensor, " some"]) -> Float[Tensor, " some"]:
        """``log E_p[exp(D)]`` in log space, for vectors so large that their exponentials overflow."""
        n, base_of = len(part), self.base_of[part]
        grown = self.coefficient.new_full((n,), -torch.inf)
        both = torch.cat([self.directions[self.direction_of[part]], self.reading.inputs[base_of]])
        for block in self.readout.blocks(2 * _FAR):
            u, z = product(both, self.readout.W_U[:, block]).split([n, n])
            if self.readout.constant is not None:
                z = z + self.readout.constant[block]
            logits = self.readout.capped(z + u * self.coefficient[part])
            grown = torch.logaddexp(grown, torch.logsumexp(logits - self.reading.log_z[base_of, None], -1))
        return grown

    def _parts(self, rows: int, width: int) -> Iterator[slice]:
        """Slices of the vectors scored against one block, small enough for a processor's cache."""
        budget = self.readout.memory_budget // (8 * self.readout.itemsize)
        wanted = max(_CACHED_ENTRIES, 4 * width) if self.directions.device.type == "cpu" else budget
        step = min(budget, wanted) // max(width, 1)
        # Parts of nearly equal length: a sum over one row alone would round in another order than among others.
        n_parts = -(-rows // max(1, step))
        yield from slices(rows, -(-rows // n_parts))


def _at_least(rows: Tensor, count: int) -> Tensor:
    """With zeros behind, so that there are at least ``count``."""
    missing = count - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
