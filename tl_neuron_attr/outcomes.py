"""What a model predicts, in a few numbers, before and after an intervention.

With log-probabilities ``log p`` of one position and a target of tokens ``B`` (against tokens ``C`` in a contrast):

=====================  =========================================================================
metric                 value
=====================  =========================================================================
``log_prob``           the target's ``T``: ``log sum_B p`` (less ``log sum_C p``), in nats
``probability``        ``sum_B p``
``rank``               1 + how many tokens are more probable than the best token of ``B``
``reciprocal_rank``    ``1 / rank``; its mean over prompts is the MRR
=====================  =========================================================================

A summary compares means over prompts. Intervals are percentile bootstrap over prompts (resampled together, seeded).
Against controls, an effect's change stands at ``z = (change - mean) / sd`` of the draws' changes, and at rank
``1 + #{|draw| >= |change|}`` by size; ``fraction`` is the share of draws at least as large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.tables import Cell
from tl_neuron_attr.targets import ResolvedTarget

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

METRICS = ("log_prob", "probability", "reciprocal_rank", "rank")
CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Predictions of several variants or prompts; the last axis is prompts. Tensors on the CPU, without a graph."""

    log_prob: Float[Tensor, "*variant trace"]
    probability: Float[Tensor, "*variant trace"]
    rank: Int[Tensor, "*variant trace"]
    top_token: Int[Tensor, "*variant trace"]

    @property
    def reciprocal_rank(self) -> Float[Tensor, "*variant trace"]:
        """``1 / rank``."""
        return 1 / self.rank.double()

    @property
    def is_contrast(self) -> bool:
        """Whether ``log_prob`` is the difference of a contrast: not the logarithm of ``probability``."""
        shown = self.probability > 1e-300
        gap = (self.log_prob - self.probability.log())[shown].abs()
        return bool((gap > 1e-9 * (1 + self.log_prob[shown].abs())).any())

    @property
    def mrr(self) -> Float[Tensor, "*variant"]:
        """Mean reciprocal rank over prompts."""
        return self.reciprocal_rank.mean(-1)

    def values(self, metric: str) -> Float[Tensor, "*variant trace"]:
        """One of ``METRICS`` as float64; :class:`ValueError` for another name."""
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}: choose one of {', '.join(METRICS)}")
        return getattr(self, metric).double()

    def __getitem__(self, index: int | slice) -> "Outcomes":
        return Outcomes(*(getattr(self, part.name)[index] for part in fields(self)))

    def to_record(self) -> dict[str, object]:
        """Plain lists, for JSON."""
        return {part.name: getattr(self, part.name).tolist() for part in fields(self)}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "Outcomes":
        """The same from the lists of :meth:`to_record`, bit for bit."""
        types = {"log_prob": torch.float64, "probability": torch.float64}
        return Outcomes(
            *(torch.tensor(record[part.name], dtype=types.get(part.name, torch.int64)) for part in fields(Outcomes))
        )

    @staticmethod
    def of(log_probs: Float[Tensor, "variant d_vocab"], target: ResolvedTarget) -> "Outcomes":
        """The outcomes of variants of one prompt, ``[variant]``; :class:`ValueError` where they are not numbers."""
        log_probs = log_probs.detach().cpu().double()
        undefined = int(torch.isnan(log_probs).any(-1).sum())
        if undefined:  # NaN is larger than nothing, so its rank would be 1
            raise ValueError(
                f"{undefined} of {len(log_probs)} predictions are NaN: activations went past what the model's "
                f"precision can hold; set or scale neurons to smaller values, or use a model in float32"
            )
        positive = log_probs[:, list(target.positive)]
        return Outcomes(
            log_prob=target.value(log_probs),
            probability=torch.logsumexp(positive, -1).exp(),
            rank=1 + (log_probs > positive.amax(-1, keepdim=True)).sum(-1),
            top_token=log_probs.argmax(-1),
        )

    @staticmethod
    def before(traces: "Sequence[Trace]") -> "Outcomes":
        """The outcomes of the traced predictions themselves, ``[trace]``."""
        return Outcomes.cat([Outcomes.of(trace.log_probs[None], trace.target) for trace in traces])

    @staticmethod
    def stack(parts: Sequence["Outcomes"]) -> "Outcomes":
        """Outcomes of several prompts, on a new last axis."""
        return Outcomes(*(torch.stack([getattr(o, part.name) for o in parts], -1) for part in fields(Outcomes)))

    @staticmethod
    def cat(parts: Sequence["Outcomes"]) -> "Outcomes":
        """Outcomes of more variants, along the first axis."""
        return Outcomes(*(torch.cat([getattr(o, part.name) for o in parts]) for part in fields(Outcomes)))


