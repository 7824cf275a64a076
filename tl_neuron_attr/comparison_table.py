"""A comparison of methods as tables for a terminal, readable at 80 columns and without colour."""

from collections.abc import Sequence

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from tl_neuron_attr.answers import VERDICTS, AnswerCheck
from tl_neuron_attr.comparison import Measured, MethodComparison

_TITLES = {
    "mrr": "Mean reciprocal rank of the right token",
    "probability": "Probability of the right token",
    "log_prob": "Log-probability of the right token (nats)",
}


def render(found: MethodComparison, check: AnswerCheck) -> ConsoleRenderable:
    """How many prompts pass per type, or why not; then a table a metric: mean and paired fall with intervals."""
    parts: list[ConsoleRenderable] = [
        Text(found.heading, "bold"),
        Text(f"intervals: 95 % bootstrap over prompts ({found.n_boot:,} resamples), seed {found.seed}"),
        _title("Prompts that the model answers"),
        _passed(found, check),
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
        table.add_column(name, justify="right" if i else "left", min_width=max(map(len, name.split())))
    return table


def _passed(found: MethodComparison, check: AnswerCheck) -> Table:
    table = _table("type", "prompts", *VERDICTS, "compared")
    compared = [prompt.type for prompt in found.prompts]
    for name in [*dict.fromkeys(answer.prompt.type for answer in check.answers), None]:
        verdicts = [answer.verdict for answer in check.answers if name is None or answer.prompt.type == name]
        counts = [
            len(verdicts),
            *map(verdicts.count, VERDICTS),
            len(compared) if name is None else compared.count(name),
        ]
        title = "all" if name is None else name or "no type"
        table.add_row(Text(title), *(f"{count:,}" for count in counts), style="bold" if name is None else "")
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
