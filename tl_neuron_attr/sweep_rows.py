"""A part of a sweep: prompts -> rows of its tables, several prompts at once, one bad prompt costing itself only.

Within a part, prompts of one length run in one forward pass (:mod:`tl_neuron_attr.rows`), and the neurons of as many
traces as one batch has are ranked together, so that they share the products with the vocabulary. A batch takes fewer
prompts where what is recorded of them would exceed half of the memory budget; the other half is for the products.
Rows are in the prompts' order whatever the batches were.

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

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.batching import rows_of, trace_bytes
from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.prompts import Request
from tl_neuron_attr.query import query_neurons
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.rows import BatchingWarning, Rows
from tl_neuron_attr.sweep_plan import Entry
from tl_neuron_attr.sweep_schema import N_QUERIED, TABLES
from tl_neuron_attr.targets import TargetError, resolve_target
from tl_neuron_attr.tokens import Tokens
from tl_neuron_attr.trace import Convention, Trace
from tl_neuron_attr.value import head_scores, layer_scores, value_neurons

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


@dataclass(frozen=True)
class _Failure:
    kind: str
    reason: str


class PartRunner:
    """Computes parts with one model."""

    def __init__(self, view: ModelView, vocabulary: Tokens, wanted: Wanted) -> None:
        self._view, self._vocabulary, self._wanted = view, vocabulary, wanted
        self._width = max(view.W_out(layer).shape[0] for layer in range(view.n_layers))

    @without_autocast
    def tables(self, entries: Sequence[Entry], done: Callable[[int, int], None]) -> dict[str, Any]:
        """The part's tables; ``done(n, failed)`` is told of prompts as they are finished."""
        rows: dict[int, _Rows] = {}
        requests: list[Request] = []
        for entry in entries:
            found = self._request(entry)
            if isinstance(found, _Failure):
                rows[entry.number] = _failed(entry, found)
                done(1, 1)
            else:
                requests.append(found)
        entry_of = {entry.number: entry for entry in entries}
        for made in self._results(requests):
            for number, result in made.items():
                entry = entry_of[number]
                rows[number] = _failed(entry, result) if isinstance(result, _Failure) else _rows(entry, result)
            done(len(made), sum(isinstance(result, _Failure) for result in made.values()))
        columns: dict[str, dict[str, list[Any]]] = {
            name: {column: [] for column in schema.names} for name, schema in TABLES.items()
        }
        for number in sorted(rows):
            for name, own in rows[number].items():
                for row in own:
                    for column, values in columns[name].items():
                        values.append(row.get(column))
        return {name: pa.table(columns[name], schema=schema) for name, schema in TABLES.items()}

    def _request(self, entry: Entry) -> Request | _Failure:
        if entry.problem is not None:
            return _Failure("unreadable", entry.problem)
        try:
            bos = self._wanted.prepend_bos if isinstance(entry.prompt, str) else None
            tokens = self._vocabulary.prompt_ids(entry.prompt, bos)
            target = resolve_target(entry.target, self._vocabulary)
        except ValueError as error:
            return _own_fault(error)
        return Request(entry.number, entry.prompt, tokens, len(tokens) - 1, target)

    def _results(self, requests: Sequence[Request]) -> Iterator[dict[int, "_Result | _Failure"]]:
        """Results by number, a batch of them at a time."""
        held: list[Trace] = []
        numbers: list[int] = []
        size = self._wanted.batch_size
        for request, trace in self._traces(requests):
            if isinstance(trace, _Failure):
                yield {request.index: trace}
                continue
            held.append(trace)
            numbers.append(request.index)
            if len(held) == size or sum(map(trace_bytes, held)) >= self._wanted.memory_budget // 4:
                yield dict(zip(numbers, _each(held, self._result), strict=True))
                held, numbers = [], []
        if held:
            yield dict(zip(numbers, _each(held, self._result), strict=True))

    def _traces(self, requests: Sequence[Request]) -> Iterator[tuple[Request, "Trace | _Failure"]]:
        run = rows_of(self._view, self._vocabulary, self._wanted.convention)
        for length in sorted({len(request.tokens) for request in requests}):
            same = [request for request in requests if len(request.tokens) == length]
            size = min(self._wanted.batch_size, self._fitting(length))
            for start in range(0, len(same), size):
                batch = same[start : start + size]
                yield from zip(batch, _each(batch, lambda rows: _run(run, rows)), strict=True)

    def _fitting(self, length: int) -> int:
        """How many prompts of a length may run at once: what is recorded of each, and its logits, twice over."""
        view = self._view
        each = view.n_layers * (3 * view.d_model + self._width + view.n_heads * (2 * view.d_head + length))
        row = length * (each + view.W_U.shape[1]) * view.compute_dtype.itemsize
        return max(1, self._wanted.memory_budget // (4 * row))

    def _result(self, traces: Sequence[Trace]) -> list["_Result"]:
        wanted = self._wanted
        budget = max(wanted.memory_budget // 2, 2**20)
        n_attn = max(wanted.k, N_QUERIED) if wanted.query else wanted.k
        mlp, attn = _ranked(traces, "mlp", wanted.k, budget), _ranked(traces, "attn", n_attn, budget)
        found: list[_Result] = []
        for trace, of_mlp, of_attn in zip(traces, mlp, attn, strict=True):
            query, warning = _queried(trace, of_attn, wanted.k, budget) if wanted.query else (None, None)
            layers, heads = layer_scores(trace, memory_budget=budget), head_scores(trace, memory_budget=budget)
            scores = [floats(layers.attn), floats(layers.mlp)], [floats(row) for row in heads.scores]
            found.append(_Result(trace_row(trace), of_mlp, of_attn.top(wanted.k), query, *scores, warning))
        return found


def _ranked(traces: Sequence[Trace], kind: Kind, k: int, budget: int) -> list[RankedNeurons]:
    """The top neurons of each trace."""
    return [value_neurons(trace, kind, k, memory_budget=budget) for trace in traces]


def _queried(trace: Trace, attn: RankedNeurons, k: int, budget: int) -> tuple[RankedNeurons, str | None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = query_neurons(trace, attn.top(N_QUERIED), "mlp", k, memory_budget=budget)
    return found, " ".join(str(one.message) for one in caught) or None


@dataclass(frozen=True)
class _Result:
    """What is kept of one prompt; nothing of its trace."""

    prompt: dict[str, Any]
    mlp: RankedNeurons
    attn: RankedNeurons
    query: RankedNeurons | None
    layers: list[list[float]]
    heads: list[list[float]]
    warning: str | None


def trace_row(trace: Trace) -> dict[str, Any]:
    """What a trace itself says, by column of ``prompts``."""
    log_probs, target = trace.log_probs, trace.target
    best = log_probs[list(target.positive)].max()
    predicted = int(log_probs.argmax())
    return {
        "tokens": trace.tokens.tolist(),
        "str_tokens": list(trace.str_tokens),
        "position": trace.position,
        "target": target.label,
        "target_ids": list(target.token_ids),
        "target_log_prob": trace.target_log_prob,
        "target_rank": 1 + int((log_probs > best).sum()),
        "predicted": trace.vocabulary.text(predicted),
        "predicted_id": predicted,
        "predicted_log_prob": float(log_probs[predicted]),
    }


_Rows = dict[str, list[dict[str, Any]]]


def _failed(entry: Entry, failure: _Failure) -> _Rows:
    return {"prompts": [{**_named(entry), "error_kind": failure.kind, "error": failure.reason}]}


def _named(entry: Entry) -> dict[str, Any]:
    return {"prompt": entry.number, "line": entry.line, "text": entry.text, "type": entry.type}


def _rows(entry: Entry, result: _Result) -> _Rows:
    number = entry.number
    attn, mlp = result.layers
    counts = {"n_mlp": result.mlp.n_neurons, "n_attn": result.attn.n_neurons, "warning": result.warning}
    ranked = [("value", result.mlp), ("value", result.attn)]
    ranked += [] if result.query is None else [("query", result.query)]
    return {
        "prompts": [{**_named(entry), **result.prompt, **counts}],
        "layers": [{"prompt": number, "layer": i, "attn": attn[i], "mlp": mlp[i]} for i in range(len(attn))],
        "heads": [
            {"prompt": number, "layer": i, "head": j, "score": score}
            for i, row in enumerate(result.heads)
            for j, score in enumerate(row)
        ],
        "neurons": [row for role, one in ranked for row in _neurons(number, role, one)],
    }


def _neurons(number: int, role: str, ranked: RankedNeurons) -> Iterator[dict[str, Any]]:
    table = ranked.table()
    for i in range(len(ranked)):
        own = {name: values[i] for name, values in table.items()}
        yield {"prompt": number, "role": role, "kind": ranked.kind, "rank": i + 1, **own}


def _run(run: Rows[Trace], rows: Sequence[Request]) -> list[Trace]:
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


def _each(given: Sequence[_In], call: Callable[[Sequence[_In]], list[_Out]]) -> list[_Out | _Failure]:
    """``call`` of all of them at once; where that fails, of each alone, and what is its own fault in its place."""
    try:
        return list(call(given))
    except (ValueError, RuntimeError, MemoryError) as error:
        fault = _own_fault(error)
        if len(given) == 1:
            return [fault]
    return [one for each in given for one in _each([each], call)]


def _own_fault(error: Exception) -> _Failure:
    """Why one prompt has no result; raises what is not the prompt's fault."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TargetError):
        return _Failure("target", reason)
    if isinstance(error, UnsupportedModelError):
        return _Failure("model", reason)
    if isinstance(error, ValueError):
        return _Failure("prompt", reason)
    if isinstance(error, MemoryError) or any(told in reason.lower() for told in _OUT_OF_MEMORY):
        return _Failure("memory", reason)
    raise error
