"""Models spread over devices, caches on yet another: the numbers of one processor, on a machine that has no other.

Block `i` of a model is on device `i % 2`, the embedding on 0, the final norm on 1, the unembedding on 2. Every result
is on the processor, and its numbers are those of the model that is all there.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import guards
import pytest
import torch
import zoo
from pretend_devices import CPU, device, pretending, shard
from whole import KINDS, everything, same

import tl_neuron_attr as na
from tl_neuron_attr.readout import Readout

PROMPT, OTHER = list(zoo.TOKENS), [5, 17, 9, 8, 63, 21, 33]
CASES = [(name, backend) for name in ("gpt2", "llama_gqa", "phi") for backend in zoo.BACKENDS]


@functools.cache
def sharded(name: str, backend: str) -> Any:
    with pretending():
        return shard(zoo.plain(zoo.hf_model(name), backend, torch.float32), unembed=2)


@functools.cache
def cached(name: str, backend: str, prompt: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What the model on the processor gives a user who asks for the needed activations."""
    model = zoo.case(name, backend).model
    _, cache = model.run_with_cache(torch.tensor([prompt]), names_filter=na.required_hooks(model))
    return {hook: cache[hook].detach() for hook in na.required_hooks(model)}


PLACES: dict[str, Callable[[int, str], torch.device]] = {
    "processor": lambda i, hook: CPU,
    "scattered": lambda i, hook: device(i % 4) if i % 5 else CPU,
}


def placed(cache: dict[str, torch.Tensor], place: str) -> dict[str, torch.Tensor]:
    return {hook: tensor.to(PLACES[place](i, hook)) for i, (hook, tensor) in enumerate(cache.items())}


@functools.cache
def on_the_processor(name: str, backend: str) -> dict[str, Any]:
    model = zoo.case(name, backend).model
    return everything(na.trace(model, PROMPT, 11), na.trace(model, OTHER, 11))


@contextlib.contextmanager
def pretending_with(model: Any) -> Iterator[None]:
    """Calls in the block leave every weight and buffer where and what it was, errors included."""

    def weights() -> list[Any]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return [(n, id(t), t.device, t.dtype, t.requires_grad, t.held.detach().clone()) for n, t in named]

    def settings() -> dict[str, Any]:
        return {name: copy.deepcopy(value) for name, value in vars(model.cfg).items()}

    with pretending():
        before, cfg = weights(), settings()
        try:
            yield
        finally:
            assert guards.same(cfg, settings())
            for old, new in zip(before, weights(), strict=True):
                assert old[:-1] == new[:-1]
                assert old[-1].equal(new[-1])


@pytest.mark.parametrize(
    ("name", "backend", "place"),
    [(*case, place) for case in CASES for place in PLACES if place == "scattered" or case[1] in zoo.UNPROCESSED],
)
def test_a_cache_on_other_devices(name: str, backend: str, place: str) -> None:
    model = sharded(name, backend)
    with pretending_with(model):
        caches = [placed(cached(name, backend, tuple(prompt)), place) for prompt in (PROMPT, OTHER)]
        traces = [na.trace(model, p, 11, cache=cache) for p, cache in zip((PROMPT, OTHER), caches, strict=True)]
        found = everything(*traces)
    same(found, on_the_processor(name, backend))


def run(model: Any, prompt: Any, target: Any = 11, **options: Any) -> Any:
    """A trace of a model that runs on its devices; the prompt may be anywhere."""
    found = na.trace(model, torch.tensor(prompt).to(device(3)), target, **options)
    assert {t.device for t in found.resid_pre} == {device(0), device(1)}, "it ran where it was put"
    return found


@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_a_model_that_runs_on_its_devices(name: str, backend: str) -> None:
    model = sharded(name, backend)
    with pretending_with(model):
        found = everything(run(model, PROMPT), run(model, OTHER))
    same(found, on_the_processor(name, backend))


