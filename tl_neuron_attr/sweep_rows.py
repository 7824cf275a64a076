"""What is kept of one prompt, as rows of a sweep's tables (:mod:`tl_neuron_attr.sweep_schema`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.ranking import RankedNeurons
from tl_neuron_attr.sweep_plan import Entry
from tl_neuron_attr.sweep_schema import TABLES
from tl_neuron_attr.trace import Trace

# By table.
Rows: TypeAlias = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Failure:
    """Why a prompt has no result: its kind (:mod:`tl_neuron_attr.sweep_parts`) and the reason."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Result:
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
    outcome, target = Outcomes.before([trace]), trace.target
    predicted = int(outcome.top_token[0])
    return {
        "tokens": trace.tokens.tolist(),
        "str_tokens": list(trace.str_tokens),
        "position": trace.position,
        "target": target.label,
        "target_ids": list(target.token_ids),
        "target_log_prob": trace.target_log_prob,
        "target_rank": int(outcome.rank[0]),
        "predicted": trace.vocabulary.text(predicted),
        "predicted_id": predicted,
        "predicted_log_prob": float(trace.log_probs[predicted]),
    }


def failed_rows(entry: Entry, failure: Failure) -> Rows:
    """The rows of a prompt without a result."""
    return {"prompts": [{**_named(entry), "error_kind": failure.kind, "error": failure.reason}]}


def _named(entry: Entry) -> dict[str, Any]:
    return {"prompt": entry.number, "line": entry.line, "text": entry.text, "type": entry.type}


def result_rows(entry: Entry, result: Result) -> Rows:
    """The rows of a prompt with one."""
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


def tables(rows: Iterable[Rows]) -> dict[str, Any]:
    """A part's tables of the rows of its prompts, in this order."""
    columns: dict[str, dict[str, list[Any]]] = {
        name: {column: [] for column in schema.names} for name, schema in TABLES.items()
    }
    for of_prompt in rows:
        for name, own in of_prompt.items():
            for row in own:
                for column, values in columns[name].items():
                    values.append(row.get(column))
    return {name: pa.table(columns[name], schema=schema) for name, schema in TABLES.items()}
