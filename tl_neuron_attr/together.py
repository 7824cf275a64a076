"""The exact top neurons of many prompts, which share what does not depend on the prompt.

Each ranking is a search of its own (:mod:`tl_neuron_attr.search`), and the searches go in step: the bases of all
prompts, layers and kinds are read out by one product with the vocabulary, the bounds of a layer by one product with
its rows, and what the searches want scored next is scored together, each direction multiplied with the vocabulary
once (:mod:`tl_neuron_attr.joint`). One prompt is the case of one search. Prompts of one type share more than half of
their top neurons' directions; how many prompts go together is limited by what their bases' probabilities take,
half of the memory budget.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.bases import Bases, Reading
from tl_neuron_attr.candidates import Candidates, base_vectors, coefficients_of
from tl_neuron_attr.joint import along_rows, score_together
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.numbering import chosen_layers
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.results import RankedNeurons
from tl_neuron_attr.search import Found, searching

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

VALUE_METHOD = "log_prob_increase"


@without_autocast
def value_neurons_of(
    traces: "Sequence[Trace]",
    kinds: Kind | Sequence[Kind],
    k: int = 100,
    *,
    layers: Sequence[int] | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> list[RankedNeurons]:
    """:func:`value_neurons` of each trace, for each of ``kinds`` in turn, computed together.

    Ids, order and scores are those of each trace alone. Raises what :func:`value_neurons` raises.

    Example:
        >>> import tl_neuron_attr as na
        >>> from tl_neuron_attr.together import value_neurons_of
        >>> model = na.load_demo_model()
        >>> traces = [na.trace(model, f"The capital of {name} is") for name in ("France", "Italy")]
        >>> [str(ranked[0]) for ranked in value_neurons_of(traces, ["mlp", "attn"], k=5)]
        ['L27N846', 'L29H1D46@4', 'L29N1285', 'L29H1D28@4']
    """
    chosen: list[Kind] = [check_kind(kinds)] if isinstance(kinds, str) else [check_kind(kind) for kind in kinds]
    count = check_count("k", k)
    readouts = Readout.of_each(traces, memory_budget=memory_budget)
    questions = [
        Question(trace, kind, chosen_layers(trace, kind, layers), count, memory_budget, readout)
        for trace, readout in zip(traces, readouts, strict=True)
        for kind in chosen
    ]
    found = found_together(questions)
    return [ranking(question, one, VALUE_METHOD) for question, one in zip(questions, found, strict=True)]


def ranking(question: Question, found: Found, method: str) -> RankedNeurons:
    """The answer to a question with its neurons' names and coefficients."""
    return RankedNeurons(
        kind=question.kind,
        ids=question.numbering.ids(found.numbers),
        scores=found.scores,
        coefficients=coefficients_of(question.trace, question.numbering, found.numbers),
        method=method,
        n_evaluated=found.n_evaluated,
        n_neurons=sum(question.numbering.sizes),
        provenance=question.trace.provenance,
    )


def found_together(questions: Sequence[Question]) -> list[Found]:
    """The best by log-probability increase, for each question."""
    found: dict[int, Found] = {}
    for group in groups([[question] for question in questions]):
        asked = [questions[i] for i in group]
        vectors = [base_vectors(q.trace, q.readout, q.kind, q.layers) for q in asked]
        found.update(zip(group, found_at(asked, Bases.of_each([q.readout for q in asked], vectors)), strict=True))
    return [found[i] for i in range(len(questions))]


def found_at(questions: Sequence[Question], bases: Sequence[Bases]) -> list[Found]:
    """Answers to questions whose bases, of one reading, fit the budget together."""
    pools = _pools(questions, bases)
    budget = questions[0].memory_budget // len(questions)
    searches = [_search(question, pool, budget) for question, pool in zip(questions, pools, strict=True)]
    wanted = {i: next(search) for i, search in enumerate(searches)}
    found: dict[int, Found] = {}
    while wanted:
        scores = score_together([(pools[i], numbers) for i, numbers in wanted.items()])
        asked, wanted = list(wanted), {}
        for i, exact in zip(asked, scores, strict=True):
            try:
                wanted[i] = searches[i].send(exact)
            except StopIteration as stop:
                found[i] = stop.value
    return [found[i] for i in range(len(questions))]


def _search(question: Question, pool: Candidates, budget: int) -> Generator[Tensor, Tensor, Found]:
    at_once = question.readout.directions_at_once()
    return searching(question.numbering.sizes, pool.bound, question.k, at_once=at_once, memory_budget=budget)


def _pools(questions: Sequence[Question], bases: Sequence[Bases]) -> list[Candidates]:
    pools = [Candidates(q.trace, q.readout, q.kind, q.layers, own) for q, own in zip(questions, bases, strict=True)]
    if len(pools) > 1 and pools[0].readout.cap is None:
        for alike in _alike(pools):
            _read_together(alike)
    return pools


def _alike(pools: Sequence[Candidates]) -> Iterator[list[Candidates]]:
    """Pools of one kind and the same layers."""
    groups: dict[tuple[str, tuple[int, ...]], list[Candidates]] = {}
    for pool in pools:
        groups.setdefault((pool.kind, tuple(pool.layers)), []).append(pool)
    yield from groups.values()


def _read_together(pools: Sequence[Candidates]) -> None:
    """Read the rows of each layer once for all pools, as far as the products fit; the rest is read alone."""
    rows = sum(pools[0].numbering.sizes) // pools[0].numbering.n_sources
    options = sum(pool.bases.g.shape[1] for pool in pools)
    if rows * (options + 1) * pools[0].readout.itemsize > pools[0].readout.memory_budget // 8:
        return
    for index in range(len(pools[0].layers)):
        read = along_rows(pools[0], index, [pool.reads(index) for pool in pools])
        for pool, own in zip(pools, read, strict=True):
            pool.given(index, own)


def groups(items: Sequence[Sequence[Question]]) -> Iterator[list[int]]:
    """Places of items that share a model and convention, as many at a time as fit the budget.

    An item is one trace's questions, which are answered in the same group.
    """
    alike: dict[tuple[int, str], list[int]] = {}
    for i, (first, *_) in enumerate(items):
        alike.setdefault((id(first.trace.model), first.trace.convention), []).append(i)
    for places in alike.values():
        budget = items[places[0]][0].memory_budget
        taken = [0, *_cuts([sum(map(_bytes, items[i])) for i in places], budget // 2)]
        yield from (places[start:end] for start, end in pairwise(taken))


def _bytes(question: Question) -> int:
    """What a question holds while it is answered: its bases' probabilities and its neurons' bounds."""
    kept = Reading.kept_bytes(question.readout, len(question.layers))
    return kept + 2 * question.readout.itemsize * sum(question.numbering.sizes)


def _cuts(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Ends of runs whose sizes sum to at most ``limit``, or of single ones."""
    total = 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            yield i
            total = 0
        total += size
    yield len(sizes)
