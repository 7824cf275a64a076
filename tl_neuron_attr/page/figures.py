"""The figures of a page, each with a caption and a text alternative that says what is seen.

The figures themselves are those of :mod:`tl_neuron_attr.plots`. On the page their titles give way to captions and
notes, which wrap; saved ones have their titles.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tl_neuron_attr import plots
from tl_neuron_attr.page.story import Ablation, Story
from tl_neuron_attr.plots import labels
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.tables import fixed

PlotlyFigure: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Figure:
    """What Plotly draws (``data`` and ``layout``), a caption, and what to say in its place."""

    id: str
    caption: str
    note: str
    alternative: str
    data: list[Any]
    layout: dict[str, Any]


def figures(story: Story) -> dict[str, Figure]:
    """Every figure by its id."""
    made = [*_of_layers(story), *_of_neurons(story), *map(_of_ablation, range(len(story.ablations)), story.ablations)]
    return {figure.id: figure for figure in made}


def _of_layers(story: Story) -> Iterator[Figure]:
    found = story.found
    yield _figure(
        "layers", "Score of every attention and MLP layer (nats)", "", _layers(story), plots.layers(found.layers)
    )
    yield _figure(
        "heads",
        "Score of every head (nats)",
        "A minus marks heads that lower the target.",
        _heads(story),
        plots.heads(found.heads),
    )
    if story.heads:
        best = story.heads[0]
        yield _figure(
            "head-positions",
            f"What the strongest head, {best.head}, brings from each token (nats)",
            "",
            _best("Bars over the tokens of the prompt", "token", _named(story, floats(best.sources))),
            plots.positions(best.sources, best.head, found.provenance),
        )


def _of_neurons(story: Story) -> Iterator[Figure]:
    ranked = story.ranked
    for id_, what, of_kind in (("mlp", "MLP", ranked.mlp), ("attn", "Attention", ranked.attn)):
        caption = f"{what} value neurons: score against rank (nats)"
        yield _figure(f"ranks-{id_}", caption, "", _ranks(of_kind), plots.ranks(of_kind))
    yield _figure(
        "neurons-per-layer",
        f"Layers of the top {len(ranked.mlp):,} MLP value neurons and {len(ranked.query):,} query neurons",
        "",
        f"MLP value neurons are in {_where(ranked.mlp)}; query neurons in {_where(ranked.query)}.",
        plots.neurons_per_layer(ranked.mlp, ranked.query, n_layers=story.trace.view.n_layers),
    )
    flow = plots.flow(
        story.flow_query,
        story.flow_value,
        story.links,
        n_query=len(story.flow_query),
        n_value=len(story.flow_value),
    )
    yield _figure(
        "flow",
        f"From query neurons through attention value neurons to {labels.target(story.found.provenance)} (nats)",
        "Width is the share of the strongest line of its side; dashed lines lower the target." + _left_out(flow),
        _flow(story),
        flow,
    )


def _of_ablation(i: int, ablation: Ablation) -> Figure:
    curve = ablation.curve
    compared = f", and {curve.protocol.controls} draws of random ones" if curve.protocol.controls else ""
    return _figure(
        f"ablation-{i}",
        f"Zeroing {ablation.name}",
        f"The best 1 to {curve.sizes[-1]}{compared}; the dashed line is the untouched model.",
        _ablation(ablation),
        plots.ablation(curve),
    )


def _figure(id_: str, caption: str, note: str, alternative: str, figure: PlotlyFigure) -> Figure:
    plain: dict[str, Any] = json.loads(figure.to_json(engine="json"))
    plain["layout"].pop("template", None)  # Plotly's own, of which figures use nothing
    return Figure(id_, caption, note, alternative, plain["data"], plain["layout"])


def _layers(story: Story) -> str:
    layers = story.found.layers
    attn, mlp = floats(layers.attn), floats(layers.mlp)
    return (
        f"Bars over {len(attn)} layers. Attention layers sum to {fixed(sum(attn), 3, '+')} nats, "
        f"{_most('layer', enumerate(attn))}; MLP layers sum to {fixed(sum(mlp), 3, '+')} nats, "
        f"{_most('layer', enumerate(mlp))}."
    )


def _heads(story: Story) -> str:
    n_layers, n_heads = story.found.heads.scores.shape
    strongest = ", ".join(f"{each.head} {fixed(each.score, 3, '+')}" for each in story.heads[:3])
    return f"Heat map of {n_layers} layers by {n_heads} heads. Strongest, in nats: {strongest}."


def _ranks(ranked: RankedNeurons) -> str:
    scores = floats(ranked.scores)
    return (
        f"Scores fall from {fixed(scores[0], 3)} nats ({ranked[0]}) to {fixed(scores[-1], 3)} at rank {len(scores)}; "
        f"together they are {fixed(sum(scores), 3)}, the first ten {fixed(sum(scores[:10]), 3)}."
    )


def _flow(story: Story) -> str:
    rows = zip(story.links["query"], story.links["value"], story.links["contribution"], strict=True)
    strongest = ", ".join(f"{query} to {value} {fixed(c, 3, '+')}" for query, value, c in list(rows)[:3])
    return (
        f"Flow from {len(story.flow_query)} query neurons through {len(story.flow_value)} attention value neurons "
        f"to {labels.target(story.found.provenance)}. Strongest links, in nats: {strongest}."
    )


def _left_out(figure: PlotlyFigure) -> str:
    """How many lines a flow lacks because they are weak; nothing where it has all."""
    count = (figure.layout.meta or {}).get("left_out", 0)
    return f" Lines below 1 % of the strongest are left out ({count:,})." if count else ""


def _ablation(ablation: Ablation) -> str:
    curve = ablation.curve
    parts: list[str] = []
    for size in curve.sizes:
        row = curve.summary(size)[0]
        random = "" if row.control_change is None else f" (random neurons {fixed(row.control_change, 3, '+')})"
        parts.append(f"{size}: {fixed(row.change, 3, '+')}{random}")
    what = "log-probability difference" if curve.before.is_contrast else "log-probability"
    return f"Change of the target's {what} in nats by number of neurons zeroed. {'; '.join(parts)}."


def _named(story: Story, scores: Sequence[float]) -> Iterable[tuple[str, float]]:
    return ((labels.source(story.found.provenance, i), score) for i, score in enumerate(scores))


def _best(what: str, name: str, scores: Iterable[tuple[object, float]]) -> str:
    return f"{what}; {_most(name, scores)}."


def _most(name: str, scores: Iterable[tuple[object, float]]) -> str:
    pairs = list(scores)
    by_score: Callable[[tuple[object, float]], float] = lambda pair: pair[1]  # noqa: E731
    high, low = max(pairs, key=by_score), min(pairs, key=by_score)
    top, bottom = (fixed(pair[1], 3, "+") for pair in (high, low))
    return f"the highest {name} {high[0]} ({top}), the lowest {name} {low[0]} ({bottom})"


def _where(ranked: RankedNeurons) -> str:
    layers = sorted(neuron.layer for neuron in ranked)
    middle = layers[len(layers) // 2]
    return f"layers {layers[0]} to {layers[-1]}, half of them up to layer {middle}"
