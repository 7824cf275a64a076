"""How far a vector spreads the logits under a base's probabilities: an upper bound of what a score loses.

With ``u = W_U' w`` and ``m = E_p[u]``, the loss ``log E_p[exp(a (u - m))]`` of a vector ``a w`` is bounded by
Bennett's inequality from the variance ``v`` of ``u`` under ``p`` and the largest deviation ``h = |a| |w| R``,
``R = max_j |W_U[:, j] - W_U p|``:

    ``log E_p[exp(a (u - m))] <= log(1 + a^2 v phi(h))``,    ``phi(h) = (exp(h) - 1 - h) / h^2``,

and trivially by ``h``. The variance is ``w' C w`` with ``C`` the covariance of the unembedding columns under
``p``. Instead of all columns, ``C`` takes the most probable tokens exactly and counts every other token with the
probability ``q`` of the next one, which can only enlarge it: with ``d_j = W_U[:, j] - W_U p``,

    ``C <= sum_top (p_j - q) d_j d_j' + q sum_all d_j d_j'``,

whose second sum follows from ``sum_j W_U[:, j] W_U[:, j]'``, the same for every base. So one ``d_model x d_model``
matrix for each base bounds the loss of every neuron without a product against the vocabulary for it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.readout import Bases, Readout

_TOP_TOKENS = 2048


class Spread:
    """Loss bounds for the vectors of one readout; the unembedding's Gram matrix is computed once."""

    def __init__(self, readout: Readout, bases: Bases) -> None:
        self._readout, self._bases = readout, bases
        d_model = readout.W_U.shape[0]
        gram = torch.zeros(d_model, d_model, dtype=readout.dtype, device=readout.W_U.device)
        total = torch.zeros(d_model, dtype=readout.dtype, device=readout.W_U.device)
        for block in readout.blocks(d_model):
            columns = readout.W_U[:, block].to(readout.dtype)
            gram += columns @ columns.T
            total += columns.sum(1)
        self._gram, self._total = gram, total

    def loss(
        self, index: int, directions: Float[Tensor, "row d_model"], coefficient: Float[Tensor, "row source"]
    ) -> Float[Tensor, "row source"]:
        """Upper bound of the loss (nats) of ``coefficient[row, source] * directions[row]`` at base ``index``."""
        covariance, reach = self._covariance(index)
        length = directions.square().sum(-1)
        rounding = 64 * torch.finfo(self._readout.dtype).eps * covariance.trace()
        variance = (directions @ covariance * directions).sum(-1).clamp(min=0) + rounding * length
        h = coefficient.abs() * (length.sqrt() * reach)[:, None]
        # Beyond this the exponential overflows, and h itself is the smaller bound anyway.
        h_small = h.clamp(max=30.0)
        phi = torch.where(h < 0.1, 0.5 + h / 5, (torch.expm1(h_small) - h_small) / h_small.square())
        return torch.minimum(h, torch.log1p(coefficient.square() * variance[:, None] * phi))

    def _covariance(self, index: int) -> tuple[Float[Tensor, "d_model d_model"], Float[Tensor, ""]]:
        """A matrix that bounds the covariance from above, and ``R``."""
        readout, expected = self._readout, self._bases.expected[index]
        n_tokens = readout.W_U.shape[1]
        p = torch.cat([readout.p_block(self._bases, index, block) for block in readout.blocks(1)])
        values, tokens = p.topk(min(_TOP_TOKENS + 1, n_tokens))
        rest = values[-1] if n_tokens > _TOP_TOKENS else values.new_zeros(())
        deviations = readout.W_U[:, tokens].to(readout.dtype) - expected[:, None]
        everywhere = self._gram - torch.outer(self._total, expected) - torch.outer(expected, self._total)
        everywhere += n_tokens * torch.outer(expected, expected)
        covariance = (deviations * (values - rest)) @ deviations.T + rest * everywhere
        return covariance, readout.reach(self._bases, index)
