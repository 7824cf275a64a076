"""Where each Hugging Face architecture keeps what a block computes with: modules, and columns of fused matrices.

A block reads the stream through a norm (or as it is), computes, and adds what its output module gives, sent
through a post-norm or times a multiplier where the architecture has one. Nothing here is trusted: the recording
checks every value, activation and sum against what the model really did.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Parts:
    """The modules of one block. Columns say which outputs of a fused module are meant; None means all."""

    norm_attn: Any  # before attention; None where attention reads the stream itself
    norm_mlp: Any
    value: Any  # module whose output holds the values
    out: Any  # module whose input is z and whose output attention adds
    up: Any
    down: Any
    gate: Any
    parallel: bool  # whether the MLP reads the stream before attention
    act: Any
    value_columns: np.ndarray | None = None  # [kv * dim]
    up_columns: np.ndarray | None = None  # [d_mlp]
    gate_columns: np.ndarray | None = None
    post_attn: Any = None  # norm of what attention adds
    post_mlp: Any = None
    multiplier: float = 1.0  # of what both add
    clip: float | None = None  # values stay within -clip and clip


def skeleton(model: Any) -> tuple[list[Any], Any, Any]:
    """Blocks, final norm and unembedding."""
    unembed = model.get_output_embeddings()
    if hasattr(model, "transformer"):
        return list(model.transformer.h), model.transformer.ln_f, unembed
    if hasattr(model, "gpt_neox"):
        return list(model.gpt_neox.layers), model.gpt_neox.final_layer_norm, unembed
    if hasattr(model.model, "decoder"):
        return list(model.model.decoder.layers), model.model.decoder.final_layer_norm, unembed
    inner = model.model
    norm = inner.final_layernorm if hasattr(inner, "final_layernorm") else inner.norm
    return list(inner.layers), norm, unembed


def logit_scale(config: Any) -> float:
    """What multiplies the logits."""
    if config.model_type == "granite":
        return 1.0 / config.logits_scaling
    return float(config.logit_scale) if config.model_type == "cohere" else 1.0


def logit_cap(config: Any) -> float | None:
    """`c` of logits `c tanh(z / c)`."""
    return getattr(config, "final_logit_softcapping", None)


def parts_of(model: Any, block: Any) -> Parts:
    """Of one block."""
    kind = model.config.model_type
    if kind in ("gpt2", "gpt_bigcode", "gpt_neo", "gptj"):
        return _gpt(model.config, block)
    if kind in ("gpt_neox", "bloom", "falcon"):
        return _fused_by_head(model.config, block)
    if kind == "opt":
        attn = block.self_attn
        norms = block.self_attn_layer_norm, block.final_layer_norm
        return Parts(*norms, attn.v_proj, attn.out_proj, block.fc1, block.fc2, None, False, block.activation_fn)
    if kind == "phi":
        attn, mlp, norm = block.self_attn, block.mlp, block.input_layernorm
        return Parts(norm, norm, attn.v_proj, attn.dense, mlp.fc1, mlp.fc2, None, True, mlp.activation_fn)
    if kind == "phi3":
        return _phi3(model.config, block)
    return _llama(model.config, block)


def _gpt(config: Any, block: Any) -> Parts:
    kind, mlp, width = config.model_type, block.mlp, config.hidden_size
    if kind == "gptj":
        attn, norm = block.attn, block.ln_1
        return Parts(norm, norm, attn.v_proj, attn.out_proj, mlp.fc_in, mlp.fc_out, None, True, mlp.act)
    norms, up_down = (block.ln_1, block.ln_2), (mlp.c_fc, mlp.c_proj)
    if kind == "gpt_neo":
        attn = block.attn.attention
        return Parts(*norms, attn.v_proj, attn.out_proj, *up_down, None, False, mlp.act)
    attn = block.attn
    kv_width = width if kind == "gpt2" else width // config.num_attention_heads  # GPT-BigCode: one key-value head
    columns = width + kv_width + np.arange(kv_width)  # all queries, all keys, all values
    return Parts(*norms, attn.c_attn, attn.c_proj, *up_down, None, False, mlp.act, columns)


def _fused_by_head(config: Any, block: Any) -> Parts:
    """Groups of heads in turn: the queries of a group, its key, its value."""
    kind, mlp = config.model_type, block.mlp
    heads = kv = config.num_attention_heads
    dim = config.hidden_size // heads
    attn = block.attention if kind == "gpt_neox" else block.self_attention
    parallel = kind == "gpt_neox" and bool(config.use_parallel_residual)
    norm_attn = getattr(block, "input_layernorm", None)
    norm_mlp = getattr(block, "post_attention_layernorm", None)
    if kind == "falcon":
        parallel = config.new_decoder_architecture or config.parallel_attn
        norm_attn = getattr(block, "ln_attn", norm_attn)
        norm_mlp = getattr(block, "ln_mlp", norm_attn if parallel else norm_mlp)
        if config.new_decoder_architecture:
            kv = config.num_kv_heads
        elif config.multi_query:
            kv = 1
    group = heads // kv + 2  # queries, key, value
    columns = (np.arange(kv)[:, None] * group + group - 1) * dim + np.arange(dim)
    act = mlp.gelu_impl if kind == "bloom" else mlp.act
    up_down = mlp.dense_h_to_4h, mlp.dense_4h_to_h
    value_out = attn.query_key_value, attn.dense
    return Parts(norm_attn, norm_mlp, *value_out, *up_down, None, bool(parallel), act, columns.reshape(-1))


def _phi3(config: Any, block: Any) -> Parts:
    attn, mlp = block.self_attn, block.mlp
    dim = config.hidden_size // config.num_attention_heads
    kv, d_mlp = config.num_key_value_heads, config.intermediate_size
    return Parts(
        block.input_layernorm,
        block.post_attention_layernorm,
        attn.qkv_proj,
        attn.o_proj,
        mlp.gate_up_proj,
        mlp.down_proj,
        mlp.gate_up_proj,
        False,
        mlp.activation_fn,
        (config.num_attention_heads + kv) * dim + np.arange(kv * dim),
        up_columns=d_mlp + np.arange(d_mlp),
        gate_columns=np.arange(d_mlp),
    )


def _llama(config: Any, block: Any) -> Parts:
    kind, attn, mlp = config.model_type, block.self_attn, block.mlp
    before, after = getattr(block, "input_layernorm", None), getattr(block, "post_attention_layernorm", None)
    post_attn, post_mlp = None, getattr(block, "post_feedforward_layernorm", None)
    parallel = kind == "cohere" or (kind == "stablelm" and config.use_parallel_residual)
    norm_mlp = before if parallel else after
    if post_mlp is not None:  # Gemma-2, Gemma-3, OLMo-2: the norm "post attention" is of what attention adds
        post_attn, norm_mlp = after, getattr(block, "pre_feedforward_layernorm", None)
    return Parts(
        before,
        norm_mlp,
        attn.v_proj,
        attn.o_proj,
        mlp.up_proj,
        mlp.down_proj,
        mlp.gate_proj,
        parallel,
        mlp.act_fn,
        post_attn=post_attn,
        post_mlp=post_mlp,
        multiplier=float(getattr(config, "residual_multiplier", 1.0)),
        clip=getattr(config, "clip_qkv", None),
    )
