"""Scores with the names they belong to and where they came from.

Every result is a frozen record on the CPU without a graph, so it can be kept, pickled, sent to another
process and plotted without the model. Scores are in nats, coefficients in the model's own activation units.

=================  =====================================================  ====================================
result             scores                                                 frame
=================  =====================================================  ====================================
``LayerScores``    ``attn``, ``mlp``: ``[layer]``                         layer, attn, mlp
``HeadScores``     ``[layer, head]``                                      layer, head, score
``NeuronScores``   ``[layer, neuron]`` or ``[layer, source, head, dim]``  columns of a ranking, ordered by id
``RankedNeurons``  ``[rank]``                                             see :mod:`tl_neuron_attr.ranking`
=================  =====================================================  ====================================
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.neurons import ID_COLUMNS, AttnNeuron, Head, Kind, Layer, MLPNeuron, check_count, check_kind
from tl_neuron_attr.ranking import (
    Provenance,
    RankedNeurons,
    check_no_nan,
    floats,
    integers,
    kept,
)
from tl_neuron_attr.serialise import SchemaError

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["HeadScores", "LayerScores", "NeuronScores", "Provenance", "RankedNeurons", "SchemaError"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerScores:
    """Score of every attention and MLP sublayer, and of the embedding where it has one, in nats."""

    attn: Float[Tensor, " layer"]
    mlp: Float[Tensor, " layer"]
    provenance: Provenance
    embed: float | None = None

    def __post_init__(self) -> None:
        if self.attn.ndim != 1 or self.attn.shape != self.mlp.shape:
            raise ValueError(
                f"attn has shape {tuple(self.attn.shape)}, mlp {tuple(self.mlp.shape)}: both must be [layer]"
            )
        object.__setattr__(self, "attn", kept(self.attn))
        object.__setattr__(self, "mlp", kept(self.mlp))

    def to_frame(self) -> "pandas.DataFrame":
        """Frame with the columns layer, attn, mlp; ``embed`` stays an attribute."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        layers = list(range(len(self.attn)))
        return pandas.DataFrame({"layer": layers, "attn": floats(self.attn), "mlp": floats(self.mlp)})

    def top(self, n: int) -> list[tuple[Layer, float]]:
        """The ``n`` highest-scoring sublayers (all where there are fewer); ``n < 1`` is a ValueError."""
        pairs = [(Layer(i, "attn"), score) for i, score in enumerate(floats(self.attn))]
        pairs += [(Layer(i, "mlp"), score) for i, score in enumerate(floats(self.mlp))]
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: check_count("n", n)]

    def __repr__(self) -> str:
        best = ", ".join(f"{layer} {score:.4f}" for layer, score in self.top(3))
        return f"LayerScores({len(self.attn)} layers, target {self.provenance.target}, strongest: {best})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HeadScores:
    """Score of every query head in nats."""

    scores: Float[Tensor, "layer head"]
    provenance: Provenance

    def __post_init__(self) -> None:
        if self.scores.ndim != 2:
            raise ValueError(f"scores has shape {tuple(self.scores.shape)}: it must be [layer, head]")
        object.__setattr__(self, "scores", kept(self.scores))

    def to_frame(self) -> "pandas.DataFrame":
        """Frame with the columns layer, head, score, highest score first."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        ranked = self.top(max(self.scores.numel(), 1))
        rows = [(head.layer, head.head, score) for head, score in ranked]
        return pandas.DataFrame(rows, columns=pandas.Index(["layer", "head", "score"]))

    def top(self, n: int) -> list[tuple[Head, float]]:
        """The ``n`` highest-scoring heads (all where there are fewer); ``n < 1`` is a ValueError."""
        pairs = [(Head(i, j), s) for i, row in enumerate(self.scores) for j, s in enumerate(floats(row))]
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: check_count("n", n)]

    def __repr__(self) -> str:
        n_layers, n_heads = self.scores.shape
        best = ", ".join(f"{head} {score:.4f}" for head, score in self.top(3))
        target = self.provenance.target
        return f"HeadScores({n_layers} layers x {n_heads} heads, target {target}, strongest: {best})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NeuronScores:
    """Dense scores (nats) and coefficients of all neurons of the given layers.

    Both tensors are ``[layer, neuron]`` for ``"mlp"`` and ``[layer, source, head, dim]`` for ``"attn"``; row
    ``i`` belongs to layer ``layers[i]``.
    """

    kind: Kind
    scores: Float[Tensor, " layer *unit"]
    coefficients: Float[Tensor, " layer *unit"]
    layers: tuple[int, ...]
    n_evaluated: int
    provenance: Provenance
    method: str = "log_prob_increase"

    def __post_init__(self) -> None:
        shape = "[layer, neuron]" if check_kind(self.kind) == "mlp" else "[layer, source, head, dim]"
        layers = tuple(self.layers)
        if self.scores.shape != self.coefficients.shape or self.scores.ndim != shape.count(",") + 1:
            raise ValueError(
                f"scores of shape {tuple(self.scores.shape)} and coefficients of shape "
                f"{tuple(self.coefficients.shape)}: for {self.kind} neurons both must be {shape}"
            )
        if len(layers) != len(self.scores) or len(set(layers)) != len(layers):
            raise ValueError(
                f"layers {layers} for {len(self.scores)} rows of scores: each row needs a label of its own"
            )
        if self.kind == "attn" and self.scores.shape[1] > len(self.provenance.tokens):
            raise ValueError(f"{self.scores.shape[1]} sources in a prompt of {len(self.provenance.tokens)} tokens")
        check_no_nan("scores", self.scores)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "scores", kept(self.scores))
        object.__setattr__(self, "coefficients", kept(self.coefficients))

    def _by_id(self) -> tuple[Tensor, Tensor, tuple[tuple[int, ...], ...]]:
        """Flat scores and coefficients in the order of ids, and for each axis of an id its labels."""
        order = sorted(range(len(self.layers)), key=self.layers.__getitem__)
        axes = (0, 1) if self.kind == "mlp" else (0, 2, 3, 1)
        scores, coefficients = (
            t.permute(axes)[torch.tensor(order, dtype=torch.long)] for t in (self.scores, self.coefficients)
        )
        labels = (tuple(self.layers[i] for i in order), *(tuple(range(n)) for n in scores.shape[1:]))
        return scores.reshape(-1), coefficients.reshape(-1), labels

    def top(self, k: int) -> RankedNeurons:
        """The ``k`` best neurons (all where there are fewer), equal scores by id. ``k < 1``: ValueError."""
        check_count("k", k)
        scores, coefficients, labels = self._by_id()
        rows = torch.arange(len(scores))
        if k < len(scores):
            rows = torch.nonzero(scores >= torch.topk(scores, k).values[-1]).flatten()
        rows = rows[torch.sort(scores[rows], descending=True, stable=True).indices][:k]
        places = list(torch.unravel_index(rows, [len(axis) for axis in labels]))
        places[0] = torch.tensor(labels[0])[places[0]]
        make = MLPNeuron if self.kind == "mlp" else AttnNeuron
        return RankedNeurons(
            kind=self.kind,
            ids=tuple(make(*place) for place in zip(*map(integers, places), strict=True)),
            scores=scores[rows],
            coefficients=coefficients[rows],
            method=self.method,
            n_evaluated=self.n_evaluated,
            n_neurons=len(scores),
            provenance=self.provenance,
        )

    def to_frame(self) -> "pandas.DataFrame":
        """Frame of every neuron in the order of ids, with the columns of :mod:`tl_neuron_attr.ranking`."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        scores, coefficients, labels = self._by_id()
        index = pandas.MultiIndex.from_product(labels, names=ID_COLUMNS[self.kind])
        frame = pandas.DataFrame(
            {"score": scores.double().numpy(), "coefficient": coefficients.double().numpy()}, index=index
        )
        frame = frame.reset_index()
        if self.kind == "attn":
            tokens = self.provenance.str_tokens
            frame["source_token"] = [tokens[source] for source in labels[3]] * (len(frame) // len(labels[3]))
        return frame

    def __repr__(self) -> str:
        return (
            f"NeuronScores({self.scores.numel():,} {self.kind} neurons of {len(self.layers)} layers, "
            f"target {self.provenance.target}, {self.n_evaluated:,} evaluated; .top(k) ranks them)"
        )
