"""Everything a page shows of one trace, gathered once: an explanation, source positions, links and ablations.

Per-token contributions are scores by source position summed over layers (:func:`tl_neuron_attr.source_scores`).
Ablations zero the first 1, 2, 5, ... neurons of each ranking at every position, and for each size as many random
neurons of the same layers (:func:`tl_neuron_attr.ablation_curve`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.curves import AblationCurve, ablation_curve
from tl_neuron_attr.explanation import Explanation, Rankings, TokenPrediction, gather, predicted_as
from tl_neuron_attr.links import links
from tl_neuron_attr.neurons import Head, Neuron
from tl_neuron_attr.positions import source_scores, sources_of
from tl_neuron_attr.ranking import RankedNeurons
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.trace import Trace

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

# Neurons of each kind that figures are drawn of, as in the paper, however few the tables show.
DEPTH = 300
# What a flow diagram can still show apart.
N_FLOW_QUERY, N_FLOW_VALUE = 8, 12
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200)


@dataclass(frozen=True, slots=True, eq=False)
class HeadStory:
    """A head, its score, and that of what it brings from each source position (nats)."""

    head: Head
    score: float
    sources: Float[Tensor, " source"]


@dataclass(frozen=True, slots=True, eq=False)
class Ablation:
    """What was ablated, in words, and the effect against how many."""

    name: str
    curve: AblationCurve


@dataclass(frozen=True, slots=True, eq=False)
class Story:
    """One trace's explanation and what a page adds to it.

    ``ranked`` are the rankings that figures show, ``found`` has the first ``k`` of them. ``targets`` are all tokens
    of the target. ``flow_query`` and ``flow_value`` are the neurons between which ``links`` holds contributions.
    ``parts`` ablates the query neurons in two: those that contribute most at the first token, and the others; it is
    empty where all are of one part.
    """

    trace: Trace
    found: Explanation
    ranked: Rankings
    targets: tuple[TokenPrediction, ...]
    sources: Float[Tensor, "layer source"]
    heads: tuple[HeadStory, ...]
    flow_query: RankedNeurons
    flow_value: RankedNeurons
    links: "pandas.DataFrame"
    ablations: tuple[Ablation, ...]
    parts: tuple[Ablation, ...]

    @property
    def k(self) -> int:
        """How many neurons of each kind the tables show and the ablations go up to."""
        return max(len(self.found.mlp), len(self.found.attn), len(self.found.query))


def tell(
    trace: Trace,
    *,
    k: int = 20,
    n_tokens: int = 5,
    controls: int = 10,
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> Story:
    """Gather what a page shows; arguments and errors are those of :func:`tl_neuron_attr.report`."""
    ranked = Rankings.of(trace, max(k, DEPTH))
    found = gather(trace, k=k, n_tokens=n_tokens, ranked=ranked)
    flow_query, flow_value = ranked.query.top(N_FLOW_QUERY), ranked.attn.top(N_FLOW_VALUE)
    heads = found.heads.top(k)
    read = sources_of(trace, [head for head, _ in heads], memory_budget)
    options: dict[str, Any] = {
        "controls": controls,
        "seed": seed,
        "memory_budget": memory_budget,
        "progress": progress,
    }
    sets = (
        ("MLP value neurons", found.mlp),
        ("attention value neurons", found.attn),
        ("query neurons", found.query),
    )
    return Story(
        trace=trace,
        found=found,
        ranked=ranked,
        targets=tuple(predicted_as(trace, token) for token in trace.target.token_ids),
        sources=source_scores(trace, memory_budget=memory_budget),
        heads=tuple(HeadStory(*each, sources) for each, sources in zip(heads, read, strict=True)),
        flow_query=flow_query,
        flow_value=flow_value,
        links=links(trace, flow_value, flow_query, memory_budget=memory_budget),
        ablations=tuple(
            Ablation(name, ablation_curve(trace, neurons, sizes=_sizes(len(neurons)), **options))
            for name, neurons in sets
        ),
        parts=tuple(
            Ablation(name, ablation_curve(trace, neurons, sizes=[len(neurons)], **options))
            for name, neurons in _by_position(found.query)
        ),
    )


def _by_position(query: RankedNeurons) -> tuple[tuple[str, list[Neuron]], ...]:
    """Query neurons that contribute most at the first token, and the others; nothing where one of them is empty."""
    at = list(zip(query, query.columns["pos"], strict=True))
    first, rest = [neuron for neuron, pos in at if pos == 0], [neuron for neuron, pos in at if pos != 0]
    if not first or not rest:
        return ()
    return ("query neurons, most at the first token", first), ("query neurons, the others", rest)


def _sizes(n: int) -> list[int]:
    """1, 2, 5, ... below ``n``, and ``n``."""
    return [*(size for size in _SIZES if size < n), n]
