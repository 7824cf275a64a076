"""Scores and bounds of vectors of any size, with and without a soft cap, against plain float64 log-probabilities."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import tl_neuron_attr as na
from tl_neuron_attr.bases import Bases
from tl_neuron_attr.capped import CappedBounds
from tl_neuron_attr.logits import Cap
from tl_neuron_attr.products import along
from tl_neuron_attr.readout import Readout
from tl_neuron_attr.scoring import changes
from tl_neuron_attr.spread import Spread, log_growth

CAPS = [None, 0.8, 30.0]
TARGETS = [42, na.Contrast(5, 60), na.AnyOf([4, 18, 71])]
SCALES = (1e-4, 1e-2, 0.3, 3.0, 40.0, 1e3)


@functools.cache
def readout(target: Any, cap: float | None, budget: int = 2**30) -> Readout:
    """The readout of a random model, its cap exchanged."""
    trace = na.trace(zoo.case("gpt2", zoo.BACKENDS[0], torch.float64).model, [5, 17, 42, 8], target)
    found = Readout.of(trace, memory_budget=budget)
    return dataclasses.replace(found, cap=None if cap is None else Cap(cap))


@functools.cache
def vectors(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bases, directions and the coefficients of each."""
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(2, width, generator=generator, dtype=torch.float64) * 3
    rows = torch.randn(40, width, generator=generator, dtype=torch.float64)
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    scale = torch.tensor(SCALES, dtype=torch.float64)
    return bases, rows, torch.outer(signs, scale).flatten().expand(len(rows), -1)


def truth(found: Readout, base: torch.Tensor, rows: torch.Tensor, coefficient: torch.Tensor) -> np.ndarray:
    """T(base + a w) - T(base), by the log-probabilities themselves."""
    moved = (base + coefficient[..., None] * rows[:, None]).flatten(0, 1)

    def value(x: torch.Tensor) -> torch.Tensor:
        log_p = found.logits(x).log_softmax(-1)
        t = found.target
        against = log_p[:, list(t.negative)].logsumexp(-1) if t.negative else 0
        return log_p[:, list(t.positive)].logsumexp(-1) - against

    return (value(moved) - value(base[None])).view_as(coefficient).numpy()


@pytest.mark.parametrize("budget", [2**30, 2**20])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("cap", CAPS)
def test_scores(cap: float | None, target: Any, budget: int) -> None:
    found = readout(target, cap, budget)
    x, rows, coefficient = vectors(found.W_U.shape[0])
    bases = Bases.of(found, x)
    for index in range(len(x)):
        place = torch.arange(len(rows)).repeat_interleave(coefficient.shape[1])
        of = torch.full((len(rows),), index)
        scores = changes(bases, of, found.direction(rows), place, coefficient.reshape(-1)).view_as(coefficient)
        expected = truth(found, x[index], rows, coefficient)
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("cap", CAPS)
def test_bounds(cap: float | None, target: Any) -> None:
    found = readout(target, cap)
    x, rows, coefficient = vectors(found.W_U.shape[0])
    bases = Bases.of(found, x)
    spread, directions = Spread(bases), found.direction(rows)
    for index in range(len(x)):
        expected = truth(found, x[index], rows, coefficient)
        if found.cap is not None:
            bounds = CappedBounds(bases, spread, found.cap, index, directions, coefficient)
            upper, lower = bounds.upper().numpy(), bounds.lower().numpy()
        else:
            options = (coefficient[..., None] * along(directions, bases.g[index])[:, None]).numpy()
            loss = 0 if target == TARGETS[1] else spread.loss(index, directions, coefficient).numpy()
            upper, lower = options.max(-1), options.min(-1) - loss
        rounding = 1e-9 * np.abs(coefficient.numpy()) + 1e-9
        assert (upper + rounding >= expected).all()
        assert (lower - rounding <= expected).all()
        # Small vectors: bounds that are worth something.
        small = np.abs(coefficient.numpy()) <= 1e-2
        assert np.abs(upper - lower)[small].max() < (0.2 if target == TARGETS[2] else 0.02)


