"""What a page says in words: its main findings, what its target is, and the settings everything was made with."""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_neuron_attr.page.story import Story
from tl_neuron_attr.plots.labels import target
from tl_neuron_attr.ranking import floats
from tl_neuron_attr.tables import fixed, probability, quoted

# Of a target of many tokens, so many are named where not all of them can be.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """A number, what it is, and what to compare it with."""

    number: str
    what: str
    beside: str


def findings(story: Story) -> list[Finding]:
    """The numbers to remember."""
    found, origin = story.found, story.found.provenance
    outcome = story.ablations[0].curve.before
    made = [
        Finding(
            probability(float(outcome.probability[0])),
            f"probability of {positives(story)}",
            f"rank {int(outcome.rank[0]):,} of {found.d_vocab:,}",
        )
    ]
    attn, mlp = sum(floats(found.layers.attn)), sum(floats(found.layers.mlp))
    start = "embedding and constant" if origin.convention == "paper" else "embedding"
    parts = ((start, origin.model_log_prob - attn - mlp), ("attention", attn), ("MLP", mlp))
    summed = ", ".join(f"{name} {fixed(part, 2, '+')}" for name, part in parts)
    made.append(
        Finding(
            f"{fixed(attn, 2, '+')} / {fixed(mlp, 2, '+')}",
            "nats from attention / MLP layers",
            f"{summed} = {value_name(story)} {fixed(origin.model_log_prob, 3)}",
        )
    )
    if story.heads:
        best = story.heads[0]
        position = int(best.sources.argmax())
        source = f"{quoted(origin.str_tokens[position], 20)} at position {position}"
        made.append(
            Finding(f"{best.head}", f"strongest head, {fixed(best.score, 2, '+')} nats", f"reads most from {source}")
        )
    for ablation in story.ablations[::2]:
        row, size = ablation.curve.summary(ablation.curve.sizes[-1])[0], ablation.curve.sizes[-1]
        kind = ablation.name.partition(" neurons")[0]
        beside = [] if row.control_change is None else [f"random neurons: {fixed(row.control_change, 2, '+')}"]
        if kind == "query":
            beside += _by_part(story)
        made.append(Finding(fixed(row.change, 2, "+"), f"nats by zeroing {size} {kind} neurons", "; ".join(beside)))
    return made


def _by_part(story: Story) -> list[str]:
    """What the query neurons do that contribute most at the first token, and the others."""
    if not story.parts:
        return []
    first, rest = (part.curve for part in story.parts)
    done = [fixed(curve.summary(curve.sizes[-1])[0].change, 2, "+") for curve in (first, rest)]
    return [f"the {first.sizes[-1]} at the first token alone: {done[0]}, the other {rest.sizes[-1]}: {done[1]}"]


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
        "target": f"{target(origin)} (token {_some(list(map(str, origin.target_ids)), ', ')})",
        "target value": f"{origin.model_log_prob:.6f} nats",
        "convention": origin.convention,
        "neurons in tables": f"{story.k}",
        "neurons in figures": f"{len(story.ranked.mlp)} MLP, {len(story.ranked.attn)} attention, "
        f"{len(story.ranked.query)} query",
        "ablation": f"mode {protocol.mode}, scope {protocol.scope}, {protocol.controls} random draws, "
        f"seed {protocol.seed}",
    }


def target_value(story: Story) -> str:
    """What ``T`` is."""
    resolved, label = story.trace.target, target(story.found.provenance)
    if resolved.negative:
        return f"T = log p(a) - log p(b) with a - b = {label}, at the predicting position."
    if len(resolved.positive) > 1:
        return f"T = log of the summed probability of {label} at the predicting position."
    return f"T = log p({label}), its log-probability at the predicting position."


def value_name(story: Story) -> str:
    """The name of ``T``."""
    return "log-probability difference" if story.trace.target.negative else "log-probability"


def positives(story: Story) -> str:
    """The tokens whose probability and rank are given: the target's, of a contrast the first."""
    text = story.trace.vocabulary.text
    return _some([quoted(text(token)) for token in story.trace.target.positive], " | ")


def _some(names: Sequence[str], between: str) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - SHOWN
    return between.join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")
