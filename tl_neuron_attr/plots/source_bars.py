"""Bars of what one head brings from each source position, one line a token."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr import tables
from tl_neuron_attr.neurons import Head
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.ranking import floats
from tl_neuron_attr.results import Provenance

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_LABELLED = 60  # tokens; of a longer prompt not every one has room for its text


def positions(scores: Float[Tensor, " source"], head: Head, provenance: Provenance) -> "Figure":
    """Score (nats) of what ``head`` brings from each source token, first token at the top.

    Args:
        scores: what ``position_scores(trace, head.layer, head.head)`` returned.
        head: which head that was.
        provenance: where the scores came from: the ``provenance`` of the trace, or of any result of it.

    Lines are integer positions with tokens as tick text, so repeated tokens stay apart.

    Raises :class:`ValueError` for scores that are not one number for each of the first tokens of the prompt.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> figure = na.plots.positions(na.position_scores(trace, 23, 4), na.Head(23, 4), trace.provenance)
        >>> figure.layout.yaxis.ticktext[3]
        "3 ' France'"
    """
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    if scores.ndim != 1 or len(scores) > len(provenance.tokens):
        raise ValueError(
            f"scores has shape {list(scores.shape)} for a prompt of {len(provenance.tokens)} tokens: it must be "
            f"[source], as position_scores gives it, and the provenance that of the same trace"
        )
    title = f"What {head} brings from each token for {labels.target(provenance)} (nats)"
    if not len(scores):
        return style.nothing(title, [labels.where(provenance)], "No source positions")
    values, n = floats(scores), len(scores)
    places = tables.decimals(values)
    shown = list(range(0, n, -(-n // _LABELLED)))
    figure: Any = Figure()
    figure.add_bar(
        x=values,
        y=list(range(n)),
        orientation="h",
        marker={"color": [style.ORANGE if value < 0 else style.BLUE for value in values]},
        text=[tables.fixed(value, places, "+") if places < 6 else f"{value:+.2e}" for value in values]
        if n <= _LABELLED
        else None,
        textposition="outside",
        cliponaxis=False,
        hovertext=[
            labels.hover(labels.source(provenance, i), labels.number(value, "nats")) for i, value in enumerate(values)
        ],
        hoverinfo="text",
    )
    figure.add_vline(x=0, line=style.ZERO)
    low, high = style.reach(values)
    room = 0.25 * (high - low) if n <= _LABELLED else 0.0  # for the numbers beside the bars
    figure.update_xaxes(title_text="score (nats)", nticks=6, range=[low - room * (low < 0), high + room * (high > 0)])
    figure.update_yaxes(
        range=[n - 0.4, -0.6],
        tickmode="array",
        tickvals=shown,
        ticktext=[labels.escaped(labels.source(provenance, i)) for i in shown],
    )
    return style.finish(figure, title, [labels.where(provenance)], max(24 * min(n, _LABELLED), 80), left=10)
