"""Neurons in order of their score, with where they came from.

The order is the result: by score, highest first, equal scores by identity, lowest first. A ranking holds no
graph and needs no model, so it can be kept, pickled, written to JSON and read back bit for bit, and plotted.

Columns of frames and JSON: ``layer, neuron`` or ``layer, head, dim, source``, then ``score`` (nats),
``coefficient``, for attention ``source_token``, and last what a table adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr import serialise, tables
from tl_neuron_attr.neurons import ID_COLUMNS, AttnNeuron, Kind, MLPNeuron, Neuron, check_count, check_kind
from tl_neuron_attr.serialise import SchemaError
from tl_neuron_attr.tables import Cell

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.ranked_neurons"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where scores came from.

    ``tokens`` and ``str_tokens`` are the whole prompt as the model saw it, BOS included, and ``position``,
    counted from 0, is the one that predicts. ``target`` is a label for people, ``target_ids`` the tokens it
    stands for, and ``model_log_prob`` the model's own value of the target in nats.
    """

    model: str
    prompt: str | None
    tokens: tuple[int, ...]
    str_tokens: tuple[str, ...]
    position: int
    target: str
    target_ids: tuple[int, ...]
    convention: str
    model_log_prob: float

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.str_tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.str_tokens)} str_tokens: they must match")
        if not 0 <= self.position < len(self.tokens):
            raise ValueError(
                f"position {self.position} is outside the prompt of {len(self.tokens)} tokens: "
                f"count from 0, negative positions resolved"
            )

    @property
    def text(self) -> str:
        """The prompt, or the joined tokens where ids were given instead of text."""
        return "".join(self.str_tokens) if self.prompt is None else self.prompt


def kept(tensor: Tensor) -> Tensor:
    """The tensor without its graph, on the CPU, and not holding a larger tensor's storage alive."""
    tensor = tensor.detach().cpu()
    held = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
    return tensor.clone() if held > tensor.numel() else tensor


def check_no_nan(name: str, tensor: Tensor) -> None:
    bad = int(torch.isnan(tensor).sum())
    if bad:
        raise ValueError(f"{bad} of {tensor.numel()} {name} are NaN: a score that is not a number cannot be ranked")


