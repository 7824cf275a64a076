"""Value scores: how much each layer, head, source position and neuron raises the target.

The score of a vector ``v`` added to a base is ``S = T(base + v) - T(base)`` in nats (Eq. 13 of Yu and
Ananiadou, EMNLP 2024), with the readout frozen (:mod:`tl_neuron_attr.readout`) and

====================================  ===============================  ==========================================
what                                  base                             ``v``
====================================  ===============================  ==========================================
attention layer, head, neuron         ``h`` (before the block)         what it adds (:mod:`tl_neuron_attr.writes`)
MLP layer, neuron                     ``h + A`` (attention included)   what it adds
====================================  ===============================  ==========================================

Layer scores telescope: they sum to ``T(final) - T(embedding)``. :func:`value_neurons` finds the exact top
neurons without scoring all of them (:mod:`tl_neuron_attr.search`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.bases import Bases
from tl_neuron_attr.candidates import Candidates, base_vectors
from tl_neuron_attr.certified import scores_within
from tl_neuron_attr.methods import VALUE_METHOD, AnyMethod, resolve_method
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.positions import added_at
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.results import HeadScores, LayerScores, NeuronScores, RankedNeurons
from tl_neuron_attr.together import ranking
from tl_neuron_attr.writes import (
    base,
    coefficients,
    head_vectors,
    n_directions,
    stream_before,
)

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


@without_autocast
def layer_scores(trace: "Trace", *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> LayerScores:
    """Score of every attention and MLP layer: what the sublayer adds, biases included (nats).

    Returns ``attn`` and ``mlp`` of shape ``[layer]``; together they sum to ``T`` of the final residual minus
    ``T`` of the embedding (Eq. 13 applied to layers).

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> int(na.layer_scores(trace).attn.argmax())
        23
    """
    readout = Readout.of(trace, memory_budget=memory_budget)
    n_layers = trace.view.n_layers
    steps = [base(trace, kind, layer) for layer in range(n_layers) for kind in ("attn", "mlp")]
    value = _targets_of(readout, [*steps, stream_before(trace, n_layers)])
    return layers_along(trace, value)


@without_autocast
def head_scores(trace: "Trace", *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> HeadScores:
    """Score of every query head, the sum of its neurons, at base ``h`` (nats): ``[layer, head]``.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> na.head_scores(trace).scores.shape
        torch.Size([30, 9])
    """
    readout = Readout.of(trace, memory_budget=memory_budget)
    bases = Bases.of(readout, base_vectors(trace, readout, "attn", range(trace.view.n_layers)))
    return heads_at([trace], [bases])[0]


@without_autocast
def value_scores(
    trace: "Trace",
    kind: Kind,
    layers: Sequence[int] | None = None,
    *,
    tolerance: float = 0.0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> NeuronScores:
    """Scores of every neuron (nats): ``[layer, neuron]`` or ``[layer, source, head, dim]``.

    Without a tolerance every score is exact: each direction is multiplied with the vocabulary once, and attention
    neurons that differ in their source position only share that product. With ``tolerance=1e-3`` every score is
    within 1e-3 nats, and only neurons whose bounds are further apart are scored exactly (``n_evaluated`` of them;
    :mod:`tl_neuron_attr.certified`), which is many times faster; the result's ``method`` says so.

    Raises :class:`ValueError` for an unknown kind or layer, layers of different width or a negative tolerance,
    :class:`UnsupportedModelError` for layers without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> na.value_scores(trace, "mlp", layers=[27]).scores.shape
        torch.Size([1, 1536])
    """
    chosen = chosen_layers(trace, check_kind(kind), layers)
    readout = Readout.of(trace, memory_budget=memory_budget)
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance}: give the largest error in nats, or 0 for exact scores")
    widths = {n_directions(trace, kind, layer) for layer in chosen}
    if len(widths) > 1:
        raise ValueError(
            f"layers {chosen} have {sorted(widths)} {kind} neurons: ask for layers of one width at a time"
        )
    weights = [coefficients(trace, kind, layer) for layer in chosen]
    pool = Candidates(trace, readout, kind, chosen)
    if tolerance > 0:
        scores, n_evaluated = scores_within(pool, tolerance)
    else:
        numbers = torch.arange(sum(pool.numbering.sizes)).split(pool.numbering.sizes)
        scores = [pool.score(number) for number in numbers]
        n_evaluated = sum(pool.numbering.sizes)
    return NeuronScores(
        kind=kind,
        scores=torch.stack([_shaped(trace, kind, t.view_as(w)) for t, w in zip(scores, weights, strict=True)]),
        coefficients=torch.stack([_shaped(trace, kind, t) for t in weights]),
        layers=tuple(chosen),
        n_evaluated=n_evaluated,
        provenance=trace.provenance,
        method=f"{VALUE_METHOD}_within_{tolerance:g}" if tolerance > 0 else VALUE_METHOD,
    )


@without_autocast
def value_neurons(
    trace: "Trace",
    kind: Kind,
    k: int = 100,
    *,
    method: AnyMethod = VALUE_METHOD,
    layers: Sequence[int] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> RankedNeurons:
    """The ``k`` neurons with the highest score, exactly those (and in the order) of the dense computation.

    Neurons are scored in descending order of an upper bound until no other can enter the top ``k``; the result
    says how many were evaluated (``n_evaluated``) of how many (``n_neurons``). Equal scores are ordered by id.

    ``method`` names another attribution method (:func:`methods_table` lists them) or is one with options, such as
    :class:`IntegratedGradients`; scores are then what that method's formula says, in its units.

    Raises :class:`ValueError` for an unknown kind, method or layer or ``k < 1``, :class:`UnsupportedModelError`
    for layers without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> str(na.value_neurons(trace, "mlp", k=5)[0])
        'L27N846'
    """
    check_kind(kind)
    name, find = resolve_method(method)
    question = Question(trace, kind, chosen_layers(trace, kind, layers), check_count("k", k), memory_budget)
    return ranking(question, find(question), name)


def layers_along(trace: "Trace", value: Float[Tensor, " base"]) -> LayerScores:
    """Layer scores of ``T`` along the stream: before each sublayer, and after the last."""
    gained = value.diff().view(trace.view.n_layers, 2)
    return LayerScores(attn=gained[:, 0], mlp=gained[:, 1], provenance=trace.provenance)


def heads_at(traces: "Sequence[Trace]", bases: Sequence[Bases]) -> list[HeadScores]:
    """Head scores of traces, at their bases of attention, which are of one reading."""
    vectors = [[head_vectors(trace, layer) for layer in range(trace.view.n_layers)] for trace in traces]
    return [
        HeadScores(scores=own.view(trace.view.n_layers, -1), provenance=trace.provenance)
        for trace, own in zip(traces, added_at(bases, vectors), strict=True)
    ]


def _targets_of(readout: Readout, vectors: Sequence[Tensor]) -> Float[Tensor, " vector"]:
    """``T`` of residual-stream vectors, which may live on the devices of their layers."""
    return Bases.of(readout, torch.stack([v.to(readout.W_U.device) for v in vectors])).value


def _shaped(trace: "Trace", kind: Kind, flat: Float[Tensor, "row source"]) -> Tensor:
    if kind == "mlp":
        return flat[:, 0].cpu()
    return flat.view(trace.view.n_heads, trace.view.d_head, -1).permute(2, 0, 1).cpu()
