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

from tl_neuron_attr.bases import Bases

_TOP_TOKENS = 2048


class Spread:
    """Loss bounds for the vectors of one readout; the unembedding's Gram matrix is computed once."""

    def __init__(self, bases: Bases) -> None:
        readout = bases.readout
        self._readout, self._bases = readout, bases
        d_model = readout.W_U.shape[0]
        gram = torch.zeros(d_model, d_model, dtype=readout.dtype, device=readout.W_U.device)
        total = torch.zeros(d_model, dtype=readout.dtype, device=readout.W_U.device)
        furthest = torch.zeros(len(bases.expected) + 1, dtype=readout.dtype, device=readout.W_U.device)
        for block in readout.blocks(d_model):
            columns = readout.W_U[:, block].to(readout.dtype)
            gram += columns @ columns.T
            total += columns.sum(1)
            square = columns.square().sum(0)
            away = square - 2 * (bases.expected @ columns) + bases.expected.square().sum(-1, keepdim=True)
            furthest = torch.maximum(furthest, torch.cat([away.amax(-1), square.amax()[None]]))
        # The square of a distance by its parts rounds beside the largest of them.
        rounding = 64 * torch.finfo(readout.dtype).eps * (furthest[-1] + bases.expected.square().sum(-1).amax())
        self._gram, self._total, self._reach = gram, total, (furthest + rounding).sqrt()

    def loss(
        self, index: int, directions: Float[Tensor, "row d_model"], coefficient: Float[Tensor, "row source"]
    ) -> Float[Tensor, "row source"]:
        """Upper bound of the loss (nats) of ``coefficient[row, source] * directions[row]`` at base ``index``."""
        variance, reach = self.moment(index, directions)
        length = directions.square().sum(-1)
        h = coefficient.abs() * (length.sqrt() * reach)[:, None]
        return torch.minimum(h, log_growth(coefficient.square() * variance[:, None], h))

    def moment(
        self, index: int, directions: Float[Tensor, "row d_model"], *, centred: bool = True
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
        """Upper bounds of ``E_p[<W_U[:, j] - c, w>^2]`` at a base, and of ``max_j |W_U[:, j] - c|``.

        ``c`` is ``W_U p`` (times the cap's slope), or zero where not ``centred``.
        """
        expected = self._bases.expected[index]
        matrix = self._moment(index, expected if centred else torch.zeros_like(expected))
        rounding = 64 * torch.finfo(self._readout.dtype).eps * matrix.trace()
        moment = (directions @ matrix * directions).sum(-1).clamp(min=0)
        return moment + rounding * directions.square().sum(-1), self._reach[index if centred else -1]

    def _moment(self, index: int, center: Float[Tensor, " d_model"]) -> Float[Tensor, "d_model d_model"]:
        """A matrix that bounds ``E_p[d_j d_j']`` from above, ``d_j = W_U[:, j] - center``."""
        readout, n_tokens = self._readout, self._readout.W_U.shape[1]
        p = self._bases.p(index)
        values, tokens = p.topk(min(_TOP_TOKENS + 1, n_tokens))
        rest = values[-1] if n_tokens > _TOP_TOKENS else values.new_zeros(())
        deviations = readout.W_U[:, tokens].to(readout.dtype) - center[:, None]
        everywhere = self._gram - torch.outer(self._total, center) - torch.outer(center, self._total)
        everywhere += n_tokens * torch.outer(center, center)
        return (deviations * (values - rest)) @ deviations.T + rest * everywhere


def growth(square: Float[Tensor, "*rows"], h: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """An upper bound of ``square * phi(h)``, or infinity where a float does not hold it.

    Up to 0.1, ``phi(h) <= 1 / 2 + h / 5``, which the quotient itself would miss by rounding.
    """
    quotient = (torch.expm1(h) - h) / h.square()
    return square * torch.where(h < 0.1, 0.5 + h / 5, quotient)


def log_growth(square: Float[Tensor, "*rows"], h: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """An upper bound of ``log(1 + square * phi(h))`` for any ``h``: ``phi(h) <= exp(h) / h^2``."""
    far = torch.logaddexp(torch.zeros_like(h), square.log() + h - 2 * h.log())
    return torch.where(h < 30, torch.log1p(growth(square, h.clamp(max=30))), far)
