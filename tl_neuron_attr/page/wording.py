"""What a page says in words: its main findings, how every number is defined, and the settings they were made with."""

from dataclasses import dataclass
from typing import Any

from tl_neuron_attr.explanation import N_QUERIED
from tl_neuron_attr.page.columns import probability
from tl_neuron_attr.page.story import Story
from tl_neuron_attr.ranking import floats
from tl_neuron_attr.tables import quoted


@dataclass(frozen=True, slots=True)
class Finding:
    """A number, what it is, and what to compare it with."""

    number: str
    what: str
    beside: str


def findings(story: Story) -> list[Finding]:
    """The numbers to remember."""
    found, origin = story.found, story.found.provenance
    outcome, positive = story.ablations[0].curve.before, story.trace.target.positive
    made = [
        Finding(
            probability(float(outcome.probability[0])),
            f"probability of {' | '.join(quoted(each.token) for each in story.targets if each.token_id in positive)}",
            f"rank {int(outcome.rank[0]):,} of {found.d_vocab:,}",
        )
    ]
    attn, mlp = sum(floats(found.layers.attn)), sum(floats(found.layers.mlp))
    made.append(
        Finding(
            f"{attn:+.2f} / {mlp:+.2f}", "nats from attention / MLP layers", f"to {origin.model_log_prob:.3f} nats"
        )
    )
    if story.heads:
        best = story.heads[0]
        source = quoted(origin.str_tokens[int(best.sources.argmax())], 20)
        made.append(Finding(f"{best.head}", f"strongest head, {best.score:+.2f} nats", f"reads most from {source}"))
    for ablation in story.ablations[::2]:
        row, size = ablation.curve.summary(ablation.curve.sizes[-1])[0], ablation.curve.sizes[-1]
        kind = ablation.name.partition(" neurons")[0]
        beside = "" if row.control_change is None else f"random neurons: {row.control_change:+.2f}"
        made.append(Finding(f"{row.change:+.2f}", f"nats by zeroing {size} {kind} neurons", beside))
    return made


def definitions(story: Story) -> list[tuple[str, str]]:
    """Terms and what they mean, in the order in which a reader meets them."""
    trace, found = story.trace, story.found
    controls = story.ablations[0].curve.protocol.controls
    beside = (
        f" Beside it stand {controls} draws of as many random neurons of the same layers, none of the set: their mean, "
        f"standard deviation and range, and the place of the change among all {controls + 1} by size."
        if controls
        else ""
    )
    layer_rule = (
        "Layer scores sum to the target's value after the last block less that of the embedding."
        if trace.convention == "exact"
        else "Readout constants are dropped, as the published code does."
    )
    return [
        ("Target", f"{_target(story)} All scores are changes of it, in nats (natural logarithms)."),
        (
            "Score",
            "The rise of the target's value when a vector is added to the residual stream at the predicting position, "
            "the final norm's scale frozen: S = T(base + v) - T(base). The base is the stream before the block for "
            "attention layers, heads and neurons, and that plus what attention added for MLP layers and neurons. "
            "Above 0, it makes the target more likely. (Yu and Ananiadou, EMNLP 2024, Eq. 13.)",
        ),
        (
            "Token contribution",
            "For each layer, the score of what all its heads together bring from that position to the predicting one; "
            "then summed over layers. It does not include what the token did on the way (MLPs, earlier positions), and "
            "within a layer the scores of positions do not exactly add up to the layer's.",
        ),
        ("Layer", f"The score of what a sublayer really adds, biases included. {layer_rule}"),
        (
            "Head",
            "The score of what the head adds, without the attention output bias. L23H4 is head 4 of layer 23; layers, "
            "heads, neurons and positions are counted from 0.",
        ),
        (
            "Value neuron",
            "A neuron by its own score. An MLP neuron, such as L8N123, adds its activation (the coefficient) times its "
            "output row. An attention neuron, such as L9H8D17@3, is dimension 17 of head 8 of layer 9, read from "
            "position 3: attention weight times value (the coefficient), times its row of the output matrix. The rankings are exact: bounds rule out the "
            f"neurons that were not scored ({found.mlp.n_evaluated:,} of {found.mlp.n_neurons:,} MLP and "
            f"{found.attn.n_evaluated:,} of {found.attn.n_neurons:,} attention neurons were).",
        ),
        (
            "Query neuron",
            f"An MLP neuron by what it does for the top {N_QUERIED} attention value neurons: each of those reads a "
            "position's stream through its key, and its score is shared out over what wrote that stream, in "
            "proportion to inner products with the key. A link is one such share.",
        ),
        (
            "Promoted and demoted tokens",
            "The tokens whose logits a neuron's vector raises and lowers most on this prompt, read through the final "
            "norm and the unembedding, the sign of the coefficient applied.",
        ),
        (
            "Ablation",
            "The first neurons of a ranking are set to zero at every position and the model is run again, everything "
            f"after them recomputed.{beside}",
        ),
    ]


def settings(story: Story) -> dict[str, str]:
    """Model and settings."""
    trace, origin = story.trace, story.found.provenance
    view, protocol = trace.view, story.ablations[0].curve.protocol
    shape = (
        f"{view.n_layers} layers, {view.n_heads} heads, d_model {view.d_model}, vocabulary {story.found.d_vocab:,}"
    )
    return {
        "model": origin.model,
        "class": type(trace.model).__name__,
        "shape": shape,
        "weights": str(view.dtype).removeprefix("torch."),
        "prompt": f"{len(origin.tokens)} tokens, predicting from position {origin.position}",
        "target": f"{origin.target} (token {', '.join(map(str, origin.target_ids))})",
        "target value": f"{origin.model_log_prob:.6f} nats",
        "convention": origin.convention,
        "neurons in tables": f"{story.k}",
        "neurons in figures": f"{len(story.ranked.mlp)} MLP, {len(story.ranked.attn)} attention, "
        f"{len(story.ranked.query)} query",
        "ablation": f"mode {protocol.mode}, scope {protocol.scope}, {protocol.controls} random draws, "
        f"seed {protocol.seed}",
    }


def _target(story: Story) -> str:
    target: Any = story.trace.target
    if target.negative:
        return f"T = log p(a) - log p(b) with a - b = {target.label}, at the predicting position."
    if len(target.positive) > 1:
        return f"T = log of the summed probability of {target.label} at the predicting position."
    return f"T = log p({target.label}), its log-probability at the predicting position."
