"""Query scores: which parts of the residual stream activate the value neurons.

For a value neuron ``n`` with score ``S_n`` (nats) and key ``k_n`` (:mod:`tl_neuron_attr.keys`), the part ``r`` of
the stream that the neuron reads gets ``S_n <r, k_n> / sum_r' <r', k_n>``, summed over the value neurons. The
parts are the embedding and what attention and MLP of every earlier layer added there (for MLP value neurons the
same layer's attention too), so a value neuron's parts sum to its score. :func:`query_neurons` splits the
sublayers' parts into neurons; what is left of a part is its output bias.

All of it is linear in the keys: with ``K[l, pos]`` the sum of ``S_n k_n / total_n`` over the value neurons that
read position ``pos`` after layer ``l`` has written, a query neuron's score is
``sum_pos post[l][pos, q] <W_out[l][q], K[l, pos]>``, one matrix product for each layer whatever the number of
value neurons.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.candidates import scores_of
from tl_neuron_attr.keys import Key, Keys, keys_of
from tl_neuron_attr.methods import VALUE_METHOD
from tl_neuron_attr.neurons import GivenNeurons, Kind, Neuron, check_kind, neurons_of
from tl_neuron_attr.numbering import Numbering, chosen_layers
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.results import LayerScores, RankedNeurons
from tl_neuron_attr.sources import kept, values
from tl_neuron_attr.writes import added, coefficients_at, directions

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

# A total this small beside the lengths of stream and key is mostly rounding, and dividing by it is meaningless.
_TINY = 1e-4


class TinyDenominatorWarning(UserWarning):
    """A value neuron whose key hardly meets its stream: its query scores are a ratio with a tiny denominator."""


@dataclass(frozen=True, eq=False)
class WeightedKeys:
    """``S_n k_n / total_n`` of value neurons that read one stream, and their sum."""

    group: Keys
    weighted: Float[Tensor, "neuron d_model"]


@without_autocast
def query_layers(
    trace: "Trace",
    neurons: Iterable[Neuron],
    *,
    key: Key = "linearised",
    normalise: bool = True,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> LayerScores:
    """Query score of the embedding and of every attention and MLP layer for the given value neurons (nats).

    Returns ``embed`` (a float) and ``attn``, ``mlp`` of shape ``[layer]``; under ``normalise`` they sum to the
    sum of the value neurons' scores. Arguments and errors are those of :func:`query_neurons`.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> layers = na.query_layers(trace, na.value_neurons(trace, "attn", k=30))
        >>> int(layers.mlp.argmax())
        0
    """
    weighted = weighted_keys(trace, neurons, key=key, normalise=normalise, memory_budget=memory_budget)
    summed = _SummedKeys(trace, weighted)
    attn: list[float] = []
    mlp: list[float] = []
    for layer in range(trace.view.n_layers):
        for kind, out, scores in (("attn", trace.attn_out, attn), ("mlp", trace.mlp_out, mlp)):
            scores.append(_along(out[layer], *summed.after(kind, layer)))
    return LayerScores(
        attn=torch.tensor(attn, dtype=trace.view.compute_dtype),
        mlp=torch.tensor(mlp, dtype=trace.view.compute_dtype),
        embed=_along(trace.resid_pre[0], *summed.all()),
        provenance=trace.provenance,
    )


@without_autocast
def query_neurons(
    trace: "Trace",
    neurons: GivenNeurons,
    kind: Kind = "mlp",
    k: int = 100,
    *,
    key: Key = "linearised",
    normalise: bool = True,
    layers: Sequence[int] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> RankedNeurons:
    """The ``k`` neurons that most activate the given value neurons (nats), summed over the positions they read.

    Args:
        trace: the trace in which ``neurons`` are value neurons.
        neurons: value neurons of either kind (a ranking, ids or labels); they weigh by their value score.
        kind: which query neurons to rank, ``"mlp"`` or ``"attn"``.
        k: how many.
        key: for MLP value neurons of gated MLPs, ``"linearised"`` (gradient of the activation product at the
            actual point), ``"gate"`` or ``"in"``.
        normalise: ``False`` gives the plain products ``S_n <r, k_n>`` of the paper's text.
        layers: query neurons of these layers only.

    The column ``pos`` and ``coefficient`` name the position where a query neuron contributes most, and its
    coefficient there.

    Raises:
        ValueError: no value neurons, one that does not exist, an unknown kind, key or layer, ``k < 1``.
        UnsupportedModelError: keys cannot be read for this model.

    Warns:
        TinyDenominatorWarning: a value neuron's key hardly meets its stream, so its ratio is meaningless.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> str(na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=5)[0])
        'L11N1229'
    """
    k = check_count("k", k)
    chosen = chosen_layers(trace, check_kind(kind), layers)
    weighted = weighted_keys(trace, neurons, key=key, normalise=normalise, memory_budget=memory_budget)
    summed = _SummedKeys(trace, weighted)
    scores = torch.cat([_layer_scores(trace, kind, layer, summed) for layer in chosen])
    best = _top(scores, k)
    numbering = Numbering.of(trace, kind, chosen)
    pos, coefficient = _strongest(trace, numbering, best, summed)
    return RankedNeurons(
        kind=kind,
        ids=numbering.ids(best),
        scores=scores[best],
        coefficients=coefficient,
        method="query" if normalise else "query_unnormalised",
        n_evaluated=scores.numel(),
        n_neurons=scores.numel(),
        provenance=trace.provenance,
        columns={"pos": tuple(pos.tolist())},
    )


def weighted_keys(
    trace: "Trace", neurons: GivenNeurons, *, key: Key, normalise: bool, memory_budget: int
) -> list[WeightedKeys]:
    """``S_n k_n / total_n`` of every value neuron, grouped by the stream it reads."""
    score = _value_scores(trace, neurons, memory_budget)
    if not score:
        raise ValueError("no value neurons were given: pass a ranking such as value_neurons(trace, 'attn', k=30)")
    out: list[WeightedKeys] = []
    tiny: list[str] = []
    for group in keys_of(trace, tuple(score), key):
        weight = group.keys.new_tensor([score[neuron] for neuron in group.neurons])
        if normalise:
            total = group.keys @ group.stream
            small = total.abs() <= _TINY * group.keys.norm(dim=-1) * group.stream.norm()
            tiny += [str(group.neurons[i]) for i in small.nonzero().flatten().tolist()]
            weight = weight / total
        out.append(WeightedKeys(group, weight[:, None] * group.keys))
    if tiny:
        warnings.warn(
            f"the keys of {', '.join(tiny)} hardly meet the stream they read, so their query scores are ratios with "
            f"a tiny denominator and mean little: leave these neurons out, or use normalise=False",
            TinyDenominatorWarning,
            stacklevel=4,
        )
    return out


def _value_scores(trace: "Trace", neurons: GivenNeurons, memory_budget: int) -> dict[Neuron, float]:
    """Value scores in this trace: those of a ranking made from it, else computed."""
    if (
        isinstance(neurons, RankedNeurons)
        and neurons.method == VALUE_METHOD
        and neurons.provenance == trace.provenance
    ):
        return dict(zip(neurons.ids, neurons.scores.tolist(), strict=True))
    ids = tuple(dict.fromkeys(neurons_of(neurons)))
    return dict(zip(ids, scores_of(trace, ids, memory_budget=memory_budget).tolist(), strict=True))


class _SummedKeys:
    """``K[l, pos]``: weighted keys summed over value neurons that read ``pos`` after a sublayer has written."""

    def __init__(self, trace: "Trace", weighted: Sequence[WeightedKeys]) -> None:
        device = trace.view.W_U.device
        self._pos = torch.tensor(sorted({w.group.pos for w in weighted}))
        place = {pos: i for i, pos in enumerate(self._pos.tolist())}
        # First sublayer that a neuron cannot see, counted as attention, MLP, attention, MLP, ...
        end = [2 * w.group.layer + w.group.reads_attn for w in weighted]
        last = 2 * trace.view.n_layers
        sums = torch.zeros(
            last + 1, len(self._pos), trace.view.d_model, dtype=trace.view.compute_dtype, device=device
        )
        for w, first in zip(weighted, end, strict=True):
            sums[first, place[w.group.pos]] += w.weighted.sum(0).to(device)
        # seen[i]: keys whose stream holds what sublayer i wrote, i.e. those that end after it.
        self._seen = sums.flip(0).cumsum(0).flip(0)

    def after(self, kind: str, layer: int) -> tuple[Tensor, Float[Tensor, "pos d_model"]]:
        """Positions read, and the summed keys that see what this sublayer wrote there."""
        return self._pos, self._seen[2 * layer + (1 if kind == "attn" else 2)]

    def all(self) -> tuple[Tensor, Float[Tensor, "pos d_model"]]:
        """Positions read, and the summed keys of all value neurons."""
        return self._pos, self._seen[0]


def _along(rows: Float[Tensor, "pos d_model"] | None, pos: Tensor, K: Tensor) -> float:
    """What a part of the stream contributes: its rows at ``pos``, each along its key."""
    return 0.0 if rows is None else float((rows[pos.to(rows.device)].to(K) * K).sum())


def _layer_scores(trace: "Trace", kind: Kind, layer: int, summed: _SummedKeys) -> Float[Tensor, " neuron"]:
    """Query scores of all neurons of a layer in the order of their ids, on the CPU."""
    view = trace.view
    pos, K = summed.after(kind, layer)
    along = _along_rows(trace, kind, layer, pos, K)
    if kind == "mlp":
        post = trace.post[layer]
        if post is None:
            raise ValueError(view.mlp_refusal(layer) or f"layer {layer} has no MLP neurons")
        return (post[pos.to(post.device)].to(along) * along).sum(0).cpu()
    along = along.view(len(pos), view.n_heads, view.d_head).transpose(0, 1)
    factor = kept(trace, layer, pos)
    along = along if factor is None else along * factor.transpose(0, 1).to(along)
    pattern = trace.pattern[layer]
    moved = torch.einsum("hps,hpd->hds", pattern[:, pos.to(pattern.device)].to(along), along)
    return (moved * values(trace, layer).to(moved)).flatten().cpu()


def _along_rows(
    trace: "Trace", kind: Kind, layer: int, pos: Tensor, K: Tensor, row: Tensor | None = None
) -> Float[Tensor, "pos row"]:
    """``<P(w), K[pos]>`` for the rows of a layer (or some of them), ``P`` what becomes of its output behind it."""
    rows = directions(trace, kind, layer)
    chosen = rows if row is None else rows[row.to(rows.device)]
    read = added(trace, kind, layer, pos).adjoint(K)
    return read.to(rows.device) @ chosen.to(K.dtype).T


def _strongest(
    trace: "Trace", numbering: Numbering, best: Int[Tensor, " rank"], summed: _SummedKeys
) -> tuple[Int[Tensor, " rank"], Float[Tensor, " rank"]]:
    """Where query neurons contribute most (in size), and their coefficients there."""
    index, row, source = numbering.places(best)
    where, coefficient = torch.zeros_like(best), torch.zeros(len(best), dtype=trace.view.compute_dtype)
    for i in index.unique().tolist():
        mine, layer = index == i, numbering.layers[i]
        pos, K = summed.after(numbering.kind, layer)
        weight = coefficients_at(trace, numbering.kind, layer, row[mine], source[mine], pos)
        along = _along_rows(trace, numbering.kind, layer, pos, K, row[mine])
        strongest = (weight * along.to(weight.device)).abs().argmax(0)
        where[mine] = pos[strongest.cpu()]
        coefficient[mine] = weight.gather(0, strongest[None])[0].cpu()
    return where, coefficient


def _top(scores: Tensor, k: int) -> Tensor:
    """Places of the ``k`` highest scores, equal ones in order of place."""
    if k < len(scores):
        places = (scores >= scores.topk(k).values[-1]).nonzero().flatten()
    else:
        places = torch.arange(len(scores))
    return places[scores[places].sort(descending=True, stable=True).indices][:k]
