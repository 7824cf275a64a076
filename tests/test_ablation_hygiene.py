"""What ablations leave behind: nothing. The user's hooks, caches, gradients, precision and settings stay theirs."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tl_neuron_attr as na

POST, Z = "blocks.0.mlp.hook_post", "blocks.1.attn.hook_z"
NEURONS = [na.MLPNeuron(0, 3), na.Head(1, 2)]


# Sequential and parallel blocks, LayerNorm and RMSNorm, grouped query attention: every backend of each.
FEW = [pytest.param(case, id="-".join(case)) for case in zoo.CASES if case[0] in ("gpt2", "llama_gqa", "neox")]


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """The cases for what does not depend on the architecture."""
    return zoo.case(*request.param)


def points(model: Any) -> dict[int, Any]:
    return {id(point): point for point in model.hook_dict.values()}


def hooks_on(model: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Every handle of every hook point, TransformerLens's and PyTorch's own, in order."""
    return {
        key: ([id(handle) for handle in point.fwd_hooks], list(point._forward_hooks))
        for key, point in points(model).items()
    }


def state(model: Any) -> dict[str, Any]:
    """Whatever a call must leave as it was."""
    return {
        "hooks": hooks_on(model),
        "backward hooks": [len(point.bwd_hooks) for point in points(model).values()],
        "contexts": [dict(point.ctx) for point in points(model).values()],
        "level": getattr(model, "context_level", 0),
        "cfg": {key: str(value) for key, value in vars(model.cfg).items()},
        "modes": [module.training for module in model.modules()],
        "parameters": [(p.dtype, p.device, p.requires_grad, p.grad is None, p._version) for p in model.parameters()],
        "gradients": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
    }


class Counter:
    """A user's hook."""

    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, tensor: Tensor, hook: Any) -> None:
        self.fired += 1


@contextlib.contextmanager
def user_hooks(model: Any) -> Any:
    """A permanent and a plain hook of the user's on each hook point that ours go to."""
    permanent, plain = Counter(), Counter()
    try:
        for name in (POST, Z):
            model.add_hook(name, permanent, is_permanent=True)
            model.add_hook(name, plain)
        yield permanent, plain
    finally:
        model.reset_hooks(including_permanent=True)


def run(model: Any, tokens: Any = zoo.TOKENS) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))


# Hooks


def test_the_users_hooks_survive_and_fire(few: zoo.ZooCase) -> None:
    model = few.model
    with user_hooks(model) as (permanent, plain):
        before = hooks_on(model)
        with na.ablating(model, NEURONS):
            run(model)
        assert hooks_on(model) == before
        trace = na.trace(model, list(zoo.TOKENS))
        na.ablation_effect(trace, NEURONS, controls=2)
        na.ablation_curve(trace, na.value_neurons(trace, "mlp", k=2), [1, 2], progress=False)
        na.mean_activations(model, [[1, 2], [3]])
        na.resample(model, [4, 5])
        assert hooks_on(model) == before
        run(model)
        assert permanent.fired == plain.fired > 0
        model.reset_hooks()
        run(model)
        assert permanent.fired == plain.fired + 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_nothing_remains_after_an_error_in_the_users_code(few: zoo.ZooCase, error: type[BaseException]) -> None:
    model = few.model
    with user_hooks(model):
        before = state(model)
        for inside in (False, True):

            def fail(tensor: Tensor, hook: Any) -> None:
                raise error

            with pytest.raises(error), na.ablating(model, NEURONS, positions=[1]):
                if inside:  # in a forward pass, past some of our hooks
                    with torch.no_grad():
                        model.run_with_hooks(torch.tensor([zoo.TOKENS]), fwd_hooks=[(POST, fail)])
                raise error
            assert state(model) == before
    plain = run(model)
    with na.ablating(model, NEURONS, positions=[1]):
        assert not torch.equal(run(model), plain)
    assert torch.equal(run(model), plain)


def test_nothing_remains_after_an_error_in_our_hook(few: zoo.ZooCase) -> None:
    model = few.model
    before = state(model)
    short = na.resample(model, [4, 5])
    with pytest.raises(ValueError, match="the other prompt has 2 tokens"), na.ablating(model, NEURONS, short):
        run(model)
    assert state(model) == before
    trace = na.trace(model, list(zoo.TOKENS))
    with pytest.raises(ValueError, match="the other prompt has 2 tokens"):
        na.ablation_effect(trace, NEURONS, short)
    assert state(model) == before