@pytest.mark.parametrize("target", [na.Contrast(7, 23), na.AnyOf([3, 50, 9]), None], ids=["contrast", "set", "own"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_other_targets(backend: str, target: Any) -> None:
    """The paper's convention too, an earlier position, and answers of several tokens."""
    model, usual = sharded("llama_gqa", backend), zoo.case("llama_gqa", backend).model
    results = []
    with pretending_with(model):
        traces = [run(model, PROMPT, target), run(model, PROMPT, target, position=3, convention="paper")]
        traces += na.trace_continuation(model, PROMPT[:4], [63, 90])
        results.append([value_part(trace) for trace in traces])
    traces = [na.trace(usual, PROMPT, target), na.trace(usual, PROMPT, target, position=3, convention="paper")]
    traces += na.trace_continuation(usual, PROMPT[:4], [63, 90])
    same(results[0], [value_part(trace) for trace in traces])


def test_in_blocks() -> None:
    """A budget so small that no probabilities are kept and the vocabulary is passed piece by piece."""
    of = Readout.of

    def small(trace: Any, **options: Any) -> Any:
        return replace(of(trace, **options), memory_budget=2**11)

    def numbers(one: Any, two: Any) -> list[Any]:
        compared, ranked = na.compare(one, two, "mlp", k=2), na.value_neurons(one, "mlp", k=2)
        return [na.layer_scores(one).mlp, na.head_scores(one).scores, compared.ids, compared.scores, ranked.scores]

    model, usual = sharded("llama_gqa", zoo.BACKENDS[0]), zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    with pretending_with(model), mock.patch.object(Readout, "of", small):
        found = numbers(run(model, PROMPT), run(model, OTHER))
    same(found, numbers(na.trace(usual, PROMPT, 11), na.trace(usual, OTHER, 11)))


def value_part(trace: Any) -> dict[str, Any]:
    layers, ranked = na.layer_scores(trace), [na.value_neurons(trace, kind, k=5) for kind in KINDS]
    found: dict[str, Any] = {"attn": layers.attn, "mlp": layers.mlp, "heads": na.head_scores(trace).scores}
    return found | {"ids": [r.ids for r in ranked], "scores": [r.scores for r in ranked], "target": trace.target}


# Ablations

MIXED = [na.MLPNeuron(0, 3), na.MLPNeuron(1, 7), na.AttnNeuron(1, 2, 5, 1), na.Head(0, 1), na.Layer(1, "mlp")]
MODES: dict[str, Callable[[Any], Any]] = {
    "zero": lambda model: "zero",
    "scale": lambda model: na.Scale(0.5),
    "mean": lambda model: na.mean_activations(model, [PROMPT, OTHER[:4]]),
    "resample": lambda model: na.resample(model, OTHER),
}


def effects(model: Any, mode: str) -> list[Any]:
    """What ablations of the whole prompt, of one position, and of single sources do; with two random draws."""
    trace, made = na.trace(model, PROMPT, 11), MODES[mode](model)
    found = [na.ablation_effect(trace, MIXED[:4], made, controls=2), na.ablation_effect(trace, MIXED, made)]
    found.append(na.ablation_effect(trace, MIXED[:4], made, positions=[2, -1]))
    if mode in ("zero", "scale"):
        found.append(na.ablation_effect(trace, MIXED, made, scope="source"))
    return [[effect.table(), effect.after.log_prob, effect.controls.log_prob] for effect in found]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_ablations(name: str, backend: str, mode: str) -> None:
    """Masks, means and other prompts' values go where the activation is."""
    model = sharded(name, backend)
    with pretending_with(model):
        found = effects(model, mode)
    same(found, effects(zoo.case(name, backend).model, mode))


@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_hooks_that_users_run(name: str, backend: str) -> None:
    """With a trace inside, and with means over padded prompts whose mask is elsewhere."""
    model, usual = sharded(name, backend), zoo.case(name, backend).model
    padded, mask = torch.tensor([PROMPT, [1, 1, *OTHER[:5]]]), torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    with pretending_with(model):
        mean = na.mean_activations(model, padded.to(device(1)), attention_mask=mask.to(device(2)))
        with torch.no_grad():
            logits = model.run_with_hooks(
                torch.tensor([PROMPT]).to(device(0)), fwd_hooks=na.ablation_hooks(model, MIXED, mean)
            )
        assert logits.device in (device(0), device(2))
        with na.ablating(model, [na.Head(0, 1)]):
            inside = value_part(run(model, PROMPT))
        logits = logits.cpu()
    mean = na.mean_activations(usual, padded, attention_mask=mask)
    with torch.no_grad():
        hooks = na.ablation_hooks(usual, MIXED, mean)
        same(logits, usual.run_with_hooks(torch.tensor([PROMPT]), fwd_hooks=hooks))
    with na.ablating(usual, [na.Head(0, 1)]):
        same(inside, value_part(na.trace(usual, PROMPT, 11)))


# The pretence itself


def test_what_the_pretence_refuses() -> None:
    """As an accelerator does; what it allows, it gives back where it belongs."""
    with pretending():
        cpu, near = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).to(device(0))
        far, number, index = near.to(device(1)), torch.tensor(2.0), torch.tensor([1, 0])
        refused: list[Callable[[], Any]] = [
            lambda: near + cpu,
            lambda: cpu + near,
            lambda: near + far,
            lambda: near @ far.T,
            lambda: near @ cpu.T,
            lambda: near.sum() + far.sum(),
            lambda: torch.cat([near, cpu]),
            lambda: torch.stack([near.sum(), number]),
            lambda: torch.where(near > 1, near, cpu),
            lambda: cpu[index.to(device(0))],
            lambda: near[index.to(device(1))],
            lambda: near.index_select(0, index),
            lambda: near.add_(cpu),
            lambda: cpu.add_(near),
            lambda: number.clone().add_(near.sum()),
            lambda: near.__setitem__(index, cpu),
        ]
        for call in refused:
            with pytest.raises(RuntimeError, match=r"same device|indices are on"):
                call()
        made = [near * number, near[index], near[[1, 0]], near[cpu > 1], torch.where(near > 1, near, number)]
        made += [near.new_zeros(2), torch.zeros(2, device=device(0)), torch.tensor([], device=device(0))]
        made += [torch.arange(3, device=device(0)), near.max(-1).values, near.sort().indices, torch.ones_like(near)]
        assert {t.device for t in made} == {device(0)}
        near[:1] = cpu[:1] + 5
        near[index] += 1
        assert (near.cpu() - (cpu + torch.tensor([[6.0], [1.0]]))).abs().max() == 0
        assert near.cpu().device == CPU and type(near.cpu()) is torch.Tensor
        vector = near[0] @ far.to(near).T
        assert vector.shape == (2,) and (vector.cpu() + 0).shape == (2,)
        assert float(near.sum()) == near.held.sum() and bool((near > 0).all())
