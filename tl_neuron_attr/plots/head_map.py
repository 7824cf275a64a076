"""A heat map of head scores, symmetric about zero, with marks on the heads that lower the target."""

import math
from typing import TYPE_CHECKING, Any, cast

from tl_neuron_attr.neurons import Head
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.results import HeadScores

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_SCALE = [[0.0, style.ORANGE], [0.5, style.FAINT], [1.0, style.BLUE]]
_MARKED = 0.05  # of the largest score


def heads(scores: HeadScores) -> "Figure":
    """Score of every head (nats): layers upwards, heads to the right.

    The scale is symmetric about zero, which is the ground's colour. A minus marks heads that lower the target by
    at least a twentieth of the largest score, so that the sign can be seen without colour; the strongest heads are
    named under the title.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> figure = na.plots.heads(na.head_scores(trace))
        >>> len(figure.data[0].z), len(figure.data[0].z[0])
        (30, 9)
    """
    style.expect(scores, HeadScores, "na.head_scores(trace)")
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    origin = scores.provenance
    title = f"Head scores for {labels.target(origin)} (nats)"
    if not scores.scores.numel():
        return style.nothing(title, [labels.where(origin)], "No heads")
    table = cast("list[list[float]]", scores.scores.tolist())
    n_layers, n_heads = scores.scores.shape
    largest = max((abs(score) for row in table for score in row if math.isfinite(score)), default=0.0) or 1.0
    below = [(i, j) for i, row in enumerate(table) for j, score in enumerate(row) if score <= -_MARKED * largest]
    gap = 1 if n_heads <= 32 else 0
    figure: Any = Figure()
    figure.add_heatmap(
        x=list(range(n_heads)),
        y=list(range(n_layers)),
        z=table,
        zmin=-largest,
        zmax=largest,
        colorscale=_SCALE,
        xgap=gap,
        ygap=gap,
        colorbar={"title": {"text": "nats"}, "thickness": 12, "outlinewidth": 0, "xpad": 4},
        hovertext=[
            [labels.hover(str(Head(i, j)), labels.number(score, "nats")) for j, score in enumerate(row)]
            for i, row in enumerate(table)
        ],
        hoverinfo="text",
    )
    figure.add_scatter(
        x=[j for _, j in below],
        y=[i for i, _ in below],
        mode="markers",
        marker={
            "symbol": "line-ew",
            "size": 7 if n_heads <= 32 else 4,
            "line": {
                "width": 2,
                "color": ["#FFFFFF" if -table[i][j] > 0.5 * largest else style.TEXT for i, j in below],
            },
        },
        hoverinfo="skip",
        showlegend=False,
    )
    figure.update_xaxes(title_text="head", tick0=0, dtick=style.step(n_heads), range=[-0.5, n_heads - 0.5])
    figure.update_yaxes(title_text="layer", tick0=0, dtick=style.step(n_layers), range=[-0.5, n_layers - 0.5])
    notes = [
        labels.where(origin),
        f"strongest: {labels.names(scores.top(3))}",
        *(["minus: lowers the target"] * bool(below)),
    ]
    style.finish(figure, title, notes, min(max(12 * n_layers, 120), 720))
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure
