"""The tables of a page."""

from tl_neuron_attr.neurons import AttnNeuron
from tl_neuron_attr.outcomes import MetricSummary
from tl_neuron_attr.page.columns import (
    Column,
    Table,
    counts,
    labels,
    numbers,
    probabilities,
    promoted,
    token,
)
from tl_neuron_attr.page.story import Ablation, Story
from tl_neuron_attr.page.wording import positives, value_name
from tl_neuron_attr.plots.labels import target
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.tables import fixed, quoted
from tl_neuron_attr.tables import probability as in_short
from tl_neuron_attr.vocab import PromotedTokens

_UP = "Tokens whose logits the neuron raises most here, the sign of its coefficient applied"
_DOWN = "Tokens whose logits the neuron lowers most here"


def tables(story: Story) -> dict[str, Table]:
    """Every table by its id."""
    made = (
        prediction(story),
        positions(story),
        layers(story),
        heads(story),
        value("mlp", "MLP value neurons", story.found.mlp, story.found.mlp_tokens),
        value("attn", "Attention value neurons", story.found.attn, story.found.attn_tokens),
        query(story),
        links(story),
        ablations(story),
    )
    return {table.id: table for table in made}


def prediction(story: Story) -> Table:
    """What the model prefers, and every token of the target."""
    rows = sorted({*story.found.predicted, *story.targets}, key=lambda row: (row.rank, row.token_id))
    positive = set(story.trace.target.positive)
    marks = {row.token_id: "target" if row.token_id in positive else "contrast" for row in story.targets}
    return Table(
        "prediction",
        f"Tokens by probability among {story.found.d_vocab:,}, with the target",
        (
            token("token", [row.token for row in rows]),
            counts("rank", [row.rank for row in rows]),
            probabilities("probability", [row.probability for row in rows], bars=True),
            numbers("log-probability", [row.log_probability for row in rows], "nats"),
            labels("role", [marks.get(row.token_id, "") for row in rows]),
        ),
        "rank",
        descending=False,
    )


def positions(story: Story) -> Table:
    """What attention brings from each token of the prompt, over all layers."""
    origin = story.found.provenance
    totals, best = floats(story.sources.sum(0)), story.sources.max(0)
    strongest = [f"L{layer}" for layer in best.indices.tolist()]
    return Table(
        "positions",
        "Score of what attention brings from each token, summed over layers (nats)",
        (
            counts("position", range(len(totals))),
            token("token", origin.str_tokens[: len(totals)]),
            numbers("score", totals, "nats, sum over layers", bars=True),
            labels("strongest layer", strongest),
            numbers("score there", floats(best.values), "nats"),
        ),
        "position",
        descending=False,
    )


def layers(story: Story) -> Table:
    """Every layer."""
    found = story.found.layers
    return Table(
        "layers",
        "Score of every layer (nats)",
        (
            counts("layer", range(len(found.attn))),
            numbers("attention", floats(found.attn), "nats", bars=True),
            numbers("MLP", floats(found.mlp), "nats", bars=True),
        ),
        "layer",
        descending=False,
    )


def heads(story: Story) -> Table:
    """The strongest heads and where they read."""
    tokens = story.found.provenance.str_tokens
    best = [int(each.sources.argmax()) for each in story.heads]
    return Table(
        "heads",
        f"The {len(story.heads)} strongest of {story.found.heads.scores.numel():,} heads",
        (
            labels("head", [each.head for each in story.heads]),
            numbers("score", [each.score for each in story.heads], "nats", bars=True),
            token("reads most from", [tokens[i] for i in best]),
            counts("at position", best),
            numbers(
                "score from there",
                [float(each.sources[i]) for each, i in zip(story.heads, best, strict=True)],
                "nats, of what the head brings from that position alone",
            ),
        ),
        "score",
    )


