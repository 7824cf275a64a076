"""Plots of made-up results, whose numbers and labels are known: no model is loaded."""

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import plotly.io
import pytest
import torch

import tl_neuron_attr as na
from tl_neuron_attr.curves import AblationCurve
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.plots import labels, style
from tl_neuron_attr.protocol import Protocol
from tl_neuron_attr.ranking import Provenance

TOKENS = ("<b>", "<script>alert(1)</script>", " $x^2$", "\n", "&amp;", " the", " the", "%{x}", " $y$")
TARGET = "' <i>' | ' $z$'"


def origin(tokens: tuple[str, ...] = TOKENS, target: str = TARGET) -> Provenance:
    return Provenance(
        "org/<u>model", None, tuple(range(len(tokens))), tokens, len(tokens) - 1, target, (1, 2), "exact", -1.25
    )


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(*scores: float, source: Provenance | None = None, method: str = "log_prob_increase") -> na.RankedNeurons:
    values = torch.tensor(scores)
    ids = tuple(na.MLPNeuron(2 * i % 7, 100 + i) for i in range(len(scores)))
    return na.RankedNeurons("mlp", ids, values, -values, method, 9, 99, source or origin())


def attn(*scores: float) -> na.RankedNeurons:
    values = torch.tensor(scores)
    ids = tuple(na.AttnNeuron(3, i, 10 + i, i % len(TOKENS)) for i in range(len(scores)))
    return na.RankedNeurons("attn", ids, values, -values, "log_prob_increase", 9, 99, origin())


def linked(value: na.RankedNeurons, query: na.RankedNeurons) -> pandas.DataFrame:
    """Contributions that tell every pair apart; some negative, one zero."""
    rows = [(str(q), str(v), (i - 1) * 0.25 + j) for i, q in enumerate(query) for j, v in enumerate(value)]
    return pandas.DataFrame(rows, columns=pandas.Index(["query", "value", "contribution"]))


def outcomes(*shape: int, seed: int = 0) -> Outcomes:
    log_prob = -numbers(*shape, seed=seed).abs().double() - 0.1
    rank = torch.randint(1, 5000, shape, generator=torch.Generator().manual_seed(seed))
    return Outcomes(log_prob, log_prob.exp(), rank, rank)


def curve(sizes: tuple[int, ...] = (1, 10, 100), n: int = 3, draws: int = 4) -> AblationCurve:
    after = tuple(outcomes(n, seed=size) for size in sizes)
    controls = tuple(outcomes(draws, n, seed=50 + size) for size in sizes)
    protocol = Protocol("zero", None, "neuron", draws, 0)
    return AblationCurve(sizes, outcomes(n, seed=99), after, controls, protocol, (origin(),) * n)


VALUE, QUERY = attn(0.9, 0.5, -0.2), mlp(0.3, 0.2)
FIGURES = {
    "layers": lambda: na.plots.layers(na.LayerScores(numbers(6), numbers(6, seed=1), origin())),
    "query layers": lambda: na.plots.layers(na.LayerScores(numbers(6), numbers(6, seed=1), origin(), 0.5)),
    "heads": lambda: na.plots.heads(na.HeadScores(numbers(6, 4), origin())),
    "positions": lambda: na.plots.positions(numbers(len(TOKENS)), na.Head(3, 2), origin()),
    "neurons per layer": lambda: na.plots.neurons_per_layer(VALUE, QUERY),
    "ranks": lambda: na.plots.ranks(VALUE),
    "flow": lambda: na.plots.flow(QUERY, VALUE, linked(VALUE, QUERY)),
    "ablation": lambda: na.plots.ablation(curve()),
    "ablation of one prompt": lambda: na.plots.ablation(curve((5,), 1, 1), "probability"),
    "overlap": lambda: na.plots.overlap(na.overlap({"<b>": [1, 2], " $x$": [2], "": []})),
    "no layers": lambda: na.plots.layers(na.LayerScores(numbers(0), numbers(0), origin())),
    "no heads": lambda: na.plots.heads(na.HeadScores(numbers(0, 4), origin())),
    "no positions": lambda: na.plots.positions(numbers(0), na.Head(3, 2), origin()),
    "no neurons per layer": lambda: na.plots.neurons_per_layer(mlp(), mlp()),
    "no ranks": lambda: na.plots.ranks(mlp()),
    "no flow": lambda: na.plots.flow(QUERY, mlp(), linked(VALUE, QUERY)),
}


