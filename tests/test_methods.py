"""Every attribution method against plain float64 loops, captum and the model itself, behind every backend."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
import zoo
from guards import as_users_run_it, unchanged, warm
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_forward import record
from reference_methods import MethodLoop, Model
from test_against_loop import QUESTIONS, recording, trace_of
from test_topk import D_VOCAB, ROUNDING, key, targets, wide

import tl_neuron_attr as na

STATIC = (*na.STATIC_METHODS, "direct_logit")
CAPTUM = 1e-7  # it keeps the weights of its quadrature in float32
NO_CONTRAST = ("prob_increase", "inverse_rank", "coefficient_inverse_rank")
# Behind a soft cap, and behind a norm after each sublayer.
MORE = tuple(case for case in zoo.FAMILY_CASES if case[0] in ("gemma2", "olmo2", "granite"))
CASES = (*zoo.CASES, *MORE)
FEW = tuple((name, backend) for name, backend in CASES if name in ("gpt2", "llama_gqa", "pythia", "gemma2", "olmo2"))


@functools.cache
def loop(name: str, question: str, processed: bool) -> MethodLoop:
    target, position, convention = QUESTIONS[question]
    return MethodLoop(recording(name), target, processed=processed, position=position, convention=convention)


@functools.cache
def expected(name: str, question: str, processed: bool, kind: str, method: str) -> dict[tuple[int, ...], float]:
    reference = loop(name, question, processed)
    return {i: reference.score(method, i) for i in reference.ids(kind)}


def float64(name: str, backend: str) -> zoo.ZooCase:
    return zoo.case(name, backend, torch.float64)


def scores(ranked: Any) -> dict[tuple[int, ...], float]:
    return {key(neuron): score for neuron, score in zip(ranked.ids, ranked.scores.tolist(), strict=True)}


def check(ranked: Any, dense: dict[tuple[int, ...], float], k: int, tolerance: float) -> None:
    """The best `k` of the dense scores: by rank, by identity, and equal ones by id."""
    best = sorted(dense.values(), reverse=True)[:k]
    assert len(ranked) == len(set(ranked.ids)) == len(best)
    assert ranked.scores.tolist() == pytest.approx(best, abs=tolerance)
    found = scores(ranked)
    for i, score in found.items():
        assert score == pytest.approx(dense[i], abs=tolerance)
    order = [(-score, i) for i, score in found.items()]
    assert order == sorted(order)


# Static methods


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("question", ["top-exact", "token-paper", "contrast-middle-paper", "any-middle-exact"])
@pytest.mark.parametrize(("name", "backend"), zoo.thinned(CASES))
def test_static_methods_equal_the_loop(name: str, backend: str, question: str, kind: Any) -> None:
    trace = trace_of(float64(name, backend), question)
    for method in STATIC:
        if trace.target.is_linear and method in NO_CONTRAST:
            continue
        dense = expected(name, question, backend in zoo.PROCESSED, kind, method)
        for k in (7, 10**6):
            ranked = na.value_neurons(trace, kind, k=k, method=method)
            assert ranked.method == method and ranked.n_neurons == len(dense)
            check(ranked, dense, k, 1e-8)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("method", STATIC)
def test_static_methods_in_float32(case: zoo.ZooCase, method: str, kind: Any) -> None:
    dense = expected(case.name, "any-middle-exact", not case.value_constant, kind, method)
    ranked = na.value_neurons(trace_of(case, "any-middle-exact"), kind, k=12, method=method)
    check(ranked, dense, 12, 1e-4 * max(1.0, *map(abs, dense.values())))


tokens = st.integers(0, D_VOCAB - 1)


@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(CASES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    prompt=st.lists(tokens, min_size=1, max_size=7),
    target=targets,
    convention=st.sampled_from(["exact", "paper"]),
    kind=st.sampled_from(["mlp", "attn"]),
    method=st.sampled_from(na.STATIC_METHODS),
    k=st.integers(1, 60),
    layers=st.sampled_from([None, [0], [1]]),
)
def test_exact_top_k_is_the_dense_ranking(
    case: tuple[str, str],
    dtype: torch.dtype,
    prompt: list[int],
    target: Any,
    convention: Any,
    kind: Any,
    method: str,
    k: int,
    layers: Any,
) -> None:
    """Whatever is asked, a short ranking is the beginning of the one that scores every neuron."""
    trace = na.trace(zoo.case(*case, dtype).model, prompt, target, convention=convention)
    if trace.target.is_linear and method in NO_CONTRAST:
        return
    every = na.value_neurons(trace, kind, k=10**6, method=method, layers=layers)
    ranked = na.value_neurons(trace, kind, k=k, method=method, layers=layers)
    assert every.n_evaluated == every.n_neurons == len(every)
    size = max(1.0, float(every.scores.abs().max()))
    assert ranked.scores.tolist() == pytest.approx(
        every.scores[:k].tolist(), abs=size * (1e-12 if dtype is torch.float64 else ROUNDING)
    )
    if dtype is torch.float64:  # in float32, neurons closer than its rounding may change places
        assert ranked.ids == every.ids[:k]
        assert ranked.coefficients.equal(every.coefficients[:k])


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("method", ["log_prob_alone", "prob_increase", "inverse_rank", "coefficient_inverse_rank"])
def test_few_neurons_are_evaluated_under_any_budget(method: str, kind: Any) -> None:
    trace = na.trace(wide(zoo.BACKENDS[0]), list(zoo.TOKENS), na.AnyOf([3, 40]))
    usual = na.value_neurons(trace, kind, k=5, method=method)
    assert usual.n_evaluated < usual.n_neurons
    small = na.value_neurons(trace, kind, k=5, method=method, memory_budget=2**20)
    assert small.ids == usual.ids
    assert small.scores.tolist() == pytest.approx(usual.scores.tolist(), abs=1e-12)
    every = na.value_neurons(trace, kind, k=10**6, method=method)
    assert small.ids == every.ids[:5]


def test_ranks_are_shared_between_prompts() -> None:
    model = wide(zoo.BACKENDS[0])
    answers = [3, na.AnyOf([9, 40]), *range(100, 160)]
    for kind in ("mlp", "attn"):
        ranks = na.InverseRanks(model, answers, kind, memory_budget=2**20)
        for prompt, target in (([5, 6, 7], 3), ([8, 9], 3), ([8, 9], na.AnyOf([9, 40])), ([1, 2], 130), ([1, 2], 7)):
            trace = na.trace(model, prompt, target)
            for alone, shared in (
                ("inverse_rank", na.InverseRank(ranks)),
                ("coefficient_inverse_rank", na.CoefficientInverseRank(ranks)),
            ):
                for layers in (None, [1]):
                    a = na.value_neurons(trace, kind, k=9, method=alone, layers=layers)
                    b = na.value_neurons(trace, kind, k=9, method=shared, layers=layers)
                    assert a.ids == b.ids and a.scores.equal(b.scores) and a.method == b.method


# Gradients


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("question", ["top-exact", "contrast-middle-paper", "any-middle-exact"])
@pytest.mark.parametrize(("name", "backend"), zoo.thinned(CASES))
def test_gradient_equals_the_loop(name: str, backend: str, question: str, kind: Any) -> None:
    reference = loop(name, question, backend in zoo.PROCESSED)
    model = Model(zoo.hf_model(name), reference)
    slope = [model.gradient(kind, layer) for layer in range(len(reference.recording.layers))]
    dense = {i: reference.coefficient(i) * slope[i[0]][model.unit(i)] for i in reference.ids(kind)}
    trace = trace_of(float64(name, backend), question)
    check(na.value_neurons(trace, kind, k=10**6, method="gradient"), dense, 10**6, 1e-7)
    check(na.value_neurons(trace, kind, k=5, method=na.GradientTimesActivation()), dense, 5, 1e-7)
    one = {i: score for i, score in dense.items() if i[0] == 1}
    check(na.value_neurons(trace, kind, k=5, method="gradient", layers=[1]), one, 5, 1e-7)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_integrated_gradients_equal_the_loop(name: str, backend: str, kind: Any) -> None:
    reference = loop(name, "any-middle-exact", backend in zoo.PROCESSED)
    model = Model(zoo.hf_model(name), reference)
    trace = trace_of(float64(name, backend), "any-middle-exact")
    for steps, budget in ((5, 2**30), (5, 2**20), (1, 2**30)):
        slope = [model.integrated(kind, layer, steps) for layer in range(len(reference.recording.layers))]
        dense = {i: reference.coefficient(i) * slope[i[0]][model.unit(i)] for i in reference.ids(kind)}
        method = na.IntegratedGradients(steps)
        ranked = na.value_neurons(trace, kind, k=10**6, method=method, memory_budget=budget)
        assert ranked.method == "integrated_gradients"
        check(ranked, dense, 10**6, 1e-7)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_integrated_gradients_are_complete(name: str, backend: str, kind: Any) -> None:
    """The scores of a layer sum to what the model loses when all its activations there are zero."""
    trace = trace_of(float64(name, backend), "top-exact")
    model = trace.model
    for layer in range(model.cfg.n_layers):
        ranked = na.value_neurons(trace, kind, k=10**6, method=na.IntegratedGradients(200), layers=[layer])
        lost = na.ablation_effect(trace, na.Layer(layer, kind), positions=[trace.position]).of("log_prob").change
        assert float(ranked.scores.sum()) == pytest.approx(-lost, abs=1e-5)


def with_activations(trace: Any, hook: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """T of rows of activations put at one hook point, as captum calls it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        def put(value: torch.Tensor, hook: Any) -> torch.Tensor:
            value = value.clone()
            value[:, trace.position] = x
            return value

        logits = trace.model.run_with_hooks(trace.tokens.expand(len(x), -1), fwd_hooks=[(hook, put)])
        return logits[:, trace.position].log_softmax(-1)[:, trace.target.positive[0]]

    return forward


