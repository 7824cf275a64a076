"""What calls may not change and may not do: the state of a model, and modules that run.

`state(model)` is everything a user could notice of a model (configuration, parameters, flags, hooks, contexts,
tokenizer) and of the process (gradient mode, default dtype, random state); two states are compared with `changes`.
`no_module_runs()` fails where any module of any model was called inside, which no patched method can hide.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
import zoo
from torch.nn.modules.module import register_module_forward_pre_hook

TORCH_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LENS_HOOKS = ("fwd_hooks", "bwd_hooks")


_WARM: dict[int, Any] = {}
FEW = zoo.thinned((kind, backend) for kind in ("gpt2", "llama_gqa") for backend in zoo.BACKENDS)


def warm(case: Any) -> Any:
    """`case`, its model run and cached once: then Transformers and a bridge have set up their own hooks."""
    if id(case.model) not in _WARM:
        _WARM[id(case.model)] = case.model  # kept, so that no other model gets this id
        with torch.no_grad():
            case.model.run_with_cache(torch.tensor([case.tokens]))
    return case


def state(model: Any) -> dict[str, Any]:
    """Names to values that compare with `==`; tensors are held as clones."""
    found: dict[str, Any] = {
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random state": torch.get_rng_state().clone(),
        "context level": getattr(model, "context_level", None),
        "tokenizer": tokenizer_state(getattr(model, "tokenizer", None)),
    }
    for key, value in vars(model.cfg).items():
        found[f"cfg.{key}"] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            found[f"{kind} {name}"] = tensor.detach().clone()
            found[f"{kind} {name} is"] = (
                id(tensor),
                tensor.data_ptr(),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
                tensor.grad is None,
            )
    for name, module in model.named_modules():
        found[f"training {name}"] = module.training
        for kind in TORCH_HOOKS:
            found[f"{kind} of {name}"] = [id(hook) for hook in getattr(module, kind).values()]
        for kind in LENS_HOOKS:
            hooks = [(id(h.hook), h.is_permanent, h.context_level) for h in getattr(module, kind, [])]
            found[f"{kind} of {name}"] = hooks
        if isinstance(getattr(module, "ctx", None), dict):
            found[f"ctx of {name}"] = copy.deepcopy(module.ctx)
    return found


def tokenizer_state(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    names = ("padding_side", "truncation_side", "add_bos_token", "model_max_length", "special_tokens_map")
    return len(tokenizer), [repr(getattr(tokenizer, name, None)) for name in names]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two states, by name."""
    return [name for name in {**before, **after} if not same(before.get(name), after.get(name))]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))  # NaN is NaN
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b) or repr(a) == repr(b)


@contextlib.contextmanager
def unchanged(*models: Any) -> Iterator[None]:
    """The state of `models` is the same after the block, exceptions included."""
    before = [state(model) for model in models]
    try:
        yield
    finally:
        for model, old in zip(models, before, strict=True):
            found = changes(old, state(model))
            assert not found, found[:10]


@contextlib.contextmanager
def no_module_runs() -> Iterator[None]:
    """No module at all is called in the block."""
    called: list[str] = []
    handle = register_module_forward_pre_hook(lambda module, args: called.append(type(module).__name__))
    try:
        yield
    finally:
        handle.remove()
        assert not called, f"{len(called)} modules ran, first {called[0]}"


@contextlib.contextmanager
def as_users_run_it() -> Iterator[None]:
    """Without the shape checks that only pytest turns on, which would catch a wrong type before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@contextlib.contextmanager
def refused(model: Any, error: type[Exception], text: str) -> Iterator[None]:
    """The block raises exactly `error` with exactly `text`, runs no module and changes nothing."""
    with refused_like(model, error, re.escape(text) + "$"):
        yield


@contextlib.contextmanager
def refused_like(model: Any, error: type[Exception], pattern: str) -> Iterator[None]:
    """As `refused`, of a text that begins as `pattern` says."""
    with as_users_run_it(), unchanged(model), no_module_runs(), pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert re.match(pattern, str(caught.value), re.DOTALL), str(caught.value)
