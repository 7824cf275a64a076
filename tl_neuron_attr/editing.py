"""What happens at one hook point when units are ablated there.

With ``x`` the activation, ``mask`` the units ablated and ``m`` the mode,

    ``x' = where(mask, m(x), x)``,

and under ``scope="source"``, for what source ``s`` brings to position ``p`` in dimension ``d`` of head ``h``,

    ``z'[p, h, d] = z[p, h, d] - (1 - factor) * pattern[h, p, s] * value[s, kv(h), d]``    (factor 0 for zero).

Positions are absolute: with a key-value cache a pass sees only its new positions, and how many came before is read
off the attention pattern of the same layer (keys minus queries), by an observing hook that goes with the ablating
one. Where it cannot be read off, the hook refuses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_neuron_attr.modes import Mode, ResampledActivations, Scale
from tl_neuron_attr.selection import FromSource


class Observer:
    """Keeps one tensor of the running pass for the ablating hook that comes after it; changes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fired = 0
        self._seen: Tensor | None = None

    def __call__(self, tensor: Tensor, hook: Any) -> None:
        self.fired += 1
        self._seen = tensor

    def take(self) -> Tensor:
        """The tensor, once; RuntimeError where the hook was not there or came too late."""
        if self._seen is None:
            raise RuntimeError(
                f"an ablating hook needs the hook on {self.name} to fire before it in the same pass: add every pair "
                f"that ablation_hooks returned, in one call"
            )
        seen, self._seen = self._seen, None
        return seen

    def __repr__(self) -> str:
        return f"Observer({self.name}, fired {self.fired} times)"


class AblationHook:
    """Ablates units at one hook point and counts how often it fired (``fired``); make it with :func:`ablation_hooks`.

    ``mask`` is ``[row, *unit]``; one row stands for every row of a batch. The tensor given is never written to.
    """

    def __init__(
        self,
        name: str,
        mask: Bool[Tensor, "row ..."],
        mode: Mode,
        positions: tuple[int, ...] | None,
        pattern: Observer | None,
        value: Observer | None,
        sources: Sequence[tuple[int, FromSource]],
        window: int | None,
    ) -> None:
        self.name = name
        self.fired = 0
        self._mask = mask
        self._mode = mode
        self._positions = positions
        self._pattern = pattern
        self._value = value
        self._sources = sources
        self._window = window

    def __call__(self, tensor: Float[Tensor, "row pos *unit"], hook: Any) -> Float[Tensor, "row pos *unit"]:
        self.fired += 1
        n_rows, (batch, n_pos, *unit) = len(self._mask), tensor.shape
        if tuple(unit) != tuple(self._mask.shape[1:]):
            raise ValueError(
                f"{self.name} holds units of shape {unit} but the weights have {list(self._mask.shape[1:])}: its "
                f"entries are not the neurons of this layer, so they cannot be ablated"
            )
        if n_rows not in (1, batch):
            raise ValueError(f"{self.name}: hooks for {n_rows} variants ran on a batch of {batch} rows")
        pattern = None if self._pattern is None else self._pattern.take()
        first = 0 if pattern is None else self._first(pattern)
        chosen = [p for p in range(first, first + n_pos) if self._positions is None or p in self._positions]
        self._check_resampled(chosen)
        mask = self._mask.to(tensor.device)[:, None]
        if self._positions is not None:
            at = torch.zeros(n_pos, dtype=torch.bool, device=tensor.device)
            at[[p - first for p in chosen]] = True
            mask = mask & at.view(1, n_pos, *(1 for _ in unit))
        rest = tensor
        if pattern is not None and self._value is not None:
            rest = tensor - self._brought(pattern, self._value.take(), first, n_rows, tensor)
        return torch.where(mask, self._mode.edited(tensor, self.name, first), rest)

    def _first(self, pattern: Float[Tensor, "row head dest source"]) -> int:
        """The absolute position of the first one that this pass computes."""
        n_queries, n_keys = pattern.shape[-2:]
        if self.fired > 1 and n_queries == n_keys == 1:
            raise ValueError(
                f"{self.name}: a pass of one position that attends to itself only is a prompt of one token (make new "
                f"hooks for each), or a step of generate whose attention does not see the key-value cache, where "
                f"absolute positions are unknown (and generation is wrong: use_past_kv_cache=False)"
            )
        if self._window is not None and n_keys > n_queries and n_keys >= self._window:
            raise ValueError(
                f"{self.name}: the key-value cache has filled the attention window of {self._window} positions, so "
                f"absolute positions are unknown; run without the cache (use_past_kv_cache=False)"
            )
        return n_keys - n_queries

    def _check_resampled(self, chosen: Sequence[int]) -> None:
        held = self._mode.n_positions if isinstance(self._mode, ResampledActivations) else None
        if held is not None and chosen and chosen[-1] >= held:
            raise ValueError(
                f"{self.name}: position {chosen[-1]} is to be ablated, but the other prompt has {held} tokens: give "
                f"positions= within it, a prompt as long, or resample(..., position=) for one position's values"
            )

    def _brought(self, pattern: Tensor, value: Tensor, first: int, n_rows: int, z: Tensor) -> Float[Tensor, "..."]:
        """What to subtract from ``z``: the share of each source that falls into this pass."""
        n_pos = z.shape[1]
        here = [(row, s) for row, s in self._sources if first <= s.dest < first + n_pos]
        if here and first > 0:
            raise ValueError(
                f'{self.name}: scope="source" at position {here[0][1].dest} in a step with a key-value cache: the '
                f"values of earlier positions are no longer there; run without the cache (use_past_kv_cache=False)"
            )
        amount = torch.zeros_like(z)
        if not here:
            return amount
        place = torch.tensor([[row, *s] for row, s in here], device=z.device)
        if n_rows == 1:  # the same for every row of the batch
            place = place.repeat_interleave(len(z), 0)
            place[:, 0] = torch.arange(len(z), device=z.device).repeat(len(here))
        row, head, dim, source, dest = place.unbind(1)
        pattern, value = pattern.to(z.device), value.to(z.device)
        group = z.shape[2] // value.shape[2]
        share = pattern[row, head, dest, source].to(z) * value[row, source, head // group, dim].to(z)
        factor = self._mode.factor if isinstance(self._mode, Scale) else 0.0
        return amount.index_put((row, dest, head, dim), share * (1 - factor), accumulate=True)

    def __repr__(self) -> str:
        units = int(self._mask.sum()) + len(self._sources)
        return f"AblationHook({self.name}, {units} units, {self._mode}, fired {self.fired} times)"
