"""How much less likely the right token is without the neurons each method names: the result of ``compare_methods``.

A row is ``untouched``, ``random`` (as many random neurons of the same layers), or a method. Per row and metric, over
prompts ``i`` with outcome ``y_i`` under the row and ``x_i`` untouched:

==============  ==============================================================================================
value           mean of ``y_i``: the MRR (mean of 1 / rank), the probability, or the log-probability (nats)
fall            mean of ``x_i - y_i``: what the row takes away; the larger, the better the method's neurons
low, high       95 per cent percentile bootstrap over prompts; every row and type of one size is resampled alike, and
                a fall's interval is that of the paired differences, so prompts that are easy do not widen it
seconds         time spent on ranking, all prompts together
==============  ==============================================================================================
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tl_neuron_attr import serialise, tables
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.outcomes import Outcomes, interval
from tl_neuron_attr.serialise import SchemaError
from tl_neuron_attr.tables import Cell

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.method_comparison"
SCHEMA_VERSION = 1

UNTOUCHED, RANDOM = "untouched", "random"
# Name in tables -> metric of Outcomes whose mean it is.
METRICS = {"mrr": "reciprocal_rank", "probability": "probability", "log_prob": "log_prob"}
# As people write the kinds.
KINDS: dict[Kind, str] = {"mlp": "MLP", "attn": "attention"}


@dataclass(frozen=True)
class Measured:
    """One metric of one row: mean and fall with their intervals. No interval for one prompt, no fall if untouched."""

    value: float
    low: float | None
    high: float | None
    fall: float | None
    fall_low: float | None
    fall_high: float | None


@dataclass(frozen=True)
class ComparisonRow:
    """One row of the table; no ``type`` over all prompts, no ``seconds`` by type or where nothing was ranked."""

    name: str
    type: str | None
    n_prompts: int
    mrr: Measured
    probability: Measured
    log_prob: Measured
    seconds: float | None

    def to_record(self) -> dict[str, Cell]:
        """Column name to value: ``mrr, mrr_low, mrr_high, mrr_fall, mrr_fall_low, mrr_fall_high``, and so on."""
        record: dict[str, Cell] = {"name": self.name, "type": self.type, "n_prompts": self.n_prompts}
        for metric in METRICS:
            for part, value in asdict(getattr(self, metric)).items():
                record[metric if part == "value" else f"{metric}_{part}"] = value
        return {**record, "seconds": self.seconds}


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt, the token that was to come next, and the type of knowledge."""

    prompt: str
    answer: str
    type: str


