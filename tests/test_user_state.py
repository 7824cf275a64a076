"""Calls change nothing of the user's: model, hooks, modes, tensors; and the user's own hooks take effect."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import guards
import pytest
import torch
import zoo
from reference_forward import parts_of

import tl_neuron_attr as na

PROMPT = list(zoo.TOKENS)
TARGETS = {"token": 11, "top": None, "contrast": na.Contrast(7, 23), "set": na.AnyOf([3, 50, 9])}


@pytest.fixture
def case(case: zoo.ZooCase) -> zoo.ZooCase:
    return guards.warm(case)


@pytest.fixture(params=guards.FEW, ids="-".join)
def some(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """Enough where the architecture plays no part."""
    return guards.warm(zoo.case(*request.param))


# The public calls of the main job

SCORES: dict[str, Callable[[Any], Any]] = {
    "layer_scores": lambda trace: na.layer_scores(trace),
    "head_scores": lambda trace: na.head_scores(trace),
    "position_scores": lambda trace: na.position_scores(trace, 1, 2),
    "value_scores mlp": lambda trace: na.value_scores(trace, "mlp"),
    "value_scores attn": lambda trace: na.value_scores(trace, "attn", layers=[0]),
    "value_neurons mlp": lambda trace: na.value_neurons(trace, "mlp", k=30),
    "value_neurons attn": lambda trace: na.value_neurons(trace, "attn", k=30, layers=[1]),
    "promoted_tokens": lambda trace: na.promoted_tokens(trace, [na.MLPNeuron(1, 3), na.AttnNeuron(0, 1, 2, 3)], k=4),
    "query_layers": lambda trace: na.query_layers(trace, [na.AttnNeuron(1, 1, 2, 3)]),
    "query_neurons": lambda trace: na.query_neurons(trace, [na.AttnNeuron(1, 1, 2, 3)], k=5),
}
RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "trace": lambda model, target: na.trace(model, PROMPT, target),
    "trace of a string": lambda model, target: na.trace(model, "t5 t42 t63", target),
    "trace with BOS": lambda model, target: na.trace(model, "t5 t42 t63", target, prepend_bos=True),
    "trace_continuation": lambda model, target: na.trace_continuation(model, PROMPT, [3, 4]),
    "required_hooks": lambda model, target: na.required_hooks(model),
}


def numbers(result: Any) -> Any:
    """What a result says, to be compared to the last bit; and a check that it holds no graph."""
    if isinstance(result, torch.Tensor):
        assert not result.requires_grad and result.grad_fn is None
        return result.clone()
    if isinstance(result, (list, tuple)):
        return [numbers(item) for item in result]
    if isinstance(result, na.Trace):
        return numbers(tensors_of(result))
    fields = getattr(result, "__dataclass_fields__", None)
    if fields:
        return [numbers(getattr(result, name)) for name in fields if name != "provenance"]
    return result


def tensors_of(trace: Any) -> list[Any]:
    found: list[Any] = []
    for name in trace.__dataclass_fields__:
        value = getattr(trace, name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return guards.same(a, b)


# Nothing changes


def test_runs_change_nothing(case: zoo.ZooCase) -> None:
    for run in RUNS.values():
        with guards.unchanged(case.model):
            first = numbers(run(case.model, 11))
            again = numbers(run(case.model, 11))
        assert equal(first, again), "calling twice gives two results"


@pytest.mark.parametrize("target", TARGETS)
def test_scores_change_nothing(some: zoo.ZooCase, target: str) -> None:
    trace = na.trace(some.model, PROMPT, TARGETS[target], convention="paper" if target == "token" else "exact")
    before = numbers(trace)
    with guards.unchanged(some.model), guards.no_module_runs():
        for name, score in SCORES.items():
            first, again = numbers(score(trace)), numbers(score(trace))
            assert equal(first, again), f"{name}: calling twice gives two results"
            assert equal(before, numbers(trace)), f"{name} wrote into the trace"


def test_a_cache_is_only_read(case: zoo.ZooCase) -> None:
    _, cache = case.model.run_with_cache(torch.tensor([PROMPT]))
    before = {name: cache[name].clone() for name in cache.keys()}  # noqa: SIM118 (an ActivationCache is no dict)
    with guards.unchanged(case.model):
        trace = na.trace(case.model, PROMPT, 11, cache=cache)
        for name, score in SCORES.items():
            score(trace)
            wrong = [key for key, value in before.items() if not guards.same(value, cache[key])]
            assert not wrong, f"{name} wrote into {wrong}"
    assert list(cache.keys()) == list(before)


def test_prompts_are_only_read(some: zoo.ZooCase) -> None:
    tensor, ids = torch.tensor([PROMPT]), list(PROMPT)
    for prompt in (tensor, ids):
        trace = na.trace(some.model, prompt)
        trace.tokens.add_(1)  # what a trace holds is its own
    assert tensor.tolist() == [PROMPT]
    assert ids == PROMPT


def test_after_an_error(some: zoo.ZooCase) -> None:
    """Refused in the middle, with the hooks of a forward pass that fails on the model."""

    def fails(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        raise RuntimeError("the user's hook fails")

    for point in ("hook_embed", f"blocks.{some.model.cfg.n_layers - 1}.hook_mlp_out"):
        hooks = some.model.hooks(fwd_hooks=[(point, fails)])
        with guards.unchanged(some.model), hooks, pytest.raises(RuntimeError, match="the user's hook"):
            na.trace(some.model, PROMPT)


@pytest.mark.parametrize("backend", zoo.BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes(backend: str, mode: Callable[[], Any]) -> None:
    model = guards.warm(zoo.case("gpt2", backend)).model
    usual = [numbers(score(na.trace(model, PROMPT, 11))) for score in SCORES.values()]
    with mode():
        with guards.unchanged(model):
            trace = na.trace(model, PROMPT, 11)
            inside = [numbers(score(trace)) for score in SCORES.values()]
        outside = na.trace_continuation(model, PROMPT, [11])[0]
    assert equal(usual, inside)
    assert equal(usual, [numbers(score(trace)) for score in SCORES.values()]), "a trace made in another mode"
    assert equal(usual, [numbers(score(outside)) for score in SCORES.values()])
    made = na.trace(model, PROMPT, 11)
    with mode():
        assert equal(usual, [numbers(score(made)) for score in SCORES.values()])


def test_a_frozen_model_and_one_with_gradients(some: zoo.ZooCase) -> None:
    usual = numbers(na.value_neurons(na.trace(some.model, PROMPT, 11), "mlp", k=5))
    flags = {name: parameter.requires_grad for name, parameter in some.model.named_parameters()}
    try:
        for flag in (False, True):
            for parameter in some.model.parameters():
                parameter.requires_grad_(flag)
            with guards.unchanged(some.model):
                trace = na.trace(some.model, PROMPT, 11)
                assert equal(usual, numbers(na.value_neurons(trace, "mlp", k=5)))
            numbers(trace)
    finally:
        for name, parameter in some.model.named_parameters():
            parameter.requires_grad_(flags[name])


# The user's hooks


class Counter:
    """A hook that counts and, when told so, edits."""

    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, tensor: torch.Tensor, hook: Any) -> None:
        self.fired += 1


def points(model: Any) -> list[str]:
    """Some that a trace reads too, and some that it does not."""
    return [
        "hook_embed",
        "blocks.0.attn.hook_pattern",
        "blocks.1.hook_mlp_out",
        "blocks.0.attn.hook_z",
        "blocks.1.mlp.hook_pre",
    ]


@contextlib.contextmanager
def added(model: Any, permanent: bool) -> Iterator[dict[str, Counter]]:
    counters = {point: Counter() for point in points(model)}
    try:
        for point, counter in counters.items():
            model.hook_dict[point].add_hook(counter, is_permanent=permanent)
        yield counters
    finally:
        for point in counters:
            model.hook_dict[point].remove_hooks("fwd", including_permanent=True)


@pytest.mark.parametrize("permanent", [False, True], ids=["temporary", "permanent"])
def test_hooks_on_the_model_stay_and_fire(some: zoo.ZooCase, permanent: bool) -> None:
    usual = numbers(na.value_neurons(na.trace(some.model, PROMPT, 11), "mlp", k=5))
    with added(some.model, permanent) as counters:
        for run in RUNS.values():
            with guards.unchanged(some.model):
                run(some.model, 11)
        fired = {point: counter.fired for point, counter in counters.items()}
        assert set(fired.values()) == {4}, f"four forward passes: {fired}"
        with guards.unchanged(some.model), pytest.raises(ValueError, match="out of range"):
            na.trace(some.model, PROMPT, position=9)
        with guards.unchanged(some.model):
            trace = na.trace(some.model, PROMPT, 11)
            assert equal(usual, numbers(na.value_neurons(trace, "mlp", k=5)))
        some.model(torch.tensor([PROMPT]))
        assert {counter.fired for counter in counters.values()} == {6}


def test_hooks_of_a_context_stay_and_fire(some: zoo.ZooCase) -> None:
    """Also nested, with hooks of both kinds outside."""
    with added(some.model, permanent=True) as outer:
        counters = [{point: Counter() for point in points(some.model)} for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for level in counters:
                stack.enter_context(some.model.hooks(fwd_hooks=list(level.items())))
            for run in RUNS.values():
                with guards.unchanged(some.model):
                    run(some.model, 11)
            some.model(torch.tensor([PROMPT]))
            assert {counter.fired for level in counters for counter in level.values()} == {5}
        some.model(torch.tensor([PROMPT]))
        assert {counter.fired for level in counters for counter in level.values()} == {5}
        assert {counter.fired for counter in outer.values()} == {6}


def test_what_hooks_keep_in_their_context(some: zoo.ZooCase) -> None:
    """`hook.ctx` is the user's store between hooks."""

    def keeps(tensor: torch.Tensor, hook: Any) -> None:
        hook.ctx["kept"] = tensor.detach().clone()

    with some.model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", keeps)]):
        na.trace(some.model, PROMPT)
        kept = some.model.hook_dict["blocks.0.hook_mlp_out"].ctx["kept"]
        with guards.unchanged(some.model):
            trace = na.trace(some.model, PROMPT)
            for score in SCORES.values():
                score(trace)
    assert kept.squeeze(0).equal(trace.mlp_out[0])
    some.model.hook_dict["blocks.0.hook_mlp_out"].ctx.clear()