@pytest.mark.parametrize(("name", "backend"), FEW)
def test_integrated_gradients_equal_captums(name: str, backend: str) -> None:
    trace = trace_of(float64(name, backend), "token-middle-exact")
    for layer in range(trace.model.cfg.n_layers):
        x = trace.post[layer][trace.position][None]
        forward = with_activations(trace, f"blocks.{layer}.mlp.hook_post")
        theirs = captum.attr.IntegratedGradients(forward).attribute(x, n_steps=20, method="gausslegendre")[0]
        ours = na.value_neurons(trace, "mlp", k=10**6, method=na.IntegratedGradients(20), layers=[layer])
        for neuron, score in zip(ours.ids, ours.scores.tolist(), strict=True):
            assert score == pytest.approx(float(theirs[neuron.neuron]), abs=CAPTUM)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_integrated_gradients_equal_captums_layer_integrated_gradients(name: str, backend: str, kind: Any) -> None:
    """captum's input is a gate: its baseline is the layer with zeros at the predicting position only."""
    trace = trace_of(float64(name, backend), "token-middle-exact")
    hook = "mlp.hook_post" if kind == "mlp" else "attn.hook_z"
    gates: list[torch.Tensor] = []

    def forward(gate: torch.Tensor) -> torch.Tensor:
        gates.append(gate)
        logits = trace.model(trace.tokens.expand(len(gate), -1))
        return logits[:, trace.position].log_softmax(-1)[:, trace.target.positive[0]]

    def close(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, trace.position] *= gates[-1].view(-1, *(1 for _ in out.shape[2:]))
        return out

    for layer in range(trace.model.cfg.n_layers):
        point = trace.model.hook_dict[f"blocks.{layer}.{hook}"]
        handle = point.register_forward_hook(close)
        try:
            theirs = captum.attr.LayerIntegratedGradients(forward, point).attribute(
                torch.ones(1, 1).double(), torch.zeros(1, 1).double(), n_steps=20, method="gausslegendre"
            )
        finally:
            handle.remove()
        at = (theirs[0] if isinstance(theirs, tuple) else theirs)[0, trace.position]
        at = at if kind == "mlp" else at.reshape(trace.view.n_heads, -1)  # a bridge's module holds them flat
        ours = na.value_neurons(trace, kind, k=10**6, method=na.IntegratedGradients(20), layers=[layer])
        found: dict[tuple[int, ...], float] = {}
        for neuron, score in zip(ours.ids, ours.scores.tolist(), strict=True):
            unit = (neuron.neuron,) if kind == "mlp" else (neuron.head, neuron.dim)
            found[unit] = found.get(unit, 0.0) + score  # over sources
        assert found == pytest.approx({unit: float(at[unit]) for unit in found}, abs=CAPTUM)