def floats(tensor: Tensor) -> list[float]:
    """The entries of a tensor of one dimension."""
    return cast("list[float]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


def integers(tensor: Tensor) -> list[int]:
    """The entries of an integer tensor of one dimension."""
    return cast("list[int]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankedNeurons:
    """Neurons of one kind, best first, with their scores (nats), coefficients and provenance.

    A coefficient is the number a neuron's output row is multiplied by: its activation, or for attention
    ``pattern * value``. ``n_evaluated`` of ``n_neurons`` were scored exactly to find these; bounds rule out
    the rest. ``columns`` holds what a table adds, one value a neuron.

    ``len``, iteration and ``ranked[i]`` work on identities; ``ranked[a:b]`` and :meth:`top` are rankings.
    """

    kind: Kind
    ids: tuple[Neuron, ...]
    scores: Float[Tensor, " rank"]
    coefficients: Float[Tensor, " rank"]
    method: str
    n_evaluated: int
    n_neurons: int
    provenance: Provenance
    columns: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict[str, tuple[Cell, ...]])

    def __post_init__(self) -> None:
        check_kind(self.kind)
        ids = tuple(self.ids)
        if self.scores.shape != (len(ids),) or self.coefficients.shape != (len(ids),):
            raise ValueError(
                f"{len(ids)} ids, scores of shape {tuple(self.scores.shape)} and coefficients of shape "
                f"{tuple(self.coefficients.shape)}: there must be one score and one coefficient for each id"
            )
        expected = MLPNeuron if self.kind == "mlp" else AttnNeuron
        for neuron in ids:
            if type(neuron) is not expected:
                raise ValueError(f"{neuron!r} among {self.kind} neurons: every id must be a {expected.__name__}")
            if isinstance(neuron, AttnNeuron) and neuron.source >= len(self.provenance.tokens):
                raise ValueError(f"{neuron} reads outside the prompt of {len(self.provenance.tokens)} tokens")
        if len(set(ids)) != len(ids):
            twice = next(neuron for i, neuron in enumerate(ids) if neuron in ids[:i])
            raise ValueError(f"{twice} is given twice: a ranking names each neuron once")
        check_no_nan("scores", self.scores)
        columns = {name: tuple(values) for name, values in self.columns.items()}
        taken = (*ID_COLUMNS[self.kind], "score", "coefficient", "source_token")
        for name, values in columns.items():
            if len(values) != len(ids):
                raise ValueError(f"column {name!r} has {len(values)} values for {len(ids)} neurons")
            if name in taken:
                raise ValueError(f"column {name!r} is one that every table has: choose another name")
            for value in values:
                if value is not None and type(value) not in (str, int, float, bool):
                    raise ValueError(
                        f"column {name!r} holds {value!r} of type {type(value).__name__}: a cell is a plain "
                        f"str, int, float, bool or None"
                    )
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "scores", kept(self.scores))
        object.__setattr__(self, "coefficients", kept(self.coefficients))
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Neuron]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: int) -> Neuron: ...
    @overload
    def __getitem__(self, index: slice) -> "RankedNeurons": ...
    def __getitem__(self, index: int | slice) -> "Neuron | RankedNeurons":
        if not isinstance(index, slice):
            return self.ids[index]
        rows = range(len(self))[index]
        return replace(
            self,
            ids=self.ids[index],
            scores=self.scores[list(rows)],
            coefficients=self.coefficients[list(rows)],
            columns={name: values[index] for name, values in self.columns.items()},
        )

    def top(self, n: int) -> "RankedNeurons":
        """The first ``n`` neurons (all of them where there are fewer); ``n < 1`` is a ValueError."""
        return self[: check_count("n", n)]

    def table(self) -> dict[str, Sequence[Cell]]:
        """The columns by name, in the order of frames and JSON."""
        names = ID_COLUMNS[self.kind]
        table: dict[str, Sequence[Cell]] = {name: [getattr(n, name) for n in self.ids] for name in names}
        table["score"] = floats(self.scores)
        table["coefficient"] = floats(self.coefficients)
        if self.kind == "attn":
            tokens = self.provenance.str_tokens
            table["source_token"] = [tokens[n.source] for n in self.ids if isinstance(n, AttnNeuron)]
        return {**table, **self.columns}

    def to_frame(self) -> "pandas.DataFrame":
        """Frame in rank order, with the columns of :mod:`tl_neuron_attr.ranking`."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame(self.table())

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON with a schema version; written to ``path`` as well where one is given.

        :meth:`from_json` gives the same bits back. Raises ValueError for infinite values, which JSON lacks.
        """
        table = self.table()
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "method": self.method,
            "n_evaluated": self.n_evaluated,
            "n_neurons": self.n_neurons,
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in (self.scores, self.coefficients)],
            "provenance": asdict(self.provenance),
            "columns": list(self.columns),
            "neurons": [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)],
        }
        return serialise.dump(record, path)

    @staticmethod
    def from_json(source: str | Path) -> "RankedNeurons":
        """Read what :meth:`to_json` wrote, from its text or from a file.

        Raises :class:`SchemaError` for another schema or version and for text that was altered, OSError for a
        file that cannot be read.
        """
        record = serialise.load(source, SCHEMA, SCHEMA_VERSION)
        try:
            kind = check_kind(record["kind"])
            make = MLPNeuron if kind == "mlp" else AttnNeuron
            rows: list[dict[str, Any]] = record["neurons"]
            score_type, coefficient_type = (getattr(torch, name) for name in record["dtypes"])
            origin: dict[str, Any] = record["provenance"]
            for name in ("tokens", "str_tokens", "target_ids"):
                origin[name] = tuple(origin[name])
            return RankedNeurons(
                kind=kind,
                ids=tuple(make(*(row[name] for name in ID_COLUMNS[kind])) for row in rows),
                scores=torch.tensor([row["score"] for row in rows], dtype=score_type),
                coefficients=torch.tensor([row["coefficient"] for row in rows], dtype=coefficient_type),
                method=record["method"],
                n_evaluated=record["n_evaluated"],
                n_neurons=record["n_neurons"],
                provenance=Provenance(**origin),
                columns={name: tuple(row[name] for row in rows) for name in record["columns"]},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SchemaError(
                f"the JSON of a ranking is incomplete or altered: {type(error).__name__}: {error}"
            ) from error

    def __repr__(self) -> str:
        return tables.as_text(*self._shown(10))

    def _repr_html_(self) -> str:
        return tables.as_html(*self._shown(25))

    def _shown(self, n_rows: int) -> tuple[list[str], dict[str, Sequence[Cell]], int]:
        """Header lines, the first rows by column, and how many rows are left out."""
        origin = self.provenance
        head = [
            f"{len(self):,} {self.kind} neurons for {origin.target} after {tables.quoted(origin.text)}, "
            f"by {self.method}, {self.n_evaluated:,} of {self.n_neurons:,} neurons evaluated",
            f"model {origin.model}, position {origin.position}, convention {origin.convention}, "
            f"target value {origin.model_log_prob:.4f} nats",
        ]
        table = self.table()
        shown: dict[str, Sequence[Cell]] = {"neuron": [str(neuron) for neuron in self.ids[:n_rows]]}
        for name, values in table.items():
            if name not in ID_COLUMNS[self.kind]:
                shown[name] = values[:n_rows]
        if "source_token" in shown:
            shown["source_token"] = [tables.quoted(str(token)) for token in shown["source_token"]]
        return head, shown, max(len(self) - n_rows, 0)
