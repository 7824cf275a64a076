"""Reading what a sweep wrote, and the tables over its prompts, without a model and without PyTorch.

The same numbers as from traces: :func:`layer_means`, :func:`layer_sums`, :func:`layer_histogram`,
:func:`shared_neurons` and :func:`top_heads` have their counterparts here, over the value neurons of the files. Parts
are read one after the other, so a table over a sweep of any length needs the memory of one part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tl_neuron_attr.neurons import ID_COLUMNS, Head, Kind, check_count, check_kind
from tl_neuron_attr.sharing import SharedNeurons, check_share, count_shared
from tl_neuron_attr.sweep_schema import TABLES
from tl_neuron_attr.sweep_store import is_done, read_manifest, read_part, settings_id
from tl_neuron_attr.tallies import (
    best_heads,
    check_fraction,
    layer_histogram_frame,
    layer_means_frame,
    layer_sums_frame,
    mean_layers,
)

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

Role = Literal["value", "query"]


def load_sweep(folder: str | Path) -> "SweepFiles":
    """Open the folder of a sweep, finished or not, to read its tables.

    Raises :class:`SweepError` (a ValueError) for a folder without a manifest that this release reads.

    Example:
        >>> import tempfile
        >>> import tl_neuron_attr as na
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = na.sweep(na.load_demo_model(), ["The capital of France is"], out, targets=[" Paris"], k=10)
        ...     found = na.load_sweep(out)
        ...     str(found.top_heads()[""][0]), found.neurons("mlp")["neuron"].tolist()[:2]
        ('L23H4', [846, 1005])
    """
    path = Path(folder)
    manifest = read_manifest(path)
    settings = manifest["settings"]
    n_parts = -(-settings["n_prompts"] // settings["part_size"])
    sweep = settings_id(settings)
    parts = tuple(part for part in range(n_parts) if is_done(path, part, sweep))
    return SweepFiles(path, manifest, parts)


@dataclass(frozen=True, repr=False)
class SweepFiles:
    """The files of a sweep; make it with :func:`load_sweep`. ``parts`` are those that are done.

    Frames have the columns of :mod:`tl_neuron_attr.sweep_schema`; scores are in nats.
    """

    folder: Path
    manifest: dict[str, Any]
    parts: tuple[int, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the sweep."""
        return self.manifest["settings"]

    @property
    def n_prompts(self) -> int:
        """How many prompts the whole sweep has."""
        return self.settings["n_prompts"]

    @property
    def n_done(self) -> int:
        """How many prompts are done, those without a result included."""
        size = self.settings["part_size"]
        return sum(min(size, self.n_prompts - part * size) for part in self.parts)

    def prompts(self) -> "pandas.DataFrame":
        """One row a prompt that has a result."""
        names = [name for name in TABLES["prompts"].names if name not in ("error_kind", "error")]
        return self._frame("prompts", names, {"error": None})

    def errors(self) -> "pandas.DataFrame":
        """One row a prompt that has none: prompt, line, text, type, error_kind, error."""
        frame = self._frame("prompts", ["prompt", "line", "text", "type", "error_kind", "error"])
        return frame[frame["error"].notna()].reset_index(drop=True)

    def layers(self) -> "pandas.DataFrame":
        """One row a prompt and layer: prompt, layer, attn, mlp."""
        return self._frame("layers")

    def heads(self) -> "pandas.DataFrame":
        """One row a prompt and head: prompt, layer, head, score."""
        return self._frame("heads")

    def neurons(self, kind: Kind | None = None, role: Role = "value") -> "pandas.DataFrame":
        """One row a (prompt, neuron), best first; of one kind without the columns that kind has not.

        Query neurons are a role, not a kind: ``neurons("mlp", role="query")``.

        Raises :class:`ValueError` for an unknown kind or role, and for query neurons that were not asked for.
        """
        names = TABLES["neurons"].names
        if kind is not None:
            other = ID_COLUMNS["attn" if check_kind(kind) == "mlp" else "mlp"]
            names = [name for name in names if name not in other or name in ID_COLUMNS[kind]]
            names = [name for name in names if kind == "attn" or name != "source_token"]
        names = [name for name in names if role == "query" or name != "pos"]
        self._check_role(role)
        return self._frame("neurons", names, {"role": role, **({} if kind is None else {"kind": kind})})

    def layer_means(self) -> "pandas.DataFrame":
        """Mean score of every layer: type, layer, attn, mlp (as :func:`layer_means`)."""
        return layer_means_frame(mean_layers(self._layers()))

    def layer_sums(self) -> "pandas.DataFrame":
        """Sums over layers, mean over prompts: type, n_prompts, attn, mlp (as :func:`layer_sums`)."""
        return layer_sums_frame(mean_layers(self._layers()))

    def layer_histogram(self, kind: Kind, n_layers: int | None = None, *, role: Role = "value") -> "pandas.DataFrame":
        """Which layers the ranked neurons are in: type, layer, neurons, share, score (as :func:`layer_histogram`)."""
        rankings = ((type_, [unit[0] for unit in units], scores) for type_, units, scores in self._ranked(kind, role))
        return layer_histogram_frame(rankings, n_layers)

    def shared_neurons(
        self, kind: Kind, k: int | None = None, share: float = 0.5, *, by_source: bool = False, role: Role = "value"
    ) -> SharedNeurons:
        """Neurons among the top ``k`` in more than ``share`` of a type's prompts (as :func:`shared_neurons`).

        Raises :class:`ValueError` for a ``k`` above the sweep's own, and a share outside its range.
        """
        own = self.settings["k"]
        top: int = own if k is None else check_count("k", k)
        if top > own:
            raise ValueError(f"k={top}, but the sweep kept the top {own}: give up to {own}")
        rankings = ((type_, units[:top], scores[:top]) for type_, units, scores in self._ranked(kind, role))
        return count_shared(rankings, check_kind(kind), top, check_share(share), by_source)

    def top_heads(self, fraction: float = 0.01) -> dict[str, tuple[Head, ...]]:
        """For each type the heads with the highest mean score, that fraction of all (as :func:`top_heads`)."""
        fraction = check_fraction(fraction)
        sums: dict[str, list[list[float]]] = {}
        for part in self.parts:
            types = self._types(part)
            for prompt, rows in _grouped(read_part(self.folder, "heads", part)):
                summed = sums.setdefault(types[prompt], [])
                for row in rows:
                    _add(summed, row["layer"], row["head"], row["score"])
        return best_heads(sums, fraction)

    def _frame(
        self, table: str, columns: list[str] | None = None, where: Mapping[str, str | None] | None = None
    ) -> Any:
        import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

        schema = TABLES[table]
        tables = [_where(read_part(self.folder, table, part), where) for part in self.parts]
        whole = pa.concat_tables([pa.table({n: [] for n in schema.names}, schema=schema), *map(_plain, tables)])
        return whole.select(columns or schema.names).to_pandas()

    def _layers(self) -> Iterator[tuple[str, list[float], list[float]]]:
        for part in self.parts:
            types = self._types(part)
            for prompt, rows in _grouped(read_part(self.folder, "layers", part)):
                yield types[prompt], [row["attn"] for row in rows], [row["mlp"] for row in rows]

    def _ranked(self, kind: Kind, role: Role) -> Iterator[tuple[str, list[tuple[int, ...]], list[float]]]:
        """Type, coordinates and scores of each prompt's neurons."""
        names = ID_COLUMNS[check_kind(kind)]
        self._check_role(role)
        for part in self.parts:
            types = self._types(part)
            table = read_part(self.folder, "neurons", part, ["prompt", "role", "kind", *names, "score"])
            for prompt, rows in _grouped(_where(table, {"role": role, "kind": kind})):
                units = [tuple(row[name] for name in names) for row in rows]
                yield types[prompt], units, [row["score"] for row in rows]

    def _types(self, part: int) -> dict[int, str]:
        table = read_part(self.folder, "prompts", part, ["prompt", "type"])
        return {row["prompt"]: row["type"] for row in table.to_pylist()}

    def _check_role(self, role: str) -> None:
        if role not in ("value", "query"):
            raise ValueError(f'unknown role {role!r}: choose "value" or "query"')
        if role == "query" and not self.settings["query"]:
            raise ValueError("this sweep has no query neurons: sweep with query=True (--query) into another folder")

    def __repr__(self) -> str:
        settings = self.settings
        return (
            f"SweepFiles({self.folder}, {settings['model']}, top {settings['k']}, "
            f"{self.n_done:,} of {self.n_prompts:,} prompts)"
        )


def _where(table: Any, wanted: Mapping[str, str | None] | None) -> Any:
    """The rows with these values; ``None`` is an empty cell."""
    for column, value in (wanted or {}).items():
        table = table.filter([given == value for given in table[column].to_pylist()])
    return table


def _plain(table: Any) -> Any:
    return table.replace_schema_metadata(None)


def _grouped(table: Any) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows of each prompt, which stand together."""
    rows: list[dict[str, Any]] = []
    for row in table.to_pylist():
        if rows and row["prompt"] != rows[0]["prompt"]:
            yield rows[0]["prompt"], rows
            rows = []
        rows.append(row)
    if rows:
        yield rows[0]["prompt"], rows


def _add(summed: list[list[float]], layer: int, head: int, score: float) -> None:
    """Add to a table of scores that grows as it is read."""
    summed += [[] for _ in range(layer + 1 - len(summed))]
    summed[layer] += [0.0] * (head + 1 - len(summed[layer]))
    summed[layer][head] += score
