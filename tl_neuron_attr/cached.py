"""The activations of one run of the model, from our own forward pass or from a user's cache.

A user's cache is checked before anything is computed from it: every needed activation is there, of the right
length, and ``hook_embed`` is the embedding of the very tokens that were given (a cache of another prompt of the
same length would give plausible, wrong numbers).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.tolerance import ROUNDING


@dataclass(frozen=True, eq=False)
class CachedRun:
    """Activations without a batch axis; ``logits`` and ``resid_final`` are keyed by position."""

    layers: Mapping[str, tuple[Tensor | None, ...]]
    resid_final: Mapping[int, Float[Tensor, " d_model"]]
    logits: Mapping[int, Float[Tensor, " d_vocab"]]

    @staticmethod
    def forward(view: ModelView, tokens: Int[Tensor, " pos"], dests: Sequence[int]) -> "CachedRun":
        """Run the model once; keep logits at the positions ``dests``."""
        logits, activations = view.run(tokens[None])
        alone = {name: tensor[0] for name, tensor in activations.items()}
        return _collect(view, alone, {dest: logits[0, dest].clone() for dest in dests})

    @staticmethod
    def forward_rows(
        view: ModelView, tokens: Int[Tensor, "row pos"], places: Sequence[tuple[int, int]]
    ) -> list["CachedRun"]:
        """Run several prompts at once; ``places`` are each row's own length and predicting position.

        Each run holds copies of its row, without what comes after the prompt, so none keeps the batch.
        """
        logits, activations = view.run(tokens)
        lengths = [length for length, _ in places]
        copies = {name: _rows(name, tensor, lengths) for name, tensor in _taken(activations)}
        kept = [logits[row, dest].clone() for row, (_, dest) in enumerate(places)]
        return [
            _collect(view, {name: copies[name][row] for name in copies}, {dest: kept[row]})
            for row, (_, dest) in enumerate(places)
        ]

    def until(self, dest: int) -> dict[str, Any]:
        """The per-layer activations cut after position ``dest``, by their name in a trace."""
        end = dest + 1
        cut = {name: tuple(None if t is None else t[:end] for t in rows) for name, rows in self.layers.items()}
        cut["pattern"] = tuple(t if t is None else t[:, :end, :end] for t in self.layers["pattern"])
        return cut


def read_cache(view: ModelView, cache: Any, tokens: Int[Tensor, " pos"], dests: Sequence[int]) -> CachedRun:
    """Take the activations from a user's cache (never written to), or say what is wrong with it."""
    if not hasattr(cache, "keys"):
        raise ValueError(
            f"the cache is a {type(cache).__name__}: give the ActivationCache (or dict of activations by hook name) "
            f"that run_with_cache returned as its second value"
        )
    held = set(cache.keys())
    missing = [name for name in view.hook_names() if name not in held]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"the cache lacks {len(missing)} of the {len(view.hook_names())} needed activations ({listed}): run the "
            f"model with names_filter=required_hooks(model), or without a filter"
        )
    activations = {name: _single(name, cache[name], len(tokens)) for name in view.hook_names()}
    _check_precision(view, activations)
    _check_tokens(view, activations["hook_embed"], tokens)
    final = activations[f"blocks.{view.n_layers - 1}.hook_resid_post"]
    return _collect(view, activations, {dest: view.own_logits(final[dest]) for dest in dests})


def _collect(view: ModelView, activations: Mapping[str, Tensor], logits: Mapping[int, Tensor]) -> CachedRun:
    parts = {
        "resid_pre": "hook_resid_pre",
        "attn_out": "hook_attn_out",
        "mlp_out": "hook_mlp_out",
        "pattern": "attn.hook_pattern",
        "value": "attn.hook_v",
        "z": "attn.hook_z",
        "post": "mlp.hook_post",
    }
    layers = {
        name: tuple(activations.get(f"blocks.{layer}.{hook}") for layer in range(view.n_layers))
        for name, hook in parts.items()
    }
    layers["value"] = tuple(None if value is None else view.clipped(value) for value in layers["value"])
    final = activations[f"blocks.{view.n_layers - 1}.hook_resid_post"]
    return CachedRun(layers, {dest: final[dest] for dest in logits}, logits)


def _taken(activations: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each activation, no longer held by the dictionary, so that its memory is free once it was used."""
    for name in list(activations):
        yield name, activations.pop(name)


def _rows(name: str, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """A copy of each row, as far as its prompt goes."""
    if name.endswith("hook_pattern"):
        return [tensor[row, :, :length, :length].clone() for row, length in enumerate(lengths)]
    return [tensor[row, :length].clone() for row, length in enumerate(lengths)]


def _single(name: str, tensor: Tensor, length: int) -> Tensor:
    """Drop a batch axis of one and check the length of the position axis."""
    is_pattern = name.endswith("hook_pattern")
    per_head = name.endswith(("hook_v", "hook_z"))
    with_batch = 4 if is_pattern or per_head else 3
    if tensor.ndim == with_batch:
        if tensor.shape[0] != 1:
            raise ValueError(
                f"the cache holds {tensor.shape[0]} prompts ({name} has shape {list(tensor.shape)}): give the cache "
                f"of one prompt, e.g. each tensor indexed [i : i + 1]"
            )
        tensor = tensor[0]
    positions = tensor.shape[-2:] if is_pattern else tensor.shape[:1]
    if tensor.ndim != with_batch - 1 or any(size != length for size in positions):
        raise ValueError(
            f"the cache's {name} has shape {list(tensor.shape)}, which is not of {length} positions as the prompt "
            f"given: pass the tokens that the cache was made with (mind the BOS token), and no pos_slice"
        )
    return tensor.detach()


def _check_precision(view: ModelView, activations: Mapping[str, Tensor]) -> None:
    """A cache narrowed after the run has lost the digits that its model's numbers are checked to."""
    for name, tensor in activations.items():
        if torch.finfo(tensor.dtype).eps > torch.finfo(view.dtype).eps:
            raise ValueError(
                f"the cache is of {tensor.dtype} ({name}) and the model of {view.dtype}: give the activations as "
                f"run_with_cache returned them, not converted"
            )


def _check_tokens(view: ModelView, embedded: Tensor, tokens: Tensor) -> None:
    """``hook_embed`` must be what the model embeds these tokens as, up to one common factor (Gemma scales it)."""
    given = embedded.to(view.compute_dtype)
    gaps = [_gaps(expected.to(given), given) for expected in view.embeddings(tokens)]
    gap = min(gaps, key=lambda each: float(each.max()))
    wrong = (gap > 10 * ROUNDING[view.dtype]).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"the cache was made with other tokens than those given (hook_embed differs at position {wrong[0]}): "
            f"pass the tokens that the cache was made with; with edited embeddings, call trace without cache= "
            f"while your hooks are on the model"
        )


def _gaps(expected: Tensor, given: Tensor) -> Float[Tensor, " pos"]:
    """How far each row is from the expected one times the common factor, beside the longest row."""
    ratios = (expected * given).sum(-1) / expected.square().sum(-1)
    factor = ratios[expected.square().sum(-1) > 0].median() if bool((expected != 0).any()) else given.new_ones(())
    return (given - factor * expected).norm(dim=-1) / given.norm(dim=-1).max().clamp(min=1e-30)
