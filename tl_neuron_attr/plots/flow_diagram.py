"""From query neurons through the value neurons they feed to the target: three columns and lines between them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tl_neuron_attr.comparison import KINDS
from tl_neuron_attr.neurons import AttnNeuron, Neuron
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.plots.layer_counts import check_same
from tl_neuron_attr.ranking import Provenance, RankedNeurons, check_count, floats

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_THIN, _THICK = 1.0, 9.0  # widths of lines, in pixels
_LINE = 42  # pixels from one box to the next below
_HALF = 0.38  # of a line: half a box's height
_POINTS = 25  # of a curve
# Left and right edges of the columns of boxes; between them are the curves.
_QUERY, _VALUE, _TARGET = (0.0, 0.95), (1.85, 3.1), (4.0, 4.95)


class _Curve(NamedTuple):
    left: float
    right: float
    start: float
    end: float
    strength: float
    unit: str
    text: str


def flow(
    query: RankedNeurons,
    value: RankedNeurons,
    links: "pandas.DataFrame",
    *,
    n_query: int = 8,
    n_value: int = 8,
    smallest: float = 0.01,
) -> "Figure":
    """The best query neurons, the best value neurons they feed, and the target, with a line for each contribution.

    Args:
        query: the query neurons, ranked.
        value: the value neurons of the same trace, ranked.
        links: ``na.links(trace, value, query)`` of the same neurons.
        n_query: how many query neurons to draw.
        n_value: how many value neurons to draw.
        smallest: lines weaker than this share of the strongest line of their side are left out; 0 draws every one
            that is not exactly zero. The title says how many were left out, and so does ``layout.meta["left_out"]``.

    A line's width is its share of the strongest line between the same two columns; dashed lines lower the target.
    A neuron left without a line keeps its box: it is among the best ranked, and its score does not hang on the few
    neurons drawn beside it. The number in a box is the neuron's own score; hover over a line for what it contributes.

    Raises :class:`ValueError` for rankings of different prompts or targets, ``smallest`` outside 0 to 1, or
    ``links`` that lack a pair of the neurons drawn.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> value = na.value_neurons(trace, "attn", k=30)
        >>> query = na.query_neurons(trace, value, k=30)
        >>> figure = na.plots.flow(query, value, na.links(trace, value, query), n_query=5, n_value=5)
        >>> [box.text[0] for box in figure.data[-3:]][2]
        "' Paris'<br>-0.258"
    """
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    check_same(value, query)
    if not 0 <= smallest <= 1:
        raise ValueError(f"smallest is {smallest}: give a share of the strongest line, from 0 to 1")
    origin = value.provenance
    unit_q, unit_v = labels.unit_of(query.method), labels.unit_of(value.method)
    unit = unit_v if unit_q == unit_v else f"query: {unit_q}; value: {unit_v}"
    title = f"From query neurons through value neurons to {labels.target(origin)} ({unit})"
    if not len(value) or not len(query):
        empty = "value" if not len(value) else "query"
        return style.nothing(title, [labels.where(origin)], f"No {empty} neurons in the ranking")
    queries, values = query.top(check_count("n_query", n_query)), value.top(check_count("n_value", n_value))
    most = max(len(queries), len(values))
    asked, fed, end = _rows(len(queries), most), _rows(len(values), most), _rows(1, most)[0]
    contributions = _contributions(links, list(map(str, queries)), list(map(str, values)))
    scores = floats(values.scores)
    figure: Any = Figure()
    left_out = 0
    for curves in (
        [
            _Curve(_QUERY[1], _VALUE[0], asked[i], fed[j], contributions[str(q), str(v)], unit_q, f"{q} to {v}")
            for i, q in enumerate(queries)
            for j, v in enumerate(values)
        ],
        [
            _Curve(_VALUE[1], _TARGET[0], fed[j], end, score, unit_v, f"{v} to {labels.target(origin)}")
            for j, (v, score) in enumerate(zip(values, scores, strict=True))
        ],
    ):
        strongest = max(abs(curve.strength) for curve in curves)
        for curve in sorted(curves, key=lambda curve: abs(curve.strength)):
            if curve.strength and abs(curve.strength) < smallest * strongest:
                left_out += 1
            elif curve.strength:
                _draw(figure, curve, abs(curve.strength) / strongest)
    of_query = [f"{q}\n{s:+.3g}" for q, s in zip(queries, floats(queries.scores), strict=True)]
    of_value = [f"{_named(v, origin)} {s:+.3g}" for v, s in zip(values, scores, strict=True)]
    of_target = f"{labels.target(origin, 12)}\n{origin.model_log_prob:.3g}"
    for edges, heading, places, texts in (
        (_QUERY, f"{KINDS[query.kind]} query", asked, of_query),
        (_VALUE, f"{KINDS[value.kind]} value", fed, of_value),
        (_TARGET, "target", [end], [of_target]),
    ):
        _boxes(figure, *edges, places, texts)
        figure.add_annotation(x=sum(edges) / 2, y=0.7, text=f"<b>{heading}</b>", showarrow=False)
    figure.update_xaxes(range=[_QUERY[0], _TARGET[1]], visible=False, fixedrange=True)
    figure.update_yaxes(range=[-most + 0.5, 1.0], visible=False, fixedrange=True)
    figure.update_layout(showlegend=False, hovermode="closest")
    notes = [labels.where(origin), "width: share of the strongest line of its side"]
    if left_out:
        notes.append(f"left out: {left_out:,} lines below {100 * smallest:g} % of that")
    notes.append("dashed: lowers the target")
    figure.update_layout(meta={"left_out": left_out})
    return style.finish(figure, title, notes, _LINE * (most + 1), left=4, right=4, bottom=8)


def _rows(count: int, most: int) -> list[float]:
    """Heights of a column's boxes from the top down, spread over what the longest column has."""
    return [-(most - 1) / 2] if count == 1 else [-i * (most - 1) / (count - 1) for i in range(count)]