@pytest.mark.parametrize("question", ["top-exact", "any-middle-exact"])
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_attribution_patching_equals_the_loop(name: str, backend: str, question: str) -> None:
    prompts = [[3, 9, 80, 4], [61, 62], list(zoo.TOKENS)]
    reference = loop(name, question, backend in zoo.PROCESSED)
    model = Model(zoo.hf_model(name), reference)
    n_layers = len(reference.recording.layers)
    seen = [record(zoo.hf_model(name), prompt) for prompt in prompts]
    dense = {}
    for layer in range(n_layers):
        mean = np.concatenate([run.layers[layer].mlp_act for run in seen]).mean(0)
        slope = model.gradient("mlp", layer)
        for n in range(len(mean)):
            dense[layer, n] = (reference.mlp_coefficient(layer, n) - mean[n]) * slope[n]
    trace = trace_of(float64(name, backend), question)
    method = na.AttributionPatching(na.mean_activations(trace.model, prompts))
    check(na.value_neurons(trace, "mlp", k=10**6, method=method), dense, 10**6, 1e-7)


def test_gradients_estimate_what_an_intervention_does() -> None:
    """Signs: a neuron moved a little towards zero, or towards its mean, lowers T by that share of its score."""
    case = float64("llama", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens))
    mean = na.mean_activations(case.model, [[3, 9, 80, 4], [61, 62]])
    for method, share in (("gradient", 0.0), (na.AttributionPatching(mean), 1.0)):
        for neuron, score in zip(
            *(lambda r: (r.ids[:4], r.scores[:4].tolist()))(na.value_neurons(trace, "mlp", k=4, method=method)),
            strict=True,
        ):
            x = float(trace.post[neuron.layer][trace.position, neuron.neuron])
            goal = share * float(mean.means[f"blocks.{neuron.layer}.mlp.hook_post"][neuron.neuron])
            little = na.SetTo(x + 1e-4 * (goal - x))
            change = na.ablation_effect(trace, neuron, mode=little, positions=[-1]).of("log_prob").change
            assert -change == pytest.approx(1e-4 * score, rel=1e-2)


