"""The look that all figures share, set on each figure and nowhere else.

Text and grid are a mid grey on a transparent ground, so a figure reads on light and dark pages. Blue and vermilion
are told apart with any colour vision, and beside colour there is always something else: a panel of its own, the side
of zero, a sign, a shape, a dash. Titles are broken into lines for the width of a phone, and the margin above grows
with them.
"""

import math
from collections.abc import Sequence
from typing import Any

from tl_neuron_attr.plots.labels import escaped, wrapped

TEXT, GRID = "#7B7B7B", "rgba(128, 128, 128, 0.25)"
CLEAR, FAINT = "rgba(0, 0, 0, 0)", "rgba(128, 128, 128, 0.15)"
BLUE, ORANGE = "#2B88C4", "#D55E00"
BLUE_BAND, ORANGE_BAND = "rgba(43, 136, 196, 0.2)", "rgba(213, 94, 0, 0.2)"
ZERO = {"color": TEXT, "width": 1}

_TITLE, _NOTE = 15, 12  # sizes of text, in pixels
_TITLE_WIDTH, _NOTE_WIDTH = 40, 57  # so many characters of them fit 360 pixels


def finish(
    figure: Any, title: str, notes: Sequence[str], height: int, *, left: int = 56, right: int = 14, bottom: int = 54
) -> Any:
    """Set title, size, ground and axes; ``height`` is that of the plot without title and margins. Returns it."""
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    first = [escaped(line) for line in wrapped(title, _TITLE_WIDTH)]
    below = [escaped(line) for note in notes for line in wrapped(note, _NOTE_WIDTH)]
    small = "<br>".join(below)
    top = 12 + 20 * len(first) + 19 * len(below) + 10 + (18 if figure.layout.annotations else 0)
    total = height + top + bottom
    figure.update_layout(
        template=go.layout.Template(),
        title={
            "text": "<br>".join(first) + (f'<br><span style="font-size:{_NOTE}px">{small}</span>' if below else ""),
            "font": {"size": _TITLE},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1 - 26 / total,
            "yref": "container",
            "yanchor": "top",  # of a title of several lines, this is the base of the first
            "pad": {"l": 12},
        },
        height=total,
        margin={"l": left, "r": right, "t": top, "b": bottom},
        font={"color": TEXT, "size": 12},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        hoverlabel={"bgcolor": "#333333", "bordercolor": "#808080", "font": {"color": "#FFFFFF"}, "align": "left"},
        modebar={"bgcolor": CLEAR, "color": TEXT, "activecolor": BLUE},
    )
    figure.update_xaxes(gridcolor=GRID, linecolor=GRID, zeroline=False, ticks="", automargin=True, title_standoff=8)
    figure.update_yaxes(gridcolor=GRID, linecolor=GRID, zeroline=False, ticks="", automargin=True, title_standoff=8)
    figure.update_xaxes(exponentformat="e")
    figure.update_yaxes(exponentformat="e")
    figure.update_annotations(font={"size": 12})
    return figure


def expect(given: object, wanted: type, way: str) -> None:
    """Raise :class:`ValueError` where a figure is asked for something else than the result that it shows."""
    if not isinstance(given, wanted):
        raise ValueError(f"this figure shows {wanted.__name__}, not {type(given).__name__}: give {way}")


def nothing(title: str, notes: Sequence[str], why: str) -> Any:
    """A figure of an empty result, which says so."""
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    figure: Any = Figure()
    figure.add_annotation(text=escaped(why), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    finish(figure, title, notes, 80, bottom=10)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def reach(values: Sequence[float]) -> list[float]:
    """A range that holds zero and every finite value, with a little room beyond them."""
    finite = [0.0, *filter(math.isfinite, values)]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 1.0
    return [low - room * (low < 0), high + room * (high > 0 or not low)]


def step(count: int, most: int = 12) -> int:
    """Distance between ticks that are integers: 1, 2, 5, 10, ..., so that at most ``most`` stand on ``count``.

    >>> step(12), step(30), step(80)
    (1, 5, 10)
    """
    size = 1
    while count > most * size:
        size = size * 5 // 2 if str(size)[0] == "2" else size * 2
    return size


def spaced(places: Sequence[float], gap: float) -> list[int]:
    """Indices of ascending places so chosen, from the first on, that no two are closer than ``gap``.

    >>> spaced([0.0, 1.0, 2.0, 10.0], 2.0)
    [0, 2, 3]
    """
    chosen: list[int] = []
    for i, place in enumerate(places):
        if not chosen or place - places[chosen[-1]] >= gap:
            chosen.append(i)
    return chosen
