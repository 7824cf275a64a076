"""Comparative neuron analysis: the score in one condition minus the score in another.

``D = S_a - S_b`` for every neuron, each condition with its own residual stream, activations and readout: two
prompts, a base and a fine-tuned model, or a model with a head ablated (trace it inside the ablation). The top
``k`` are exact: ``D <= upper_a - lower_b`` with the bounds of :mod:`tl_neuron_attr.candidates`, and neurons are
scored in both conditions, best bound first, until no other can enter.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.candidates import Candidates, coefficients_of
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.results import RankedNeurons
from tl_neuron_attr.search import best_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tl_neuron_attr.trace import Trace


@without_autocast
def compare(
    trace_a: "Trace",
    trace_b: "Trace",
    kind: Kind,
    k: int = 100,
    *,
    layers: "Sequence[int] | None" = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> RankedNeurons:
    """The ``k`` neurons whose score (nats) is most above, in ``trace_a``, what it is in ``trace_b``.

    Scores are the differences ``S_a - S_b``; coefficients are those in ``trace_a``, and the columns ``score_a``,
    ``score_b`` and ``coefficient_b`` give the two conditions. Swap the traces for neurons that lose most. Where
    they came from (``provenance``) is ``trace_a``.

    Raises :class:`ValueError` for models of different shape, attention neurons of prompts whose predicting
    positions differ (their source positions would not correspond), an unknown kind or layer, or ``k < 1``;
    :class:`UnsupportedModelError` for layers without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> france = na.trace(model, "The capital of France is", " Paris")
        >>> italy = na.trace(model, "The capital of Italy is", " Paris")
        >>> na.compare(france, italy, "mlp", k=5).method
        'log_prob_increase_difference'
    """
    k = check_count("k", k)
    chosen = chosen_layers(trace_a, check_kind(kind), layers)
    _check_comparable(trace_a, trace_b, kind)
    sides = [
        Candidates(trace, Readout.of(trace, memory_budget=memory_budget // 2), kind, chosen)
        for trace in (trace_a, trace_b)
    ]
    a, b = sides
    if a.numbering != b.numbering:
        raise ValueError(
            f"{trace_a.view.name} and {trace_b.view.name} have {a.numbering.sizes} and {b.numbering.sizes} {kind} "
            f"neurons in the layers compared: a neuron must be the same place in both"
        )

    def bound(index: int) -> Tensor:
        return a.upper(index) - b.lower(index)

    def difference(numbers: Tensor) -> Tensor:
        return a.score(numbers) - b.score(numbers)

    found = best_first(
        a.numbering.sizes,
        bound,
        difference,
        k,
        at_once=min(side.readout.directions_at_once() for side in sides),
        memory_budget=memory_budget,
    )
    score_a, score_b = a.score(found.numbers), b.score(found.numbers)
    return RankedNeurons(
        kind=kind,
        ids=a.numbering.ids(found.numbers),
        scores=found.scores,
        coefficients=coefficients_of(trace_a, a.numbering, found.numbers),
        method="log_prob_increase_difference",
        n_evaluated=found.n_evaluated,
        n_neurons=sum(a.numbering.sizes),
        provenance=trace_a.provenance,
        columns={
            "score_a": tuple(score_a.tolist()),
            "score_b": tuple(score_b.tolist()),
            "coefficient_b": tuple(coefficients_of(trace_b, b.numbering, found.numbers).tolist()),
        },
    )


def _check_comparable(trace_a: "Trace", trace_b: "Trace", kind: Kind) -> None:
    a, b = trace_a.view, trace_b.view
    for name in ("n_layers", "n_heads", "d_head", "d_model"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(
                f"{a.name} has {name}={getattr(a, name)}, {b.name} {name}={getattr(b, name)}: compare two "
                f"conditions of one model, or two models of the same shape"
            )
    if trace_a.convention != trace_b.convention:
        raise ValueError(
            f"the traces follow the conventions {trace_a.convention!r} and {trace_b.convention!r}: take both alike"
        )
    if kind == "attn" and trace_a.position != trace_b.position:
        raise ValueError(
            f"the traces predict at positions {trace_a.position} and {trace_b.position}, so their source positions "
            f"do not correspond: compare attention neurons of prompts with as many tokens, or compare MLP neurons"
        )
