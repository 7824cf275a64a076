"""One forward pass of a Hugging Face model in float64, written down for the reference loop.

Imports neither the package nor TransformerLens: what the reference loop knows of a model comes from here,
through forward hooks on the Hugging Face modules and from their weights. Everything is a float64 NumPy array.

Shapes: `pos` positions, `head` query heads, `kv` key-value heads, `dim` dimensions of a head.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

Array = np.ndarray


@dataclass(frozen=True)
class LayerRecord:
    """What one block read, computed and added, and the weights that say so."""

    resid_pre: Array  # [pos, d_model]
    attn_out: Array  # [pos, d_model], what attention adds, bias included
    mlp_out: Array  # [pos, d_model], what the MLP adds, bias included
    mlp_act: Array  # [pos, d_mlp], what multiplies the rows of W_out
    pattern: Array  # [head, dest, source]
    value: Array  # [pos, kv, dim], value bias included
    value_constant: Array  # [kv, dim]: what the values hold whatever the stream is, b_V + W_V' (bias of the norm)
    W_V: Array  # [kv, d_model, dim]
    W_O: Array  # [head, dim, d_model]
    W_out: Array  # [d_mlp, d_model]
    W_in: Array  # [d_model, d_mlp]; "up" of a gated MLP
    W_gate: Array | None  # [d_model, d_mlp]
    in_pre: Array  # [pos, d_mlp]
    gate_pre: Array | None  # [pos, d_mlp]
    gain_attn: Array  # [d_model], of the norm before attention
    gain_mlp: Array  # [d_model], of the norm before the MLP
    parallel: bool  # whether the MLP reads the stream before attention


@dataclass(frozen=True)
class Recording:
    """A forward pass over one prompt."""

    tokens: tuple[int, ...]
    embed: Array  # [pos, d_model]
    layers: tuple[LayerRecord, ...]
    final: Array  # [pos, d_model], the residual stream before the final norm
    layer_norm: bool  # LayerNorm or RMSNorm
    eps: float
    gain: Array  # [d_model]
    norm_bias: Array  # [d_model]
    W_U: Array  # [d_model, d_vocab]
    b_U: Array  # [d_vocab]
    log_probs: Array  # [pos, d_vocab], the model's own
    act: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Parts:
    """Where an architecture keeps things: the modules of one block."""

    norm_attn: Any
    norm_mlp: Any
    value: Any  # module whose output holds the values
    out: Any  # module whose input is z and whose output attention adds
    up: Any
    down: Any
    gate: Any
    parallel: bool


class Float64Only(TorchFunctionMode):
    """Turns the casts to float32 inside a model (softmax, RMSNorm, rotary angles) into casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(widen(a) for a in args)
        return func(*args, **{k: widen(v) for k, v in (kwargs or {}).items()})


def record(hf_model: Any, tokens: list[int]) -> Recording:
    """Run a deep copy of `hf_model` on `tokens` in float64 and write down what every block did."""
    model = copy.deepcopy(hf_model).double().eval()
    model.set_attn_implementation("eager")
    widen_rotary(model)
    blocks, final_norm, unembed = skeleton(model)
    parts = [parts_of(model, block) for block in blocks]
    seen: dict[Any, Array] = {}
    handles = []

    def keep(key: Any, module: Any, which: str) -> None:
        if which == "in":
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, a, k: seen.__setitem__(key, _np(a[0] if a else k["hidden_states"])[0]),
                    with_kwargs=True,
                )
            )
        else:
            handles.append(module.register_forward_hook(lambda _m, _a, o: seen.__setitem__(key, _np(o)[0])))

    for layer, (block, p) in enumerate(zip(blocks, parts, strict=True)):
        keep((layer, "pre"), block, "in")
        keep((layer, "value"), p.value, "out")
        keep((layer, "attn"), p.out, "out")
        keep((layer, "act"), p.down, "in")
        keep((layer, "mlp"), p.down, "out")
        keep((layer, "in"), p.up, "out")
        if p.gate is not None:
            keep((layer, "gate"), p.gate, "out")
    keep("final", final_norm, "in")
    try:
        with torch.no_grad(), Float64Only():
            output = model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = tuple(_layer(model, p, seen, layer, _np(output.attentions[layer])[0]) for layer, p in enumerate(parts))
    _check_stream(layers, seen["final"])
    width = layers[0].resid_pre.shape[1]
    norm_bias = getattr(final_norm, "bias", None)
    unembed_bias = getattr(unembed, "bias", None)
    d_vocab = unembed.weight.shape[0]
    config = model.config
    eps = next(
        getattr(config, name)
        for name in ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
        if hasattr(config, name)
    )
    mlp = next(
        m for m in blocks[0].modules() if hasattr(m, "act") or hasattr(m, "act_fn") or hasattr(m, "activation_fn")
    )
    return Recording(
        tokens=tuple(tokens),
        embed=layers[0].resid_pre,
        layers=layers,
        final=seen["final"],
        layer_norm=isinstance(final_norm, torch.nn.LayerNorm),
        eps=float(eps),
        gain=_np(final_norm.weight),
        norm_bias=np.zeros(width) if norm_bias is None else _np(norm_bias),
        W_U=_np(unembed.weight).T,
        b_U=np.zeros(d_vocab) if unembed_bias is None else _np(unembed_bias),
        log_probs=_np(output.logits[0].log_softmax(-1)),
        act=getattr(mlp, "act", None) or getattr(mlp, "act_fn", None) or mlp.activation_fn,
    )


