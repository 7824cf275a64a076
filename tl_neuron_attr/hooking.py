"""Put hooks on hook points, and take away exactly those.

TransformerLens removes hooks by level or all at once, which may take a user's hooks along or leave ours behind.
Here every hook placed is removed by identity of its handle, so the user's own hooks, permanent or not, survive
whatever happens in between, and contexts may end in any order. Ours are placed as permanent ones: a
``model.reset_hooks()`` inside the context must not silently end an ablation; the end of the context does.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.model_view import ModelView

HookFunction: TypeAlias = Callable[..., Tensor | None]
HookPairs: TypeAlias = Sequence[tuple[str, Any]]


@contextmanager
def attached(model: Any, pairs: HookPairs) -> Generator[None]:
    """Hold ``(hook name, hook)`` pairs on a model; they come after the hooks that are already there.

    Nothing of them remains after the block, after an error in it or in a hook, or a keyboard interrupt.
    """
    points: Mapping[str, Any] = model.hook_dict
    placed: list[tuple[Any, Any]] = []
    try:
        for name, hook in pairs:
            point = points[name]
            point.add_hook(hook, is_permanent=True)
            placed.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in placed:
            handle.hook.remove()
            point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]


def logits_with(
    view: ModelView, tokens: Int[Tensor, "row pos"], pairs: HookPairs
) -> Float[Tensor, "row pos d_vocab"]:
    """Logits of one forward pass with these hooks in place, without gradients."""
    with attached(view.model, pairs), torch.no_grad():
        return view.logits(tokens)


def record(view: ModelView, tokens: Int[Tensor, "row pos"], names: Sequence[str]) -> dict[str, Tensor]:
    """Activations at hook points, batch axis included, of one forward pass without gradients."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> HookFunction:
        def hook(tensor: Tensor, hook: Any) -> None:
            seen[name] = tensor.detach().clone()

        return hook

    logits_with(view, tokens, [(name, keep(name)) for name in names])
    for name in names:
        if name not in seen:
            raise never_fired(view, name)
    return seen


def never_fired(view: ModelView, name: str) -> UnsupportedModelError:
    """The error for a hook point that the forward pass does not go through."""
    return UnsupportedModelError(
        f"the hook on {name} of {view.name} ({type(view.model).__name__}) never fired, so nothing there could be "
        f"recorded or ablated: the model computes this part another way; report the model's architecture"
    )
