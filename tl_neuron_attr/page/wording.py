"""What a page says in words: its main findings, what its target is, and the settings everything was made with."""

from dataclasses import dataclass

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


def target_value(story: Story) -> str:
    """What ``T`` is."""
    target = story.trace.target
    if target.negative:
        return f"T = log p(a) - log p(b) with a - b = {target.label}, at the predicting position."
    if len(target.positive) > 1:
        return f"T = log of the summed probability of {target.label} at the predicting position."
    return f"T = log p({target.label}), its log-probability at the predicting position."
