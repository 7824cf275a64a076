"""Prediction equals intervention: a score is what the model's own log-probability does.

The model runs with its later blocks cut out: a hook on the last `hook_resid_post` sets the residual stream at the
predicting position to the base, then to the base plus the vector; a hook on `ln_final.hook_scale` keeps the scale of
the undisturbed run. Everything comes from the model (its cache, weights, hooks); the package gives the score only.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from model_run import Run

import tl_neuron_attr as na

QUESTIONS = [(None, -1), (na.Contrast(5, 60), 3), (na.AnyOf([4, 18, 71]), 4)]


def of(target: Any, log_p: torch.Tensor) -> float:
    if isinstance(target, na.Contrast):
        return (log_p[target.positive] - log_p[target.negative]).item()
    if isinstance(target, na.AnyOf):
        return log_p[list(target.tokens)].logsumexp(0).item()
    return log_p[target].item()


@pytest.fixture(params=QUESTIONS, ids=str)
def asked(request: pytest.FixtureRequest, case: zoo.ZooCase) -> tuple[Run, Any, Callable[..., None]]:
    """The run, the trace, and a check that adding a vector at a base changes the target by a score."""
    target, position = request.param
    run = Run(case, position)
    trace = na.trace(case.model, list(case.tokens), target, position=position)
    resolved = run.logits[0, run.position].argmax().item() if target is None else target

    def check(score: torch.Tensor, base: torch.Tensor, vector: torch.Tensor) -> None:
        effect = of(resolved, run.with_stream(base + vector)) - of(resolved, run.with_stream(base))
        assert score.item() == pytest.approx(effect, abs=1e-4)

    return run, trace, check


def test_freezing_alone_changes_nothing(case: zoo.ZooCase) -> None:
    run = Run(case, 3)
    own = run.with_stream(run.at(run.last, "hook_resid_post")[3])
    assert (own - run.logits[0, 3].log_softmax(-1)).abs().max() < 1e-5


def test_layers_and_heads(asked: tuple[Run, Any, Callable[..., None]]) -> None:
    run, trace, check = asked
    layers, heads = na.layer_scores(trace), na.head_scores(trace).scores
    for layer in range(run.last + 1):
        check(layers.attn[layer], run.before_attn(layer), run.at(layer, "hook_attn_out")[run.position])
        check(layers.mlp[layer], run.before_mlp(layer), run.at(layer, "hook_mlp_out")[run.position])
        head = layer % heads.shape[1]
        dims, sources = run.model.W_O.shape[2], range(run.position + 1)
        vector = sum(run.attn_vector(layer, head, dim, s) for dim in range(dims) for s in sources)
        check(heads[layer, head], run.before_attn(layer), vector)


def test_mlp_neurons(asked: tuple[Run, Any, Callable[..., None]]) -> None:
    run, trace, check = asked
    ranked = na.value_neurons(trace, "mlp", k=10**6)
    for rank in (0, 1, 2, 5, 20, -2, -1):  # the best and the worst
        neuron = ranked.ids[rank]
        base = run.before_mlp(neuron.layer)
        check(ranked.scores[rank], base, run.mlp_vector(neuron.layer, neuron.neuron))


def test_attn_neurons(asked: tuple[Run, Any, Callable[..., None]]) -> None:
    run, trace, check = asked
    ranked = na.value_neurons(trace, "attn", k=10**6)
    for rank in (0, 1, 2, 5, 20, -2, -1):
        n = ranked.ids[rank]
        check(ranked.scores[rank], run.before_attn(n.layer), run.attn_vector(n.layer, n.head, n.dim, n.source))