def _named(neuron: Neuron, origin: Provenance) -> str:
    """A value neuron's label; below it, and before its score, the token that an attention neuron reads."""
    read = labels.token(origin.str_tokens[neuron.source], 8) if isinstance(neuron, AttnNeuron) else ""
    return f"{neuron}\n{read}"


def _contributions(
    links: "pandas.DataFrame", queries: Sequence[str], values: Sequence[str]
) -> Mapping[tuple[str, str], float]:
    missing = {"query", "value", "contribution"} - set(links.columns)
    if missing:
        raise ValueError(f"links has no column {', '.join(sorted(missing))}: give na.links(trace, value, query)")
    rows = zip(links["query"], links["value"], links["contribution"], strict=True)
    found = {(str(q), str(v)): float(c) for q, v, c in rows}
    for q in queries:
        for v in values:
            if (q, v) not in found:
                raise ValueError(
                    f"links has no row from {q} to {v}, which are drawn: give na.links(trace, value, query) of the "
                    f"same neurons, or draw fewer (n_query, n_value)"
                )
    return found


def _draw(figure: Any, curve: _Curve, share: float) -> None:
    steps = [i / (_POINTS - 1) for i in range(_POINTS)]
    figure.add_scatter(
        x=[curve.left + (curve.right - curve.left) * t for t in steps],
        y=[curve.start + (curve.end - curve.start) * t * t * (3 - 2 * t) for t in steps],
        mode="lines",
        line={
            "width": _THIN + (_THICK - _THIN) * share,
            "color": style.BLUE if curve.strength > 0 else style.ORANGE,
            "dash": "solid" if curve.strength > 0 else "4px,3px",
        },
        opacity=0.4 + 0.4 * share,
        hovertext=labels.hover(curve.text, labels.number(curve.strength, curve.unit)),
        hoverinfo="text",
    )


def _boxes(figure: Any, left: float, right: float, places: Sequence[float], texts: Sequence[str]) -> None:
    """One column of boxes with two lines of text each."""
    for y in places:
        corners = {"x0": left, "x1": right, "y0": y - _HALF, "y1": y + _HALF}
        figure.add_shape(type="rect", **corners, fillcolor=style.FAINT, line={"width": 0}, layer="below")
    figure.add_scatter(
        x=[(left + right) / 2] * len(places),
        y=list(places),
        mode="text",
        text=["<br>".join(labels.escaped(line) for line in text.split("\n")) for text in texts],
        textfont={"size": 10},
        hoverinfo="skip",
    )
