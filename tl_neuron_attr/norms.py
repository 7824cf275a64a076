"""Normalisation layers with their scale frozen.

LayerNorm and RMSNorm are both ``x -> gain * (x - m(x)) / s(x) + bias``, where ``m(x)`` is the mean for
LayerNorm and zero for RMSNorm, and ``s(x) = sqrt(mean((x - m(x))^2) + eps)``. Once ``s`` is frozen the linear
part ``N(x) = gain * (x - m(x)) / s`` is a linear map, so a sum of vectors is the sum of what each gives. Its
adjoint carries a direction from behind the norm to the residual stream:
``<g, N(x)> = <N*(g), x>`` with ``N*(g) = (gain * g - m(gain * g)) / s``.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """One normalisation layer's parameters.

    ``gain`` and ``bias`` are ``None`` where the model has none (or has folded them away); ``centred`` tells
    LayerNorm from RMSNorm; ``identity`` marks a model without normalisation, whose scale is one.
    """

    gain: Float[Tensor, " d_model"] | None
    bias: Float[Tensor, " d_model"] | None
    centred: bool
    eps: float
    identity: bool = False

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """``s(x)``, the root mean square of the (centred) input with epsilon inside."""
        if self.identity:
            return torch.ones_like(x[..., :1])
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(
        self, x: Float[Tensor, "*batch d_model"], scale: Float[Tensor, "*#batch 1"]
    ) -> Float[Tensor, "*batch d_model"]:
        """``N(x)``: the norm without its bias, at a frozen ``scale``."""
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        if self.gain is not None:
            x = x * self.gain.to(x)
        return x / scale

    def adjoint(
        self, g: Float[Tensor, "*batch d_model"], scale: Float[Tensor, "*#batch 1"]
    ) -> Float[Tensor, "*batch d_model"]:
        """``N*(g)``: ``<g, linear(x)> = <adjoint(g), x>`` for every ``x``."""
        if self.gain is not None:
            g = g * self.gain.to(g)
        if self.centred:
            g = g - g.mean(-1, keepdim=True)
        return g / scale
