"""Bars of layer scores: attention above, MLP below, on one scale."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tl_neuron_attr.neurons import Kind, Layer
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.ranking import floats
from tl_neuron_attr.results import LayerScores

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]


def layers(scores: LayerScores) -> "Figure":
    """Score of every attention layer and every MLP layer (nats), one panel each on one scale.

    Takes what ``layer_scores`` and ``query_layers`` return; the embedding, where there is one, is a grey bar before
    layer 0 of attention. The strongest layers are named under the title.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> figure = na.plots.layers(na.layer_scores(trace))
        >>> len(figure.data[0].y)
        30
    """
    style.expect(scores, LayerScores, "na.layer_scores(trace)")
    from plotly.subplots import make_subplots  # pyright: ignore[reportMissingTypeStubs]

    origin, n = scores.provenance, len(scores.attn)
    what = "Layer scores" if scores.embed is None else "Query scores of layers"
    title = f"{what} for {labels.target(origin)} (nats)"
    if not n:
        return style.nothing(title, [labels.where(origin)], "No layers")
    figure: Any = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.14, subplot_titles=["Attention", "MLP"]
    )
    if scores.embed is not None:
        figure.add_bar(
            x=[-1],
            y=[scores.embed],
            name="embedding",
            marker={"color": style.TEXT},
            hovertext=[labels.hover("embedding", labels.number(scores.embed, "nats"))],
            hoverinfo="text",
            row=1,
            col=1,
        )
    panels: list[tuple[Kind, Tensor, str]] = [("attn", scores.attn, style.BLUE), ("mlp", scores.mlp, style.ORANGE)]
    for row, (kind, values, colour) in enumerate(panels, start=1):
        heights = floats(values)
        figure.add_bar(
            x=list(range(n)),
            y=heights,
            name=kind,
            marker={"color": colour},
            hovertext=[
                labels.hover(str(Layer(i, kind)), labels.number(height, "nats")) for i, height in enumerate(heights)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
        figure.add_hline(y=0, line=style.ZERO, row=row, col=1)
    apart = style.step(n)
    ticks = {i: str(i) for i in range(0, n, apart)}
    if scores.embed is not None:
        ticks = {-1: "embed"} | {i: text for i, text in ticks.items() if i or n < 6}
    figure.update_xaxes(tickmode="array", tickvals=list(ticks), ticktext=list(ticks.values()))
    figure.update_xaxes(range=[-0.6 if scores.embed is None else -1.8, n - 0.4])
    figure.update_xaxes(title_text="layer", row=2, col=1)
    every = [*floats(scores.attn), *floats(scores.mlp), scores.embed or 0.0]
    figure.update_yaxes(title_text="score (nats)", range=style.reach(every))
    figure.update_layout(showlegend=False, bargap=0.2, barmode="overlay")
    strongest = f"strongest: {labels.names(scores.top(3))}"
    return style.finish(figure, title, [labels.where(origin), strongest], 340)