# Causal


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("question", ["top-exact", "contrast-middle-paper"])
@pytest.mark.parametrize(("name", "backend"), zoo.thinned(FEW))
def test_causal_equals_the_loop_and_one_by_one_ablation(name: str, backend: str, question: str, kind: Any) -> None:
    reference = loop(name, question, backend in zoo.PROCESSED)
    hf = zoo.hf_model(name)
    model = Model(hf, reference)
    trace = trace_of(float64(name, backend), question)
    value = na.value_neurons(trace, kind, k=25)
    for where, everywhere in (("all", True), ("predicting", False)):
        method = na.Causal(candidates=25, positions=where)
        ranked = na.value_neurons(trace, kind, k=10**6, method=method)
        assert ranked.n_evaluated == 25 and ranked.method == "causal" and set(ranked.ids) == set(value.ids)
        dense = {i: model.fall(kind, i[0], [model.unit(i)], everywhere) for i in map(key, value.ids)}
        # Processed values: zero is another point than for the unprocessed model, which the loop knows.
        check(ranked, dense, 25, 1e-7)
        positions = None if everywhere else [trace.position]
        for neuron, score in zip(ranked.ids[:6], ranked.scores.tolist(), strict=False):
            change = na.ablation_effect(trace, neuron, positions=positions).of("log_prob").change
            assert score == pytest.approx(-change, abs=1e-9)
        small = na.value_neurons(trace, kind, k=4, method=method, memory_budget=2**20)
        check(small, dense, 4, 1e-7)