def skeleton(model: Any) -> tuple[list[Any], Any, Any]:
    """Blocks, final norm and unembedding."""
    unembed = model.get_output_embeddings()
    if hasattr(model, "transformer"):
        return list(model.transformer.h), model.transformer.ln_f, unembed
    if hasattr(model, "gpt_neox"):
        return list(model.gpt_neox.layers), model.gpt_neox.final_layer_norm, unembed
    inner = model.model
    norm = inner.final_layernorm if hasattr(inner, "final_layernorm") else inner.norm
    return list(inner.layers), norm, unembed


def parts_of(model: Any, block: Any) -> _Parts:
    kind = model.config.model_type
    if kind == "gpt2":
        attn, mlp = block.attn, block.mlp
        return _Parts(block.ln_1, block.ln_2, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj, None, False)
    if kind == "gpt_neox":
        attn, mlp = block.attention, block.mlp
        return _Parts(
            block.input_layernorm,
            block.post_attention_layernorm,
            attn.query_key_value,
            attn.dense,
            mlp.dense_h_to_4h,
            mlp.dense_4h_to_h,
            None,
            bool(model.config.use_parallel_residual),
        )
    if kind == "phi":
        attn, mlp, norm = block.self_attn, block.mlp, block.input_layernorm
        return _Parts(norm, norm, attn.v_proj, attn.dense, mlp.fc1, mlp.fc2, None, True)
    attn, mlp = block.self_attn, block.mlp
    return _Parts(
        block.input_layernorm,
        block.post_attention_layernorm,
        attn.v_proj,
        attn.o_proj,
        mlp.up_proj,
        mlp.down_proj,
        mlp.gate_proj,
        False,
    )


def _layer(model: Any, p: _Parts, seen: dict[Any, Array], layer: int, pattern: Array) -> LayerRecord:
    kind = model.config.model_type
    heads, n_pos = pattern.shape[0], pattern.shape[1]
    W_O = _matrix(p.out)  # [head * dim, d_model]
    dim = W_O.shape[0] // heads
    W_V, value, bias = (
        _matrix(p.value),
        seen[layer, "value"],
        _bias(p.value),
    )  # [d_model, width], [pos, width], [width]
    d_model = W_V.shape[0]
    if kind == "gpt2":  # columns: all queries, all keys, all values
        W_V, value, bias = W_V[:, 2 * d_model :], value[:, 2 * d_model :], bias[2 * d_model :]
    elif kind == "gpt_neox":  # columns: head by head its query, key, value
        W_V = W_V.reshape(d_model, heads, 3, dim)[:, :, 2].reshape(d_model, -1)
        value = value.reshape(n_pos, heads, 3, dim)[:, :, 2].reshape(n_pos, -1)
        bias = bias.reshape(heads, 3, dim)[:, 2].reshape(-1)
    kv = W_V.shape[1] // dim
    constant = bias if getattr(p.norm_attn, "bias", None) is None else bias + _np(p.norm_attn.bias) @ W_V
    record = LayerRecord(
        resid_pre=seen[layer, "pre"],
        attn_out=seen[layer, "attn"],
        mlp_out=seen[layer, "mlp"],
        mlp_act=seen[layer, "act"],
        pattern=pattern,
        value=value.reshape(n_pos, kv, dim),
        value_constant=constant.reshape(kv, dim),
        W_V=W_V.reshape(d_model, kv, dim).transpose(1, 0, 2),
        W_O=W_O.reshape(heads, dim, d_model),
        W_out=_matrix(p.down),
        W_in=_matrix(p.up),
        W_gate=None if p.gate is None else _matrix(p.gate),
        in_pre=seen[layer, "in"],
        gate_pre=None if p.gate is None else seen[layer, "gate"],
        gain_attn=_np(p.norm_attn.weight),
        gain_mlp=_np(p.norm_mlp.weight),
        parallel=p.parallel,
    )
    z = np.einsum("hqk,khd->qhd", pattern, np.repeat(record.value, heads // kv, axis=1))
    rebuilt = z.reshape(n_pos, -1) @ W_O + _bias(p.out)
    np.testing.assert_allclose(rebuilt, record.attn_out, atol=1e-10)
    np.testing.assert_allclose(record.mlp_act @ record.W_out + _bias(p.down), record.mlp_out, atol=1e-10)
    return record


def _check_stream(layers: tuple[LayerRecord, ...], final: Array) -> None:
    """The recording itself: before + attention + MLP = after, for every block."""
    after = [layer.resid_pre for layer in layers[1:]] + [final]
    for layer, post in zip(layers, after, strict=True):
        np.testing.assert_allclose(layer.resid_pre + layer.attn_out + layer.mlp_out, post, atol=1e-10)


def widen_rotary(model: Any) -> None:
    """Rotary frequencies are computed in float32 by transformers: compute them again in float64."""
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            config = model.config
            theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
            n = module.inv_freq.shape[0]
            wide = float(theta) ** (-torch.arange(n, dtype=torch.float64) / n)
            torch.testing.assert_close(module.inv_freq, wide, atol=1e-7, rtol=1e-5)
            module.inv_freq = wide


def _matrix(module: Any) -> Array:
    """Weight as [in, out]; GPT-2's Conv1D keeps it that way, Linear the other way round."""
    weight = _np(module.weight)
    return weight.T if isinstance(module, torch.nn.Linear) else weight


def _bias(module: Any) -> Array:
    bias = module.bias
    return np.zeros(_matrix(module).shape[1]) if bias is None else _np(bias)


def _np(tensor: torch.Tensor) -> Array:
    assert tensor.dtype == torch.float64, tensor.dtype
    return tensor.detach().numpy().copy()
