"""What ablating more and more neurons does: the best ranked ones against a band of random ones."""

import math
from typing import TYPE_CHECKING, Any

from tl_neuron_attr.curves import AblationCurve
from tl_neuron_attr.outcomes import MetricSummary
from tl_neuron_attr.plots import labels, style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_METRICS = {
    "log_prob": ("Log-probability", "nats"),
    "probability": ("Probability", "0 to 1"),
    "reciprocal_rank": ("Reciprocal rank", "1 / rank"),
    "rank": ("Rank", "1: most probable"),
}


def ablation(curve: AblationCurve, metric: str = "log_prob") -> "Figure":
    """The target's log-probability (or another metric) against how many neurons are ablated.

    Circles and a solid line are the best ranked neurons, diamonds and a dotted line the mean of the random draws
    within a band from the least to the largest of them, and the dashed line is the model untouched. For several
    prompts, points are means and bars their 95 per cent bootstrap intervals. Of a contrast, ``log_prob`` is the
    difference of two log-probabilities, and the other metrics are those of its first token.

    Raises :class:`ValueError` for a metric other than log_prob, probability, reciprocal_rank, rank.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> ranked = na.value_neurons(trace, "mlp", k=10)
        >>> curve = na.ablation_curve(trace, ranked, sizes=[1, 10], controls=3, progress=False)
        >>> list(na.plots.ablation(curve).data[-1].x)
        [1, 10]
    """
    style.expect(curve, AblationCurve, "na.ablation_curve(...)")
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    curve.before.values(metric)
    what, unit = _METRICS[metric]
    contrast = curve.before.is_contrast
    if contrast and metric == "log_prob":
        what = "Log-probability difference"
    sizes = list(curve.sizes)
    rows = [next(row for row in curve.summary(size) if row.metric == metric) for size in sizes]
    figure: Any = Figure()
    _controls(figure, curve, rows)
    bars = None
    if rows[0].after_low is not None:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [(row.after_high or 0.0) - row.after for row in rows],
            "arrayminus": [row.after - (row.after_low or 0.0) for row in rows],
            "color": style.BLUE,
        }
    figure.add_hline(y=rows[0].before, line={"color": style.TEXT, "width": 1, "dash": "dash"})
    figure.add_scatter(
        x=sizes,
        y=[row.after for row in rows],
        error_y=bars,
        name="best ranked",
        mode=_line(sizes),
        line={"color": style.BLUE, "width": 2},
        marker={"color": style.BLUE, "size": 8},
        hovertext=[
            labels.hover(
                f"best {size:,}",
                f"{what.lower()} {_number(row.after)} ({_number(row.change, '+')})",
                *([] if row.after_low is None else [f"95 %: {_number(row.after_low)} to {_number(row.after_high)}"]),
            )
            for size, row in zip(sizes, rows, strict=True)
        ],
        hoverinfo="text",
    )
    _axes(figure, sizes, f"{what.lower()} ({unit})")
    origin, n = curve.provenance[0], len(curve.provenance)
    whose = labels.target(origin) if n == 1 else "the target"
    if contrast and metric != "log_prob":
        whose = f"the first of {whose}" if n == 1 else "the target's first token"
    title = f"{what} of {whose} after ablating neurons ({unit})"
    notes = [labels.where(origin) if n == 1 else f"means over {n:,} prompts, the first {labels.where(origin)}"]
    notes += [str(curve.protocol), f"dashed: untouched, {_number(rows[0].before)}"]
    figure.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.24, "yanchor": "top"})
    return style.finish(figure, title, notes, 280, bottom=96)


def _controls(figure: Any, curve: AblationCurve, rows: list[MetricSummary]) -> None:
    """The band and the mean of the random draws; nothing where there are none."""
    drawn = [
        (size, row.before + row.control_change, row.before + row.control_min, row.before + row.control_max)
        for size, row in zip(curve.sizes, rows, strict=True)
        if row.control_change is not None and row.control_min is not None and row.control_max is not None
    ]
    if not drawn:
        return
    sizes, means, low, high = (list(part) for part in zip(*drawn, strict=True))
    count = len(curve.controls[0].rank)
    figure.add_scatter(
        x=[*sizes, *reversed(sizes)],
        y=[*high, *reversed(low)],
        name=f"least to largest of {count} random draws",
        mode="lines",
        line={"color": style.ORANGE, "width": 0.5},
        fill="toself",
        fillcolor=style.ORANGE_BAND,
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=sizes,
        y=means,
        name="random, mean",
        mode=_line(sizes),
        line={"color": style.ORANGE, "width": 2, "dash": "dot"},
        marker={"color": style.ORANGE, "size": 8, "symbol": "diamond"},
        hovertext=[
            labels.hover(f"random {size:,}", f"mean {_number(mean)}", f"from {_number(least)} to {_number(most)}")
            for size, mean, least, most in drawn
        ],
        hoverinfo="text",
    )


def _line(sizes: list[int]) -> str:
    """Points as well where there is room for them."""
    return "lines+markers" if len(sizes) <= 30 else "lines"


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def _axes(figure: Any, sizes: list[int], y_title: str) -> None:
    wide = sizes[-1] >= 20 * sizes[0]
    places = [math.log10(size) if wide else float(size) for size in sizes]
    reach = places[-1] - places[0] or 1.0
    ticks = [sizes[i] for i in style.spaced(places, reach / 12)]
    figure.update_xaxes(
        type="log" if wide else "linear",
        range=[places[0] - 0.05 * reach, places[-1] + 0.05 * reach],
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"{size:,}" for size in ticks],
        title_text="neurons ablated",
    )
    figure.update_yaxes(title_text=y_title, separatethousands=True)
