"""The best-first search against plain sorting, on numbers alone: many candidates, ties, any budget."""

import pytest
import torch

from tl_neuron_attr.search import best_first


@pytest.mark.parametrize("budget", [2**30, 2**12], ids=["kept", "passing"])
@pytest.mark.parametrize("n_values", [3, 50, 10**6], ids=["ties", "some ties", "no ties"])
@pytest.mark.parametrize("k", [1, 20, 100])
def test_finds_what_sorting_finds(k: int, n_values: int, budget: int) -> None:
    """Groups of unequal size; more candidates than one look takes; bounds that attain the scores and loose ones."""
    generator = torch.Generator().manual_seed(k + n_values)
    sizes = (30_011, 7, 20_000, 1)
    scores = torch.randint(n_values, (sum(sizes),), generator=generator).double() / n_values
    for looseness in (0.0, 1.0):
        bounds = scores + looseness * torch.rand(len(scores), generator=generator, dtype=torch.float64)
        groups = bounds.split(sizes)

        def bound(group: int, groups: tuple[torch.Tensor, ...] = groups) -> torch.Tensor:
            return groups[group].clone()

        found = best_first(sizes, bound, lambda n: scores[n], k, at_once=500, memory_budget=budget)
        order = scores.sort(descending=True, stable=True)
        assert torch.equal(found.numbers, order.indices[:k])
        assert torch.equal(found.scores, order.values[:k])
        assert k <= found.n_evaluated <= len(scores)
