"""What a ranking is asked for: whose neurons, of which layers, how many; what every attribution method starts from.

A method answers in one of two ways. Where its scores have upper bounds that cost less than the scores themselves,
:meth:`Question.exact` searches best first (:mod:`tl_neuron_attr.search`) and scores few neurons; else
:meth:`Question.dense` scores every neuron, one layer at a time. Both give exactly the ``k`` best, ties by id.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.numbering import Numbering
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.search import Found, best_first, best_of
from tl_neuron_attr.writes import added, directions

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


@runtime_checkable
class Pool(Protocol):
    """Upper bounds of every neuron of a layer (by its index), and exact scores of a few, on the CPU."""

    def upper(self, index: int) -> Float[Tensor, " neuron"]: ...

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]: ...


@dataclass(frozen=True, eq=False)
class Question:
    """The ``k`` best neurons of ``layers`` (checked and sorted) of one trace; ``given`` is its readout if made."""

    trace: "Trace"
    kind: Kind
    layers: list[int]
    k: int
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    given: Readout | None = None

    @cached_property
    def readout(self) -> Readout:
        """The frozen readout of the trace."""
        return self.given or Readout.of(self.trace, memory_budget=self.memory_budget)

    @cached_property
    def numbering(self) -> Numbering:
        """Numbers of all neurons asked about."""
        return Numbering.of(self.trace, self.kind, self.layers)

    def exact(self, pool: Pool) -> Found:
        """The best of a pool, without scoring those that its bounds rule out."""
        return best_first(
            self.numbering.sizes,
            pool.upper,
            pool.score,
            self.k,
            at_once=self.readout.directions_at_once(),
            memory_budget=self.memory_budget,
        )

    def dense(self, scores: Callable[[int], Float[Tensor, "row source"]]) -> Found:
        """The best of all scores; ``scores(layer)`` gives those of one layer."""
        return best_of(self.numbering.sizes, lambda index: scores(self.layers[index]).flatten().cpu(), self.k)

    def vectors(self, layer: int) -> Iterator[Float[Tensor, "row d_model"]]:
        """What a coefficient of one of every row of a layer adds to the stream, in parts that fit the budget."""
        rows, behind = directions(self.trace, self.kind, layer), added(self.trace, self.kind, layer)
        dtype = self.trace.view.compute_dtype
        for part in rows.split(max(1, self.memory_budget // (16 * dtype.itemsize * rows.shape[1]))):
            yield behind.linear(part.to(dtype))


Find: TypeAlias = Callable[[Question], Found]