def texts(part: Any) -> Iterator[str]:
    """Every text that a figure shows: of titles, ticks, legends, hover boxes, marks and annotations."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("text", "ticktext", "hovertext", "name", "texttemplate", "hovertemplate"):
                yield from strings(value)
            else:
                yield from texts(value)
    elif isinstance(part, list):
        for each in part:
            yield from texts(each)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts(value)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def plain(text: str) -> str:
    """What Plotly shows of a text: our own markup taken away, entities read."""
    return html.unescape(re.sub(r"</?b>|<span style=[^>]*>|</span>", "", text.replace("<br>", " ")))


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_is_escaped_and_every_title_has_a_unit_and_the_prompt(name: str) -> None:
    template = plotly.io.templates.default
    figure = FIGURES[name]()
    assert plotly.io.templates.default == template
    found = list(texts(json.loads(figure.to_json())))
    for text in found:
        own = re.sub(r"<br>|<b>[^<]*</b>|<span style=[^<>]*>|</span>", "", text)
        assert "<" not in own and "$" not in text, text
    title = plain(figure.layout.title.text)
    unit = (
        "(counts)" if "neurons per" in name or name == "overlap" else "(0 to 1)" if "one prompt" in name else "(nats)"
    )
    assert unit in title
    if name != "overlap":
        assert repr("".join(TOKENS))[-20:] in title
        assert name == "ablation" or ("<i>" in title and "$z$" in title)
    assert all(part.hovertemplate is None for part in figure.data if hasattr(part, "hovertemplate"))
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0, 0, 0, 0)"
    assert figure.layout.template.layout.to_plotly_json() == {}
    if name.startswith("no "):
        assert not figure.data
        assert any(text.startswith("No ") for text in found)


def test_nothing_heavy_is_needed_to_plot_and_nothing_but_results() -> None:
    code = """
import sys
sys.modules["nbformat"] = sys.modules["ipywidgets"] = None
import tl_neuron_attr as na
na.plots.heads
assert not {"plotly", "transformer_lens", "transformers", "pandas"} & set(sys.modules)
import torch
from tl_neuron_attr.ranking import Provenance
origin = Provenance("tiny", None, (1,), ("a",), 0, "' b'", (2,), "exact", -1.0)
figure = na.plots.heads(na.HeadScores(torch.zeros(2, 3), origin))
assert figure.to_html(include_plotlyjs=True).count("plotly") > 3
assert "transformer_lens" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_layers_are_the_scores() -> None:
    attn_scores, mlp_scores = numbers(80), numbers(80, seed=1)
    figure = na.plots.layers(na.LayerScores(attn_scores, mlp_scores, origin()))
    shown = {part.name: part for part in figure.data}
    assert list(shown["attn"].y) == attn_scores.tolist() and list(shown["attn"].x) == list(range(80))
    assert list(shown["mlp"].y) == mlp_scores.tolist() and shown["mlp"].xaxis != shown["attn"].xaxis
    assert [note.text for note in figure.layout.annotations] == ["Attention", "MLP"]
    assert len(figure.layout.xaxis2.tickvals) <= 12
    low, high = figure.layout.yaxis.range
    assert figure.layout.yaxis2.range == (low, high)
    both = torch.cat([attn_scores, mlp_scores])
    assert low < float(both.min()) and high > float(both.max())
    best = max(range(80), key=lambda i: attn_scores[i])
    assert shown["attn"].hovertext[best] == f"<b>L{best}.attn</b><br>{float(attn_scores[best]):+.4g} nats"
    assert figure.layout.title.text.startswith("Layer scores for")


def test_the_embedding_of_query_layers_has_a_bar_of_its_own() -> None:
    figure = na.plots.layers(na.LayerScores(-numbers(1).abs(), -numbers(1).abs(), origin(), 0.5))
    (embed,) = (part for part in figure.data if part.name == "embedding")
    assert (list(embed.x), list(embed.y)) == ([-1], [0.5])
    assert dict(zip(figure.layout.xaxis2.tickvals, figure.layout.xaxis2.ticktext, strict=True)) == {
        -1: "embed",
        0: "0",
    }
    assert figure.layout.title.text.startswith("Query scores of layers")


def test_heads_are_the_scores_and_negative_ones_are_marked() -> None:
    scores = torch.tensor([[0.0, 4.0, -0.1], [-3.0, 1.0, -0.3]])
    figure = na.plots.heads(na.HeadScores(scores, origin()))
    cells, marks = figure.data
    assert [list(row) for row in cells.z] == scores.tolist()
    assert (cells.zmin, cells.zmax) == (-4.0, 4.0)
    assert cells.hovertext[1][0] == "<b>L1H0</b><br>-3 nats"
    assert list(zip(marks.y, marks.x, strict=True)) == [(1, 0), (1, 2)]
    assert "strongest: L0H1 +4, L1H1 +1, L0H0 +0 minus: lowers the target" in plain(figure.layout.title.text)
    flat = na.plots.heads(na.HeadScores(torch.zeros(1, 1), origin()))
    assert flat.data[0].zmax > 0 and not len(flat.data[1].x)


