"""Tiny configurations of every architecture, as Hugging Face builds them, and random weights for them.

Two or three layers, about a hundred tokens, no dropout. What makes an architecture special is switched on and
small enough to matter within a short prompt: windows shorter than it, soft caps below the logits, multipliers
away from one.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_inner=72,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def llama_like(cls: Any, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return cls(**{**values, **changes})


def _neox(parallel: bool) -> Any:
    return transformers.GPTNeoXConfig(
        vocab_size=110,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        rotary_pct=0.5,
        use_parallel_residual=parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
    )


# The architectures that the suite runs everything on.
MAIN: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": lambda: llama_like(transformers.LlamaConfig),
    "llama_gqa": lambda: llama_like(
        transformers.LlamaConfig,
        vocab_size=96,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,  # 6 * 16 != 48
    ),
    "qwen2": lambda: llama_like(transformers.Qwen2Config, vocab_size=128, num_key_value_heads=2),
    "neox": lambda: _neox(parallel=True),
    "neox_sequential": lambda: _neox(parallel=False),
    "phi": lambda: llama_like(
        transformers.PhiConfig, num_hidden_layers=2, hidden_act="gelu_new", partial_rotary_factor=0.5
    ),
}


def _grouped(cls: Any, **changes: Any) -> Any:
    """Two layers, two key-value heads for four query heads, special tokens inside the vocabulary."""
    values = dict(num_hidden_layers=2, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    return llama_like(cls, **{**values, **changes})


def _gemma(cls: Any, **changes: Any) -> Any:
    """The embedding's scale, sqrt(36), is a whole number; 4 * 8 != 36; the unembedding is tied."""
    values = dict(hidden_size=36, head_dim=8, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
    return _grouped(cls, **{**values, **changes})


def _gpt_neo() -> Any:
    return transformers.GPTNeoConfig(
        vocab_size=96,
        max_position_embeddings=32,
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        intermediate_size=72,
        window_size=3,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def _gptj() -> Any:
    return transformers.GPTJConfig(
        vocab_size=100,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_inner=72,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def _opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=100,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        ffn_dim=56,
        max_position_embeddings=32,
        num_attention_heads=4,
        do_layer_norm_before=True,
        dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def _falcon(**changes: Any) -> Any:
    values: dict[str, Any] = dict(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=72,
        max_position_embeddings=64,
        parallel_attn=True,
        bias=True,
        alibi=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.FalconConfig(**{**values, **changes})


def _bloom() -> Any:
    return transformers.BloomConfig(
        vocab_size=100,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def _gpt_bigcode() -> Any:
    return transformers.GPTBigCodeConfig(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=72,
        multi_query=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def _attn_only() -> Any:
    """GPT-2 whose MLPs add nothing (see `randomise`): what an attention-only HookedTransformer computes."""
    config = _gpt2()
    config.attn_only = True
    return config


t = transformers
OTHERS: dict[str, Callable[[], Any]] = {
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "opt": _opt,
    "mistral": lambda: _grouped(t.MistralConfig, head_dim=8, sliding_window=3),
    "qwen3": lambda: _grouped(t.Qwen3Config, head_dim=12),
    "phi3": lambda: _grouped(t.Phi3Config),
    "gemma": lambda: _gemma(t.GemmaConfig),
    "gemma2": lambda: _gemma(
        t.Gemma2Config,
        query_pre_attn_scalar=12,
        sliding_window=3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: _gemma(
        t.Gemma3TextConfig,
        query_pre_attn_scalar=12,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo": lambda: _grouped(t.OlmoConfig, num_key_value_heads=4),
    "olmo_clipped": lambda: _grouped(t.OlmoConfig, num_key_value_heads=4, clip_qkv=1.5),
    "olmo2": lambda: _grouped(t.Olmo2Config, num_key_value_heads=4),
    "granite": lambda: _grouped(
        t.GraniteConfig,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=0.5,
    ),
    "cohere": lambda: _grouped(t.CohereConfig, logit_scale=0.7, tie_word_embeddings=True),
    "stablelm": lambda: _grouped(t.StableLmConfig, partial_rotary_factor=0.5, use_qkv_bias=True, hidden_dropout=0.0),
    "stablelm_parallel": lambda: _grouped(
        t.StableLmConfig, partial_rotary_factor=0.25, use_parallel_residual=True, hidden_dropout=0.0
    ),
    "falcon": lambda: _falcon(multi_query=True, new_decoder_architecture=False),
    "falcon_sequential": lambda: _falcon(
        multi_query=False, new_decoder_architecture=False, parallel_attn=False, alibi=True
    ),
    "falcon_new": lambda: _falcon(multi_query=False, new_decoder_architecture=True, num_kv_heads=2),
    "bloom": _bloom,
    "smollm3": lambda: _grouped(t.SmolLM3Config, no_rope_layers=[1, 0]),
    "gpt_bigcode": _gpt_bigcode,
    "attn_only": _attn_only,
}
CONFIGS = MAIN | OTHERS

EMBEDDINGS = ("wte", "wpe", "embed_tokens", "embed_in", "embed_positions", "word_embeddings")


def randomise(hf_model: Any, seed: int) -> Any:
    """Norm gains around 1, every bias and matrix random, large enough for peaked attention and logits."""
    generator = torch.Generator().manual_seed(seed)
    gemma = hf_model.config.model_type.startswith("gemma")
    one = 0.0 if gemma else 1.0  # Gemma keeps a gain g as g - 1
    embedding = 0.35 if gemma else 0.6  # Gemma multiplies the embedding by 6
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(one + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif any(part in name for part in EMBEDDINGS):
                parameter.copy_(embedding * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
            if getattr(hf_model.config, "attn_only", False) and "mlp.c_proj" in name:
                parameter.zero_()
    return hf_model.eval()
