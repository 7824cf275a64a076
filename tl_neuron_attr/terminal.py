"""An explanation as tables for a terminal, readable at 80 columns and without colour.

Tokens are quoted, so that leading spaces show, and put in as plain text: nothing in a token is taken for
markup. Token lists are cut to whole tokens that fit.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tl_neuron_attr.explanation import N_QUERIED, Explanation, TokenPrediction
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.tables import probability, quoted, strings
from tl_neuron_attr.vocab import PromotedTokens, TokenChange

# Rows of a table; the rest is for --json.
_SHOWN = 50


def render(found: Explanation, k: int) -> ConsoleRenderable:
    """Everything that ``explain`` found, with the ``k`` strongest layers and heads."""
    origin = found.provenance
    side_by_side = Table.grid(padding=(0, 6))
    side_by_side.add_row(
        _scores("Strongest layers", "layer", found.layers.top(k)),
        _scores("Strongest heads", "head", found.heads.top(k)),
    )
    position = f"position {origin.position} {quoted(origin.str_tokens[origin.position], 20)}"
    return Group(
        Text.assemble((quoted(origin.read), "bold"), " -> ", (quoted(found.target.token), "bold")),
        Text(f"model {origin.model}, {position}, convention {origin.convention}; scores in nats"),
        _title(f"Prediction (rank among {found.d_vocab:,} tokens)"),
        _predictions(found),
        side_by_side,
        _title(f"MLP neurons: {_share(found.mlp)}"),
        _neurons(found.mlp, found.mlp_tokens),
        _title(f"Attention neurons: {_share(found.attn)}"),
        _neurons(found.attn, found.attn_tokens),
        _title(f"Query neurons: MLP neurons that activate the top {N_QUERIED} attention neurons"),
        _neurons(found.query, found.query_tokens),
    )


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _share(ranked: RankedNeurons) -> str:
    return f"top {len(ranked):,} of {ranked.n_neurons:,}, {ranked.n_evaluated:,} scored"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _predictions(found: Explanation) -> Table:
    table = _table()
    for name in ("rank", "token", "probability", "log-probability"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    rows = list(found.predicted)
    if found.target not in rows:
        rows.append(found.target)
    for row in rows:
        style = "bold" if row == found.target else ""
        table.add_row(*(Text(cell, style) for cell in _prediction(row)))
    return table


def _prediction(row: TokenPrediction) -> tuple[str, ...]:
    return f"{row.rank:,}", quoted(row.token, 30), probability(row.probability), f"{row.log_probability:.4f}"


def _scores(title: str, name: str, pairs: Sequence[tuple[object, float]]) -> ConsoleRenderable:
    table = _table()
    table.add_column(name, no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    shown = pairs[:_SHOWN]
    for (label, _), score in zip(shown, strings([score for _, score in shown])[0], strict=True):
        table.add_row(str(label), score)
    return Group(_title(title), table, *_more(len(pairs)))


def _more(count: int) -> list[Text]:
    return [] if count <= _SHOWN else [Text(f"... and {count - _SHOWN:,} more (--json has all)")]


def _neurons(every: RankedNeurons, promoted: PromotedTokens) -> ConsoleRenderable:
    table, ranked = _table(), every.top(_SHOWN)
    table.add_column("neuron", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("coefficient", justify="right", no_wrap=True)
    place, tokens = _places(ranked)
    if place:
        table.add_column(place, no_wrap=True, max_width=14, overflow="ellipsis")
    table.add_column("tokens it pushes", ratio=1)
    numbers = (strings(floats(values))[0] for values in (ranked.scores, ranked.coefficients))
    for i, (score, coefficient) in enumerate(zip(*numbers, strict=True)):
        cells: list[ConsoleRenderable] = [Text(str(ranked[i])), Text(score), Text(coefficient)]
        if place:
            cells.append(Text(quoted(tokens[i])))
        table.add_row(*cells, _Ends(promoted.up[i], promoted.down[i]))
    return Group(table, *_more(len(every)))


def _places(ranked: RankedNeurons) -> tuple[str, Sequence[str]]:
    """The heading and the tokens of the positions that neurons read from, or write at where that varies."""
    table = ranked.table()
    if "pos" in ranked.columns:
        return "at", [ranked.provenance.str_tokens[cast("int", pos)] for pos in table["pos"]]
    if ranked.kind == "attn":
        return "reads", [str(token) for token in table["source_token"]]
    return "", []


class _Ends:
    """The tokens a neuron pushes up and down: two lines, each with as many whole tokens as fit."""

    def __init__(self, up: Sequence[TokenChange], down: Sequence[TokenChange]) -> None:
        self.lines = {"up": up, "down": down}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for name, changes in self.lines.items():
            yield Text.assemble((f"{name:<4} ", "dim"), " ".join(_fitting(changes, options.max_width - 5)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(20, options.max_width), options.max_width)


def _fitting(changes: Sequence[TokenChange], width: int) -> Iterator[str]:
    for i, (token, _) in enumerate(changes):
        shown = quoted(token, max(width - 5, 1)) if i == 0 else quoted(token)
        width -= cell_len(shown) + (i > 0)
        if i and width < 0:
            return
        yield shown
