"""The exact top neurons without scoring every neuron: best-first search under an upper bound.

Neurons are scored exactly in descending order of an upper bound of their score; when the ``k``-th best exact
score reaches the next bound, no neuron left can enter, and the result *is* the dense top ``k``. Equal scores are
ordered by number, which is the order of ids. Bounds carry a slack for rounding (:mod:`tl_neuron_attr.candidates`),
so rounding never drops a neuron.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The first round scores the k best bounds and a few more, mostly all that is needed whatever k is (on the embedded
# model 1 to 18 more): a round more costs another reading of the vocabulary. Then candidates are scored this many at a
# time, then twice as many, and so on: few at first, since the threshold rises most then, and many where bounds are
# loose: large products are efficient.
_CHUNK = 64
_BEYOND = 16
_SCAN_LIMIT = 8192
# Bounds whose maximum is taken before the highest are looked for.
_RUN = 64


@dataclass(frozen=True, eq=False)
class Found:
    """Numbers and exact scores of the best, best first, and how many were scored to be sure."""

    numbers: Int[Tensor, " rank"]
    scores: Float[Tensor, " rank"]
    n_evaluated: int


def best_first(
    sizes: Sequence[int],
    bound: Callable[[int], Tensor],
    score: Callable[[Tensor], Tensor],
    k: int,
    *,
    at_once: int,
    memory_budget: int,
) -> Found:
    """The ``k`` candidates with the highest ``score``, which gives exact ones (see :func:`searching`)."""
    search = searching(sizes, bound, k, at_once=at_once, memory_budget=memory_budget)
    numbers = next(search)
    while True:
        try:
            numbers = search.send(score(numbers))
        except StopIteration as stop:
            return stop.value


def searching(
    sizes: Sequence[int],
    bound: Callable[[int], Tensor],
    k: int,
    *,
    at_once: int,
    memory_budget: int,
) -> Generator[Tensor, Tensor, Found]:
    """Search for the best ``k``: yields numbers to score, at most ``at_once``, and takes their exact scores.

    ``sizes`` are the numbers of candidates of each group, counted through; ``bound(group)`` gives upper bounds of
    their scores, all on one device, which is asked for candidates once for each round. Numbers and scores are on the
    CPU. Bounds are kept where they fit a quarter of the budget, else computed anew.
    """
    kept = 4 * sum(sizes) <= memory_budget // 4
    pool = _Kept(sizes, bound) if kept else _Passing(sizes, bound)
    numbers, scores = torch.empty(0, dtype=torch.int64), torch.empty(0)
    first = k + _BEYOND
    n_evaluated, threshold, limit, chunk = 0, -torch.inf, first, _CHUNK
    while True:
        candidates, bounds = pool.best(threshold, limit)
        start = 0
        while start < len(candidates) and bounds[start] >= threshold:
            part = candidates[start : start + min(max(chunk, first - n_evaluated), at_once)]
            exact = yield part
            pool.remove(part)
            start += len(part)
            chunk *= 2 if n_evaluated >= first else 1
            n_evaluated += len(part)
            numbers, scores = _best(torch.cat([numbers, part]), torch.cat([scores.to(exact), exact]), k)
            threshold = float(scores[-1]) if len(scores) == k else -torch.inf
        if len(candidates) < limit:
            return Found(numbers, scores, n_evaluated)
        limit = _SCAN_LIMIT


def best_of(sizes: Sequence[int], scores: Callable[[int], Tensor], k: int) -> Found:
    """The ``k`` best where every score is computed anyway: ``scores(group)`` gives those of one group, on the CPU."""
    numbers, best, start = torch.empty(0, dtype=torch.int64), torch.empty(0), 0
    for group, size in enumerate(sizes):
        own = scores(group)
        candidates = torch.cat([numbers, torch.arange(start, start + size)])
        numbers, best = _best(candidates, torch.cat([best.to(own), own]), k)
        start += size
    return Found(numbers, best, start)


def best_given(numbers: Int[Tensor, " candidate"], scores: Float[Tensor, " candidate"], k: int) -> Found:
    """The ``k`` best of candidates that are all scored."""
    return Found(*_best(numbers, scores, k), len(numbers))


def _best(numbers: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    by_number = numbers.argsort()
    order = by_number[scores[by_number].argsort(descending=True, stable=True)][:k]
    return numbers[order], scores[order]


class _Kept:
    """Bounds of the candidates that are not scored yet, all held."""

    def __init__(self, sizes: Sequence[int], bound: Callable[[int], Tensor]) -> None:
        self._all = torch.cat([bound(group) for group in range(len(sizes))])

    def remove(self, numbers: Tensor) -> None:
        self._all[numbers.to(self._all.device)] = -torch.inf

    def best(self, threshold: float, limit: int) -> tuple[Int[Tensor, " candidate"], Float[Tensor, " candidate"]]:
        """The ``limit`` highest bounds that are at least ``threshold``, best first, on the CPU."""
        if threshold == -torch.inf:
            numbers = _top(self._all, limit)
        else:
            numbers = (self._all >= threshold).nonzero()[:, 0]
            numbers = numbers[_top(self._all[numbers], limit)]
        return _ordered(numbers.cpu(), self._all[numbers].cpu(), threshold)


class _Passing:
    """The same, each group's computed when they are looked through."""

    def __init__(self, sizes: Sequence[int], bound: Callable[[int], Tensor]) -> None:
        self._bound = bound
        self._starts = torch.tensor([0, *sizes]).cumsum(0)
        self._removed: list[list[Tensor]] = [[] for _ in sizes]

    def remove(self, numbers: Tensor) -> None:
        group = torch.searchsorted(self._starts, numbers, right=True) - 1
        for index in group.unique().tolist():
            self._removed[index].append(numbers[group == index] - self._starts[index])

    def best(self, threshold: float, limit: int) -> tuple[Int[Tensor, " candidate"], Float[Tensor, " candidate"]]:
        """The ``limit`` highest bounds that are at least ``threshold``, best first, on the CPU."""
        numbers, found = torch.empty(0, dtype=torch.int64), torch.empty(0)
        for group, start in enumerate(self._starts[:-1].tolist()):
            bounds = self._bound(group)
            for gone in self._removed[group]:
                bounds[gone.to(bounds.device)] = -torch.inf
            value, place = bounds.topk(min(limit, len(bounds)))
            numbers, found = (
                torch.cat([numbers, place.cpu() + start]),
                torch.cat([found.to(value.dtype), value.cpu()]),
            )
            if len(numbers) > limit:
                found, order = found.topk(limit)
                numbers = numbers[order]
        return _ordered(numbers, found, threshold)


def _top(values: Float[Tensor, " value"], count: int) -> Int[Tensor, " place"]:
    """Places of the ``count`` highest values: they are in the ``count`` runs with the highest maxima."""
    n_runs = len(values) // _RUN
    if n_runs <= 2 * count:
        return values.topk(min(count, len(values))).indices
    end = n_runs * _RUN
    runs = values[:end].view(n_runs, _RUN).amax(1).topk(count).indices
    inside = (runs[:, None] * _RUN + torch.arange(_RUN, device=values.device)).flatten()
    places = torch.cat([inside, torch.arange(end, len(values), device=values.device)])
    return places[values[places].topk(count).indices]


def _ordered(numbers: Tensor, bounds: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    kept = (bounds >= threshold) & (bounds > -torch.inf)
    numbers, bounds = numbers[kept], bounds[kept]
    order = bounds.argsort(descending=True, stable=True)
    return numbers[order], bounds[order]
