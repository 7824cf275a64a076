"""Layers, heads and the exact top neurons of prompts, from one reading of their bases.

Everything here is scored at the same vectors: with ``h_l`` the stream before block ``l`` and ``A_l`` what its
attention adds, heads and attention neurons at ``h_l``, MLP neurons at ``h_l + A_l``, and layer scores are differences
of ``T`` between consecutive ones of ``h_0, h_0 + A_0, h_1, ..., h_L`` (:mod:`tl_neuron_attr.value`). So one product
with the vocabulary reads all of them, for as many prompts as fit half of the memory budget, and the heads of
those prompts are scored by one more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.bases import Bases
from tl_neuron_attr.candidates import base_vectors
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.results import HeadScores, LayerScores, RankedNeurons
from tl_neuron_attr.together import VALUE_METHOD, found_at, groups, ranking
from tl_neuron_attr.value import heads_at, layers_along
from tl_neuron_attr.writes import stream_before

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """What :func:`overviews` finds of one trace."""

    layers: LayerScores
    heads: HeadScores
    mlp: RankedNeurons
    attn: RankedNeurons


@without_autocast
def overviews(traces: "Sequence[Trace]", k: int, *, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> list[Overview]:
    """:func:`layer_scores`, :func:`head_scores` and the top ``k`` value neurons of both kinds, of each trace.

    Numbers are those of each function for each trace alone. Raises what :func:`value_neurons` raises.

    Example:
        >>> import tl_neuron_attr as na
        >>> from tl_neuron_attr.overview import overviews
        >>> model = na.load_demo_model()
        >>> [found] = overviews([na.trace(model, "The capital of France is", " Paris")], k=5)
        >>> str(found.mlp[0]), int(found.layers.attn.argmax())
        ('L27N846', 23)
    """
    count = check_count("k", k)
    readouts = Readout.of_each(traces, memory_budget=memory_budget)
    asked = [_Asked(trace, readout, count) for trace, readout in zip(traces, readouts, strict=True)]
    found: dict[int, Overview] = {}
    for group in groups([(own.attn, own.mlp) for own in asked]):
        found.update(zip(group, _of_group([asked[i] for i in group]), strict=True))
    return [found[i] for i in range(len(asked))]


class _Asked:
    """What is asked of one trace; both questions have one readout and all layers."""

    def __init__(self, trace: "Trace", readout: Readout, k: int) -> None:
        self.trace, self.readout = trace, readout
        self.attn, self.mlp = (
            Question(trace, kind, chosen_layers(trace, kind, None), k, readout.memory_budget, readout)
            for kind in ("attn", "mlp")
        )

    def vectors(self) -> list[Float[Tensor, "_ d_model"]]:
        """The bases of attention, those of the MLPs, and the stream after the last block."""
        both = [base_vectors(self.trace, self.readout, q.kind, q.layers) for q in (self.attn, self.mlp)]
        return [*both, stream_before(self.trace, self.trace.view.n_layers)[None].to(both[0].device)]

    def layers(self, attn: Bases, mlp: Bases, final: Bases) -> LayerScores:
        """From what :meth:`vectors` were read out as."""
        return layers_along(self.trace, torch.cat([torch.stack([attn.value, mlp.value], 1).flatten(), final.value]))


def _of_group(asked: Sequence[_Asked]) -> list[Overview]:
    """Those of traces whose bases fit the budget together."""
    read = Bases.of_each(
        [own.readout for own in asked for _ in range(3)], [v for own in asked for v in own.vectors()]
    )
    bases = [(read[i], read[i + 1], read[i + 2]) for i in range(0, len(read), 3)]
    questions = [question for own in asked for question in (own.mlp, own.attn)]
    of_each = [one for attn, mlp, _ in bases for one in (mlp, attn)]
    ranked = [ranking(q, one, VALUE_METHOD) for q, one in zip(questions, found_at(questions, of_each), strict=True)]
    heads = heads_at([own.trace for own in asked], [attn for attn, _, _ in bases])
    return [
        Overview(own.layers(*bases[i]), heads[i], mlp=ranked[2 * i], attn=ranked[2 * i + 1])
        for i, own in enumerate(asked)
    ]
