"""Hooks that ablate neurons, for ``run_with_hooks`` and ``add_hook``, and a context manager for anything else.

What an ablating hook does is in :mod:`tl_neuron_attr.editing`, which units identities name in
:mod:`tl_neuron_attr.selection`; several selections can be rows of one batch.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_neuron_attr.editing import AblationHook, Observer
from tl_neuron_attr.hooking import attached
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.modes import Mode, ResampledActivations, Scale, Zero, resolve_mode
from tl_neuron_attr.selection import Neurons, Selection, check_scope, identities, mlp_width, select

HookPair: TypeAlias = tuple[str, AblationHook | Observer]


def ablation_hooks(
    model: Any,
    neurons: Neurons,
    mode: str | Mode = "zero",
    *,
    positions: Sequence[int] | None = None,
    scope: str = "neuron",
) -> list[HookPair]:
    """``(hook name, hook)`` pairs for ``run_with_hooks``, ``add_hook`` and ``hooks()`` of any TransformerLens model.

    Add all of them, in this order: some only observe for the others. Every hook has ``name`` and ``fired``.

    Args:
        model: a ``TransformerBridge`` or ``HookedTransformer``.
        neurons: ranked neurons, ``MLPNeuron``, ``AttnNeuron``, ``Head``, ``Layer``, or an iterable of these, mixed.
        mode: ``"zero"``, ``Scale(factor)``, ``SetTo(value)``, or what ``mean_activations`` or ``resample`` gave.
        positions: absolute positions to ablate at, counted from 0 (in a padded batch: columns); ``None`` is every
            position, as if the neuron's parameters were edited.
        scope: ``"source"`` ablates of an attention neuron only what its source brings to ``positions``, or to the
            predicting position of the ranking it is from. Other identities have no source: all of them is ablated.

    Raises:
        ValueError: an unknown mode or scope, an identity outside the model, an empty set, a negative position,
            ``scope="source"`` with another mode than zero and scale, or without a destination.
        UnsupportedModelError: a layer without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> hooks = na.ablation_hooks(model, [na.Head(23, 8), na.MLPNeuron(28, 1227)])
        >>> [name for name, _ in hooks]
        ['blocks.28.mlp.hook_post', 'blocks.23.attn.hook_z']
        >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=hooks)
        >>> [hook.fired for _, hook in hooks]
        [1, 1]
    """
    view = ModelView(model)
    at = absolute_positions(positions)
    return hooks_for(view, [select(view, identities(neurons), check_scope(scope), at)], resolve_mode(mode), at)


@contextmanager
def ablating(
    model: Any,
    neurons: Neurons,
    mode: str | Mode = "zero",
    *,
    positions: Sequence[int] | None = None,
    scope: str = "neuron",
) -> Generator[tuple[AblationHook | Observer, ...]]:
    """Whatever runs in the block runs with these neurons ablated: calls, ``generate``, ``run_with_cache``.

    Takes and raises what :func:`ablation_hooks` does; gives the hooks, whose ``fired`` says how often each fired.
    The user's own hooks stay and see values from before the ablation where they were added before it; ours go when
    the block ends, however it ends, and do not go before (``reset_hooks()`` leaves them). Blocks nest.

    ``generate`` runs one pass a token, ablated each, with its key-value cache or without. (TransformerLens 3.9 and
    4.3 lose that cache with transformers 5.24 on many architectures, ablated or not: there pass
    ``use_past_kv_cache=False``.)

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> with na.ablating(model, na.Layer(28, "mlp")) as hooks:
        ...     _ = model.generate("The capital of France is", max_new_tokens=3, do_sample=False, verbose=False)
        >>> hooks[0].fired
        3
    """
    pairs = ablation_hooks(model, neurons, mode, positions=positions, scope=scope)
    with attached(model, pairs):
        yield tuple(hook for _, hook in pairs)


def absolute_positions(positions: Sequence[int] | None) -> tuple[int, ...] | None:
    """Check positions that must mean the same in every run; raises :class:`ValueError` for negative ones or none."""
    if positions is None:
        return None
    if not len(positions):
        raise ValueError("positions=[] ablates nowhere: give at least one, or None for every position")
    negative = [position for position in positions if position < 0]
    if negative:
        raise ValueError(
            f"position {negative[0]} counts from the end, which hooks cannot know (a step of generate sees one "
            f"position only): count from 0"
        )
    return tuple(int(position) for position in positions)


def hooks_for(
    view: ModelView, selections: Sequence[Selection], mode: Mode, positions: tuple[int, ...] | None
) -> list[HookPair]:
    """Hooks under which row ``i`` of a batch has ``selections[i]`` ablated (one selection: every row)."""
    if any(s.sources for s in selections) and not isinstance(mode, Zero | Scale):
        raise ValueError(
            f'scope="source" with mode {mode}: one source\'s share of an activation can only be removed or scaled; '
            f'use "zero" or Scale(factor), or scope="neuron"'
        )
    observed = positions is not None or isinstance(mode, ResampledActivations)
    window = view.attention_window
    pairs: list[HookPair] = []
    for layer in _layers(s.mlp for s in selections):
        name = f"blocks.{layer}.mlp.hook_post"
        mask = _mask(selections, lambda s, layer=layer: s.mlp.get(layer, frozenset()), mlp_width(view, layer))
        pattern = Observer(f"blocks.{layer}.attn.hook_pattern") if observed else None
        hook = AblationHook(name, mask, mode, positions, pattern, None, [], window)
        pairs += [(h.name, h) for h in (pattern, hook) if h is not None]
    for layer in _layers(part for s in selections for part in (s.attn, s.sources)):
        name = f"blocks.{layer}.attn.hook_z"
        flat = _mask(selections, lambda s, layer=layer: s.attn.get(layer, frozenset()), view.n_heads * view.d_head)
        mask = flat.view(-1, view.n_heads, view.d_head)
        sources = [(row, s) for row, sel in enumerate(selections) for s in sorted(sel.sources.get(layer, ()))]
        pattern = Observer(f"blocks.{layer}.attn.hook_pattern") if observed or sources else None
        value = Observer(f"blocks.{layer}.attn.hook_v") if sources else None
        hook = AblationHook(name, mask, mode, positions, pattern, value, sources, window)
        pairs += [(h.name, h) for h in (pattern, value, hook) if h is not None]
    return pairs


def _layers(parts: Iterable[dict[int, Any]]) -> list[int]:
    return sorted({layer for part in parts for layer in part})


def _mask(
    selections: Sequence[Selection], units: Callable[[Selection], frozenset[int]], width: int
) -> Bool[Tensor, "row unit"]:
    mask = torch.zeros(len(selections), width, dtype=torch.bool)
    for row, selection in enumerate(selections):
        mask[row, sorted(units(selection))] = True
    return mask
