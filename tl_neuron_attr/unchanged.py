"""Whether a model's weights are still those that a trace was made with.

Each weight has to be the same parameter, edited in place as often as then, of the same precision and in the same
memory, or on another device: a move is no edit. Moved away and back, it lies in other memory and may hold anything,
so it counts as changed. An edit in place through ``.data``, or through an array that shares the memory, is one that
PyTorch does not count, so it cannot be seen here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn


class Weights:
    """The weights of a model as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = [_Seen.of(weight) for weight in model.parameters()]

    def are_still_of(self, model: nn.Module) -> bool:
        """Whether the model has these weights now."""
        weights = list(model.parameters())
        return len(weights) == len(self._seen) and all(
            seen.is_still(weight) for seen, weight in zip(self._seen, weights, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    weight: Callable[[], nn.Parameter | None]
    edits: int
    dtype: torch.dtype
    device: torch.device
    address: int

    @staticmethod
    def of(weight: nn.Parameter) -> "_Seen":
        return _Seen(ref(weight), _edits(weight), weight.dtype, weight.device, weight.data_ptr())

    def is_still(self, weight: nn.Parameter) -> bool:
        same = self.weight() is weight and self.edits == _edits(weight) and self.dtype == weight.dtype
        return same and (self.address == weight.data_ptr() or self.device != weight.device)


def _edits(weight: nn.Parameter) -> int:
    """How often it was edited in place; tensors of inference mode do not count."""
    return 0 if weight.is_inference() else weight._version
