"""Many prompts -> their traces, several prompts of one length in each forward pass.

A padded row equals its prompt alone only if attention masks, absolute positions and a release's own handling of
both are right, so nothing is ever padded here: a forward pass takes prompts of equal length, found by looking ahead.
With ``x`` an activation of one row of a batch and ``y`` that of its prompt alone, what must hold is

    ``max |x - y| <= tolerance * max |y|``    for each activation and the log-probabilities,

which is confirmed on the first and last row of the first batch, and again whenever a batch has twice as many rows or
twice as long ones as those confirmed. Where it fails (a release whose batches are wrong, a hook that edits one row
only), every further prompt is run alone, and a warning says so.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.cached import CachedRun
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.prompts import Request, requests
from tl_neuron_attr.targets import Target
from tl_neuron_attr.tokens import Prompt, Tokens
from tl_neuron_attr.tolerance import TOLERANCE
from tl_neuron_attr.trace import Convention, Trace, build, prepare

# How far ahead prompts of one length are looked for, in batches, while the traces that wait for their turn are small.
_LOOK_AHEAD = 8
_WAITING_BYTES = 2**30


class BatchingWarning(UserWarning):
    """Rows of a batch were not what their prompts give alone, so prompts are run one by one, more slowly."""


def trace_batch(
    model: Any,
    prompts: Iterable[Prompt] | Int[Tensor, "row pos"],
    targets: Target | Sequence[Target] | Int[Tensor, " row"] = None,
    *,
    batch_size: int = 8,
    position: int = -1,
    attention_mask: Int[Tensor, "row pos"] | Bool[Tensor, "row pos"] | None = None,
    convention: Convention = "exact",
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Iterator[Trace]:
    """Traces of many prompts, in their order, each equal to ``trace(model, prompt, target)`` up to rounding.

    Prompts of unequal length never share a forward pass, so there is no padding, and the tokenizer's padding side
    plays no part. A trace holds its own activations only; traces are made as they are asked for.

    Args:
        model: as for :func:`trace`.
        prompts: a list (or generator) of what :func:`trace` takes, or a tensor of ids ``[row, pos]``.
        targets: one target for all, ``None`` (each prompt's own top prediction), or a list of one for each.
        batch_size: how many prompts of one length to run at once.
        position: the predicting position of every prompt; negative counts from the end of its tokens.
        attention_mask: for a tensor whose rows are padded, on either side: 1 for a token, 0 for padding.
        convention: as for :func:`trace`.
        prepend_bos: as for :func:`trace`.
        progress: whether to show a progress bar on stderr.

    Raises:
        UnsupportedModelError: as :func:`trace`.
        TargetError: as :func:`trace`, naming the target: ``targets[3]: ...``.
        ValueError: as :func:`trace`, naming the prompt: ``prompts[3]: ...``; another number of targets than of
            prompts; a mask that does not fit, or with a hole; rows with padding but no mask; ``batch_size`` below 1.

    All of it is checked before the first forward pass, except what a generator has yet to give. Warns
    :class:`BatchingWarning` where a batch does not give what its prompts give alone; they are then run alone.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> prompts = ["The capital of France is", "The capital of Italy is", "Two and two make"]
        >>> for trace in na.trace_batch(model, prompts, [" Paris", " Rome", None], progress=False):
        ...     print(trace.target.label)
        ' Paris'
        ' Rome'
        ' '
    """
    size = Tokens.as_index(batch_size)
    if size is None or size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: give how many prompts to run at once, 1 or more")
    view, vocabulary = prepare(model, convention)
    wanted, total = requests(
        prompts,
        targets,
        vocabulary,
        getattr(model, "tokenizer", None),
        attention_mask=attention_mask,
        position=position,
        prepend_bos=prepend_bos,
    )
    return _with_progress(_in_order(wanted, _Runner(view, vocabulary, convention), size), total, progress)


def _with_progress(traces: Iterator[Trace], total: int | None, progress: bool) -> Iterator[Trace]:
    with tqdm(total=total, disable=not progress, desc="traces", unit="prompt") as bar:
        for trace in traces:
            yield trace
            bar.update()


def _in_order(wanted: Iterator[Request], run: "_Runner", batch_size: int) -> Iterator[Trace]:
    """Run prompts of one length together as far as the look-ahead goes, and hand traces out in the prompts' order."""
    look_ahead = _LOOK_AHEAD * batch_size if batch_size > 1 else 1
    waiting: list[Request] = []
    made: dict[int, Trace] = {}
    for index in itertools.count():
        waiting += itertools.islice(wanted, look_ahead - len(waiting) - len(made))
        if index not in made:
            if not waiting:
                return
            full = sum(map(_bytes, made.values())) >= _WAITING_BYTES
            rows = _of_one_length(waiting, 1 if full else batch_size)
            taken = [row.index for row in rows]
            waiting = [request for request in waiting if request.index not in taken]
            silent = run.problem is None
            made.update(zip(taken, run(rows), strict=True))
            if silent and run.problem is not None:
                warnings.warn(run.problem, BatchingWarning, stacklevel=3)
        yield made.pop(index)


def _of_one_length(waiting: Sequence[Request], batch_size: int) -> list[Request]:
    """The next prompt, and those of its length behind it."""
    same = (request for request in waiting if len(request.tokens) == len(waiting[0].tokens))
    return list(itertools.islice(same, batch_size))


@dataclass
class _Runner:
    """Runs prompts of one length: together, or each alone once rows of a batch were seen to be wrong."""

    view: ModelView
    vocabulary: Tokens
    convention: Convention
    problem: str | None = None
    confirmed_rows: int = 0
    confirmed_length: int = 0

    @without_autocast
    def __call__(self, rows: Sequence[Request]) -> list[Trace]:
        if self.problem or len(rows) == 1:
            return [self._single(row) for row in rows]
        traces, problem = self._together(rows)
        length = len(rows[0].tokens)
        if not problem and len(rows) < 2 * self.confirmed_rows and length < 2 * self.confirmed_length:
            return traces
        first, last = self._single(rows[0]), self._single(rows[-1])
        problem = problem or _difference(traces[0], first, rows[0]) or _difference(traces[-1], last, rows[-1])
        if not problem:
            self.confirmed_rows = max(self.confirmed_rows, len(rows))
            self.confirmed_length = max(self.confirmed_length, length)
            return traces
        name = f"{self.view.name} ({type(self.view.model).__name__})"
        self.problem = (
            f"{len(rows)} prompts of {length} tokens run as one batch do not give what they give alone in {name}: "
            f"{problem}; this and every further prompt is run alone. Give batch_size=1 to do so from the start; a "
            f"hook of yours must edit every row of a batch alike"
        )
        return [first, *map(self._single, rows[1:-1]), last]

    def _single(self, row: Request) -> Trace:
        return self._built(row, CachedRun.forward(self.view, row.tokens, [row.dest]))

    def _together(self, rows: Sequence[Request]) -> tuple[list[Trace], str | None]:
        """Traces cut from one forward pass; where that fails, none, and why: each prompt alone has the last word."""
        try:
            tokens = torch.stack([row.tokens for row in rows])
            runs = CachedRun.forward_rows(self.view, tokens, [row.dest for row in rows])
            return [self._built(row, run) for row, run in zip(rows, runs, strict=True)], None
        except (IndexError, RuntimeError, ValueError) as error:
            return [], f"{type(error).__name__}: {error}"

    def _built(self, row: Request, run: CachedRun) -> Trace:
        return build(self.view, self.vocabulary, row.prompt, row.tokens, row.dest, row.target, self.convention, run)


def _difference(batched: Trace, alone: Trace, row: Request) -> str | None:
    """The first activation of a row that is not, up to rounding, that of its prompt alone; ``None`` if all are."""
    expected = dict(_tensors(alone))
    found = dict(_tensors(batched))
    tolerance = TOLERANCE[alone.view.dtype]
    for name, own in expected.items():
        other = found.get(name)
        if other is None or other.shape != own.shape:
            return f"{name} of prompts[{row.index}] has another shape"
        own, other = own.to(alone.view.compute_dtype), other.to(alone.view.compute_dtype)
        gap = float(torch.where(own == other, 0.0, (own - other).abs()).max())
        size = float(own.abs().max())
        if not gap <= tolerance * size:  # also true for NaN
            return f"{name} of prompts[{row.index}] differs by {gap:.3g} where the largest is {size:.3g}"
    return None


def _tensors(trace: Trace) -> Iterator[tuple[str, Tensor]]:
    """Everything recorded, by name; a layer's as ``name[layer]``."""
    for field in fields(trace):
        value = getattr(trace, field.name)
        if isinstance(value, Tensor):
            yield field.name, value
        elif isinstance(value, tuple):
            yield from ((f"{field.name}[{i}]", part) for i, part in enumerate(value) if isinstance(part, Tensor))


def _bytes(trace: Trace) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(trace))