def test_nothing_is_attached_by_bad_input(few: zoo.ZooCase) -> None:
    before = state(few.model)
    with pytest.raises(ValueError, match="unknown mode"), na.ablating(few.model, NEURONS, "knock"):
        pass
    with pytest.raises(ValueError, match="L7H0 is not in"), na.ablating(few.model, [*NEURONS, na.Head(7, 0)]):
        pass
    assert state(few.model) == before


def test_an_interrupt_while_hooks_are_attached_leaves_none(few: zoo.ZooCase, monkeypatch: pytest.MonkeyPatch) -> None:
    model = few.model
    before = state(model)
    point = model.hook_dict[Z]

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(point), "add_hook", _only_on(point, type(point).add_hook, interrupted))
        with pytest.raises(KeyboardInterrupt), na.ablating(model, NEURONS):
            pass
    assert state(model) == before


def _only_on(point: Any, real: Any, instead: Any) -> Any:
    def add_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (instead if self is point else real)(self, *args, **kwargs)

    return add_hook


def test_contexts_nest_and_end_in_any_order(few: zoo.ZooCase) -> None:
    model = few.model
    plain, before = run(model), state(model)
    first, second = [na.MLPNeuron(0, 3), na.Head(1, 1)], [na.MLPNeuron(0, 5), na.Head(1, 1)]
    only_second = model.run_with_hooks(torch.tensor([zoo.TOKENS]), fwd_hooks=na.ablation_hooks(model, second))
    a, b = na.ablating(model, first), na.ablating(model, second)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert torch.equal(run(model), only_second)
    b.__exit__(None, None, None)
    assert torch.equal(run(model), plain)
    with model.hooks(fwd_hooks=[(POST, Counter())]):
        c = na.ablating(model, second)
        c.__enter__()
        with model.hooks(fwd_hooks=[(Z, Counter())]):
            assert torch.equal(run(model), only_second)
        assert torch.equal(run(model), only_second)
    assert torch.equal(run(model), only_second)  # TransformerLens's context ended, ours did not
    c.__exit__(None, None, None)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for neurons in (first, second, NEURONS):
            stack.enter_context(na.ablating(model, neurons))
        raise KeyboardInterrupt
    assert state(model) == before


def test_reset_hooks_inside_does_not_end_the_ablation(few: zoo.ZooCase) -> None:
    model = few.model
    before = state(model)
    with na.ablating(model, NEURONS):
        ablated = run(model)
        model.reset_hooks()
        assert torch.equal(run(model), ablated)
        model.run_with_cache(torch.tensor([zoo.TOKENS]))
        assert torch.equal(run(model), ablated)
    assert state(model) == before
    plain = run(model)
    with na.ablating(model, NEURONS):
        model.reset_hooks(including_permanent=True)  # asked for by name: gone, and the context ends all the same
        assert torch.equal(run(model), plain)
    assert state(model) == before


def test_hooks_count_their_firings(few: zoo.ZooCase) -> None:
    with na.ablating(few.model, NEURONS) as hooks:
        assert [hook.fired for hook in hooks] == [0, 0]
        for _ in range(3):
            run(few.model)
    assert [(hook.name, hook.fired) for hook in hooks] == [(POST, 3), (Z, 3)]


# Tensors


def test_tensors_are_returned_not_written(few: zoo.ZooCase) -> None:
    """A cache taken before ours keeps the values from before, one taken after sees the ablation."""
    model = few.model
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> None:
        seen[str(len(seen))] = tensor

    try:
        model.add_hook(POST, keep)
        run(model)
        with na.ablating(model, na.MLPNeuron(0, 3)), torch.no_grad():
            _, cache = model.run_with_cache(torch.tensor([zoo.TOKENS]), names_filter=[POST])
    finally:
        model.reset_hooks()
    assert torch.equal(seen["0"], seen["1"])
    assert seen["1"][0, :, 3].abs().min() > 0
    assert not cache[POST][0, :, 3].any()
    trace = na.trace(model, list(zoo.TOKENS))
    kept = copy.deepcopy([t for t in trace.post if t is not None])
    na.ablation_effect(trace, na.value_neurons(trace, "mlp", k=3))
    assert all(torch.equal(a, b) for a, b in zip(kept, trace.post, strict=True) if b is not None)


@pytest.mark.parametrize("options", [{}, {"positions": [3, 6]}, {"scope": "source", "positions": [6]}], ids=str)
def test_gradients_on_and_off(few: zoo.ZooCase, options: dict[str, Any]) -> None:
    model = few.model
    neurons = [na.MLPNeuron(0, 3), na.AttnNeuron(1, 2, 3, 4)]
    grads: list[Tensor] = []
    try:
        with na.ablating(model, neurons, na.Scale(0.5), **options):
            off = run(model)
            on = model(torch.tensor([zoo.TOKENS]))
            assert on.requires_grad
            assert not off.requires_grad
            assert torch.equal(on, off)
            on[0, 6, 11].backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert all(grad.isfinite().all() for grad in grads)
    finally:
        model.zero_grad(set_to_none=True)


