"""Which function an MLP's activation is.

A HookedTransformer's MLP holds its function. A bridge only declares a name, and for some architectures it declares a
default that the wrapped model does not use. So the functions that it may be are listed here, the declared one first,
and :mod:`tl_neuron_attr.keys` takes the one that gives the model's own activations.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from torch import Tensor

Activation: TypeAlias = Callable[[Tensor], Tensor]

_COMMON = ("gelu", "gelu_new", "silu", "relu", "relu2", "quick_gelu")


def activations(mlp: Any, cfg: Any) -> tuple[Activation, ...]:
    """The functions that the activation of ``mlp`` may be, the likeliest first."""
    own = getattr(mlp, "act_fn", None)
    if callable(own):
        return (cast("Activation", own),)
    from transformers.activations import ACT2FN

    declared = getattr(cfg, "act_fn", None)
    names = dict.fromkeys(name for name in (declared, *_COMMON) if name in ACT2FN)
    return tuple(cast("Activation", ACT2FN[name]) for name in names)