def value(id_: str, what: str, ranked: RankedNeurons, pushed: PromotedTokens) -> Table:
    """Neurons by score, with what they promote."""
    tokens, reads = ranked.provenance.str_tokens, list[Column]()
    if ranked.kind == "attn":
        sources = [neuron.source for neuron in ranked if isinstance(neuron, AttnNeuron)]
        reads = [token("reads", [tokens[source] for source in sources])]
    return Table(
        f"{id_}-neurons",
        f"{what}: the top {len(ranked):,} of {ranked.n_neurons:,}",
        (
            labels("neuron", ranked.ids),
            numbers("score", floats(ranked.scores), "nats", bars=True),
            numbers("coefficient", floats(ranked.coefficients), "what its output row is multiplied by"),
            *reads,
            promoted("promotes", pushed.up, _UP),
            promoted("demotes", pushed.down, _DOWN),
        ),
        "score",
    )


def query(story: Story) -> Table:
    """Query neurons, and where they write what is read most."""
    ranked, pushed = story.found.query, story.found.query_tokens
    tokens = ranked.provenance.str_tokens
    where = [int(pos) for pos in ranked.columns["pos"] if pos is not None]
    return Table(
        "query-neurons",
        f"Query neurons: the top {len(ranked):,} of {ranked.n_neurons:,} MLP neurons",
        (
            labels("neuron", ranked.ids),
            numbers("score", floats(ranked.scores), "nats: its share of the value neurons' scores", bars=True),
            numbers("coefficient", floats(ranked.coefficients), "what its output row is multiplied by there"),
            token("writes at", [tokens[pos] for pos in where], "The position where it contributes most"),
            promoted("promotes", pushed.up, _UP),
            promoted("demotes", pushed.down, _DOWN),
        ),
        "score",
    )


def links(story: Story) -> Table:
    """The strongest links of the flow."""
    best = story.links.head(20)
    return Table(
        "links",
        f"The {len(best)} strongest links of the flow",
        (
            labels("query neuron", best["query"]),
            labels("value neuron", best["value"]),
            numbers("contribution", [float(c) for c in best["contribution"]], "nats of its score", bars=True),
        ),
        "contribution",
    )


def ablations(story: Story) -> Table:
    """The effect of zeroing the top ``k`` of each kind, beside random neurons."""
    shown = (*story.ablations, *story.parts)
    rows = [(each, _of(each, "log_prob")) for each in shown]
    after = [_of(each, metric) for metric in ("probability", "rank") for each in shown]
    probability, rank = after[: len(rows)], after[len(rows) :]
    compared = [
        numbers("random: mean", [row.control_change for _, row in rows], "nats", signed=True),
        numbers("random: sd", [row.control_sd for _, row in rows], "nats"),
        labels("random: range", [_span(row) for _, row in rows], "nats"),
        labels("rank among controls", [_place(each, row) for each, row in rows]),
    ]
    tops = [story.trace.vocabulary.text(int(each.curve.after[-1].top_token[0])) for each in shown]
    of, untouched = f"of {positives(story)}", in_short(probability[0].before)
    return Table(
        "ablations",
        f"{target(story.found.provenance)} after zeroing neurons",
        (
            labels("zeroed", [f"{each.curve.sizes[-1]} {each.name}" for each in shown]),
            numbers(value_name(story), [row.after for _, row in rows], f"nats; before {rows[0][1].before:.4f}"),
            numbers("change", [row.change for _, row in rows], "nats", bars=True, signed=True),
            *(compared if rows[0][1].control_change is not None else []),
            probabilities("probability", [row.after for row in probability], f"{of}, before {untouched}"),
            counts("rank", [int(row.after) for row in rank], f"{of}, before {int(rank[0].before):,}"),
            labels("top prediction", [quoted(text) for text in tops]),
        ),
    )


def _of(ablation: Ablation, metric: str) -> MetricSummary:
    summary = ablation.curve.summary(ablation.curve.sizes[-1])
    return next(row for row in summary if row.metric == metric)


def _span(row: MetricSummary) -> str:
    if row.control_min is None or row.control_max is None:
        return "–"
    return f"{fixed(row.control_min, 3, '+')} to {fixed(row.control_max, 3, '+')}"


def _place(ablation: Ablation, row: MetricSummary) -> str:
    return f"{row.rank_among_controls} of {1 + ablation.curve.protocol.controls}"
