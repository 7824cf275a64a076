"""How much types have in common, as a matrix with the counts written into it."""

from typing import TYPE_CHECKING, Any

from tl_neuron_attr.plots import labels, style

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_SCALE = [[0.0, "#E4EEF5"], [1.0, "#0B4F7D"]]


def overlap(frame: "pandas.DataFrame", *, of: str = "neurons or heads") -> "Figure":
    """How many members each two types have in common; the diagonal holds the types' own sizes.

    Takes what ``na.overlap`` returns; ``of`` says what the members are, for the title. A cell's colour is the
    number in common as a share of the smaller of the two types, from light (none) to dark (all).

    Raises :class:`ValueError` for a frame whose rows and columns are not the same types.

    Example:
        >>> import tl_neuron_attr as na
        >>> sets = {"capital": [na.Head(3, 1), na.Head(5, 2)], "country": [na.Head(5, 2)]}
        >>> [list(row) for row in na.plots.overlap(na.overlap(sets), of="heads").data[0].text]
        [['2', '1'], ['1', '1']]
    """
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    names = [str(name) for name in frame.columns]
    if [str(name) for name in frame.index] != names:
        raise ValueError(
            f"the rows {[str(name) for name in frame.index]} and columns {names} differ: give a frame of na.overlap"
        )
    title = f"{of[:1].upper()}{of[1:]} in common between types (counts)"
    if not names:
        return style.nothing(title, [], "No types")
    counts = [[int(count) for count in row] for row in frame.to_numpy().tolist()]
    sizes, n = [counts[i][i] for i in range(len(counts))], len(names)
    shares = [
        [count / min(sizes[i], sizes[j]) if min(sizes[i], sizes[j]) else 0.0 for j, count in enumerate(row)]
        for i, row in enumerate(counts)
    ]
    figure: Any = Figure()
    figure.add_heatmap(
        x=list(range(n)),
        y=list(range(n)),
        z=shares,
        zmin=0,
        zmax=1,
        colorscale=_SCALE,
        xgap=2,
        ygap=2,
        text=[[f"{count:,}" for count in row] for row in counts],
        texttemplate="%{text}",
        colorbar={"thickness": 12, "outlinewidth": 0, "tickvals": [0, 0.5, 1], "tickformat": ".0%", "xpad": 4},
        hovertext=[
            [
                labels.hover(
                    f"{names[i]} and {names[j]}" if i != j else names[i],
                    f"{count:,} in common" if i != j else f"{count:,} {of}",
                    *([f"of {sizes[i]:,} and {sizes[j]:,}"] if i != j else []),
                )
                for j, count in enumerate(row)
            ]
            for i, row in enumerate(counts)
        ],
        hoverinfo="text",
    )
    ticks = {
        "tickmode": "array",
        "tickvals": list(range(n)),
        "ticktext": [labels.escaped(labels.shortened(name)) for name in names],
    }
    figure.update_xaxes(**ticks, tickangle=-45 if n > 2 else 0)
    figure.update_yaxes(**ticks, range=[n - 0.5, -0.5])
    style.finish(figure, title, ["colour: as a share of the smaller type"], max(44 * n, 100), left=10)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure
