"""What prompts of one type have in common, and what types have in common with each other.

A neuron is shared by a type if it is among the top ``k`` in more than ``share`` of the type's prompts (300 and one
half in the paper). Prompts differ in length, so by default an attention neuron is ``(layer, head, dim)``
(:mod:`tl_neuron_attr.sharing`, which counts them); ``(layer, head, dim, source)`` compares prompts of one template
and length.
"""

import itertools
from collections.abc import Iterator
from dataclasses import astuple

import torch
from torch import Tensor

from tl_neuron_attr.analysis import TypedRankings, TypedTraces, typed
from tl_neuron_attr.neurons import Head, check_count
from tl_neuron_attr.ranking import floats
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.sharing import SharedNeurons, check_share, count_shared
from tl_neuron_attr.tallies import best_heads, check_fraction
from tl_neuron_attr.value import head_scores


def shared_neurons(
    rankings: TypedRankings, k: int = 300, share: float = 0.5, *, by_source: bool = False
) -> SharedNeurons:
    """The neurons among the top ``k`` in more than ``share`` of a type's prompts.

    Args:
        rankings: pairs of a type and a ranking of one prompt, read once.
        k: how many of each ranking to take; each must have as many, or all of its model's neurons.
        share: of a type's prompts, from 0 up to, but not including, 1.
        by_source: whether attention neurons at different source positions are different (see the module).

    Raises:
        ValueError: no rankings, those of several models or kinds, one of fewer than ``k`` neurons, ``share`` outside
            its range.

    Example:
        >>> import tl_neuron_attr as na
        >>> prompts = ["The capital of France is", "The capital of Italy is"]
        >>> traces = na.trace_batch(na.load_demo_model(), prompts, [" Paris", " Rome"], progress=False)
        >>> found = na.shared_neurons((("capital", na.value_neurons(t, "mlp", k=100)) for t in traces), k=100)
        >>> found.columns, 0 < len(found.groups["capital"]) < 100
        (('layer', 'neuron'), True)
    """
    k, share = check_count("k", k), check_share(share)
    pairs = typed(rankings)
    first_type, first = next(pairs)

    def plain() -> Iterator[tuple[str, list[tuple[int, ...]], list[float]]]:
        for type_, ranked in itertools.chain([(first_type, first)], pairs):
            if len(ranked) < min(k, ranked.n_neurons):
                raise ValueError(
                    f"a ranking of {type_} has {len(ranked)} neurons, k={k}: rank with value_neurons(k={k})"
                )
            best = ranked.top(k)
            yield type_, [astuple(neuron) for neuron in best.ids], floats(best.scores)

    return count_shared(plain(), first.kind, k, share, by_source)


def top_heads(
    traces: TypedTraces, fraction: float = 0.01, *, memory_budget: int = DEFAULT_MEMORY_BUDGET
) -> dict[str, tuple[Head, ...]]:
    """For each type the heads with the highest mean score: that fraction of all heads (rounded down, at least one).

    Raises :class:`ValueError` for no traces, those of several models, or a fraction outside 0 to 1.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> [str(head) for head in na.top_heads([("capital", trace)])["capital"]]
        ['L23H4', 'L29H1']
    """
    fraction = check_fraction(fraction)
    sums: dict[str, Tensor] = {}
    for type_, trace in typed(traces):
        scores = head_scores(trace, memory_budget=memory_budget).scores.double()
        sums[type_] = sums.get(type_, torch.zeros_like(scores)) + scores
    return best_heads({type_: summed.tolist() for type_, summed in sums.items()}, fraction)
