"""Score against rank: how fast scores fall off, and how much the best of them hold together."""

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tl_neuron_attr.comparison import KINDS
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.ranking import RankedNeurons, floats

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]


def ranks(ranked: RankedNeurons) -> "Figure":
    """Score of each ranked neuron, best first, and below it the sum of the scores up to that rank.

    The unit is that of the ranking's method (nats for ``log_prob_increase``). Scores of neurons do not add up to
    the change of all of them together; the sum shows how concentrated they are.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> figure = na.plots.ranks(na.value_neurons(trace, "mlp", k=50))
        >>> list(figure.data[0].x[:3])
        [1, 2, 3]
    """
    style.expect(ranked, RankedNeurons, 'a ranking such as na.value_neurons(trace, "mlp")')
    from plotly.subplots import make_subplots  # pyright: ignore[reportMissingTypeStubs]

    origin, unit = ranked.provenance, labels.unit_of(ranked.method)
    title = f"Scores of {KINDS[ranked.kind]} neurons by rank for {labels.target(origin)} ({unit})"
    notes = [labels.where(origin), f"method {ranked.method}"]
    if not len(ranked):
        return style.nothing(title, notes, "No neurons in the ranking")
    figure: Any = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.14, subplot_titles=["Score", "Cumulative sum"]
    )
    scores, n = floats(ranked.scores), len(ranked)
    places = list(range(1, n + 1))
    for row, (values, what, colour) in enumerate(
        [(scores, "score", style.BLUE), (list(accumulate(scores)), "sum so far", style.ORANGE)], start=1
    ):
        figure.add_scatter(
            x=places,
            y=values,
            name=what,
            mode="lines+markers" if n <= 50 else "lines",
            line={"color": colour, "width": 2},
            cliponaxis=False,
            marker={"color": colour, "size": 6, "symbol": "circle" if row == 1 else "diamond"},
            hovertext=[
                labels.hover(f"{i} {neuron}", f"{what} {labels.number(value, unit)}")
                for i, neuron, value in zip(places, ranked, values, strict=True)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
        figure.update_yaxes(title_text=unit, row=row, col=1)
    apart = style.step(n)
    ticks = [1, *range(apart, n + 1, apart)] if apart > 1 else places
    figure.update_xaxes(tickmode="array", tickvals=ticks, range=[1 - 0.03 * n, n + 0.03 * n])
    figure.update_xaxes(title_text="rank", row=2, col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False)
    notes.append(f"best: {labels.names(list(zip(ranked, scores, strict=True))[:3])}")
    notes.append(f"sum of {n:,}: {sum(scores):.4g}")
    return style.finish(figure, title, notes, 340)
