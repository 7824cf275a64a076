"""Models for which the method has no meaning, or a release that computes something else: refused by name.

A part of the model view. What is decided here is what a model *is*; whether its numbers fit together is decided on
numbers at every trace (:mod:`tl_neuron_attr.checks`).
"""

import re
from collections.abc import Iterator
from typing import Any

from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.upstream import upstream_fault

_STATE_SPACE = re.compile(
    r"(?i:mamba|rwkv|retention|recurrent|rglru|delta_?net|linear_?attn|linear_?attention|hyena|short_?conv|mixer)"
    r"|(^|_)ssm|SSM"
)
_PACKED = re.compile(r"(^|\.)(qweight|qzeros|weight_packed|quant_state|SCB)(\.|$)")
_EXPERTS = re.compile(r"expert|router|sparse_?moe", re.IGNORECASE)


def refuse(model: Any, cfg: Any, name: str) -> None:
    """Raise :class:`UnsupportedModelError` for a model of another kind, before any number is computed."""
    if not hasattr(model, "blocks") or hasattr(model, "decoder_blocks"):
        raise UnsupportedModelError(
            f"{name} is not a decoder-only transformer (no `blocks`): encoders and encoder-decoders predict no "
            f"next token from one residual stream; use a causal language model"
        )
    wrapped = type(getattr(model, "original_model", None)).__name__
    if getattr(cfg, "attention_dir", "causal") != "causal" or "MaskedLM" in wrapped:
        raise UnsupportedModelError(
            f"{name} attends in both directions: an encoder predicts no next token; use a causal model"
        )
    if hasattr(model, "ln_final") and getattr(model.ln_final, "original_component", model) is None:
        raise UnsupportedModelError(
            f"{name} has no final norm, and this release of TransformerLens expects one (its own forward pass "
            f"fails): use a model that norms its last residual stream"
        )
    packed = _packed(model)
    if packed is not None:
        raise UnsupportedModelError(
            f"{name} holds packed quantised weights ({packed}): neuron vectors must be readable, so load the model "
            f"unquantised, or dequantise it"
        )
    for layer, block in enumerate(model.blocks):
        found = _state_space(block)
        if found is not None:
            raise UnsupportedModelError(
                f"layer {layer} of {name} is not attention alone (it holds {found}): state-space, recurrent and "
                f"hybrid layers have no attention neurons, so their scores are not defined; use a transformer"
            )
    fault = upstream_fault(model, cfg, name)
    if fault is not None:
        raise UnsupportedModelError(fault)
    if not cfg.attn_only and all(mlp_refusal(model, cfg, name, layer) for layer in range(cfg.n_layers)):
        raise UnsupportedModelError(
            f"every MLP of {name} is a mixture of experts, whose hook_post is not one set of MLP neurons, so their "
            f"scores are not defined; use a model with dense layers"
        )


def mlp_refusal(model: Any, cfg: Any, name: str, layer: int) -> str | None:
    """Why the MLP neurons of ``layer`` cannot be attributed, or ``None`` where they can."""
    if cfg.attn_only:
        return f"{name} has no MLP in layer {layer}: attention-only models have attention neurons only"
    mlp = getattr(model.blocks[layer], "mlp", None)
    original = getattr(mlp, "original_component", None)
    if original is None:
        experts = getattr(cfg, "num_experts", None) or "moe" in type(mlp).__name__.lower()
    else:
        experts = any(_EXPERTS.search(part) for part in _parts(original))
    if experts:
        return (
            f"layer {layer} of {name} is a mixture of experts: its hook_post is not one set of MLP "
            f"neurons, so their scores are not defined; attribute attention neurons or dense layers"
        )
    return None


def _packed(model: Any) -> str | None:
    """The first weight that is not of floating point, or the first part of one by its usual names."""
    for weight, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            return f"{weight}, {parameter.dtype}"
    return next((buffer for buffer, _ in model.named_buffers() if _PACKED.search(buffer)), None)


def _state_space(block: Any) -> str | None:
    """The part of a block that is neither attention nor MLP nor norm, as ``name (class)``."""
    original = getattr(block, "original_component", None)
    for owner in (block, original):
        for child, module in [] if owner is None else owner.named_children():
            wrapped = type(getattr(module, "original_component", module)).__name__
            if child.startswith("_") or "norm" in child or child.startswith("ln"):
                continue
            if _STATE_SPACE.search(child) or _STATE_SPACE.search(wrapped):
                return f"{child}: {wrapped}"
    return None


def _parts(module: Any) -> Iterator[str]:
    """The class of a module, and names and classes of what it holds."""
    yield type(module).__name__
    for child, part in module.named_children():
        yield child
        yield type(part).__name__


def reads_length(model: Any) -> bool:
    """Whether rotary angles are scaled with the length of the whole text, so that they depend on later tokens.

    Not a reason to refuse a model, but prompts of unequal lengths cannot share a forward pass then.
    """
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    of_layers = [list(kind.values()) if isinstance(kind, dict) else [kind] for kind in kinds]
    return any(kind == "longrope" or "dynamic" in str(kind) for each in of_layers for kind in each)
