"""Low precision gives float32 attributions; memory stays under its budget whatever the vocabulary is.

Memory is what torch allocates, by the allocator's own record of every allocation and release.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import zoo
from allocated import Memory

import tl_neuron_attr as na
from tl_neuron_attr import checks

PROMPT = list(zoo.TOKENS)
LOW = [torch.bfloat16, torch.float16]
KINDS = ("mlp", "attn")
MODELS = [(name, backend) for name in ("gpt2", "llama_gqa") for backend in zoo.BACKENDS]


def tensors(trace: Any) -> Iterator[torch.Tensor]:
    """Every score of a trace."""
    layers = na.layer_scores(trace)
    yield from (layers.attn, layers.mlp, na.head_scores(trace).scores, na.position_scores(trace, 1, 2))
    for kind in KINDS:
        dense, ranked = na.value_scores(trace, kind), na.value_neurons(trace, kind, k=20)
        yield from (dense.scores, dense.coefficients, ranked.scores, ranked.coefficients)


# Precision


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("name", "backend"), MODELS)
def test_low_precision(name: str, backend: str, dtype: torch.dtype) -> None:
    """Float32 results, exactly those of float32 arithmetic on the same weights and activations.

    The top 20 are nearly those of the float32 model: weights and activations are rounded to 8 or 11 bits, which
    moves scores by a few thousandths and lets neurons at the end of the ranking change places.
    """
    model, usual = zoo.plain(zoo.hf_model(name), backend, dtype), na.trace(zoo.case(name, backend).model, PROMPT, 11)
    _, cache = model.run_with_cache(torch.tensor([PROMPT]), names_filter=na.required_hooks(model))
    trace = na.trace(model, PROMPT, 11, cache=cache)
    found = list(tensors(trace))
    assert {t.dtype for t in found} == {torch.float32}
    assert trace.log_probs.dtype == torch.float32
    assert trace.log_probs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    for kind in KINDS:
        ranked, expected = na.value_neurons(trace, kind, k=20), na.value_neurons(usual, kind, k=20)
        assert len(set(ranked.ids) & set(expected.ids)) >= 16
        assert ranked.scores.tolist() == pytest.approx(expected.scores.tolist(), abs=0.05)

    wide = zoo.plain(zoo.hf_model(name), backend, dtype).to(torch.float32)
    widened = {key: value.float() for key, value in cache.items()}
    with mock.patch.dict(checks.TOLERANCE, {torch.float32: checks.TOLERANCE[dtype]}):
        exact = na.trace(wide, PROMPT, 11, cache=widened)
        for a, b in zip(found, tensors(exact), strict=True):
            assert (a - b).abs().max() < 1e-6


@functools.cache
def with_an_impossible_token(name: str) -> Any:
    """Token 11 has a logit of -70 after the prompt: p ~ 1e-31."""
    hf = zoo.clone(zoo.hf_model(name), torch.float32)
    with torch.no_grad():
        final = hf(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0, -1]
        hf.lm_head.weight[11] = -70 * final / final.square().sum()
    return hf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize(("name", "backend"), list(zip(("gpt2", "llama_gqa") * 2, zoo.BACKENDS, strict=False)))
def test_an_impossible_token(name: str, backend: str, dtype: torch.dtype) -> None:
    """Nothing underflows: log-probabilities come from log_softmax, never from the log of a probability."""
    model = zoo.plain(with_an_impossible_token(name), backend, dtype)
    width = torch.float64 if dtype is torch.float64 else torch.float32
    for target in (11, na.Contrast(3, 11), na.AnyOf([11, 3])):
        trace = na.trace(model, PROMPT, target)
        for scores in tensors(trace):
            assert scores.dtype == width
            assert scores.isfinite().all()
    trace = na.trace(model, PROMPT, 11)
    assert -110 < trace.target_log_prob < -60
    layers, contrast = na.layer_scores(trace), na.layer_scores(na.trace(model, PROMPT, na.Contrast(11, 3)))
    assert layers.attn.sum() + layers.mlp.sum() < -20, "the layers bring the token down from about 1 in 96"
    assert contrast.attn.sum() + contrast.mlp.sum() < -20
    assert na.value_neurons(trace, "mlp", k=5).scores.tolist() == pytest.approx(
        na.value_scores(trace, "mlp").scores.flatten().topk(5).values.tolist(), abs=1e-5
    )


# Memory


def test_the_measure_of_memory() -> None:
    """It sees what is allocated inside and released again."""
    memory = Memory()
    memory.of(lambda: [torch.ones(2**20) + 1 for _ in range(3)] and None)
    assert 4 * 2**22 <= memory.peak <= 4 * 2**22 + 2**16


@functools.cache
def wide(backend: str, dtype: torch.dtype) -> Any:
    config = zoo.llama_like(
        transformers.LlamaConfig,
        vocab_size=50_000,
        hidden_size=64,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    return zoo.plain(zoo.randomise(hf, seed=9), backend, dtype)


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "layer_scores": lambda trace, budget: na.layer_scores(trace, memory_budget=budget).mlp,
    "head_scores": lambda trace, budget: na.head_scores(trace, memory_budget=budget).scores,
    "position_scores": lambda trace, budget: na.position_scores(trace, 1, 0, memory_budget=budget),
    "value_scores": lambda trace, budget: na.value_scores(trace, "attn", layers=[1], memory_budget=budget).scores,
    "value_neurons mlp": lambda trace, budget: na.value_neurons(trace, "mlp", k=300, memory_budget=budget),
    "value_neurons attn": lambda trace, budget: na.value_neurons(trace, "attn", k=300, memory_budget=budget),
    "promoted_tokens": lambda trace, budget: na.promoted_tokens(
        trace, [na.MLPNeuron(1, n) for n in range(400)], k=3, memory_budget=budget
    ),
}
TARGETS = {"token": None, "contrast": na.Contrast(7, 40_000), "set": na.AnyOf([3, 9, 49_999])}


@pytest.mark.parametrize(
    ("dtype", "target"), [(torch.float32, "token"), (torch.float32, "contrast"), (torch.bfloat16, "set")], ids=str
)
@pytest.mark.parametrize("backend", zoo.UNPROCESSED)
def test_memory_stays_under_its_budget(backend: str, dtype: torch.dtype, target: str) -> None:
    """And nothing but memory depends on it."""
    trace = na.trace(wide(backend, dtype), PROMPT, TARGETS[target])
    for name, call in CALLS.items():
        results = []
        for budget in (2**26, 2**30):
            memory = Memory()
            results.append(memory.of(functools.partial(call, trace, budget)))
            assert 0 < memory.peak <= budget, f"{name}: {memory.peak / 2**20:.0f} of {budget / 2**20:.0f} MiB"
        small, usual = results
        if name.startswith("value_neurons"):
            assert small.ids == usual.ids
            assert small.scores.tolist() == pytest.approx(usual.scores.tolist(), abs=1e-5)
        elif name == "promoted_tokens":
            assert [[token for token, _ in up] for up in small.up] == [[token for token, _ in up] for up in usual.up]
        else:
            assert (small - usual).abs().max() < 1e-5


@pytest.mark.parametrize("backend", zoo.UNPROCESSED)
def test_memory_of_a_dense_layer(backend: str) -> None:
    """4,096 neurons times 50,000 tokens is 781 MiB in float32, which is never held at once."""
    trace, memory = na.trace(wide(backend, torch.float32), PROMPT), Memory()
    dense = memory.of(lambda: na.value_scores(trace, "mlp", layers=[1], memory_budget=2**26))
    assert 0 < memory.peak <= 2**26
    ranked = na.value_neurons(trace, "mlp", k=50, layers=[1])
    best = dense.scores[0].topk(50)
    assert ranked.scores.tolist() == pytest.approx(best.values.tolist(), abs=1e-5)


def test_memory_of_a_large_set_of_tokens() -> None:
    """A set target of 500 tokens."""
    trace = na.trace(wide(zoo.BACKENDS[0], torch.float32), PROMPT, na.AnyOf(list(range(500))))
    memory = Memory()
    memory.of(lambda: na.value_neurons(trace, "mlp", k=300, memory_budget=2**26))
    assert memory.peak <= 2**26, f"{memory.peak / 2**20:.0f} of 64 MiB"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", zoo.UNPROCESSED)
def test_memory_of_a_trace_from_a_cache(backend: str, dtype: torch.dtype) -> None:
    """No converted copy of the weights, whatever the checks read."""
    model = wide(backend, dtype)
    _, cache = model.run_with_cache(torch.tensor([PROMPT]), names_filter=na.required_hooks(model))
    memory = Memory()
    memory.of(lambda: na.trace(model, PROMPT, cache=cache))
    assert memory.peak <= 2**26, f"{memory.peak / 2**20:.0f} of 64 MiB"
