"""A part of a sweep: prompts -> rows of its tables, several prompts at once, one bad prompt costing itself only.

Within a part, prompts of one length, or of like length if asked for, run in one forward pass
(:mod:`tl_neuron_attr.rows`), as many as a batch has, and the part's traces are scored together, so that they share
their products with the vocabulary (:mod:`tl_neuron_attr.overview`). With a batch of one, nothing is shared. Of the
memory budget, a forward pass takes half at most and the traces that are held a quarter; what they leave is for
scoring them, and what does not fit is done in turns. Rows are in the prompts' order whatever the batches were.

What is a prompt's own fault, and goes to its row as the reason:

==============  ====================================================================
``unreadable``  its line is no prompt
``prompt``      empty, unknown token ids, longer than the context
``target``      not one token
``model``       its numbers do not fit together (:mod:`tl_neuron_attr.checks`)
``memory``      alone, it does not fit into memory
==============  ====================================================================

Everything else that goes wrong ends the run, and the next one goes on from there.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.batching import rows_of, trace_bytes
from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.overview import overviews
from tl_neuron_attr.prompts import Request
from tl_neuron_attr.query import query_neurons
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.rows import BatchingWarning, alike
from tl_neuron_attr.rows import Rows as RunRows
from tl_neuron_attr.sweep_plan import Entry
from tl_neuron_attr.sweep_rows import Failure, Result, Rows, failed_rows, result_rows, tables, trace_row
from tl_neuron_attr.sweep_schema import N_QUERIED
from tl_neuron_attr.targets import TargetError, resolve_target
from tl_neuron_attr.tokens import Tokens
from tl_neuron_attr.trace import Convention, Trace

# How PyTorch says so of processors and accelerators, in every release.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Wanted:
    """What is computed of each prompt, and how."""

    k: int
    query: bool
    convention: Convention
    prepend_bos: bool | None
    batch_size: int
    memory_budget: int
    mix_lengths: bool


class PartRunner:
    """Computes parts with one model."""

    def __init__(self, view: ModelView, vocabulary: Tokens, wanted: Wanted) -> None:
        self._view, self._vocabulary, self._wanted = view, vocabulary, wanted
        self._width = max(view.W_out(layer).shape[0] for layer in range(view.n_layers))

    @without_autocast
    def part(self, entries: Sequence[Entry], done: Callable[[int, int], None]) -> dict[str, Any]:
        """The part's tables; ``done(n, failed)`` is told of prompts as they are finished."""
        rows: dict[int, Rows] = {}
        requests: list[Request] = []
        for entry in entries:
            found = self._request(entry)
            if isinstance(found, Failure):
                rows[entry.number] = failed_rows(entry, found)
                done(1, 1)
            else:
                requests.append(found)
        entry_of = {entry.number: entry for entry in entries}
        for made in self._results(requests):
            for number, result in made.items():
                entry = entry_of[number]
                rows[number] = (
                    failed_rows(entry, result) if isinstance(result, Failure) else result_rows(entry, result)
                )
            done(len(made), sum(isinstance(result, Failure) for result in made.values()))
        return tables(rows[number] for number in sorted(rows))

    def _request(self, entry: Entry) -> Request | Failure:
        if entry.problem is not None:
            return Failure("unreadable", entry.problem)
        try:
            bos = self._wanted.prepend_bos if isinstance(entry.prompt, str) else None
            tokens = self._vocabulary.prompt_ids(entry.prompt, bos)
            target = resolve_target(entry.target, self._vocabulary)
        except ValueError as error:
            return _own_fault(error)
        return Request(entry.number, entry.prompt, tokens, len(tokens) - 1, target)

    def _results(self, requests: Sequence[Request]) -> Iterator[dict[int, "Result | Failure"]]:
        """Results by number, a batch of them at a time."""
        held: list[Trace] = []
        numbers: list[int] = []
        n_bytes = 0
        alone, room = self._wanted.batch_size == 1, self._wanted.memory_budget // 4
        for request, trace in self._traces(requests):
            if isinstance(trace, Failure):
                yield {request.index: trace}
                continue
            held.append(trace)
            numbers.append(request.index)
            n_bytes += trace_bytes(trace)
            if alone or n_bytes >= room:
                yield self._scored(numbers, held, n_bytes)
                held, numbers, n_bytes = [], [], 0
        if held:
            yield self._scored(numbers, held, n_bytes)

    def _scored(self, numbers: Sequence[int], held: Sequence[Trace], n_bytes: int) -> dict[int, "Result | Failure"]:
        budget = max(self._wanted.memory_budget - n_bytes, 2**20)
        return dict(zip(numbers, _each(held, lambda traces: self._result(traces, budget)), strict=True))

    def _traces(self, requests: Sequence[Request]) -> Iterator[tuple[Request, "Trace | Failure"]]:
        # Anew for each part, so that a part has the same bytes whatever ran before it.
        run = rows_of(self._view, self._vocabulary, self._wanted.convention)
        run.mixes = run.mixes and self._wanted.mix_lengths
        # The longest first: what they confirm of lengths need not be confirmed again for shorter ones.
        waiting = sorted(requests, key=lambda request: -len(request.tokens))
        while waiting:
            size = min(self._wanted.batch_size, self._fitting(len(waiting[0].tokens)))
            batch = alike(waiting, size, mixes=run.mixes)
            taken = {request.index for request in batch}
            waiting = [request for request in waiting if request.index not in taken]
            yield from zip(batch, _each(batch, lambda rows: _run(run, rows)), strict=True)

    def _fitting(self, length: int) -> int:
        """How many prompts of a length may run at once: what is recorded of each, and its logits, twice over."""
        view = self._view
        each = view.n_layers * (3 * view.d_model + self._width + view.n_heads * (2 * view.d_head + length))
        row = length * (each + view.W_U.shape[1]) * view.compute_dtype.itemsize
        return max(1, self._wanted.memory_budget // (4 * row))

    def _result(self, traces: Sequence[Trace], budget: int) -> list["Result"]:
        wanted = self._wanted
        depth = max(wanted.k, N_QUERIED) if wanted.query else wanted.k
        found: list[Result] = []
        for trace, all_of in zip(traces, overviews(traces, depth, memory_budget=budget), strict=True):
            query, warning = _queried(trace, all_of.attn, wanted.k, budget) if wanted.query else (None, None)
            layers = [floats(all_of.layers.attn), floats(all_of.layers.mlp)]
            heads = [floats(row) for row in all_of.heads.scores]
            ranked = all_of.mlp.top(wanted.k), all_of.attn.top(wanted.k)
            found.append(Result(trace_row(trace), *ranked, query, layers, heads, warning))
        return found


def _queried(trace: Trace, attn: RankedNeurons, k: int, budget: int) -> tuple[RankedNeurons, str | None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = query_neurons(trace, attn.top(N_QUERIED), "mlp", k, memory_budget=budget)
    return found, " ".join(str(one.message) for one in caught) or None


def _run(run: RunRows[Trace], rows: Sequence[Request]) -> list[Trace]:
    """One forward pass; a prompt that cannot be traced says nothing against running the others together."""
    before = run.problem
    try:
        traces = run(rows)
    except Exception:
        run.problem = before
        raise
    if run.problem is not None and before is None:
        warnings.warn(run.problem, BatchingWarning, stacklevel=2)
    return traces


def _each(given: Sequence[_In], call: Callable[[Sequence[_In]], list[_Out]]) -> list[_Out | Failure]:
    """``call`` of all of them at once; where that fails, of each half; what is one's own fault is in its place."""
    try:
        return list(call(given))
    except (ValueError, RuntimeError, MemoryError) as error:
        fault = _own_fault(error)
        if len(given) == 1:
            return [fault]
    half = len(given) // 2
    return [*_each(given[:half], call), *_each(given[half:], call)]


def _own_fault(error: Exception) -> Failure:
    """Why one prompt has no result; raises what is not the prompt's fault."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TargetError):
        return Failure("target", reason)
    if isinstance(error, UnsupportedModelError):
        return Failure("model", reason)
    if isinstance(error, ValueError):
        return Failure("prompt", reason)
    if isinstance(error, MemoryError) or any(told in reason.lower() for told in _OUT_OF_MEMORY):
        return Failure("memory", reason)
    raise error
