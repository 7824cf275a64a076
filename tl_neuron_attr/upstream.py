"""Bridges that compute another function than the model they wrap: faults of TransformerLens releases, by name.

A trace checks that a model's numbers fit together; those of a bridge that leaves out a part of its model fit together
too, and describe a model that nobody has. Each fault here was found by comparing a bridge's log-probabilities with
those of the Hugging Face model, and is told by what the bridge and its configuration hold.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional

_GRID = torch.linspace(-4, 4, 33)


def upstream_fault(model: Any, cfg: Any, name: str) -> str | None:
    """Why the predictions of a bridge are not its model's, or ``None`` where no fault is known."""
    original = getattr(model, "original_model", None)
    wrapped, config = type(original).__name__, getattr(original, "config", None)
    found = _of_configuration(cfg, config, name, wrapped)
    if found is not None:
        return found
    for layer, block in enumerate(model.blocks):
        missing = _left_out(getattr(block, "mlp", None))
        if missing is not None:
            return (
                f"layer {layer} of {name}: this release computes processed MLPs {missing}, so its predictions are "
                f"not the model's; use the bridge without enable_compatibility_mode()"
            )
    return None


def _of_configuration(cfg: Any, config: Any, name: str, wrapped: str) -> str | None:
    if wrapped.startswith("Cohere") and not getattr(cfg, "rotary_interleaved_cos_sin", False):
        return (
            f"{name} is a {wrapped}, whose queries and keys this release of TransformerLens rotates in another "
            f"layout than the model does, so its predictions are not the model's; TransformerLens 4.3 is right"
        )
    if wrapped.startswith("HunYuanDenseV1") and not getattr(cfg, "qk_norm_after_rope", False):
        return (
            f"{name} is a {wrapped}, whose queries and keys this release of TransformerLens norms before it rotates "
            f"them, not behind, so its predictions are not the model's; TransformerLens 4.3 is right"
        )
    if getattr(config, "new_decoder_architecture", False):
        return (
            f"{name} is a {wrapped} with new_decoder_architecture=True, whose queries, keys and values every release "
            f"of TransformerLens up to 4.3 splits in another order than the model, so its predictions are not the "
            f"model's; Falcon models without it are right"
        )
    if getattr(config, "scale_attn_weights", True) is False:
        return (
            f"{name} has scale_attn_weights=False, and every release of TransformerLens up to 4.3 divides attention "
            f"scores by the root of d_head all the same, so its predictions are not the model's"
        )
    cap = getattr(getattr(config, "text_config", config), "attn_logit_softcapping", None)
    if wrapped.startswith("Gemma3") and cap is not None:
        return (
            f"{name} has attn_logit_softcapping={cap}, which {wrapped} ignores and every release of TransformerLens "
            f"up to 4.3 applies, so its predictions are not the model's; set it to None"
        )
    return None


def _left_out(mlp: Any) -> str | None:
    """What a bridge's gated MLP with processed weights computes without: it runs on matrices and a name alone."""
    original = getattr(mlp, "original_component", None)
    if original is None or not getattr(mlp, "_use_processed_weights", False) or not hasattr(mlp, "gate"):
        return None
    for part, module in original.named_children():
        if "norm" in part or "norm" in type(module).__name__.lower():
            return f"without the model's {part}"
    act = next((a for a in (getattr(original, n, None) for n in ("act_fn", "activation_fn", "act")) if a), None)
    if not callable(act):
        return None
    forward = cast("Callable[[torch.Tensor], torch.Tensor]", getattr(act, "forward", act))  # past everyone's hooks
    with torch.no_grad():
        own = forward(_GRID.to(next(original.parameters())))
    used = _named(getattr(mlp, "config", None))(_GRID).to(own)
    return None if float((used - own).abs().max()) < 0.02 else "with another activation function than the model's"


def _named(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that releases up to 4.3 take for a configured name: SiLU for every one that they do not know."""
    names = ("activation_function", "hidden_activation", "hidden_act", "act_fn")
    name = next((str(n) for n in (getattr(config, each, None) for each in names) if n is not None), "silu")
    if name == "gelu":
        return functional.gelu
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return lambda x: functional.gelu(x, approximate="tanh")
    if name in ("relu2", "relu_2", "relu_squared"):
        return lambda x: functional.relu(x).square()
    return functional.relu if name == "relu" else functional.silu
