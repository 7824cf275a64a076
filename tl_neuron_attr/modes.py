"""What an ablated activation becomes: a closed set of modes.

=====================================  =============================================================
mode                                   the value ``x`` of an ablated unit becomes
=====================================  =============================================================
``"zero"`` or :class:`Zero`            0
:class:`Scale` ``(factor)``            ``factor * x``
:class:`SetTo` ``(value)``             ``value``
:func:`mean_activations`               its mean over all positions of given prompts
:func:`resample`                       its value in another prompt
=====================================  =============================================================

The last two hold recorded activations; :mod:`tl_neuron_attr.recording` makes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Zero:
    """Zero, as in the paper: as if the neuron's output row were zero.

    >>> str(Zero())
    'zero'
    """

    def __str__(self) -> str:
        return "zero"

    def edited(self, tensor: Float[Tensor, "row pos *unit"], name: str, first: int) -> Float[Tensor, "..."]:
        """What the activation would become if every unit of it were ablated."""
        return torch.zeros_like(tensor)


@dataclass(frozen=True)
class Scale:
    """The value times ``factor``: 0 is zero, 1 changes nothing, 2 doubles (steering).

    >>> str(Scale(2))
    'scale by 2'
    """

    factor: float | int

    def __str__(self) -> str:
        return f"scale by {self.factor:g}"

    def edited(self, tensor: Float[Tensor, "row pos *unit"], name: str, first: int) -> Float[Tensor, "..."]:
        """What the activation would become if every unit of it were ablated."""
        return tensor * self.factor


@dataclass(frozen=True)
class SetTo:
    """One given value, in the model's own activation units.

    >>> str(SetTo(0.5))
    'set to 0.5'
    """

    value: float | int

    def __str__(self) -> str:
        return f"set to {self.value:g}"

    def edited(self, tensor: Float[Tensor, "row pos *unit"], name: str, first: int) -> Float[Tensor, "..."]:
        """What the activation would become if every unit of it were ablated."""
        largest = torch.finfo(tensor.dtype).max
        if abs(self.value) > largest:
            raise ValueError(f"{self} is past what {tensor.dtype} holds: give a value of at most {largest:.4g}")
        return torch.full_like(tensor, self.value)


@dataclass(frozen=True, eq=False, repr=False)
class MeanActivations:
    """Each unit's mean over every position of given prompts; make it once with :func:`mean_activations`.

    ``means`` maps hook names to ``[d_mlp]`` or ``[head, d_head]``, float32 or better.
    """

    means: Mapping[str, Tensor]
    n_prompts: int
    n_positions: int

    def __str__(self) -> str:
        return f"mean over {self.n_positions} positions of {self.n_prompts} prompts"

    __repr__ = __str__

    def edited(self, tensor: Float[Tensor, "row pos *unit"], name: str, first: int) -> Float[Tensor, "..."]:
        """What the activation would become if every unit of it were ablated."""
        return _fitting(self.means, tensor, name).to(tensor).expand_as(tensor)


@dataclass(frozen=True, eq=False, repr=False)
class ResampledActivations:
    """Each unit's values in another prompt; make it with :func:`resample`.

    ``values`` maps hook names to ``[pos, d_mlp]`` or ``[pos, head, d_head]``. With ``everywhere``, ``pos`` is one
    position whose values are used at every ablated one; else position ``i`` takes the values of position ``i``.
    """

    values: Mapping[str, Tensor]
    everywhere: bool
    label: str = "resample"

    def __str__(self) -> str:
        return self.label

    __repr__ = __str__

    def edited(self, tensor: Float[Tensor, "row pos *unit"], name: str, first: int) -> Float[Tensor, "..."]:
        """What the activation would become if every unit of it were ablated."""
        values = _fitting(self.values, tensor, name).to(tensor)
        if not self.everywhere:
            values = values[first : first + tensor.shape[1]]
            missing = tensor.shape[1] - len(values)  # never used: the hook has refused ablated positions there
            values = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
        return values.expand_as(tensor)

    @property
    def n_positions(self) -> int | None:
        """How many positions can be ablated; ``None`` is any number."""
        return None if self.everywhere else len(next(iter(self.values.values())))


def mean_of(mean: MeanActivations, units: Float[Tensor, "*unit"], name: str) -> Float[Tensor, "*unit"]:
    """The means of one hook point, as :class:`ValueError` where they are of another model."""
    return _fitting(mean.means, units[None, None], name)


Mode: TypeAlias = Zero | Scale | SetTo | MeanActivations | ResampledActivations

_MODES = '"zero" (or Zero()), Scale(factor), SetTo(value), mean_activations(model, prompts), resample(model, prompt)'


def resolve_mode(mode: object) -> Mode:
    """The mode object of what a user gives; :class:`ValueError`, listing the modes, for anything else."""
    if isinstance(mode, Zero | Scale | SetTo | MeanActivations | ResampledActivations):
        return mode
    if isinstance(mode, str) and mode == "zero":
        return Zero()
    raise ValueError(f"unknown mode {mode!r}: the modes are {_MODES}")


def _fitting(held: Mapping[str, Tensor], tensor: Tensor, name: str) -> Tensor:
    """The values for a hook point, or what is wrong with them."""
    values = held.get(name)
    if values is None or values.shape[values.ndim - tensor.ndim + 2 :] != tensor.shape[2:]:
        shape = "none" if values is None else f"shape {list(values.shape)}"
        raise ValueError(
            f"{name} has {list(tensor.shape[2:])} units but the mode holds {shape} for it: it was made "
            f"with another model; compute it with this one"
        )
    return values
