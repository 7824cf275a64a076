"""A sweep's tables in one: as JSON, and for a terminal of 80 columns without colour."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from tl_neuron_attr import serialise
from tl_neuron_attr.neurons import Head, Kind
from tl_neuron_attr.sharing import SharedNeurons, overlap
from tl_neuron_attr.sweep_read import SweepFiles

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.sweep_summary"
SCHEMA_VERSION = 1
_KINDS: tuple[Kind, ...] = ("mlp", "attn")
_NAMES: dict[Kind, str] = {"mlp": "MLP", "attn": "attention"}
# More types than these make tables of types against types unreadable.
_MOST_TYPES = 7
_FEW = 5


@dataclass(frozen=True, eq=False)
class SweepSummary:
    """What :func:`summarise` found; frames as :class:`SweepFiles` has them, by kind where neurons are meant."""

    files: SweepFiles
    prompts: "pandas.DataFrame"
    sums: "pandas.DataFrame"
    heads: dict[str, tuple[Head, ...]]
    histograms: "dict[Kind, pandas.DataFrame]"
    shared: dict[Kind, SharedNeurons]
    overlaps: "dict[Kind, pandas.DataFrame]"

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON; written to ``path`` as well where one is given."""
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "settings": self.files.settings,
            "n_done": self.files.n_done,
            "prompts": _records(self.prompts),
            "layer_sums": _records(self.sums),
            "top_heads": {type_: list(map(str, heads)) for type_, heads in self.heads.items()},
            "layer_histogram": {kind: _records(frame) for kind, frame in self.histograms.items()},
            "shared_neurons": {kind: _records(shared.to_frame()) for kind, shared in self.shared.items()},
            "overlap": {kind: _records(frame) for kind, frame in self.overlaps.items()},
        }
        return serialise.dump(record, path)


def summarise(files: SweepFiles, k: int | None = None, share: float = 0.5) -> SweepSummary:
    """Every table of a sweep; ``k`` and ``share`` are those of :meth:`SweepFiles.shared_neurons`.

    Raises :class:`ValueError` where no prompt has a result yet, and for ``k`` and ``share`` out of range.
    """
    prompts, errors = files.prompts(), files.errors()
    if prompts.empty:
        raise ValueError(f"{files.folder} has no results yet ({len(errors)} prompts without one): run sweep first")
    shared: dict[Kind, SharedNeurons] = {kind: files.shared_neurons(kind, k, share) for kind in _KINDS}
    return SweepSummary(
        files=files,
        prompts=_by_type(prompts, errors),
        sums=files.layer_sums(),
        heads=files.top_heads(),
        histograms={kind: files.layer_histogram(kind) for kind in _KINDS},
        shared=shared,
        overlaps={kind: overlap(found.sets()) for kind, found in shared.items()},
    )


def _by_type(prompts: "pandas.DataFrame", errors: "pandas.DataFrame") -> "pandas.DataFrame":
    """One row a type: how many have a result, how many none, and how well the model predicts their targets."""
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    without = errors.loc[errors["error_kind"] != "unreadable", "type"].tolist()
    rows = [
        {
            "type": type_,
            "results": len(own),
            "without": without.count(type_),
            "log_prob": float(own["target_log_prob"].mean()),
            "predicted": float((own["target_rank"] == 1).mean()),
        }
        for type_, own in prompts.groupby("type", sort=False)
    ]
    return pandas.DataFrame(rows)


def render(found: SweepSummary) -> ConsoleRenderable:
    """The tables, the strongest few of each."""
    files, settings = found.files, found.files.settings
    n_results = int(found.prompts["results"].to_numpy().sum())
    parts: list[ConsoleRenderable] = [
        Text(f"{files.n_done:,} of {files.n_prompts:,} prompts done, {n_results:,} have a result", "bold"),
        Text(f"model {settings['model']}"),
        *([Text('query neurons: load_sweep(DIR).neurons("mlp", role="query")')] if settings["query"] else []),
        Text(f"top {settings['k']} neurons, convention {settings['convention']}; scores in nats, means over prompts"),
        _title("Prompts, target's log-probability, sums of layers, heads"),
        _prompts(found),
    ]
    for kind in _KINDS:
        name = _NAMES[kind]
        parts += [
            _title(f"Layers with most of the top {name} neurons, and their share"),
            _layers(found.histograms[kind]),
        ]
        shared = found.shared[kind]
        parts.append(
            _title(f"Shared: {name} neurons in the top {shared.k} of more than {shared.share:.0%} of the prompts")
        )
        parts.append(_shared(shared))
        if 1 < len(shared.groups) <= _MOST_TYPES:
            parts += [_title(f"Shared {name} neurons that types have in common"), _overlap(found.overlaps[kind])]
    return Group(*parts)


def _prompts(found: SweepSummary) -> Table:
    table = _table("type", "results", "none", "log p", "rank 1", "attn", "mlp", "top heads")
    sums = {row["type"]: row for row in _records(found.sums)}
    for row in _records(found.prompts):
        own = sums[row["type"]]
        heads = " ".join(map(str, found.heads[row["type"]][:2]))
        cells = (f"{row['results']:,}", f"{row['without']:,}", f"{row['log_prob']:.3f}", f"{row['predicted']:.0%}")
        table.add_row(_type(row["type"]), *cells, f"{own['attn']:.3f}", f"{own['mlp']:.3f}", heads)
    return table


def _layers(frame: "pandas.DataFrame") -> Table:
    table = _table("type", "most", "2nd", "3rd", "4th", "5th")
    for type_, own in frame.groupby("type", sort=False):
        best = own.sort_values(["share", "layer"], ascending=[False, True]).head(_FEW)
        cells = [f"L{row['layer']} {row['share']:.1%}" for row in _records(best)]
        table.add_row(_type(type_), *cells, *[""] * (_FEW - len(cells)))
    return table


def _shared(shared: SharedNeurons) -> Table:
    table = _table("type", "shared", *["most shared", *[""] * (_FEW - 2)])
    for type_, group in shared.groups.items():
        names = [_unit(shared.kind, found.unit) for found in group[: _FEW - 1]]
        table.add_row(_type(type_), f"{len(group):,}", *names, *[""] * (_FEW - 1 - len(names)))
    return table


def _overlap(frame: "pandas.DataFrame") -> Table:
    names = [_type(name).plain for name in frame.columns]
    table = _table("", *names)
    for name, row in zip(names, frame.values.tolist(), strict=True):
        table.add_row(Text(name), *map(str, row))
    return table


def _unit(kind: Kind, unit: Sequence[int]) -> str:
    return "".join(
        f"{letter}{number}" for letter, number in zip("LN" if kind == "mlp" else "LHD", unit, strict=False)
    )


def _type(name: object) -> Text:
    shown = str(name) or "no type"
    return Text(shown if len(shown) <= 10 else f"{shown[:9]}…")


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _records(frame: "pandas.DataFrame") -> list[dict[str, Any]]:
    return [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False, name=None)]