def test_no_gradient_flows_through_a_zeroed_neuron(few: zoo.ZooCase) -> None:
    model = few.model
    caught: dict[str, Tensor] = {}

    def catch(tensor: Tensor, hook: Any) -> None:
        tensor.retain_grad()
        caught["post"] = tensor

    try:
        with model.hooks(fwd_hooks=[(POST, catch)]), na.ablating(model, na.MLPNeuron(0, 3)):
            model(torch.tensor([zoo.TOKENS]))[0, 6, 11].backward()
        grad = caught["post"].grad
        assert grad is not None
        assert not grad[..., 3].any()
        assert grad[..., 4].any()
    finally:
        model.zero_grad(set_to_none=True)


# Settings


def test_calls_change_nothing(few: zoo.ZooCase) -> None:
    model = few.model
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            before = state(model)
            trace = na.trace(model, list(zoo.TOKENS))
            ranked = na.value_neurons(trace, "attn", k=3)
            na.ablation_effect(trace, ranked, controls=3)
            na.ablation_effect(trace, ranked, scope="source", controls=1)
            na.ablation_effect(
                trace, [ranked, na.Head(0, 1)], na.mean_activations(model, [[3, 4], [5]]), positions=[2]
            )
            na.ablation_curve(trace, ranked, [1, 3], na.resample(model, list(zoo.TOKENS[::-1])), progress=False)
            with na.ablating(model, ranked, na.SetTo(1)):
                pass
            assert state(model) == before


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_a_model_in_training_mode_stays_in_it(backend: str) -> None:
    """Without dropout it is run as it is; with dropout a random effect is refused."""
    with training(zoo.case("llama_gqa", backend).model) as model:
        trace = na.trace(model, list(zoo.TOKENS), 11)
        before = state(model)
        na.ablation_effect(trace, NEURONS)
        assert state(model) == before
    model = zoo.case("gpt2", backend).model
    trace = na.trace(model, list(zoo.TOKENS), 11)
    model.drop = torch.nn.Dropout(0.1)
    try:
        with training(model), pytest.raises(ValueError, match="is in training mode with dropout"):
            before = state(model)
            na.ablation_effect(trace, NEURONS)
        assert state(model)["hooks"] == before["hooks"]
    finally:
        del model.drop


@contextlib.contextmanager
def training(model: Any) -> Any:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield model.train()
    finally:
        for module, mode in modes:
            module.training = mode


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_bfloat16(name: str, backend: str) -> None:
    """Ablations in a bfloat16 model stay in it: the dtype of activations, and zeroed rows bit for bit."""
    model = zoo.case(name, backend, torch.bfloat16).model
    matrix = model.blocks[0].mlp.W_out
    kept = matrix.detach().clone()
    with torch.no_grad():
        matrix[3] = 0
        edited = run(model)
        matrix.copy_(kept)
    trace = na.trace(model, list(zoo.TOKENS), 11)
    with na.ablating(model, na.MLPNeuron(0, 3)) as [hook]:
        out = run(model)
        assert hook(torch.ones(1, 7, kept.shape[0], dtype=torch.bfloat16), hook=None).dtype is torch.bfloat16
    assert torch.equal(out, edited)
    for mode in (
        na.mean_activations(model, [[3, 4], [5]]),
        na.resample(model, list(zoo.TOKENS)),
        na.SetTo(0.3),
        na.Scale(1),
    ):
        effect = na.ablation_effect(trace, [na.MLPNeuron(0, 3), na.Head(1, 2)], mode, controls=2)
        assert effect.after.log_prob.isfinite().all()
        assert effect.after.log_prob.dtype is torch.float64
    effect = na.ablation_effect(trace, na.value_neurons(trace, "attn", k=3), scope="source", controls=2)
    assert effect.controls.log_prob.isfinite().all()


def test_results_and_modes_pickle() -> None:
    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    trace = na.trace(model, list(zoo.TOKENS), 11)
    effect = na.ablation_effect(trace, NEURONS, controls=2)
    again = pickle.loads(pickle.dumps(effect))
    assert repr(again) == repr(effect)
    mean = na.mean_activations(model, [[3, 4], [5]])
    assert torch.equal(pickle.loads(pickle.dumps(mean)).means[POST], mean.means[POST])
