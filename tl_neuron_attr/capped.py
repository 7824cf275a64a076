"""Bounds of scores behind a soft cap, whose readout is not affine.

With ``D_j = cap(z_j + a u_j) - cap(z_j)`` the change of a capped logit, the score of ``a w`` for a token ``t`` is
``S = D_t - log E_p[exp(D)]``. Jensen still gives ``S <= D_t - E_p[D]``, and ``D_t`` is exact from one inner product.
The expectation follows from the cap's slope at the base and its largest curvature ``K``
(:mod:`tl_neuron_attr.logits`):

    ``|E_p[D] - a <e, N(w)>| <= (K / 2) a^2 E_p[u^2]``,    ``e = W_U (p * slope(z))``,

with ``E_p[u^2]`` bounded by one ``d_model x d_model`` matrix for each base (:mod:`tl_neuron_attr.spread`). From
below, since ``|D_j| <= |a u_j| <= h = |a| |N(w)| max_j |W_U[:, j]|`` and also ``|D_j| <= 2 c``,

    ``log E_p[exp(D)] <= log(1 + E_p[D] + a^2 E_p[u^2] phi(h))``,    ``phi(h) = (exp(h) - 1 - h) / h^2``.

For ``AnyOf`` the first term is ``log sum_b p(b | B) exp(D_b)``; a contrast ``D_a - D_b`` is exact.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.logits import Cap
from tl_neuron_attr.products import along
from tl_neuron_attr.spread import Spread, growth


class CappedBounds:
    """Bounds of the scores of vectors ``coefficient[row, source] * w[row]`` at one base."""

    def __init__(
        self,
        bases: Bases,
        spread: Spread,
        cap: Cap,
        index: int,
        directions: Float[Tensor, "row d_model"],
        coefficient: Float[Tensor, "row source"],
    ) -> None:
        self._bases, self._cap, self._index = bases, cap, index
        self._directions, self._coefficient = directions, coefficient
        target = bases.readout.target
        self._linear = target.is_linear
        self._gained = self._change(bases.positive, target.positive)
        if self._linear:
            self._gained = self._gained - self._change(bases.negative, target.negative)
        # Rounding of the inner products, beside the lengths of what they are products of.
        length = directions.norm(dim=-1)
        moment, furthest = spread.moment(index, directions, centred=False)
        self._square = coefficient.square() * moment[:, None]
        self._size = coefficient.abs() * (length * furthest)[:, None]
        self._mean = coefficient * (directions * bases.expected[index]).sum(-1)[:, None]
        n_options = 16 + len(target.positive)
        self.slack = n_options * torch.finfo(bases.readout.dtype).eps * (1 + self._size)

    def upper(self) -> Float[Tensor, "row source"]:
        """Upper bounds."""
        if self._linear:
            return self._gained + self.slack
        return self._gained - (self._mean - self._cap.curvature / 2 * self._square) + self.slack

    def lower(self) -> Float[Tensor, "row source"]:
        """Lower bounds."""
        if self._linear:
            return self._gained - self.slack
        expected = self._mean + self._cap.curvature / 2 * self._square
        h = self._size.clamp(max=2 * self._cap.c)
        lost = torch.log1p((expected + growth(self._square, h)).clamp(min=-0.999))
        return self._gained - torch.minimum(lost, h) - self.slack

    def _change(self, z: Float[Tensor, "base token"], tokens: tuple[int, ...]) -> Float[Tensor, "row source"]:
        """``D`` of a token, or ``log sum_b p(b | B) exp(D_b)`` of several."""
        u = along(self._directions, self._bases.readout.unembedded(tokens))
        if len(tokens) == 1:
            return self._cap.change(z[self._index, 0], self._coefficient * u)
        share = torch.log_softmax(self._bases.log_p[self._index], -1)
        gained = torch.full_like(self._coefficient, -torch.inf)
        for option in range(len(tokens)):
            change = self._cap.change(z[self._index, option], self._coefficient * u[:, option, None])
            gained = torch.logaddexp(gained, share[option] + change)
        return gained