# Hooks take effect: a trace made under hooks is the trace of a model with the same edit in its weights


def zero_pattern(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
    pattern = pattern.clone()
    pattern[:, 1] = 0
    return pattern


def zero_neuron(post: torch.Tensor, hook: Any) -> torch.Tensor:
    post = post.clone()
    post[..., 3] = 0
    return post


def zero_z(z: torch.Tensor, hook: Any, d_head: int) -> torch.Tensor:
    z = z.clone()
    if z.ndim == 4:
        z[:, :, 1] = 0
    else:
        z[..., d_head : 2 * d_head] = 0
    return z


@functools.cache
def with_zeros(name: str, backend: str, part: str) -> Any:
    """Layer 0 with the output rows of head 1, or of MLP neuron 3, set to zero."""
    hf = zoo.clone(zoo.hf_model(name), torch.float32)
    parts = parts_of(hf, zoo.blocks(hf)[0])
    d_head = getattr(hf.config, "head_dim", None) or hf.config.hidden_size // hf.config.num_attention_heads
    module, rows = (parts.out, slice(d_head, 2 * d_head)) if part == "head" else (parts.down, slice(3, 4))
    with torch.no_grad():
        (module.weight.T if isinstance(module, torch.nn.Linear) else module.weight)[rows] = 0
    return zoo.build(hf, backend)


# Where values have a constant part, weight processing puts it into the output bias, out of the pattern's reach.
HEADS = [(name, backend) for name, backend in guards.FEW if name != "gpt2" or backend in zoo.UNPROCESSED]


@pytest.mark.parametrize(("name", "backend"), HEADS)
def test_zeroing_the_pattern_of_a_head(name: str, backend: str) -> None:
    intervened(name, backend, "head", [("blocks.0.attn.hook_pattern", zero_pattern)])


@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_zeroing_a_neuron(name: str, backend: str) -> None:
    intervened(name, backend, "neuron", [("blocks.0.mlp.hook_post", zero_neuron)])


@pytest.mark.parametrize(("name", "backend"), HEADS)
def test_zeroing_the_output_of_a_head(name: str, backend: str) -> None:
    """Behind pattern and values, at `hook_z`: the run as intervened upon (its neurons: test_edited_heads.py)."""
    d_head = zoo.case(name, backend).model.cfg.d_head
    intervened(name, backend, "head", [("blocks.0.attn.hook_z", functools.partial(zero_z, d_head=d_head))])


def intervened(name: str, backend: str, part: str, hooks: list[Any]) -> None:
    model, edited = guards.warm(zoo.case(name, backend)).model, with_zeros(name, backend, part)
    usual, expected = na.trace(model, PROMPT, 11), na.trace(edited, PROMPT, 11)
    with model.hooks(fwd_hooks=hooks):
        traces = [na.trace(model, PROMPT, 11), na.trace_continuation(model, PROMPT, [11])[0]]
        _, cache = model.run_with_cache(torch.tensor([PROMPT]))
    traces.append(na.trace(model, PROMPT, 11, cache=cache))
    assert abs(expected.target_log_prob - usual.target_log_prob) > 1e-3, "the intervention changes nothing"
    for trace in traces:
        assert trace.target_log_prob == pytest.approx(expected.target_log_prob, abs=1e-5)
        for score in (na.layer_scores, na.head_scores):
            close(score(trace), score(expected))
        for kind in ("mlp", "attn"):
            close(na.value_scores(trace, kind), na.value_scores(expected, kind))
    assert na.trace(model, PROMPT, 11).target_log_prob == usual.target_log_prob


def close(found: Any, expected: Any) -> None:
    for name in ("attn", "mlp", "scores"):
        if hasattr(found, name):
            assert (getattr(found, name) - getattr(expected, name)).abs().max() < 1e-4