def test_infinite_scores_leave_the_scale_to_the_finite_ones() -> None:
    scores = torch.tensor([[1.0, -2.0], [math.inf, -math.inf]])
    [table, marks] = na.plots.heads(na.HeadScores(scores, origin())).data
    assert (table.zmin, table.zmax) == (-2.0, 2.0)
    assert list(zip(marks.y, marks.x, strict=True)) == [(0, 1), (1, 1)]


def test_repeated_tokens_have_bars_of_their_own() -> None:
    scores = numbers(len(TOKENS))
    figure = na.plots.positions(scores, na.Head(3, 2), origin())
    (bars,) = figure.data
    assert list(bars.x) == scores.tolist() and list(bars.y) == list(range(len(TOKENS)))
    ticks = dict(zip(figure.layout.yaxis.tickvals, map(plain, figure.layout.yaxis.ticktext), strict=True))
    assert (ticks[5], ticks[6]) == ("5 ' the'", "6 ' the'")
    assert [ticks[0], ticks[2], ticks[3]] == ["0 '<b>'", "2 ' $x^2$'", r"3 '\n'"]
    assert plain(bars.hovertext[7]).startswith("7 '%{x}'")
    assert plain(figure.layout.title.text).startswith("What L3H2 brings from each token for ' <i>' | ' $z$' (nats)")
    first, last = figure.layout.yaxis.range
    assert first > last  # the first token is at the top


def test_a_long_prompt_has_every_bar_and_some_of_the_ticks() -> None:
    long = origin(tuple(f" token{i}" for i in range(500)))
    figure = na.plots.positions(numbers(500), na.Head(0, 0), long)
    assert len(figure.data[0].x) == 500 and len(figure.layout.yaxis.tickvals) <= 60
    assert figure.layout.height < 2000 and figure.data[0].text is None
    assert max(len(plain(line)) for line in figure.layout.title.text.split("<br>")) < 70


def test_positions_of_another_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores has shape \[12\] for a prompt of 9 tokens: it must be \[source\]"):
        na.plots.positions(numbers(12), na.Head(0, 0), origin())


def test_layers_are_counted_value_against_query() -> None:
    value, query = mlp(*[1.0] * 10), mlp(*[1.0] * 4)
    figure = na.plots.neurons_per_layer(value, query, n_layers=9)
    assert [list(part.y) for part in figure.data] == [[2, 1, 2, 1, 2, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0, 0]]
    assert [part.name for part in figure.data] == ["value", "query"]
    alone = na.plots.neurons_per_layer(attn(1.0))
    assert [list(part.y) for part in alone.data] == [[0, 0, 0, 1]]
    with pytest.raises(ValueError, match="n_layers=6, but a neuron of layer 6 is ranked"):
        na.plots.neurons_per_layer(value, n_layers=6)


@pytest.mark.parametrize(
    "other",
    [
        origin(target="' Rome'"),
        origin(TOKENS[1:]),
        replace(origin(), model="another"),
        replace(origin(), convention="paper"),
        replace(origin(), position=2),
        replace(origin(), target_ids=(1, 3)),
    ],
)
def test_rankings_of_two_traces_are_refused(other: Provenance) -> None:
    with pytest.raises(ValueError, match="give two rankings of one trace"):
        na.plots.neurons_per_layer(VALUE, mlp(1.0, source=other))
    with pytest.raises(ValueError, match="give two rankings of one trace"):
        na.plots.flow(mlp(1.0, source=other), VALUE, linked(VALUE, QUERY))


def test_ranks_have_scores_and_their_sum_so_far() -> None:
    ranked = mlp(3.0, 1.0, -2.0, -4.0)
    score, total = na.plots.ranks(ranked).data
    assert (list(score.x), list(score.y)) == ([1, 2, 3, 4], [3.0, 1.0, -2.0, -4.0])
    assert list(total.y) == [3.0, 4.0, 2.0, -2.0]
    assert score.hovertext[2] == "<b>3 L4N102</b><br>score -2 nats"
    assert score.xaxis != total.xaxis and score.marker.symbol != total.marker.symbol
    one = na.plots.ranks(mlp(3.0))
    assert "markers" in one.data[0].mode and "sum of 1: 3" in plain(one.layout.title.text)