@dataclass(frozen=True)
class MetricSummary:
    """One metric, mean over prompts: before, after, change, and where the change stands among the controls'.

    Intervals are ``None`` for a single prompt, ``percent`` where ``before`` is 0, control columns without controls,
    and ``z`` where the draws do not differ.
    """

    metric: str
    before: float
    before_low: float | None
    before_high: float | None
    after: float
    after_low: float | None
    after_high: float | None
    change: float
    change_low: float | None
    change_high: float | None
    percent: float | None
    control_change: float | None
    control_sd: float | None
    control_min: float | None
    control_max: float | None
    z: float | None
    rank_among_controls: int | None
    fraction: float | None

    def to_record(self) -> dict[str, Cell]:
        """Column name to value."""
        return asdict(self)


def summarise(before: Outcomes, after: Outcomes, controls: Outcomes, seed: int) -> tuple[MetricSummary, ...]:
    """Every metric of outcomes ``[trace]``, against controls ``[draw, trace]`` (there may be none)."""
    return tuple(_summary(metric, before, after, controls, seed) for metric in METRICS)


def percent(before: float | int, change: float | int) -> float | None:
    """The change in per cent of the size of what was there before."""
    return None if before == 0 else 100 * change / abs(before)


def _summary(metric: str, before: Outcomes, after: Outcomes, controls: Outcomes, seed: int) -> MetricSummary:
    old, new = before.values(metric), after.values(metric)
    draws = (controls.values(metric) - old).mean(-1)
    change = float((new - old).mean())
    mean = sd = least = most = z = share = None
    among = None
    if len(draws):
        mean, least, most = float(draws.mean()), float(draws.min()), float(draws.max())
        as_large = int((draws.abs() >= abs(change)).sum())
        among, share = 1 + as_large, as_large / len(draws)
        sd = float(draws.std()) if len(draws) > 1 else None
        z = (change - mean) / sd if sd else None
    before_low, before_high = interval(old, seed)
    after_low, after_high = interval(new, seed)
    change_low, change_high = interval(new - old, seed)
    return MetricSummary(
        metric=metric,
        before=float(old.mean()),
        before_low=before_low,
        before_high=before_high,
        after=float(new.mean()),
        after_low=after_low,
        after_high=after_high,
        change=change,
        change_low=change_low,
        change_high=change_high,
        percent=percent(float(old.mean()), change),
        control_change=mean,
        control_sd=sd,
        control_min=least,
        control_max=most,
        z=z,
        rank_among_controls=among,
        fraction=share,
    )


def interval(
    values: Float[Tensor, " trace"], seed: int, n_boot: int = _RESAMPLES
) -> tuple[float, float] | tuple[None, None]:
    """Percentile bootstrap interval (95 per cent) of the mean over prompts; nothing for a single prompt.

    One seed and number of prompts give the same resamples, so intervals of several values of the same prompts, and
    of their differences, are paired.
    """
    if len(values) < 2:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (n_boot, len(values)), generator=generator)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(values[picks].mean(-1), torch.tensor([tail, 1 - tail], dtype=values.dtype))
    return float(low), float(high)


def shown(summary: Sequence[MetricSummary]) -> dict[str, Sequence[Cell]]:
    """A summary as columns of short strings for people; only columns that hold anything."""
    table: dict[str, Sequence[Cell]] = {
        "metric": [row.metric for row in summary],
        "before": [_short(row.before) for row in summary],
        "after": [_short(row.after) for row in summary],
        "change": [_short(row.change) for row in summary],
        "change (95 %)": [_span(row.change_low, row.change_high) for row in summary],
        "per cent": [_short(row.percent) for row in summary],
        "controls' change": [_short(row.control_change) for row in summary],
        "sd": [_short(row.control_sd) for row in summary],
        "range": [_span(row.control_min, row.control_max) for row in summary],
        "z": [_short(row.z) for row in summary],
        "rank among controls": [row.rank_among_controls for row in summary],
    }
    return {name: cells for name, cells in table.items() if any(cell not in ("", None) for cell in cells)}


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None else f"{_short(low)} to {_short(high)}"
