"""What becomes of a sublayer's output before the residual stream gets it.

Most blocks add the output ``o`` of attention and MLP as it is. Gemma-2, Gemma-3 and OLMo-2 normalise it first,
Granite multiplies it by a constant ``m``:

    ``added = m (N(o) + bias)``

with ``N`` the linear part of the norm behind the sublayer at the scale of the true ``o``
(:mod:`tl_neuron_attr.norms`). With that scale frozen, a neuron whose row is ``w`` adds ``a m N(w)``, so neurons and
output bias still sum to what is added. A direction ``g`` of the stream reads the row along the adjoint,
``<g, m N(w)> = <m N*(g), w>``.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.norms import Norm


@dataclass(frozen=True, eq=False)
class Post:
    """The norm behind a sublayer (``None`` where there is none) and the multiplier of what is added."""

    norm: Norm | None = None
    multiplier: float = 1.0

    @property
    def is_identity(self) -> bool:
        """Whether the output is added as it is."""
        return (self.norm is None or self.norm.identity) and self.multiplier == 1

    def at(self, output: Float[Tensor, "*batch d_model"]) -> "FrozenPost":
        """The map with its scale frozen at these outputs."""
        scale = None if self.norm is None or self.norm.identity else self.norm.scale(output)
        return FrozenPost(self, scale)


@dataclass(frozen=True, eq=False)
class FrozenPost:
    """A :class:`Post` at a frozen scale, one for each position or a single one; without a norm it has none."""

    post: Post
    scale: Float[Tensor, "*batch 1"] | None

    def linear(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``m N(x)``: what a part ``x`` of the output adds to the stream."""
        if self.post.is_identity:
            return x
        if self.scale is not None and self.post.norm is not None:
            x = self.post.norm.linear(x, self.scale.to(x))
        return x * self.post.multiplier

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """:meth:`linear` times the frozen scale, which is the same for every prompt."""
        if self.scale is not None and self.post.norm is not None:
            x = self.post.norm.linear(x, torch.ones_like(x[..., :1]))
        return x if self.post.multiplier == 1 else x * self.post.multiplier

    def adjoint(self, g: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``m N*(g)``: what a direction ``g`` of the stream reads of the output."""
        if self.post.is_identity:
            return g
        if self.scale is not None and self.post.norm is not None:
            g = self.post.norm.adjoint(g, self.scale.to(g))
        return g * self.post.multiplier

    def added(self, output: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What the whole output adds to the stream, the norm's bias included."""
        x = self.linear(output)
        if self.scale is None or self.post.norm is None or self.post.norm.bias is None:
            return x
        return x + self.post.norm.bias.to(x) * self.post.multiplier
