"""What small vectors along one line do to the normaliser, from sums that all of them share.

With ``c = u - m`` (:mod:`tl_neuron_attr.scoring`) and central moments ``M_k = E_p[c^k]`` of a line,

    ``E_p[expm1(a c)] = sum_(k >= 1) a^k M_k / k!``

so ``K`` sums over the vocabulary serve every coefficient ``a`` on the line, where each alone needs an exponential for
every token: attention neurons that differ in their source position only. With ``r >= |c|`` for every token and
``x = |a| r <= 1``, what is left out after ``k = K`` is at most

    ``a^2 M_2 x^(K - 1) / (K + 1)! * (K + 2) / (K + 1)``

and the sum itself about ``a^2 M_2 / 2``, so that ``K = 10`` leaves out 6e-8 of it, half of what a float32 rounds to,
and ``K = 18`` 2e-17 of it for float64. Cauchy-Schwarz gives ``r = |N(w)| (max_j |W_U[:, j]| + |W_U p|)``: without a
product, and of each vector alone, so that a neuron's score does not depend on which others are asked for. Sums are of
``(c / r)^k``, coefficients ``a r``, which no float overflows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Vectors of so many source positions share the sums; with fewer, exponentials take less time.
MANY_SOURCES = 4
_ORDER = {torch.float32: 10, torch.float64: 18}


class Moments:
    """Of lines, and vectors on them: ``scaled`` is ``a r`` of each vector, ``reach`` is ``r`` of each line."""

    def __init__(
        self, scaled: Float[Tensor, " vector"], reach: Float[Tensor, " line"], line: Int[Tensor, " vector"]
    ) -> None:
        self._scaled, self._line = scaled, line
        self._inverse = 1 / reach.clamp(min=torch.finfo(reach.dtype).tiny)[:, None]
        self._total = reach.new_zeros(len(reach), _ORDER[reach.dtype])

    def add(self, part: slice, c: Float[Tensor, "row token"], p: Float[Tensor, "#row token"]) -> None:
        """What some tokens contribute to some lines; ``c`` is overwritten."""
        c.mul_(self._inverse[part])
        power, total = c * p, self._total[part]
        total[:, 0] += power.sum(-1)
        for k in range(1, total.shape[1]):
            total[:, k] += power.mul_(c).sum(-1)

    def grown(self) -> Float[Tensor, " vector"]:
        """``log E_p[exp(a c)]`` (nats) of every vector, once all tokens were added."""
        total, grown = self._total[self._line], torch.zeros_like(self._scaled)
        for k in range(total.shape[1], 0, -1):
            grown = (grown + total[:, k - 1]) * self._scaled / k
        return torch.log1p(grown)
