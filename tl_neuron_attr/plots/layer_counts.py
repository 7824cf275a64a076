"""How many of the ranked neurons each layer has: value neurons against query neurons."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from tl_neuron_attr.comparison import KINDS
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.ranking import RankedNeurons

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]


def neurons_per_layer(
    value: RankedNeurons, query: RankedNeurons | None = None, *, n_layers: int | None = None
) -> "Figure":
    """Number of ranked neurons in each layer: value neurons, and below them the query neurons where given.

    ``n_layers`` is how many layers the model has; without it, the axis ends at the last layer with a neuron.

    Raises :class:`ValueError` for rankings of different prompts or targets, or neurons past ``n_layers``.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> value = na.value_neurons(trace, "attn", k=30)
        >>> figure = na.plots.neurons_per_layer(value, na.query_neurons(trace, value, k=30), n_layers=30)
        >>> [sum(panel.y) for panel in figure.data]
        [30, 30]
    """
    from plotly.subplots import make_subplots  # pyright: ignore[reportMissingTypeStubs]

    rankings = [("Value", value, style.BLUE)] + ([] if query is None else [("Query", query, style.ORANGE)])
    origin = value.provenance
    if query is not None:
        check_same(value, query)
    last = max((neuron.layer for _, ranked, _ in rankings for neuron in ranked), default=-1)
    n = last + 1 if n_layers is None else n_layers
    if last >= n:
        raise ValueError(f"n_layers={n_layers}, but a neuron of layer {last} is ranked: give the model's own number")
    title = f"Neurons per layer for {labels.target(origin)} (counts)"
    if last < 0:
        return style.nothing(title, [labels.where(origin)], "No neurons in the ranking")
    figure: Any = make_subplots(
        rows=len(rankings),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.14,
        subplot_titles=[f"{role} neurons: top {len(r):,} {KINDS[r.kind]} neurons" for role, r, _ in rankings],
    )
    for row, (role, ranked, colour) in enumerate(rankings, start=1):
        counts = Counter(neuron.layer for neuron in ranked)
        heights = [counts[layer] for layer in range(n)]
        figure.add_bar(
            x=list(range(n)),
            y=heights,
            name=role.lower(),
            marker={"color": colour},
            hovertext=[
                labels.hover(f"layer {i}", f"{count} {role.lower()} neurons") for i, count in enumerate(heights)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
        apart = style.step(max(heights), 5)
        figure.update_yaxes(title_text="neurons", tick0=0, dtick=apart, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(tick0=0, dtick=style.step(n), range=[-0.6, n - 0.4])
    figure.update_xaxes(title_text="layer", row=len(rankings), col=1)
    figure.update_layout(showlegend=False, bargap=0.2)
    return style.finish(figure, title, [labels.where(origin)], 40 + 150 * len(rankings))


def check_same(value: RankedNeurons, query: RankedNeurons) -> None:
    """Raise :class:`ValueError` for rankings of different prompts, positions or targets."""
    one, other = value.provenance, query.provenance
    if (one.tokens, one.position, one.target) != (other.tokens, other.position, other.target):
        raise ValueError(
            f"the value neurons are for {one.target} after {one.text!r}, the query neurons for {other.target} after "
            f"{other.text!r}: give two rankings of one trace"
        )