def test_causal_candidates() -> None:
    case = zoo.case("llama_gqa", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens))
    some = [na.MLPNeuron(1, 3), na.MLPNeuron(0, 5), na.MLPNeuron(1, 3)]
    ranked = na.value_neurons(trace, "mlp", k=9, method=na.Causal(some))
    assert set(ranked.ids) == set(some) and len(ranked) == 2
    value = na.value_neurons(trace, "mlp", k=7)
    assert set(na.value_neurons(trace, "mlp", method=na.Causal(value)).ids) == set(value.ids)
    assert na.value_neurons(trace, "mlp", k=1, method="causal", layers=[0]).n_evaluated == min(
        300, len(na.value_scores(trace, "mlp", layers=[0]).scores[0])
    )
    for neuron, kind, layers in ((na.MLPNeuron(1, 3), "mlp", [0]), (na.MLPNeuron(1, 3), "attn", None)):
        with as_users_run_it(), pytest.raises(ValueError, match=r"^candidate L1N3 is not among the .* neurons of"):
            na.value_neurons(trace, kind, method=na.Causal([neuron]), layers=layers)
    with as_users_run_it(), pytest.raises(ValueError, match="does not exist here"):
        na.value_neurons(trace, "mlp", method=na.Causal([na.MLPNeuron(1, 10**6)]))


# What is refused, and what nothing changes


def test_refusals() -> None:
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens), na.Contrast(3, 4))
    with as_users_run_it():
        for method in NO_CONTRAST:
            with pytest.raises(ValueError, match="not defined for the contrast"):
                na.value_neurons(trace, "mlp", method=method)
        for method in ("magic", 3, None, na.Zero()):
            with pytest.raises(ValueError, match=r"^unknown method .*: choose one of log_prob_increase, .*causal$"):
                na.value_neurons(trace, "mlp", method=method)
        with pytest.raises(ValueError, match=r"^method 'attribution_patching' needs a mean: give "):
            na.value_neurons(trace, "mlp", method="attribution_patching")
        mean = na.mean_activations(case.model, [[1, 2, 3]])
        with pytest.raises(ValueError, match=r"^method 'attribution_patching' is defined for MLP neurons"):
            na.value_neurons(trace, "attn", method=na.AttributionPatching(mean))
        other = zoo.case("llama", zoo.BACKENDS[0])
        ranks = na.InverseRanks(other.model, [3])
        token = na.trace(case.model, list(case.tokens), 3)
        with pytest.raises(ValueError, match=r"^these ranks are of mlp rows of "):
            na.value_neurons(token, "mlp", method=na.InverseRank(ranks))
        with pytest.raises(ValueError, match=r"^ranks are not defined for the contrast"):
            na.InverseRanks(other.model, [na.Contrast(3, 4)])
        with pytest.raises(ValueError, match=r"^layers="):
            na.InverseRanks(other.model, [3], layers=[99])
        for steps in (0, -1):
            with pytest.raises(ValueError, match=r"^steps is "):
                na.IntegratedGradients(steps)
        with pytest.raises(ValueError, match=r"^candidates is 0"):
            na.Causal(0)
        with pytest.raises(ValueError, match="names no neuron"):
            na.Causal([])
        with pytest.raises(ValueError, match=r"^unknown positions 'last'"):
            na.Causal(positions="last")


