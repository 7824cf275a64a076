"""Effect against the number of neurons ablated: the best ranked ones against random ones of the same layers."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tl_neuron_attr import serialise, tables
from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.controls import draw_controls
from tl_neuron_attr.modes import Mode, resolve_mode
from tl_neuron_attr.outcomes import MetricSummary, Outcomes, shown, summarise
from tl_neuron_attr.protocol import Protocol, Traces, sets_for, traces_of_one_model
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.results import Provenance
from tl_neuron_attr.selection import Neurons, Selection
from tl_neuron_attr.tables import Cell
from tl_neuron_attr.variants import run_all

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.ablation_curve"
SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class AblationCurve:
    """Predictions with the first ``sizes[i]`` neurons ablated; make it with :func:`ablation_curve`.

    ``before`` holds ``[trace]``; ``after[i]`` ``[trace]`` and ``controls[i]`` ``[draw, trace]`` are those of
    ``sizes[i]``.
    """

    sizes: tuple[int, ...]
    before: Outcomes
    after: tuple[Outcomes, ...]
    controls: tuple[Outcomes, ...]
    protocol: Protocol
    provenance: tuple[Provenance, ...]

    def summary(self, size: int) -> tuple[MetricSummary, ...]:
        """Every metric at one size, as :meth:`AblationEffect.summary`; :class:`ValueError` for a size not run."""
        if size not in self.sizes:
            raise ValueError(f"size {size} was not run: the sizes are {list(self.sizes)}")
        i = self.sizes.index(size)
        return summarise(self.before, self.after[i], self.controls[i], self.protocol.seed)

    def _rows(self) -> Iterator[dict[str, Cell]]:
        for size in self.sizes:
            yield from ({"size": size, **row.to_record()} for row in self.summary(size))

    def to_frame(self) -> "pandas.DataFrame":
        """One row a size and metric: ``size``, then the columns of :class:`MetricSummary`."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame(list(self._rows()))

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON with a schema version: protocol, summary, every outcome; written to ``path`` if given."""
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "protocol": asdict(self.protocol),
            "sizes": self.sizes,
            "summary": list(self._rows()),
            "before": self.before.to_record(),
            "after": [outcomes.to_record() for outcomes in self.after],
            "controls": [outcomes.to_record() for outcomes in self.controls],
            "provenance": [asdict(origin) for origin in self.provenance],
        }
        return serialise.dump(record, path)

    def __repr__(self) -> str:
        return tables.as_text(*self._shown())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._shown())

    def _shown(self) -> tuple[list[str], dict[str, Sequence[Cell]], int]:
        first, n = self.provenance[0], len(self.provenance)
        head = [
            f"Ablating the best neurons of {first.model} ({self.protocol}), {n} prompt{'s' if n > 1 else ''}, the "
            f"first: {first.target} after {tables.quoted(first.read)}"
        ]
        rows = [row for size in self.sizes for row in self.summary(size) if row.metric == "log_prob"]
        return head, {"size": self.sizes, **shown(rows)}, 0


@without_autocast
def ablation_curve(
    traces: Traces,
    ranked: Neurons,
    sizes: Sequence[int] = (1, 2, 5, 10, 20, 50, 100, 300),
    mode: str | Mode = "zero",
    *,
    controls: int = 0,
    positions: Sequence[int] | None = None,
    scope: str = "neuron",
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = True,
) -> AblationCurve:
    """Ablate the first 1, 2, 5, ... of ``ranked``, and for each size ``controls`` draws of as many random neurons.

    Takes and raises what ``ablation_effect`` does; ``ranked`` is in order, best first, the same for all traces or
    a list of one for each. Variants are rows of one batch within ``memory_budget`` bytes. :class:`ValueError` as well
    for sizes below 1, in descending order, or above the number of neurons ranked.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> ranked = na.value_neurons(trace, "mlp", k=10)
        >>> na.ablation_curve(trace, ranked, sizes=[1, 10], progress=False).to_frame()["size"].tolist()
        [1, 1, 1, 1, 10, 10, 10, 10]
    """
    given, resolved = traces_of_one_model(traces), resolve_mode(mode)
    protocol = Protocol.of(resolved, positions, scope, controls, seed)
    sets = sets_for(traces, ranked)
    _check_sizes(sizes, min(map(len, sets)))
    generator = torch.Generator().manual_seed(seed)
    variants: list[list[Selection]] = []
    for trace, named in zip(given, sets, strict=True):
        rows: list[Selection] = []
        for size in sizes:
            chosen = protocol.select(trace, named[:size])
            rows += [chosen, *draw_controls(trace.view, chosen, controls, generator)]
        variants.append(rows)
    outcomes = run_all(given, variants, resolved, protocol, memory_budget, progress)
    starts = [i * (1 + controls) for i in range(len(sizes))]
    return AblationCurve(
        sizes=tuple(sizes),
        before=Outcomes.before(given),
        after=tuple(outcomes[start] for start in starts),
        controls=tuple(outcomes[start + 1 : start + 1 + controls] for start in starts),
        protocol=protocol,
        provenance=tuple(trace.provenance for trace in given),
    )


def _check_sizes(sizes: Sequence[int], n_ranked: int) -> None:
    if not len(sizes):
        raise ValueError("sizes=[] asks for nothing: give the numbers of neurons to ablate, e.g. [1, 10, 100]")
    for size, after in zip(sizes, [*sizes[1:], None], strict=True):
        check_count("size", size)
        if after is not None and after <= size:
            raise ValueError(f"sizes {list(sizes)} do not ascend: give them in ascending order, each once")
    if sizes[-1] > n_ranked:
        raise ValueError(
            f"sizes go up to {sizes[-1]}, but {n_ranked} neurons are ranked: rank more (k={sizes[-1]}), or give "
            f"sizes up to {n_ranked}"
        )
