"""Exact scores of vectors added to bases, and the bound that precedes them.

With ``p = softmax(z(base))``, ``u = W_U' N(w)`` and ``m = E_p[u]``, the score of ``a w`` at a base (Eq. 13) is

    ``S = a (u_t - m) - log E_p[exp(a (u - m))]``                           a token ``t``
    ``S = a (u_a - u_b)``                                                   ``Contrast(a, b)``
    ``S = log sum_B p(b | B) exp(a (u_b - m)) - log E_p[exp(a (u - m))]``   ``AnyOf(B)``

The last term is computed by :mod:`tl_neuron_attr.growth`. It is never negative (Jensen), so what precedes it bounds
the score from one vector per base and option, ``a (u_b - m) = a <g_b, N(w)>`` with ``g_b = W_U[:, b] - W_U p``. A
contrast attains it (``g = W_U[:, a] - W_U[:, b]``). Behind a soft cap the change ``D`` of the capped logits takes the
place of ``a u``, and ``m = E_p[slope u]`` only shifts both terms (:mod:`tl_neuron_attr.capped`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.growth import Lines
from tl_neuron_attr.products import MIN_ROWS, along


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors ``coefficient * w`` of one prompt; each is on a line, a direction ``N(w)`` at a base.

    Lines name their bases among ``bases`` and their directions among those that they are scored with; ``line`` names
    the vectors' lines. ``many`` is whether lines can hold so many vectors that small ones share their sums.
    """

    bases: Bases
    base_of: Int[Tensor, " line"]
    direction_of: Int[Tensor, " line"]
    line: Int[Tensor, " vector"]
    coefficient: Float[Tensor, " vector"]
    many: bool = False


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
        grown = _lines(directions, curved).grown()
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
        self.many = vectors.many and self.readout.cap is None
        self._directions = directions
        if not self.is_linear:
            self.mean = (self._own() * self.bases.expected[self.base_of]).sum(-1)
            self.shift = self.mean[self.line] * self.coefficient
            if self.readout.cap is not None:
                self.shift = self.shift.clamp(-2 * self.readout.cap.c, 2 * self.readout.cap.c)

    def reach(self) -> Float[Tensor, " line"]:
        """A bound of ``|u - m|`` on each line; zero where nobody asks for it."""
        if not self.many:
            return torch.zeros_like(self.mean)
        furthest = self.bases.reading.longest + self.bases.expected.square().sum(-1).sqrt()
        return self._own().square().sum(-1).sqrt() * furthest[self.base_of]

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


def _lines(directions: Float[Tensor, "direction d_model"], asked: Sequence[_Asked]) -> Lines:
    """The vectors of several prompts as those of one reading."""
    starts = accumulate([0, *[len(one.base_of) for one in asked]])
    line = torch.cat([one.line + start for one, start in zip(asked, starts, strict=False)])
    coefficient, reach = torch.cat([one.coefficient for one in asked]), torch.cat([one.reach() for one in asked])
    small: Tensor | None = None
    if any(one.many for one in asked):
        many = torch.cat([torch.full_like(one.line, one.many, dtype=torch.bool) for one in asked])
        small = many & (coefficient.abs() * reach[line] <= 1)
    return Lines(
        directions=directions,
        reading=asked[0].bases.reading,
        direction_of=torch.cat([one.direction_of for one in asked]),
        base_of=torch.cat([one.base_of + one.bases.start for one in asked]),
        mean=torch.cat([one.mean for one in asked]),
        reach=reach,
        line=line,
        coefficient=coefficient,
        shift=torch.cat([one.shift for one in asked]),
        small=small,
    )


def _at_least(rows: Tensor, count: int) -> Tensor:
    """With zeros behind, so that there are at least ``count``."""
    missing = count - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