@pytest.mark.parametrize(
    ("method", "unit"), [("query", "nats"), ("coefficient", "units of activation"), ("direct_logit", "logits")]
)
def test_the_unit_is_that_of_the_method(method: str, unit: str) -> None:
    figure = na.plots.ranks(mlp(3.0, method=method))
    assert f"({unit})" in plain(figure.layout.title.text) and figure.layout.yaxis.title.text == unit


def test_every_method_has_a_unit() -> None:
    known = set(labels._UNITS) | {
        "log_prob_increase",
        "log_prob_alone",
        "gradient",
        "integrated_gradients",
        "attribution_patching",
        "causal",
    }
    assert set(na.METHODS) <= known


def test_a_flow_has_a_line_for_every_contribution() -> None:
    links = linked(VALUE, QUERY)
    figure = na.plots.flow(QUERY, VALUE, links, n_value=2)
    lines = {part.hovertext: part for part in figure.data if part.mode == "lines"}
    expected = {
        f"<b>{row.query} to {row.value}</b><br>{row.contribution:+.4g} nats"
        for row in links.itertuples()
        if row.contribution and row.value in map(str, VALUE[:2])
    }
    assert len(expected) == 3  # of four pairs, one contributes nothing
    to_target = {text for text in lines if "to &#39;" in text or "to '" in text}
    assert set(lines) == expected | to_target
    assert {plain(text) for text in to_target} == {
        "L3H0D10@0 to ' <i>' | ' $z$' +0.9 nats",
        "L3H1D11@1 to ' <i>' | ' $z$' +0.5 nats",
    }
    widths = {round(part.line.width, 6) for text, part in lines.items() if text in expected}
    assert len(widths) == 3 and max(widths) == 9.0
    for text, part in lines.items():
        assert (part.line.dash == "solid") == ("+" in text)
    written = [plain(text) for part in figure.data if part.mode == "text" for text in part.text]
    assert written[:2] == ["L0N100 +0.3", "L2N101 +0.2"]
    assert written[2:4] == ["L3H0D10@0 '<b>' +0.9", "L3H1D11@1 '<scrip'... +0.5"]
    assert written[4].endswith("-1.25")


def test_a_flow_leaves_out_links_that_are_next_to_nothing() -> None:
    links = linked(VALUE, QUERY)
    strongest = links["contribution"].abs().max()
    weak = links.assign(contribution=[strongest, *[0.009 * strongest] * (len(links) - 1)])
    figure = na.plots.flow(QUERY, VALUE, weak)
    assert sum(part.mode == "lines" for part in figure.data) == 1 + len(VALUE)
    assert figure.layout.meta == {"left_out": len(links) - 1}
    assert f"left out: {len(links) - 1} lines below 1 % of that" in figure.layout.title.text
    every = na.plots.flow(QUERY, VALUE, weak, smallest=0.0)
    assert sum(part.mode == "lines" for part in every.data) == len(links) + len(VALUE)
    assert "left out" not in every.layout.title.text
    for smallest in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"smallest is {smallest}: give a share"):
            na.plots.flow(QUERY, VALUE, links, smallest=smallest)


def test_a_flow_has_the_units_of_its_rankings() -> None:
    value, query = replace(VALUE, method="norm"), replace(QUERY, method="query_unnormalised")
    figure = na.plots.flow(query, value, linked(VALUE, QUERY))
    assert "(query: nats x activation; value: units of the residual stream)" in plain(figure.layout.title.text)
    units = {text.partition("</b><br>")[2].partition(" ")[2] for text in hovers(figure)}
    assert units == {"nats x activation", "units of the residual stream"}


def hovers(figure: Any) -> list[str]:
    return [part.hovertext for part in figure.data if part.mode == "lines"]


def test_a_flow_needs_the_links_of_its_neurons() -> None:
    links = linked(VALUE, QUERY)
    with pytest.raises(ValueError, match=r"links has no row from L2N101 to L3H2D12@2, which are drawn"):
        na.plots.flow(QUERY, VALUE, links[:-1])
    with pytest.raises(ValueError, match="links has no column contribution"):
        na.plots.flow(QUERY, VALUE, links[["query", "value"]])
    with pytest.raises(ValueError, match="n_query is 0"):
        na.plots.flow(QUERY, VALUE, links, n_query=0)
    zero = links.assign(contribution=0.0)
    assert sum(part.mode == "lines" for part in na.plots.flow(QUERY, VALUE, zero).data) == 3


