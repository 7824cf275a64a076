"""The paper's tables over many prompts of several types: where scores are, layer by layer and summed up.

Every function takes pairs of a type and a trace (or ranking), in any order, from a list or a generator that is read
once, so that one trace at a time is held::

    pairs = zip(types, na.trace_batch(model, prompts, targets))

With ``S_i`` the scores (nats) of one prompt's layers or neurons, a table has means over the prompts of a type of

============================  ===================================================================
function                      what is averaged
============================  ===================================================================
:func:`layer_means`           the score of each attention and MLP layer
:func:`layer_sums`            ``sum_i S_i`` over layers, attention and MLP each
:func:`neuron_sums`           ``sum_i S_i`` over neurons: all, those with ``S_i > 0``, the highest
:func:`layer_histogram`       how many of the ranked neurons a layer has, and their scores' sum
============================  ===================================================================
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.candidates import Candidates
from tl_neuron_attr.certified import bounds_within
from tl_neuron_attr.neurons import Kind, check_count, check_kind
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.ranking import RankedNeurons, floats
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.tallies import MeanLayers, layer_histogram_frame, layer_means_frame, layer_sums_frame, mean_layers
from tl_neuron_attr.trace import Trace
from tl_neuron_attr.value import layer_scores, value_neurons, value_scores

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

TypedTraces: TypeAlias = Iterable[tuple[str, Trace]]
TypedRankings: TypeAlias = Iterable[tuple[str, RankedNeurons]]


def layer_means(traces: TypedTraces, *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> "pandas.DataFrame":
    """Mean score of every layer (nats): one row a type and layer, the columns type, layer, attn, mlp.

    Raises :class:`ValueError` for no traces or those of several models.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> frame = na.layer_means([("capital", trace)])
        >>> int(frame["attn"].idxmax())
        23
    """
    return layer_means_frame(_mean_layers(traces, memory_budget))


def layer_sums(traces: TypedTraces, *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> "pandas.DataFrame":
    """Sum of all layers' scores (nats), mean over prompts: one row a type, the columns type, n_prompts, attn, mlp.

    Raises :class:`ValueError` as :func:`layer_means`.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> prompts = ["The capital of France is", "The color of grass is"]
        >>> traces = na.trace_batch(model, prompts, [" Paris", " green"], progress=False)
        >>> na.layer_sums(zip(["capital", "colour"], traces)).columns.tolist()
        ['type', 'n_prompts', 'attn', 'mlp']
    """
    return layer_sums_frame(_mean_layers(traces, memory_budget))


def neuron_sums(
    traces: TypedTraces,
    kind: Kind,
    top: Sequence[int] = (100, 200),
    *,
    tolerance: float = 0.1,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "pandas.DataFrame":
    """Sums of neuron scores (nats), mean over prompts: one row a type.

    Columns: type, n_prompts, ``all``, ``positive`` (scores above zero), then ``top_100`` and so on for each of
    ``top``, the sum of that many highest scores (of all, where there are fewer), which is exact. An attention neuron
    counts for each source position.

    ``all`` and ``positive`` are true to within ``tolerance`` (nats, for every prompt): upper and lower bounds of each
    score stand for it, except where they leave most open, and those neurons are scored. ``tolerance=0.0`` scores
    every neuron, which takes several times as long.

    Raises :class:`ValueError` as :func:`layer_means`, for an unknown kind, an entry of ``top`` below 1 and a negative
    ``tolerance``; :class:`UnsupportedModelError` for a model with layers without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> frame = na.neuron_sums([("capital", trace)], "mlp", top=[100], tolerance=1.0)
        >>> bool(frame["top_100"][0] < frame["positive"][0])
        True
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    check_kind(kind)
    counts = [check_count("top", n) for n in top]
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance}: give how far off a sum may be in nats, 0 or more")
    sums: dict[str, list[Tensor]] = {}
    for type_, trace in typed(traces):
        lower, upper = _bounds(trace, kind, tolerance, memory_budget)
        best = value_neurons(trace, kind, max([1, *counts]), memory_budget=memory_budget).scores.double()
        parts = [(lower + upper).sum() / 2, (lower.clamp(min=0) + upper.clamp(min=0)).sum() / 2]
        sums.setdefault(type_, []).append(torch.stack([*parts, *(best[:n].sum() for n in counts)]))
    names = ["all", "positive", *(f"top_{n}" for n in counts)]
    rows: list[dict[str, object]] = []
    for type_, found in sums.items():
        means = floats(torch.stack(found).mean(0))
        rows.append({"type": type_, "n_prompts": len(found), **dict(zip(names, means, strict=True))})
    return pandas.DataFrame(rows)


def layer_histogram(rankings: TypedRankings, n_layers: int | None = None) -> "pandas.DataFrame":
    """Which layers the ranked neurons are in: one row a type and layer.

    Columns: type, layer, ``neurons`` (their number, mean over prompts), ``share`` (of the type's ranked neurons) and
    ``score`` (nats, their sum, mean over prompts). ``n_layers`` is how many layers to list; by default up to the
    last one that any ranked neuron is in.

    Raises :class:`ValueError` for no rankings, those of several models or kinds, or too small ``n_layers``.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> frame = na.layer_histogram([("capital", na.value_neurons(trace, "mlp", k=100))], n_layers=30)
        >>> len(frame), float(frame["neurons"].sum())
        (30, 100.0)
    """
    plain = (
        (type_, [neuron.layer for neuron in ranked.ids], floats(ranked.scores)) for type_, ranked in typed(rankings)
    )
    return layer_histogram_frame(plain, n_layers)


def typed(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The pairs of a type and a trace or ranking one by one.

    Raises :class:`ValueError` for none, anything else than such pairs, and those of several models or kinds.
    """
    first: Any = None
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{pair!r} is not a pair of a type and a trace or ranking: zip(types, traces) makes such"
            )
        type_, found = pair
        first = found if first is None else first
        if type(found) is not type(first) or getattr(found, "kind", None) != getattr(first, "kind", None):
            raise ValueError(f"{found!r} is not of the kind of the first one, {first!r}: give one kind at a time")
        own, known = found.provenance.model, first.provenance.model
        if own != known or getattr(found, "model", None) is not getattr(first, "model", None):
            raise ValueError(f"results of several models ({known} and {own}): give those of one model at a time")
        yield type_, found
    if first is None:
        raise ValueError("there is nothing to average: give at least one pair of a type and a trace or ranking")


@without_autocast
def _bounds(
    trace: Trace, kind: Kind, tolerance: float, memory_budget: int
) -> tuple[Float[Tensor, " neuron"], Float[Tensor, " neuron"]]:
    """Bounds of all scores for sums within ``tolerance``; the scores themselves where it is zero."""
    if tolerance == 0:
        scores = value_scores(trace, kind, memory_budget=memory_budget).scores.double().flatten()
        return scores, scores
    readout = Readout.of(trace, memory_budget=memory_budget)
    return bounds_within(Candidates(trace, readout, kind, chosen_layers(trace, kind, None)), tolerance)


def _mean_layers(traces: TypedTraces, memory_budget: int) -> dict[str, MeanLayers]:
    def plain() -> Iterator[tuple[str, list[float], list[float]]]:
        for type_, trace in typed(traces):
            scores = layer_scores(trace, memory_budget=memory_budget)
            yield type_, floats(scores.attn), floats(scores.mlp)

    return mean_layers(plain())