@pytest.mark.parametrize(("name", "backend"), [c for c in zoo.CASES if c[0] in ("gpt2", "llama_gqa")])
def test_nothing_changes(name: str, backend: str) -> None:
    """Gradients are there under no_grad and inference mode, for frozen parameters, and leave none behind."""
    case = warm(zoo.case(name, backend))
    trace = na.trace(case.model, list(case.tokens))
    mean = na.mean_activations(case.model, [[1, 2, 3]])
    methods = ["gradient", na.IntegratedGradients(2), na.AttributionPatching(mean), na.Causal(5), *STATIC]
    usual = [na.value_neurons(trace, "mlp", k=5, method=method) for method in methods]
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context(), unchanged(case.model):
            inside = na.trace(case.model, list(case.tokens))
            found = [na.value_neurons(inside, "mlp", k=5, method=method) for method in methods]
        for a, b in zip(usual, found, strict=True):
            assert a.ids == b.ids and torch.allclose(a.scores, b.scores, atol=1e-6)
            assert not b.scores.requires_grad
    flags = [p.requires_grad for p in case.model.parameters()]
    try:
        for parameter in case.model.parameters():
            parameter.requires_grad_(False)
        with unchanged(case.model):
            frozen = [na.value_neurons(trace, "mlp", k=5, method=method) for method in methods[:3]]
    finally:
        for parameter, flag in zip(case.model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
    for a, b in zip(usual, frozen, strict=False):
        assert a.ids == b.ids and torch.allclose(a.scores, b.scores, atol=1e-6)


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_low_precision(backend: str) -> None:
    model = zoo.build(zoo.hf_model("llama"), backend, torch.bfloat16)
    trace = na.trace(model, list(zoo.TOKENS), 11)
    exact = na.trace(zoo.case("llama", backend, torch.float64).model, list(zoo.TOKENS), 11)
    for method in ("gradient", na.IntegratedGradients(4), na.Causal(10), *STATIC):
        ranked = na.value_neurons(trace, "mlp", k=10, method=method)
        assert ranked.scores.dtype in (torch.float32, torch.float64) and bool(ranked.scores.isfinite().all())
    slope = na.value_neurons(exact, "mlp", k=10**6, method="gradient")
    own = scores(na.value_neurons(trace, "mlp", k=10**6, method="gradient"))
    a = np.array(slope.scores.tolist())
    b = np.array([own[i] for i in map(key, slope.ids)])
    assert np.corrcoef(a, b)[0, 1] > 0.99


def test_the_table_names_every_method() -> None:
    frame = na.methods_table()
    assert list(frame.columns) == ["name", "formula", "cost", "source"]
    assert list(frame.name) == list(na.METHODS) and tuple(frame.name[:8]) == na.STATIC_METHODS
    assert not frame.isna().any(axis=None) and all(len(cell) > 1 for name in frame for cell in frame[name])


def test_results_survive_json() -> None:
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    trace = na.trace(case.model, list(case.tokens), 11)
    for method in (*STATIC, "gradient", na.IntegratedGradients(2), na.Causal(4)):
        ranked = na.value_neurons(trace, "attn", k=6, method=method)
        back = na.RankedNeurons.from_json(ranked.to_json())
        assert back.method == ranked.method and back.ids == ranked.ids and back.scores.equal(ranked.scores)
        assert list(ranked.to_frame().score) == ranked.scores.tolist()


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_ranks_of_other_weights_are_refused(backend: str) -> None:
    model = zoo.build(zoo.hf_model("gpt2"), backend)
    ranks = na.InverseRanks(model, [42])
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)
    trace = na.trace(model, list(zoo.TOKENS), 42)
    with pytest.raises(ValueError, match="make the trace \\(and any InverseRanks\\) again"):
        na.value_neurons(trace, "mlp", k=3, method=na.InverseRank(ranks))
