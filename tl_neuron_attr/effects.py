"""What ablating neurons does to a prediction, and whether random neurons of the same layers do as much.

``before`` is the traced model's own prediction, ``after`` that of a run with the neurons ablated (everything
downstream recomputed, the final norm too), ``controls`` are runs with random neurons ablated the same way
(:mod:`tl_neuron_attr.controls`). Metrics and statistics: :mod:`tl_neuron_attr.outcomes`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tl_neuron_attr import serialise, tables
from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.controls import draw_controls
from tl_neuron_attr.modes import Mode, resolve_mode
from tl_neuron_attr.outcomes import METRICS, MetricSummary, Outcomes, percent, shown, summarise
from tl_neuron_attr.protocol import Protocol, Traces, sets_for, traces_of_one_model
from tl_neuron_attr.ranking import floats, integers
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.results import Provenance
from tl_neuron_attr.selection import Neurons, Selection
from tl_neuron_attr.tables import Cell
from tl_neuron_attr.trace import Trace
from tl_neuron_attr.variants import run_all

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.ablation_effect"
SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class AblationEffect:
    """Predictions before and after an ablation, one or many prompts; make it with :func:`ablation_effect`.

    ``before`` and ``after`` hold ``[trace]``, ``controls`` ``[draw, trace]``. ``top_before`` and ``top_after`` are
    the most probable tokens as strings, ``neurons`` the labels of what was ablated, per prompt.
    """

    before: Outcomes
    after: Outcomes
    controls: Outcomes
    top_before: tuple[str, ...]
    top_after: tuple[str, ...]
    neurons: tuple[tuple[str, ...], ...]
    protocol: Protocol
    provenance: tuple[Provenance, ...]

    def summary(self) -> tuple[MetricSummary, ...]:
        """Means over prompts with intervals, and where the change stands among the controls', for every metric."""
        return summarise(self.before, self.after, self.controls, self.protocol.seed)

    def of(self, metric: str) -> MetricSummary:
        """The summary of one metric; :class:`ValueError` for another name than those of ``METRICS``."""
        self.before.values(metric)
        return next(row for row in self.summary() if row.metric == metric)

    def summary_frame(self) -> "pandas.DataFrame":
        """One row a metric, the columns of :class:`MetricSummary`."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame([row.to_record() for row in self.summary()])

    def table(self) -> dict[str, Sequence[Cell]]:
        """One entry a prompt: prompt, target, ``n_neurons``, then each metric before, after, change and per cent,
        the mean change of the controls, and the top predictions."""
        table: dict[str, Sequence[Cell]] = {
            "prompt": [origin.text for origin in self.provenance],
            "target": [origin.target for origin in self.provenance],
            "n_neurons": [len(labels) for labels in self.neurons],
        }
        for metric in METRICS:
            part = integers if metric == "rank" else floats
            before, after = part(getattr(self.before, metric)), part(getattr(self.after, metric))
            changes = [new - old for old, new in zip(before, after, strict=True)]
            table[f"{metric}_before"], table[f"{metric}_after"], table[f"{metric}_change"] = before, after, changes
            table[f"{metric}_percent"] = [percent(old, change) for old, change in zip(before, changes, strict=True)]
            if len(self.controls.rank):
                draws = (self.controls.values(metric) - self.before.values(metric)).mean(0)
                table[f"{metric}_control_change"] = floats(draws)
        return {**table, "top_before": self.top_before, "top_after": self.top_after}

    def to_frame(self) -> "pandas.DataFrame":
        """One row a prompt: see :meth:`table`. :meth:`summary_frame` has means, intervals and controls."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame(self.table())

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON with a schema version: protocol, summary, every outcome; written to ``path`` if given."""
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "protocol": asdict(self.protocol),
            "summary": [row.to_record() for row in self.summary()],
            "before": self.before.to_record(),
            "after": self.after.to_record(),
            "controls": self.controls.to_record(),
            "top_before": self.top_before,
            "top_after": self.top_after,
            "neurons": self.neurons,
            "provenance": [asdict(origin) for origin in self.provenance],
        }
        return serialise.dump(record, path)

    def __repr__(self) -> str:
        return tables.as_text(*self._shown())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._shown())

    def _shown(self) -> tuple[list[str], dict[str, Sequence[Cell]], int]:
        first, labels = self.provenance[0], self.neurons[0]
        named = ", ".join([*labels[:5], *(["..."] if len(labels) > 5 else [])])
        what = f"{first.target} after {tables.quoted(first.read)}"
        many = f", means over {len(self.provenance)} prompts, the first: " if len(self.provenance) > 1 else ", "
        head = [f"Ablating {named} ({len(labels)}) of {first.model} ({self.protocol}){many}{what}"]
        if len(self.provenance) == 1:
            head.append(f"top prediction {self.top_before[0]!r} -> {self.top_after[0]!r}")
        return head, shown(self.summary()), 0


@without_autocast
def ablation_effect(
    traces: Traces,
    neurons: Neurons,
    mode: str | Mode = "zero",
    *,
    positions: Sequence[int] | None = None,
    scope: str = "neuron",
    controls: int = 0,
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> AblationEffect:
    """Target rank, reciprocal rank, probability, log-probability and top prediction before and after an ablation.

    Args:
        traces: one trace, or several of one model.
        neurons: as for ``ablation_hooks``, the same for all traces; or, for several traces, a list of one ranked
            result (or list of neurons) for each.
        mode: as for ``ablation_hooks``.
        positions: where to ablate; negative counts from the end of each prompt; ``None`` is every position.
        scope: as for ``ablation_hooks``: under ``"neuron"`` the sources of attention neurons are ignored, also those
            past the prompt, so that one list serves prompts of several lengths; under ``"source"`` the
            destination of a source is the predicting position, or ``positions``.
        controls: how many draws of as many random neurons from the same layers, none of the set, to compare with.
        seed: of draws and bootstrap intervals.
        memory_budget: bytes for the rows (variants) of one batch.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: what ``ablation_hooks`` raises; no traces, traces of several models, a list of rankings that does
            not fit the traces, positions outside the prompt or after the predicting one, layers with too few other
            neurons for controls, a model that no longer predicts what was traced.
        UnsupportedModelError: a hook never fired (named).

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> effect = na.ablation_effect(trace, na.value_neurons(trace, "mlp", k=10), controls=20)
        >>> effect.of("log_prob").rank_among_controls
        1
    """
    given, resolved = traces_of_one_model(traces), resolve_mode(mode)
    protocol = Protocol.of(resolved, positions, scope, controls, seed)
    sets = sets_for(traces, neurons)
    generator = torch.Generator().manual_seed(seed)
    variants: list[list[Selection]] = []
    for trace, named in zip(given, sets, strict=True):
        chosen = protocol.select(trace, named)
        variants.append([chosen, *draw_controls(trace.view, chosen, controls, generator)])
    outcomes = run_all(given, variants, resolved, protocol, memory_budget, progress)
    before = Outcomes.before(given)
    return AblationEffect(
        before=before,
        after=outcomes[0],
        controls=outcomes[1:],
        top_before=_top_strings(given, before),
        top_after=_top_strings(given, outcomes[0]),
        neurons=tuple(tuple(dict.fromkeys(str(identity) for identity, _ in named)) for named in sets),
        protocol=protocol,
        provenance=tuple(trace.provenance for trace in given),
    )


def _top_strings(traces: Sequence[Trace], outcomes: Outcomes) -> tuple[str, ...]:
    return tuple(t.vocabulary.text(top) for t, top in zip(traces, integers(outcomes.top_token), strict=True))
