"""Predictions of many prompts before and after ablations, by type of prompt and by what was ablated.

A change in per cent is that of the mean over prompts, ``100 (after - before) / |before|``. Metrics, intervals and
what stands beside controls: :mod:`tl_neuron_attr.outcomes`. Made by :mod:`tl_neuron_attr.knockouts`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tl_neuron_attr.outcomes import MetricSummary, Outcomes, percent, summarise
from tl_neuron_attr.protocol import Protocol
from tl_neuron_attr.tables import Cell

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]


@dataclass(frozen=True, eq=False)
class Ablated:
    """One set ablated in the prompts of one type: outcomes ``[trace]``, controls ``[draw, trace]``, set sizes."""

    before: Outcomes
    after: Outcomes
    controls: Outcomes
    n_neurons: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class AblationTable:
    """Predictions of many prompts before and after ablations, by type of prompt and name of what was ablated."""

    cells: Mapping[tuple[str, str], Ablated]
    protocol: Protocol
    model: str

    def to_frame(self) -> "pandas.DataFrame":
        """One row a type of prompt, set and metric: ``type``, ``ablated``, ``n_prompts``, ``n_neurons`` (mean),
        then the columns of ``MetricSummary`` (before, after, change, each with its interval, and the controls'), and
        ``control_percent``. The mean of the metric ``reciprocal_rank`` is the MRR."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame(list(self._rows()))

    def overall(self) -> "pandas.DataFrame":
        """The rows of :meth:`to_frame` over the prompts of all types together, so without ``type``."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        rows: list[dict[str, Cell]] = []
        for name in dict.fromkeys(name for _, name in self.cells):
            same = [cell for (_, ablated), cell in self.cells.items() if ablated == name]
            joined = Ablated(
                before=Outcomes.cat([cell.before for cell in same]),
                after=Outcomes.cat([cell.after for cell in same]),
                controls=_side_by_side([cell.controls for cell in same]),
                n_neurons=tuple(n for cell in same for n in cell.n_neurons),
            )
            rows += [{"ablated": name, **row} for row in self._of(joined)]
        return pandas.DataFrame(rows)

    def own_against_other(self) -> "pandas.DataFrame":
        """Mean change in per cent over types of prompt: their own type's set ablated, and other types' sets.

        The columns ``own`` and ``other``, one row a metric. For :func:`ablate_type_heads`, whose sets are named by
        types; ``None`` where there is no such set. Every other type counts as other, also one that shares its heads.
        """
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        found: dict[str, dict[bool, list[float]]] = {}
        for (type_, name), cell in self.cells.items():
            for row in self._summary(cell):
                if row.percent is not None:
                    found.setdefault(row.metric, {}).setdefault(type_ == name, []).append(row.percent)
        rows = [{"metric": m, "own": _mean(f.get(True)), "other": _mean(f.get(False))} for m, f in found.items()]
        return pandas.DataFrame(rows, columns=pandas.Index(["metric", "own", "other"]))

    def _rows(self) -> Iterator[dict[str, Cell]]:
        for (type_, name), cell in self.cells.items():
            yield from ({"type": type_, "ablated": name, **row} for row in self._of(cell))

    def _of(self, cell: Ablated) -> Iterator[dict[str, Cell]]:
        counts: dict[str, Cell] = {
            "n_prompts": len(cell.n_neurons),
            "n_neurons": sum(cell.n_neurons) / len(cell.n_neurons),
        }
        for row in self._summary(cell):
            control = None if row.control_change is None else percent(row.before, row.control_change)
            yield {**counts, **row.to_record(), "control_percent": control}

    def _summary(self, cell: Ablated) -> tuple[MetricSummary, ...]:
        return summarise(cell.before, cell.after, cell.controls, self.protocol.seed)

    def __repr__(self) -> str:
        names = list(dict.fromkeys(name for _, name in self.cells))
        types = list(dict.fromkeys(type_ for type_, _ in self.cells))
        return f"AblationTable({self.model}, prompts of {', '.join(types)}; ablated {', '.join(names)}; .to_frame())"


def _side_by_side(parts: list[Outcomes]) -> Outcomes:
    """Outcomes of more prompts, along the last axis."""
    return Outcomes(
        log_prob=torch.cat([part.log_prob for part in parts], -1),
        probability=torch.cat([part.probability for part in parts], -1),
        rank=torch.cat([part.rank for part in parts], -1),
        top_token=torch.cat([part.top_token for part in parts], -1),
    )


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
