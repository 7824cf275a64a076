"""Every score of every neuron to a tolerance, most of them without a product against the vocabulary.

A neuron's score lies in an interval known from one inner product and one quadratic form
(:mod:`tl_neuron_attr.candidates`, :mod:`tl_neuron_attr.spread`). Where the interval is no wider than twice the
tolerance, its middle is the score to that tolerance; the others are scored exactly. The cost hardly depends on the
number of source positions, which share directions and so all but the last step of a bound.
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