@pytest.mark.parametrize("metric", ["log_prob", "probability", "reciprocal_rank", "rank"])
def test_an_ablation_curve_is_the_summary(metric: str) -> None:
    given = curve()
    figure = na.plots.ablation(given, metric)
    band, control, best = figure.data
    rows = {size: next(row for row in given.summary(size) if row.metric == metric) for size in given.sizes}
    assert list(best.x) == [1, 10, 100] and list(best.y) == [row.after for row in rows.values()]
    whole = [y + plus for y, plus in zip(best.y, best.error_y.array, strict=True)]
    assert whole == pytest.approx([row.after_high for row in rows.values()])
    least = [y - minus for y, minus in zip(best.y, best.error_y.arrayminus, strict=True)]
    assert least == pytest.approx([row.after_low for row in rows.values()])
    draws = [outcome.values(metric).mean(-1) for outcome in given.controls]
    assert list(control.y) == pytest.approx([float(each.mean()) for each in draws])
    high, low = [float(each.max()) for each in draws], [float(each.min()) for each in draws]
    assert list(band.y) == pytest.approx([*high, *reversed(low)])
    assert figure.layout.shapes[0].y0 == rows[1].before
    assert best.marker.symbol != control.marker.symbol and best.line.dash != control.line.dash
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.xaxis.range[0] < 0 and figure.layout.xaxis.range[1] > math.log10(100)


def test_a_curve_of_one_prompt_has_neither_intervals_nor_a_band_without_draws() -> None:
    figure = na.plots.ablation(curve((5,), 1, 0))
    (best,) = figure.data
    assert best.error_y.array is None and list(best.x) == [5]
    with pytest.raises(ValueError, match="unknown metric 'entropy'"):
        na.plots.ablation(curve(), "entropy")


def test_a_contrast_is_not_called_a_log_probability() -> None:
    plain_curve = curve((1, 2), n=1)
    contrast = replace(plain_curve, before=replace(plain_curve.before, log_prob=torch.tensor([1.5]).double()))
    names = {
        "log_prob": "Log-probability difference of ' <i>' | ' $z$' after",
        "probability": "Probability of the first of ' <i>' | ' $z$' after",
        "rank": "Rank of the first of ' <i>' | ' $z$' after",
    }
    for metric, name in names.items():
        assert plain(na.plots.ablation(contrast, metric).layout.title.text).startswith(name)
        own = name.replace(" difference", "").replace("the first of ", "")
        assert plain(na.plots.ablation(plain_curve, metric).layout.title.text).startswith(own)
    title = na.plots.ablation(replace(contrast, provenance=(origin(),) * 2), "rank").layout.title.text
    assert plain(title).startswith("Rank of the target's first token after")


def test_an_overlap_is_written_into_its_cells() -> None:
    frame = na.overlap({"<b>": [1, 2, 3, 4], " $x$": [2, 3], "none": []})
    figure = na.plots.overlap(frame, of="heads")
    (cells,) = figure.data
    assert [[int(count) for count in row] for row in cells.text] == frame.values.tolist()
    assert [list(row) for row in cells.z] == [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert cells.hovertext[0][1] == "<b>&lt;b&gt; and  &#36;x&#36;</b><br>2 in common<br>of 4 and 2"
    assert list(figure.layout.yaxis.ticktext) == ["&lt;b&gt;", " &#36;x&#36;", "none"]
    assert figure.layout.title.text.startswith("Heads in common between types (counts)")
    with pytest.raises(ValueError, match=r"give a frame of na\.overlap"):
        na.plots.overlap(frame.iloc[:2])


@pytest.mark.parametrize("width", [5, 20, 40])
def test_lines_fit_and_lose_nothing(width: int) -> None:
    for text in [
        "one two three",
        "'  two  spaces'",
        "東京" * 20,
        "a" * 50 + " b",
        "",
        "' Paris' | ' Rome' | ' London'",
    ]:
        lines = labels.wrapped(text, width)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert all(labels.cell_len(line) <= width for line in lines) or "'" in text


def test_figures_leave_the_results_as_they_were() -> None:
    scores = na.HeadScores(numbers(3, 3), origin())
    before = scores.scores.clone()
    na.plots.heads(scores)
    assert torch.equal(scores.scores, before)


def test_a_figure_of_something_else_is_refused_by_name() -> None:
    """Outside of tests, where no types are checked."""
    with pytest.raises(ValueError, match=r"shows RankedNeurons, not list: give a ranking such as"):
        style.expect([1, 2], na.RankedNeurons, 'a ranking such as na.value_neurons(trace, "mlp")')
    code = "import tl_neuron_attr as na; na.plots.layers('L9')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(na.__file__).parents[1]
    )
    assert "this figure shows LayerScores, not str: give na.layer_scores(trace)" in done.stderr
