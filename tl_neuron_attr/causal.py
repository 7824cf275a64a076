"""What each candidate alone is really worth: zero it, run the model again, everything after it computed anew.

    ``score = T(untouched) - T(neuron zeroed)``

the fall of the target (nats), so a high score means important. Candidates are many rows of one batch
(:mod:`tl_neuron_attr.variants`), and each score is what ``ablation_effect`` gives for that neuron alone. Attention
neurons that differ in their source only are one entry of ``hook_z``: they are zeroed together and share a score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from tl_neuron_attr import static
from tl_neuron_attr.modes import Zero
from tl_neuron_attr.neurons import AttnNeuron, Neuron, kind_of
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import RankedNeurons, check_count
from tl_neuron_attr.search import Found, best_given
from tl_neuron_attr.selection import select
from tl_neuron_attr.variants import run_variants

Where: TypeAlias = Literal["all", "predicting"]


@dataclass(frozen=True)
class Causal:
    """The exact fall of the target when each candidate alone is zeroed.

    Args:
        candidates: how many neurons to try, the best by ``log_prob_increase``, or the neurons themselves; no other
            neuron can be in the ranking.
        positions: ``"all"`` zeroes at every position, as if the output row were zero (the paper's intervention);
            ``"predicting"`` at the predicting position only.

    Raises :class:`ValueError` for no candidates or another choice of positions, and when ranking for a candidate
    that the model lacks, of another kind or of a layer left out.
    """

    candidates: int | RankedNeurons | Sequence[Neuron] = 300
    positions: Where = "all"
    name: ClassVar[str] = "causal"

    def __post_init__(self) -> None:
        if self.positions not in get_args(Where):
            raise ValueError(f'unknown positions {self.positions!r}: choose "all" or "predicting"')
        if isinstance(self.candidates, int):
            check_count("candidates", self.candidates)
            return
        object.__setattr__(self, "candidates", tuple(dict.fromkeys(self.candidates)))
        if not self.candidates:
            raise ValueError("candidates=[] names no neuron: give how many to try, or at least one neuron")

    def find(self, question: Question) -> Found:
        """The best of the candidates."""
        trace, numbers = question.trace, self._numbers(question)
        at = None if self.positions == "all" else (trace.position,)
        units = [_unit(neuron) for neuron in question.numbering.ids(numbers)]
        distinct = list(dict.fromkeys(units))
        selections = [select(trace.view, [(neuron, None)]) for neuron in distinct]
        after = run_variants(trace, selections, Zero(), at, question.memory_budget, lambda _: None)
        fall = dict(zip(distinct, Outcomes.before([trace]).log_prob - after.log_prob, strict=True))
        scores = torch.stack([fall[unit] for unit in units])
        return best_given(numbers, scores, question.k)

    def _numbers(self, question: Question) -> torch.Tensor:
        if isinstance(self.candidates, int):
            wider = Question(question.trace, question.kind, question.layers, self.candidates, question.memory_budget)
            return static.log_prob_increase(wider).numbers
        for neuron in self.candidates:
            if kind_of(neuron) != question.kind or neuron.layer not in question.layers:
                raise ValueError(
                    f"candidate {neuron} is not among the {question.kind} neurons of layers {question.layers}: give "
                    f"candidates of that kind and those layers"
                )
        return question.numbering.numbers(question.trace, list(self.candidates))


def _unit(neuron: Neuron) -> Neuron:
    """What is zeroed: an attention neuron whatever its source."""
    return AttnNeuron(neuron.layer, neuron.head, neuron.dim, 0) if isinstance(neuron, AttnNeuron) else neuron
