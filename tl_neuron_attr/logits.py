"""What a model makes of its unembedding's output: a multiplier and a soft cap.

``logits = cap(m W_U' x)`` with a constant ``m`` (Cohere multiplies, Granite divides) and, for Gemma-2, the soft cap
``cap(z) = c tanh(z / c)``; without a cap it is the identity. Its slope is ``1 / cosh(z / c)^2``, at most one, and its
curvature is at most ``K = 4 / (3 sqrt(3) c)`` in size. How a logit ``z`` changes when ``d`` is added before the cap,

    ``D = cap(z + d) - cap(z) = c tanh(d / c) slope(z) / (1 + tanh(z / c) tanh(d / c))``,

is computed by this formula where ``d`` is small beside ``c``, which keeps the precision of small changes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Cap:
    """The soft cap ``c tanh(z / c)``."""

    c: float

    def __call__(self, z: Float[Tensor, "*logits"]) -> Float[Tensor, "*logits"]:
        """The capped logits."""
        return (z / self.c).tanh() * self.c

    def slope(self, z: Float[Tensor, "*logits"]) -> Float[Tensor, "*logits"]:
        """The derivative at ``z``, by exponentials: their rounding does not depend on an entry's neighbours."""
        e = (z.abs() * (-2 / self.c)).exp()
        return 4 * e / (1 + e).square()

    @property
    def curvature(self) -> float:
        """``K``, the largest size of the second derivative."""
        return 4 / (3 * 3**0.5 * self.c)

    def change(self, z: Float[Tensor, "*#logits"], d: Float[Tensor, "*#logits"]) -> Float[Tensor, "*logits"]:
        """``D``, how the capped logits change when ``d`` is added before the cap."""
        before, moved = (z / self.c).tanh(), (d / self.c).tanh()
        near = moved * self.slope(z) / (1 + before * moved)
        far = ((z + d) / self.c).tanh() - before
        return torch.where(moved.abs() < 0.5, near, far) * self.c


@dataclass(frozen=True)
class LogitMap:
    """The multiplier and the cap (``None`` where there is none)."""

    multiplier: float = 1.0
    cap: Cap | None = None

    def __call__(self, unembedded: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """The model's logits."""
        logits = unembedded if self.multiplier == 1 else unembedded * self.multiplier
        return logits if self.cap is None else self.cap(logits)