@dataclass(frozen=True, eq=False, repr=False)
class MethodComparison:
    """Every row's outcome for every prompt; make it with :func:`compare_methods`.

    ``outcomes`` holds ``[row, prompt]``, rows named by ``names``: untouched, random, then ``methods``;
    ``neurons[row][prompt]`` are the labels that were zeroed, from ``random`` on. ``seconds`` has the time of ranking
    by method, of shared work (``trace``, ``control``, ``ablation``) and ``total``.
    """

    model: str
    kind: Kind
    k: int
    seed: int
    n_boot: int
    methods: tuple[str, ...]
    prompts: tuple[ComparedPrompt, ...]
    outcomes: Outcomes
    neurons: tuple[tuple[tuple[str, ...], ...], ...]
    seconds: Mapping[str, float]

    def __post_init__(self) -> None:
        check_kind(self.kind)
        shape = (2 + len(self.methods), len(self.prompts))
        if self.outcomes.rank.shape != shape or [len(each) for each in self.neurons] != [shape[1]] * (shape[0] - 1):
            raise ValueError(
                f"{len(self.methods)} methods and {len(self.prompts)} prompts need outcomes of shape {list(shape)} "
                f"and neurons for all but the first; the outcomes have shape {list(self.outcomes.rank.shape)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The rows' names, in order."""
        return (UNTOUCHED, RANDOM, *self.methods)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of knowledge among the prompts, in order of appearance."""
        return tuple(dict.fromkeys(prompt.type for prompt in self.prompts))

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One row a name, over all prompts."""
        return tuple(self._rows(None))

    @property
    def rows_by_type(self) -> tuple[ComparisonRow, ...]:
        """One row a type and name."""
        return tuple(row for kind in self.types for row in self._rows(kind))

    def of(self, name: str) -> ComparisonRow:
        """The row of one name over all prompts; :class:`ValueError`, listing the rows, for another name."""
        if name not in self.names:
            raise ValueError(f"no row {name!r}: the rows are {', '.join(self.names)}")
        return self.rows[self.names.index(name)]

    def _rows(self, kind: str | None) -> Iterator[ComparisonRow]:
        chosen = [i for i, prompt in enumerate(self.prompts) if kind is None or prompt.type == kind]
        for place, name in enumerate(self.names):
            yield ComparisonRow(
                name=name,
                type=kind,
                n_prompts=len(chosen),
                seconds=self.seconds.get(name) if kind is None else None,
                **{metric: self._measured(metric, place, chosen) for metric in METRICS},
            )

    def _measured(self, metric: str, place: int, chosen: Sequence[int]) -> Measured:
        values = self.outcomes.values(METRICS[metric])[:, list(chosen)]
        after, falls = values[place], values[0] - values[place]
        low, high = interval(after, self.seed, self.n_boot)
        measured = Measured(float(after.mean()), low, high, None, None, None)
        if not place:
            return measured
        fall_low, fall_high = interval(falls, self.seed, self.n_boot)
        return replace(measured, fall=float(falls.mean()), fall_low=fall_low, fall_high=fall_high)

    def to_frame(self, by: Literal["type"] | None = None) -> "pandas.DataFrame":
        """One row a name over all prompts, or with ``by="type"`` one a type and name.

        Columns: ``name, type, n_prompts``, then for each of ``mrr``, ``probability`` and ``log_prob`` (nats) the
        mean, ``_low``, ``_high``, ``_fall``, ``_fall_low`` and ``_fall_high``, and last ``seconds``, which only the
        table over all prompts has, and ``type``, which only the other has. :class:`ValueError` for another ``by``.
        """
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        if by not in (None, "type"):
            raise ValueError(f'by={by!r}: give "type" for one table a type of knowledge, or None for all prompts')
        rows = self.rows if by is None else self.rows_by_type
        return pandas.DataFrame([row.to_record() for row in rows]).drop(columns="type" if by is None else "seconds")

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON with a schema version: the tables and every outcome; written to ``path`` as well if given.

        Only ``seconds`` differs between two runs of the same comparison.
        """
        table = [row.to_record() for row in (*self.rows, *self.rows_by_type)]
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "kind": self.kind,
            "k": self.k,
            "seed": self.seed,
            "n_boot": self.n_boot,
            "methods": self.methods,
            "table": [{name: cell for name, cell in row.items() if name != "seconds"} for row in table],
            "prompts": [asdict(prompt) for prompt in self.prompts],
            "outcomes": self.outcomes.to_record(),
            "neurons": self.neurons,
            "seconds": dict(self.seconds),
        }
        return serialise.dump(record, path)

    @staticmethod
    def from_json(source: str | Path) -> "MethodComparison":
        """Read what :meth:`to_json` wrote, from its text or from a file.

        Raises :class:`SchemaError` for another schema or version and for text that was altered, OSError for a
        file that cannot be read.
        """
        record = serialise.load(source, SCHEMA, SCHEMA_VERSION)
        try:
            return MethodComparison(
                **{name: record[name] for name in ("model", "kind", "k", "seed", "n_boot", "seconds")},
                methods=tuple(record["methods"]),
                prompts=tuple(ComparedPrompt(**prompt) for prompt in record["prompts"]),
                outcomes=Outcomes.from_record(record["outcomes"]),
                neurons=tuple(tuple(tuple(labels) for labels in row) for row in record["neurons"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SchemaError(
                f"the JSON of a comparison is incomplete or altered: {type(error).__name__}: {error}"
            ) from error

    def __repr__(self) -> str:
        return tables.as_text(*self._shown())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._shown())

    def _shown(self) -> tuple[list[str], dict[str, Sequence[Cell]], int]:
        rows = self.rows
        shown: dict[str, Sequence[Cell]] = {"neurons by": [row.name for row in rows]}
        for metric, title in (("mrr", "MRR"), ("probability", "probability"), ("log_prob", "log-probability")):
            column = [getattr(row, metric) for row in rows]
            shown[title] = [f"{one.value:.4f}" for one in column]
            shown[f"{title} fall (95 %)"] = [with_span(one.fall, one.fall_low, one.fall_high) for one in column]
        shown["seconds"] = ["" if row.seconds is None else f"{row.seconds:.1f}" for row in rows]
        return [self.heading], shown, 0

    @property
    def heading(self) -> str:
        """One line: what was zeroed, in which model, over how many prompts."""
        n = len(self.prompts)
        return (
            f"Zeroing the top {self.k} {KINDS[self.kind]} neurons of {self.model} by each method, "
            f"{n:,} prompt{'s' if n != 1 else ''} ({', '.join(kind or 'no type' for kind in self.types)})"
        )


def with_span(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, as people read it; as much of it as there is.

    >>> with_span(0.5, 0.25, 0.75)
    '0.5000 [0.2500, 0.7500]'
    """
    if value is None:
        return ""
    return f"{value:.4f}" if low is None or high is None else f"{value:.4f} [{low:.4f}, {high:.4f}]"
