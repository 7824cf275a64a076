"""Arithmetic in the precision that is asked for, whatever the user's session does to operations on their way.

Under ``torch.autocast`` matrix products are computed in bfloat16 or float16 whatever their operands are, so scores
made inside it would carry three digits and look like any others. Public calls switch it off for their own work, the
forward pass included: a model runs in the precision of its own weights. The user's setting is back afterwards.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import torch

_KINDS = ("cpu", "cuda", "xpu", "mps")
_Call = TypeVar("_Call", bound=Callable[..., Any])


def without_autocast(call: _Call) -> _Call:
    """``call`` with autocast off while it runs, on every kind of device where it was on."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as off:
            for kind in _active():
                off.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return cast("_Call", wrapped)


def _active() -> list[str]:
    if hasattr(torch.amp, "is_autocast_available"):  # PyTorch 2.4 and later ask by kind of device
        return [kind for kind in _KINDS if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    return ["cpu", *["cuda"] * torch.is_autocast_enabled()]
