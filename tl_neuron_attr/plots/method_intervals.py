"""What zeroing each attribution method's neurons does, with intervals over prompts."""

from typing import TYPE_CHECKING, Any

from tl_neuron_attr.comparison import KINDS, RANDOM, UNTOUCHED, Measured, MethodComparison
from tl_neuron_attr.plots import labels, style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_PANELS = {"mrr": "MRR", "probability": "Prob.", "log_prob": "Log-prob.<br>(nats)"}


def methods(comparison: MethodComparison) -> "Figure":
    """MRR, probability and log-probability of the right token after zeroing each method's neurons, with intervals.

    One panel a metric, one line a row of the comparison: a dot at the mean, a bar over its 95 per cent bootstrap
    interval. Methods are dots; the untouched model and random neurons are diamonds, and a dashed line through the
    untouched mean shows what each method takes away (further left is a larger fall). Hover for the paired fall.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> found = na.compare_methods(model, na.load_knowledge(["capital"])[:2], ["norm"], progress=False)
        >>> figure = na.plots.methods(found)
        >>> figure.layout.xaxis3.title.text
        'Log-prob.<br>(nats)'
    """
    from plotly.subplots import make_subplots  # pyright: ignore[reportMissingTypeStubs]

    rows = comparison.rows
    # Integer positions with names as tick text: on an axis of names, equal ones would share a line.
    lines = range(len(rows) - 1, -1, -1)
    figure: Any = make_subplots(rows=1, cols=len(_PANELS), shared_yaxes=True, horizontal_spacing=0.03)
    for column, (metric, title) in enumerate(_PANELS.items(), start=1):
        baselines = [row.name in (UNTOUCHED, RANDOM) for row in rows]
        for chosen, colour, symbol in ((True, style.ORANGE, "diamond"), (False, style.BLUE, "circle")):
            shown = [row for row, baseline in zip(rows, baselines, strict=True) if baseline is chosen]
            places = [line for line, baseline in zip(lines, baselines, strict=True) if baseline is chosen]
            found: list[Measured] = [getattr(row, metric) for row in shown]
            figure.add_scatter(
                x=[one.value for one in found],
                y=places,
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [0.0 if one.high is None else one.high - one.value for one in found],
                    "arrayminus": [0.0 if one.low is None else one.value - one.low for one in found],
                    "color": colour,
                },
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 9},
                hovertext=[_hover(row.name, title, one) for row, one in zip(shown, found, strict=True)],
                hoverinfo="text",
                showlegend=False,
                row=1,
                col=column,
            )
        untouched: Measured = getattr(rows[0], metric)
        figure.add_vline(
            x=untouched.value, line={"color": style.ORANGE, "width": 1, "dash": "dash"}, row=1, col=column
        )
        figure.update_xaxes(title_text=title, row=1, col=column)
    figure.update_xaxes(nticks=4, tickangle=0)
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], tickmode="array", tickvals=list(lines))
    figure.update_yaxes(ticktext=[labels.escaped(row.name) for row in rows])
    n, what = len(comparison.prompts), f"top {comparison.k} {KINDS[comparison.kind]} neurons of {comparison.model}"
    over = labels.prompts([prompt.prompt for prompt in comparison.prompts])
    style.finish(
        figure,
        f"Right token after zeroing the {what} (MRR, probability, nats)",
        [f"{over}, 95 % bootstrap intervals" if n > 1 else over, "dashed: untouched; diamonds: nothing or random"],
        28 * len(rows),
        left=10,
        bottom=60,
    )
    return figure


def _hover(name: str, title: str, one: Measured) -> str:
    lines = [f"{title.replace('<br>', ' ')}: {_number(one.value, one.low, one.high)}"]
    if one.fall is not None:
        lines.append(f"fall: {_number(one.fall, one.fall_low, one.fall_high)}")
    return labels.hover(name, *lines)


def _number(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.4g}, {high:.4g}]"