def test_small_scores_keep_their_digits_in_float32() -> None:
    """A score of 1e-6 nats is right to four digits, behind a cap too, where plain log-probabilities are not."""
    for cap in CAPS:
        found = readout(42, cap)
        x, rows, _ = vectors(found.W_U.shape[0])
        coefficient = torch.full((len(rows), 1), 1e-6, dtype=torch.float64)
        # As a derivative, which is exact to 1e-6 of itself for a vector this small.
        leaf = x[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(found.logits(leaf[None]).log_softmax(-1)[0, 42], leaf)
        expected = (rows @ slope) * 1e-6
        single = dataclasses.replace(
            found, W_U=found.W_U.float(), scale=found.scale.float(), constant=found.constant.float()
        )
        bases = Bases.of(single, x[:1].float())
        of = torch.zeros(len(rows), dtype=torch.int64)
        scores = changes(bases, of, single.direction(rows), torch.arange(len(rows)), coefficient[:, 0].float())
        assert (scores.double() - expected).abs().max() < 1e-4 * expected.abs().max()


def test_growth_of_large_vectors() -> None:
    """log(1 + s phi(h)) where phi overflows a float, against its logarithm in extended range."""
    for square in (1e-12, 1e-6, 1.0, 1e3):
        for h in (0.05, 1.0, 29.9, 30.1, 60.0, 500.0, 5000.0):
            exact = h - 2 * np.log(h) + np.log(square) if h > 600 else np.log(square * (np.expm1(h) - h) / h**2)
            bound = log_growth(*torch.tensor([square, h], dtype=torch.float64)).item()
            assert bound >= np.logaddexp(0, exact) - 1e-9
            assert bound <= np.logaddexp(0, exact) * 1.1 + 1e-9


def test_the_cap_and_its_curvature() -> None:
    """Slope and change against differences; the curvature bound holds everywhere and is attained."""
    for c in (0.5, 30.0):
        cap, z = Cap(c), torch.linspace(-6 * c, 6 * c, 2001, dtype=torch.float64)
        leaf = z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cap(leaf).sum(), leaf)
        torch.testing.assert_close(cap.slope(z), slope, atol=1e-12, rtol=1e-12)
        worst = 0.0
        for d in (-5 * c, -0.3 * c, 1e-3 * c, 0.7 * c):
            change = cap.change(z, torch.tensor(d, dtype=torch.float64))
            torch.testing.assert_close(change, cap(z + d) - cap(z), atol=1e-12 * c, rtol=1e-12)
            off = (change - slope * d).abs().max().item() / (cap.curvature / 2 * d * d)
            assert off <= 1 + 1e-6
            worst = max(worst, off)
        assert worst > 0.99


def test_lower_bound_where_every_logit_bends_up() -> None:
    """All tokens but the target at the cap's largest curvature: an expectation without it would be too small."""
    found = readout(42, 0.5)
    width = found.W_U.shape[0]
    unit = torch.zeros(width, dtype=torch.float64)
    unit[0], unit[1] = 1.0, -1.0
    columns = torch.stack([unit * 0.0 if token == 42 else unit for token in range(96)], -1)
    plain = dataclasses.replace(found.norm, gain=None, bias=None)
    found = dataclasses.replace(found, W_U=columns, constant=None, norm=plain, scale=torch.ones_like(found.scale))
    x = unit[None] * (-0.5 * np.arctanh(3**-0.5) / 2)  # tanh(z / c)^2 = 1 / 3
    bases = Bases.of(found, x)
    coefficient = torch.tensor([[0.05, 0.1]], dtype=torch.float64)
    bounds = CappedBounds(bases, Spread(bases), Cap(0.5), 0, found.direction(unit[None]), coefficient)
    expected = truth(found, x[0], unit[None], coefficient)
    assert (bounds.lower().numpy() <= expected).all()
    assert (bounds.upper().numpy() >= expected).all()
