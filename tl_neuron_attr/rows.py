"""Prompts of one length as rows of one forward pass, confirmed against each alone.

A padded row equals its prompt alone only if attention masks, absolute positions and a release's own handling of
both are right, so nothing is ever padded here: a forward pass takes prompts of equal length, found by looking ahead.
With ``x`` a number of one row of a batch and ``y`` that of its prompt alone, what must hold is

    ``max |x - y| <= tolerance * max |y|``    for everything that is recorded of a row,

which is confirmed on the first and last row of the first batch, and again whenever a batch has twice as many rows or
twice as long ones as those confirmed. Where it fails (a release whose batches are wrong, a hook that edits one row
only), every further prompt is run alone, and a warning says so.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.prompts import Request
from tl_neuron_attr.tolerance import TOLERANCE

_Made = TypeVar("_Made")
# How far ahead prompts of one length are looked for, in batches, while what waits for its turn is small.
_LOOK_AHEAD = 8
_WAITING_BYTES = 2**30


class BatchingWarning(UserWarning):
    """Rows of a batch were not what their prompts give alone, so prompts are run one by one, more slowly."""


@dataclass
class Rows(Generic[_Made]):
    """Runs prompts of one length: together, or each alone once rows of a batch were seen to be wrong.

    ``together`` makes something of each row of a batch, ``alone`` of one prompt; ``difference`` says how the first
    is not the second, or ``None`` where it is, up to rounding.
    """

    view: ModelView
    together: Callable[[Sequence[Request]], list[_Made]]
    alone: Callable[[Request], _Made]
    difference: Callable[[_Made, _Made, Request], str | None]
    problem: str | None = None
    confirmed_rows: int = 0
    confirmed_length: int = 0

    @without_autocast
    def __call__(self, rows: Sequence[Request]) -> list[_Made]:
        if self.problem or len(rows) == 1:
            return [self.alone(row) for row in rows]
        made, problem = self._tried(rows)
        length = len(rows[0].tokens)
        if not problem and len(rows) < 2 * self.confirmed_rows and length < 2 * self.confirmed_length:
            return made
        first, last = self.alone(rows[0]), self.alone(rows[-1])
        problem = problem or self.difference(made[0], first, rows[0]) or self.difference(made[-1], last, rows[-1])
        if not problem:
            self.confirmed_rows = max(self.confirmed_rows, len(rows))
            self.confirmed_length = max(self.confirmed_length, length)
            return made
        name = f"{self.view.name} ({type(self.view.model).__name__})"
        self.problem = (
            f"{len(rows)} prompts of {length} tokens run as one batch do not give what they give alone in {name}: "
            f"{problem}; this and every further prompt is run alone. Give batch_size=1 to do so from the start; a "
            f"hook of yours must edit every row of a batch alike"
        )
        return [first, *map(self.alone, rows[1:-1]), last]

    def _tried(self, rows: Sequence[Request]) -> tuple[list[_Made], str | None]:
        """What one forward pass makes; where that fails, nothing, and why: each prompt alone has the last word."""
        try:
            return self.together(rows), None
        except (IndexError, RuntimeError, ValueError) as error:
            return [], f"{type(error).__name__}: {error}"


def in_order(
    wanted: Iterator[Request],
    run: Rows[_Made],
    batch_size: int,
    *,
    n_bytes: Callable[[_Made], int] = lambda made: 0,
    stacklevel: int = 3,
) -> Iterator[_Made]:
    """Run prompts of one length together as far as the look-ahead goes, and hand on in the prompts' order.

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
            rows = _of_one_length(waiting, 1 if full else batch_size)
            taken = [row.index for row in rows]
            waiting = [request for request in waiting if request.index not in taken]
            silent = run.problem is None
            made.update(zip(taken, run(rows), strict=True))
            if silent and run.problem is not None:
                warnings.warn(run.problem, BatchingWarning, stacklevel=stacklevel)
        yield made.pop(due.index)


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


def _of_one_length(waiting: Sequence[Request], batch_size: int) -> list[Request]:
    """The next prompt, and those of its length behind it."""
    same = (request for request in waiting if len(request.tokens) == len(waiting[0].tokens))
    return list(itertools.islice(same, batch_size))
