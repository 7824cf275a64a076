"""HookedTransformers of the zoo's models, through TransformerLens's own weight conversions.

Granite, Cohere, StableLM, Falcon, SmolLM3 and GPT-BigCode have neither conversion nor configuration.
"""

from typing import Any

import torch

CONVERSIONS = {
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen2": "qwen2",
    "gpt_neox": "neox",
    "phi": "phi",
    "gpt_neo": "neo",
    "gptj": "gptj",
    "opt": "opt",
    "mistral": "mistral",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "bloom": "bloom",
}
LAYER_NORM = ("gpt2", "gpt_neo", "gptj", "opt", "gpt_neox", "phi", "olmo", "bloom")
LEARNED = ("gpt2", "gpt_neo", "opt")
ADJACENT = ("gptj",)


def expresses(config: Any) -> bool:
    """Whether the installed TransformerLens can convert a model of the configuration."""
    from transformer_lens.pretrained import weight_conversions as wc

    return hasattr(wc, f"convert_{CONVERSIONS.get(config.model_type)}_weights")


def hooked(hf: Any, processed: bool, tokenizer: Any, dtype: torch.dtype) -> Any:
    """A HookedTransformer with the weights of `hf`; without MLPs if its configuration says `attn_only`.

    Processed as `from_pretrained` does it: logits with a soft cap do not survive a centred unembedding, nor
    OLMo-2 the folding of norms that come after the sublayer.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions as wc

    attn_only = getattr(hf.config, "attn_only", False)
    values = hooked_config(hf.config) | dict(original_architecture=type(hf).__name__, attn_only=attn_only)
    cfg = HookedTransformerConfig(**values, dtype=dtype, device="cpu")
    convert = getattr(wc, f"convert_{CONVERSIONS[hf.config.model_type]}_weights")
    model = HookedTransformer(cfg, tokenizer=tokenizer, move_to_device=False)
    with torch.no_grad():
        state = {k: v.detach().clone().to(dtype) for k, v in convert(hf, cfg).items()}
        if attn_only:
            state = {k: v for k, v in state.items() if ".mlp." not in k and ".ln2." not in k}
        foldable = processed and hf.config.model_type != "olmo2"
        model.load_and_process_state_dict(
            state,
            fold_ln=foldable,
            center_writing_weights=foldable,
            center_unembed=processed and hf.config.model_type != "gemma2",
            fold_value_biases=processed,
        )
    return model.eval()


def hooked_config(config: Any) -> dict[str, Any]:
    """The fields of HookedTransformerConfig that TransformerLens itself sets for the architecture."""
    kind, heads, width = config.model_type, config.num_attention_heads, config.hidden_size
    d_head = getattr(config, "head_dim", None) or width // heads
    values: dict[str, Any] = dict(
        n_layers=config.num_hidden_layers,
        d_model=width,
        n_heads=heads,
        d_head=d_head,
        n_ctx=getattr(config, "max_position_embeddings", 64),  # Bloom has no limit
        d_vocab=config.vocab_size,
        default_prepend_bos=False,
        d_mlp=_first(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * width),
        act_fn=_first(config, "hidden_activation", "activation_function", "hidden_act", default="gelu_fast"),
        eps=_first(config, "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", default=1e-5),  # may be 0
        normalization_type="LN" if kind in LAYER_NORM else "RMS",
        gated_mlp=kind not in LAYER_NORM or kind == "olmo",
    )
    if kind not in LAYER_NORM:
        kv = config.num_key_value_heads
        values |= dict(final_rms=True, n_key_value_heads=None if kv == heads and kind != "qwen2" else kv)
    if kind == "bloom":
        values |= dict(positional_embedding_type="alibi", post_embedding_ln=True)
    elif kind not in LEARNED:
        values |= _rotary(config, d_head)
    if kind == "gpt_neox":
        values |= dict(parallel_attn_mlp=config.use_parallel_residual)
    if kind in ("phi", "gptj"):
        values |= dict(parallel_attn_mlp=True)
    if kind == "gpt_neo":
        values |= dict(use_attn_scale=False)
    if kind in ("qwen3", "gemma3_text"):
        values |= dict(use_qk_norm=True)
    if kind in ("gemma2", "gemma3_text"):
        values |= dict(use_normalization_before_and_after=True, attn_scale=config.query_pre_attn_scalar**0.5)
    if kind == "gemma2":
        values |= dict(
            attn_scores_soft_cap=config.attn_logit_softcapping,
            output_logits_soft_cap=config.final_logit_softcapping,
        )
    if getattr(config, "clip_qkv", None) is not None:
        values |= dict(clip_qkv=config.clip_qkv)
    return values | _windows(config)


def _first(config: Any, *names: str, default: Any) -> Any:
    return next((getattr(config, n) for n in names if getattr(config, n, None) is not None), default)


def _rotary(config: Any, d_head: int) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or vars(config)
    share, local = 1.0, {}
    if config.model_type in ("gpt_neox", "phi"):
        share = 0.5
    if config.model_type == "gemma3_text":
        base = rope.get("sliding_attention", {}).get("rope_theta") or config.rope_local_base_freq
        local, rope = dict(rotary_base_local=base), rope.get("full_attention", rope)
    return local | dict(
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=config.model_type in ADJACENT,
        rotary_base=float(rope.get("rope_theta") or 10000.0),
        rotary_dim=getattr(config, "rotary_dim", None) or int(share * d_head),
    )


def _windows(config: Any) -> dict[str, Any]:
    kind, n_layers = config.model_type, config.num_hidden_layers
    if kind == "gpt_neo":
        types, window = config.attention_layers, config.window_size
    elif kind == "mistral":
        types, window = ["local"] * n_layers, config.sliding_window
    elif kind in ("gemma2", "gemma3_text"):
        types = ["local" if t == "sliding_attention" else "global" for t in config.layer_types]
        window = config.sliding_window
    else:
        return {}
    return dict(use_local_attn=True, attn_types=types, window_size=window)
