"""Every score of every neuron, or their sum, to a tolerance, most of them without a product against the vocabulary.

A neuron's score lies in an interval known from one inner product and one quadratic form
(:mod:`tl_neuron_attr.candidates`, :mod:`tl_neuron_attr.spread`). Where the interval is no wider than twice the
tolerance, its middle is the score to that tolerance; the others are scored exactly. The cost hardly depends on the
number of source positions, which share directions and so all but the last step of a bound.

A sum of the intervals' middles is off by at most the sum of their half widths; for a tolerance of a sum the widest
intervals are scored until what is left fits.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.candidates import Candidates


def scores_within(pool: Candidates, tolerance: float) -> tuple[list[Float[Tensor, " neuron"]], int]:
    """Scores (nats) of every neuron of a pool, layer by layer, and how many were scored exactly."""
    scores: list[Tensor] = []
    n_evaluated, start = 0, 0
    for index, size in enumerate(pool.numbering.sizes):
        lower, upper = pool.interval(index)
        made = torch.lerp(lower, upper, 0.5)
        wide = (~(upper - lower <= 2 * tolerance)).nonzero()[:, 0]
        for part in wide.split(pool.readout.directions_at_once()):
            made[part] = pool.score(part + start).to(made)
        scores.append(made)
        n_evaluated, start = n_evaluated + len(wide), start + size
    return scores, n_evaluated


def bounds_within(pool: Candidates, tolerance: float) -> tuple[Float[Tensor, " neuron"], Float[Tensor, " neuron"]]:
    """Lower and upper bounds (nats) of every neuron of a pool whose half widths sum to at most ``tolerance``.

    Where a neuron had to be scored for that, both are its score. What holds of the sum of the middles holds with
    negative values cut off at zero too.
    """
    pairs = [pool.interval(index) for index in range(len(pool.layers))]
    lower, upper = (torch.cat(side).double() for side in zip(*pairs, strict=True))
    apart, order = ((upper - lower) / 2).sort(descending=True)
    left = apart.flip(0).cumsum(0).flip(0)
    scored = order[: int((left > tolerance).sum())].sort().values
    for part in scored.split(pool.readout.directions_at_once()):
        lower[part] = upper[part] = pool.score(part).double()
    return lower, upper
