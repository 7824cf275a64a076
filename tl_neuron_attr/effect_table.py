"""The effect of an ablation on one prompt as tables for a terminal, readable at 80 columns and without colour."""

from collections.abc import Iterable

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from tl_neuron_attr.effects import AblationEffect
from tl_neuron_attr.tables import fixed, probability, quoted

_NAMES = {
    "log_prob": "log-probability (nats)",
    "probability": "probability",
    "reciprocal_rank": "1 / rank",
    "rank": "rank",
}


def render(found: AblationEffect) -> ConsoleRenderable:
    """What was ablated, then every metric before and after, then its change among those of the random draws."""
    origin, ablated, draws = found.provenance[0], found.neurons[0], found.protocol.controls
    rows = found.summary()
    parts: list[ConsoleRenderable] = [
        Text.assemble((quoted(origin.read), "bold"), " -> ", (origin.target, "bold")),
        Text(f"model {origin.model}, position {origin.position}, {found.protocol}"),
        Text(f"top prediction {quoted(found.top_before[0])} -> {quoted(found.top_after[0])}"),
        Text(f"\nAblating {', '.join(ablated)}", "bold"),
        _table(
            ("", "before", "after", "change", "per cent"),
            (
                (
                    _NAMES[row.metric],
                    _number(row.metric, row.before),
                    _number(row.metric, row.after),
                    _number(row.metric, row.change, sign=True),
                    "" if row.percent is None else f"{row.percent:+.1f}",
                )
                for row in rows
            ),
        ),
    ]
    if draws:
        parts += [
            Text(f"\nThe change among {draws} draws of as many random neurons of the same layers", "bold"),
            _table(
                ("", "their mean", "least", "largest", "z", "rank among\ncontrols"),
                (
                    (
                        _NAMES[row.metric],
                        *(
                            _number(row.metric, value, sign=True)
                            for value in (row.control_change, row.control_min, row.control_max)
                        ),
                        "" if row.z is None else f"{row.z:.1f}",
                        f"{row.rank_among_controls} of {draws + 1}",
                    )
                    for row in rows
                ),
            ),
        ]
    return Group(*parts)


def _table(names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _number(metric: str, value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return ""
    plus = "+" if sign else ""
    if metric == "rank":
        return f"{value:{plus},.0f}" if value == round(value) else f"{value:{plus},.1f}"
    return probability(value, plus) if metric == "probability" else fixed(value, 4, plus)
