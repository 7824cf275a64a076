"""A comparison of methods as tables for a terminal, readable at 80 columns and without colour."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from tl_neuron_attr.comparison import Measured, MethodComparison

_TITLES = {
    "mrr": "Mean reciprocal rank of the right token",
    "probability": "Probability of the right token",
    "log_prob": "Log-probability of the right token (nats)",
}


def render(found: MethodComparison, passed: Mapping[str, tuple[int, int]]) -> ConsoleRenderable:
    """How many prompts pass per type, then a table a metric: mean and paired fall, each with its interval."""
    parts: list[ConsoleRenderable] = [
        Text(found.heading, "bold"),
        Text(f"intervals: 95 % bootstrap over prompts ({found.n_boot:,} resamples), seed {found.seed}"),
        _title("Prompts that the model answers"),
        _passed(found, passed),
    ]
    for metric, title in _TITLES.items():
        rows: list[Measured] = [getattr(row, metric) for row in found.rows]
        parts += [_title(title), _metric(found.names, rows)]
    return Group(*parts, _title("Seconds"), _seconds(found))


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _passed(found: MethodComparison, passed: Mapping[str, tuple[int, int]]) -> Table:
    table = _table("type", "answered", "of", "compared")
    compared = [prompt.type for prompt in found.prompts]
    for name, (answered, asked) in passed.items():
        table.add_row(Text(name or "no type"), f"{answered:,}", f"{asked:,}", f"{compared.count(name):,}")
    totals = (sum(count[i] for count in passed.values()) for i in (0, 1))
    table.add_row("all", *(f"{total:,}" for total in totals), f"{len(compared):,}", style="bold")
    return table


def _metric(names: Sequence[str], rows: Sequence[Measured]) -> Table:
    table = _table("neurons by", "mean", "95 %", "fall", "95 %")
    for name, row in zip(names, rows, strict=True):
        fall = "" if row.fall is None else f"{row.fall:.3f}"
        table.add_row(
            Text(name), f"{row.value:.3f}", _span(row.low, row.high), fall, _span(row.fall_low, row.fall_high)
        )
    return table


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _seconds(found: MethodComparison) -> Table:
    table = _table("part", "seconds", "a prompt")
    for name, seconds in found.seconds.items():
        table.add_row(Text(name), f"{seconds:.1f}", f"{seconds / len(found.prompts):.3f}")
    return table
