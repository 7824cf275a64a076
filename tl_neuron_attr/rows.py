"""Prompts as rows of one forward pass, confirmed against each alone.

No row is ever masked or shifted: a shorter prompt is continued, with some token, to the length of the longest, and
what comes after it is cut off again. A causal model's activations at a position depend on no later one, so those of
the prompt are what it gives alone; nothing hangs on a release's own handling of padding, masks or positions. Prompts
share a pass only where their lengths are alike (:func:`alike`), so that little is computed for nothing.
With ``x`` a number of one row of a batch and ``y`` that of its prompt alone, what must hold is

    ``max |x - y| <= tolerance * max |y|``    for everything that is recorded of a row,

which is confirmed on the longest and the shortest row of the first batch, again for the first of unequal lengths, and
again whenever a batch has twice as many rows or twice as long ones as those confirmed. Where it fails for unequal
lengths (a hook that edits the last column), prompts share a pass with those of their own length only. Where it fails
for one length too (a release whose batches are wrong, a hook that edits one row only), every further prompt is run
alone, and a warning says so.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.prompts import Request
from tl_neuron_attr.tolerance import TOLERANCE

_Made = TypeVar("_Made")
# How far ahead prompts of like length are looked for, in batches, while what waits for its turn is small.
_LOOK_AHEAD = 8
_WAITING_BYTES = 2**30
# By how many tokens lengths in one pass may differ, or by which part of the longest: computing so many for nothing
# costs less than another pass.
_FEW = 8
_PART = 4


class BatchingWarning(UserWarning):
    """Rows of a batch were not what their prompts give alone, so prompts are run one by one, more slowly."""


@dataclass
class Rows(Generic[_Made]):
    """Runs prompts together, or each alone once rows of a batch were seen to be wrong.

    ``together`` makes something of each row of a batch, ``alone`` of one prompt; ``difference`` says how the first
    is not the second, or ``None`` where it is, up to rounding. ``mixes`` is whether lengths may be unequal.
    """

    view: ModelView
    together: Callable[[Sequence[Request]], list[_Made]]
    alone: Callable[[Request], _Made]
    difference: Callable[[_Made, _Made, Request], str | None]
    mixes: bool
    problem: str | None = None
    confirmed_rows: int = 0
    confirmed_length: int = 0
    confirmed_mixed: bool = False

    @without_autocast
    def __call__(self, rows: Sequence[Request]) -> list[_Made]:
        """What is made of each row; rows of unequal lengths begin with the longest, as :func:`alike` gives them."""
        if self.problem or len(rows) == 1:
            return [self.alone(row) for row in rows]
        lengths = [len(row.tokens) for row in rows]
        mixed = lengths[0] != lengths[-1]
        if mixed and not self.mixes:
            return [made for _, same in itertools.groupby(rows, _length) for made in self(list(same))]
        made, problem = self._tried(rows)
        if not problem and self._is_confirmed(len(rows), lengths[0], mixed):
            return made
        first, last = self.alone(rows[0]), self.alone(rows[-1])
        problem = problem or self.difference(made[0], first, rows[0]) or self.difference(made[-1], last, rows[-1])
        if not problem:
            self.confirmed_rows = max(self.confirmed_rows, len(rows))
            self.confirmed_length = max(self.confirmed_length, lengths[0])
            self.confirmed_mixed = self.confirmed_mixed or mixed
            return made
        if mixed:
            self.mixes = False
            return self(rows)
        name = f"{self.view.name} ({type(self.view.model).__name__})"
        self.problem = (
            f"{len(rows)} prompts of {lengths[0]} tokens run as one batch do not give what they give alone in "
            f"{name}: {problem}; this and every further prompt is run alone. Give batch_size=1 to do so from the "
            f"start; a hook of yours must edit every row of a batch alike"
        )
        return [first, *map(self.alone, rows[1:-1]), last]

    def _is_confirmed(self, n_rows: int, length: int, mixed: bool) -> bool:
        as_large = n_rows < 2 * self.confirmed_rows and length < 2 * self.confirmed_length
        return as_large and (self.confirmed_mixed or not mixed)

    def _tried(self, rows: Sequence[Request]) -> tuple[list[_Made], str | None]:
        """What one forward pass makes; where that fails, nothing, and why: each prompt alone has the last word."""
        try:
            return self.together(rows), None
        except (IndexError, RuntimeError, ValueError) as error:
            return [], f"{type(error).__name__}: {error}"


def alike(waiting: Sequence[Request], size: int, *, mixes: bool) -> list[Request]:
    """The first of those waiting and up to ``size - 1`` others of the nearest lengths, longest first."""
    due = len(waiting[0].tokens)
    taken: list[Request] = []
    shortest = longest = due
    for row in sorted(waiting, key=lambda row: abs(len(row.tokens) - due)):
        low, high = min(shortest, len(row.tokens)), max(longest, len(row.tokens))
        if len(taken) == size or (low < high and not mixes):
            break
        if high - low <= max(_FEW, high // _PART):
            taken.append(row)
            shortest, longest = low, high
    return sorted(taken, key=_length, reverse=True)


def continued(view: ModelView, rows: Sequence[Request]) -> Int[Tensor, "row pos"]:
    """The rows' ids, shorter ones continued with another token than their last one.

    A hook that wrongly counts it in (a mean over positions) is told by its numbers then, also for a prompt of one
    token over and over.
    """
    longest = max(map(_length, rows))
    other = [(row.tokens[-1:] + 1) % view.W_E.shape[0] for row in rows]
    return torch.stack(
        [torch.cat([row.tokens, one.expand(longest - _length(row))]) for row, one in zip(rows, other, strict=True)]
    )


def _length(row: Request) -> int:
    return len(row.tokens)


def in_order(
    wanted: Iterator[Request],
    run: Rows[_Made],
    batch_size: int,
    *,
    n_bytes: Callable[[_Made], int] = lambda made: 0,
    stacklevel: int = 3,
) -> Iterator[_Made]:
    """Run prompts of like length together as far as the look-ahead goes, and hand on in the prompts' order.

    ``n_bytes`` is what holding one result costs while others go first; ``stacklevel`` that of the warning.
    """
    look_ahead = _LOOK_AHEAD * batch_size if batch_size > 1 else 1
    waiting: list[Request] = []
    order: list[Request] = []
    made: dict[int, _Made] = {}
    while True:
        read = list(itertools.islice(wanted, look_ahead - len(order)))
        waiting += read
        order += read
        if not order:
            return
        due = order.pop(0)
        if due.index not in made:
            full = sum(map(n_bytes, made.values())) >= _WAITING_BYTES
            rows = alike(waiting, 1 if full else batch_size, mixes=run.mixes)
            silent = run.problem is None
            made.update(_each_in_turn(rows, due, run))
            waiting = [request for request in waiting if request.index not in made]
            if silent and run.problem is not None:
                warnings.warn(run.problem, BatchingWarning, stacklevel=stacklevel)
        yield made.pop(due.index)


def _each_in_turn(rows: Sequence[Request], due: Request, run: Rows[_Made]) -> dict[int, _Made]:
    """What is made of rows by their numbers; where one of them fails, of the due one only: each fails at its turn."""
    try:
        return dict(zip([row.index for row in rows], run(rows), strict=True))
    except Exception:
        if len(rows) == 1:
            raise
    return {due.index: run([due])[0]}


def difference(what: str, batched: Tensor | None, alone: Tensor, view: ModelView, row: Request) -> str | None:
    """How numbers of a row differ from those of its prompt alone by more than rounding, or ``None``."""
    if batched is None or batched.shape != alone.shape:
        return f"{what} of prompts[{row.index}] has another shape"
    own, other = alone.to(view.compute_dtype), batched.to(view.compute_dtype)
    gap = float(torch.where(own == other, 0.0, (own - other).abs()).max())
    size = float(own.abs().max())
    if not gap <= TOLERANCE[view.dtype] * size:  # also true for NaN
        return f"{what} of prompts[{row.index}] differs by {gap:.3g} where the largest is {size:.3g}"
    return None
