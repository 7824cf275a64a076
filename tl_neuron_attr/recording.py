"""Activations of other prompts, recorded once, as modes of ablation: their mean, or their values."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.hooking import record
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.modes import MeanActivations, ResampledActivations
from tl_neuron_attr.tokens import Prompt, Tokens

_BATCH = 8


@without_autocast
def mean_activations(
    model: Any,
    prompts: Sequence[Prompt] | Int[Tensor, "prompt pos"],
    *,
    attention_mask: Int[Tensor, "prompt pos"] | None = None,
    skip_first: int = 0,
    prepend_bos: bool | None = None,
) -> MeanActivations:
    """The mode that replaces activations by their mean over every position of ``prompts``.

    Prompts run in batches of equal length, so there is never any padding to count. Padded tokens are given as
    a tensor ``[prompt, pos]`` with its ``attention_mask`` (1 is a token, 0 padding): each row is stripped first.
    ``skip_first`` leaves out that many positions at the start of every prompt, whose activations are often unlike
    all others (the attention sink).

    Raises :class:`ValueError` for no prompts, a tensor without its mask, or prompts that are all skipped, and
    :class:`UnsupportedModelError` for a model without neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> mean = na.mean_activations(model, ["The weather is fine.", "He went home early."])
        >>> trace = na.trace(model, "The capital of France is", " Paris")
        >>> hooks = na.ablation_hooks(model, na.value_neurons(trace, "mlp", k=10), mode=mean)
    """
    view = ModelView(model)
    view.check_ready()
    rows = _rows(view.vocabulary(), prompts, attention_mask, prepend_bos)
    by_length: dict[int, list[Tensor]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    n_positions = sum(max(len(row) - skip_first, 0) for row in rows)
    if skip_first < 0 or n_positions == 0:
        raise ValueError(
            f"skip_first={skip_first} leaves {n_positions} positions of {len(rows)} prompts: give 0 or more, and "
            f"prompts longer than it"
        )
    totals: dict[str, Tensor] = {}
    for same in by_length.values():
        for batch in torch.stack(same).split(_BATCH):
            for name, seen in record(view, batch, ablated_hooks(view)).items():
                total = seen[:, skip_first:].double().sum((0, 1))
                totals[name] = total if name not in totals else totals[name] + total
    means = {name: (total / n_positions).to(view.compute_dtype) for name, total in totals.items()}
    return MeanActivations(means, len(rows), n_positions)


@without_autocast
def resample(
    model: Any, prompt: Prompt, *, position: int | None = None, prepend_bos: bool | None = None
) -> ResampledActivations:
    """The mode that replaces activations by those of another prompt.

    Position ``i`` takes the values of position ``i`` of ``prompt``; with ``position=`` every ablated position takes
    the values of that one (negative counts from the end).

    Raises :class:`ValueError` for an empty prompt or a position outside it, and when an ablated run is longer than
    ``prompt``.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> trace = na.trace(model, "The capital of France is", " Paris")
        >>> other = na.resample(model, "The capital of Italy is")
        >>> na.ablation_effect(trace, na.Layer(28, "mlp"), mode=other).top_before
        (' Paris',)
    """
    view = ModelView(model)
    view.check_ready()
    vocabulary = view.vocabulary()
    tokens = vocabulary.prompt_ids(prompt, prepend_bos)
    label = f"resample from {''.join(vocabulary.text(token) for token in tokens.tolist())!r}"
    values = {name: seen[0] for name, seen in record(view, tokens[None], ablated_hooks(view)).items()}
    if position is None:
        return ResampledActivations(values, everywhere=False, label=label)
    if not -len(tokens) <= position < len(tokens):
        raise ValueError(
            f"position {position} is out of range for a prompt of {len(tokens)} tokens: give {-len(tokens)} to "
            f"{len(tokens) - 1}"
        )
    at = position % len(tokens)
    cut = {name: seen[at : at + 1].clone() for name, seen in values.items()}
    return ResampledActivations(cut, everywhere=True, label=f"{label}, position {at}")


def ablated_hooks(view: ModelView) -> list[str]:
    """The hook points where neurons are: ``attn.hook_z`` of every layer and ``mlp.hook_post`` where defined."""
    names: list[str] = []
    for layer in range(view.n_layers):
        names.append(f"blocks.{layer}.attn.hook_z")
        if view.mlp_refusal(layer) is None:
            names.append(f"blocks.{layer}.mlp.hook_post")
    return names


def _rows(
    vocabulary: Tokens, prompts: Sequence[Prompt] | Tensor, mask: Tensor | None, prepend_bos: bool | None
) -> list[Int[Tensor, " pos"]]:
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the one string {prompts!r}: give a list of prompts, e.g. [{prompts!r}]")
    if isinstance(prompts, Tensor):
        if mask is None or mask.shape != prompts.shape:
            raise ValueError(
                f"prompts is a tensor of shape {list(prompts.shape)}: give attention_mask= of the same shape (ones "
                f"where nothing is padded), so that padding is not averaged"
            )
        given = list(zip(prompts, mask, strict=True))
        return [vocabulary.prompt_ids(row[kept.bool().to(row.device)], None) for row, kept in given]
    if mask is not None:
        raise ValueError("attention_mask= goes with a tensor of padded prompts: a list of prompts has no padding")
    if not len(prompts):
        raise ValueError("no prompts are given: a mean needs at least one")
    return [vocabulary.prompt_ids(prompt, prepend_bos if isinstance(prompt, str) else None) for prompt in prompts]
