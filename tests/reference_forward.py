"""One forward pass of a Hugging Face model in float64, written down for the reference loop.

Imports neither the package nor TransformerLens: what the reference loop knows of a model comes from here,
through forward hooks on the Hugging Face modules and from their weights. Everything is a float64 NumPy array.

The recording checks itself: values, activations, logits and what every block adds are computed again from the
stream and the weights, and must be what the model computed.
"""

import copy
from typing import Any

import numpy as np
import torch
from reference_float64 import Float64Only, widen_rotary
from reference_parts import Parts, logit_cap, logit_scale, parts_of, skeleton
from reference_recording import Array, LayerRecord, Norm, PostMap, Recording

__all__ = ["Array", "LayerRecord", "Norm", "Recording", "parts_of", "record", "skeleton"]


def record(hf_model: Any, tokens: list[int]) -> Recording:
    """Run a deep copy of `hf_model` on `tokens` in float64 and write down what every block did."""
    model = copy.deepcopy(hf_model).double().eval()
    model.set_attn_implementation("eager")
    widen_rotary(model)
    blocks, final_norm, unembed = skeleton(model)
    parts = [parts_of(model, block) for block in blocks]
    seen: dict[Any, Array] = {}
    output = _run(model, blocks, parts, final_norm, tokens, seen)
    layers = tuple(_layer(p, seen, layer, _np(output.attentions[layer])[0]) for layer, p in enumerate(parts))
    _check_stream(layers, seen["final"])
    bias = getattr(unembed, "bias", None)
    norm = _norm(final_norm, layers[0].resid_pre.shape[1])
    assert norm is not None
    recording = Recording(
        tokens=tuple(tokens),
        embed=layers[0].resid_pre,
        layers=layers,
        final=seen["final"],
        norm=norm,
        W_U=_np(unembed.weight).T,
        b_U=np.zeros(unembed.weight.shape[0]) if bias is None else _np(bias),
        logit_scale=logit_scale(model.config),
        cap=logit_cap(model.config),
        log_probs=_np(output.logits[0].log_softmax(-1)),
        act=parts[0].act,
    )
    z = recording.capped(recording.logit_scale * (norm(recording.final) @ recording.W_U + recording.b_U))
    _same(z, _np(output.logits[0]))
    return recording


def _run(model: Any, blocks: list[Any], parts: list[Parts], final_norm: Any, tokens: list[int], seen: dict) -> Any:
    """The forward pass; `seen` gets [pos, width] of every place under (layer, name)."""
    handles = []

    def flat(tensor: torch.Tensor) -> Array:  # some modules see [1, pos, width], some [pos, width]
        return _np(tensor).reshape(len(tokens), -1)

    def inputs(key: Any, module: Any) -> None:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            seen[key] = flat(args[0] if args else kwargs["hidden_states"])

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def outputs(key: Any, module: Any) -> None:
        handles.append(module.register_forward_hook(lambda _m, _a, out: seen.__setitem__(key, flat(out))))

    for layer, (block, p) in enumerate(zip(blocks, parts, strict=True)):
        inputs((layer, "pre"), block)
        outputs((layer, "value"), p.value)
        outputs((layer, "attn"), p.out)
        inputs((layer, "act"), p.down)
        outputs((layer, "mlp"), p.down)
        outputs((layer, "in"), p.up)
        if p.gate is not None:
            outputs((layer, "gate"), p.gate)
    inputs("final", final_norm)
    try:
        with torch.no_grad(), Float64Only():
            return model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def _layer(p: Parts, seen: dict[Any, Array], layer: int, pattern: Array) -> LayerRecord:
    heads, n_pos = pattern.shape[0], pattern.shape[1]
    W_O = _matrix(p.out)  # [head * dim, d_model]
    d_model, dim = W_O.shape[1], W_O.shape[0] // heads
    norm_attn, norm_mlp = _norm(p.norm_attn, d_model), _norm(p.norm_mlp, d_model)
    W_V, b_V, value = _columns(p.value, seen[layer, "value"], p.value_columns)
    unclipped = value
    if p.clip is not None:
        value = value.clip(-p.clip, p.clip)
    constant = b_V if norm_attn is None else b_V + norm_attn.bias @ W_V
    W_in, b_in, in_pre = _columns(p.up, seen[layer, "in"], p.up_columns)
    W_gate = b_gate = gate_pre = None
    if p.gate is not None:
        W_gate, b_gate, gate_pre = _columns(p.gate, seen[layer, "gate"], p.gate_columns)
    attn_post = _post(p.post_attn, p.multiplier, seen[layer, "attn"])
    mlp_post = _post(p.post_mlp, p.multiplier, seen[layer, "mlp"])
    everywhere = slice(None)
    record = LayerRecord(
        resid_pre=seen[layer, "pre"],
        attn_out=seen[layer, "attn"] if attn_post is None else attn_post(seen[layer, "attn"], everywhere),
        mlp_out=seen[layer, "mlp"] if mlp_post is None else mlp_post(seen[layer, "mlp"], everywhere),
        mlp_act=seen[layer, "act"],
        pattern=pattern,
        value=value.reshape(n_pos, -1, dim),
        value_constant=constant.reshape(-1, dim),
        W_V=W_V.reshape(d_model, -1, dim).transpose(1, 0, 2),
        W_O=W_O.reshape(heads, dim, d_model),
        W_out=_matrix(p.down),
        W_in=W_in,
        W_gate=W_gate,
        in_pre=in_pre,
        gate_pre=gate_pre,
        norm_attn=norm_attn,
        norm_mlp=norm_mlp,
        attn_post=attn_post,
        mlp_post=mlp_post,
        b_O=_bias(p.out),
        b_out=_bias(p.down),
        parallel=p.parallel,
    )
    # what is read: the stream through the norm and the weights
    attn_read = record.resid_pre if norm_attn is None else norm_attn(record.resid_pre)
    mlp_read = record.mlp_read if norm_mlp is None else norm_mlp(record.mlp_read)
    _same(attn_read @ W_V + b_V, unclipped)
    _same(mlp_read @ W_in + b_in, in_pre)
    with torch.no_grad():
        if gate_pre is None:
            _same(p.act(torch.tensor(in_pre)).numpy(), record.mlp_act)
        else:
            _same(mlp_read @ W_gate + b_gate, gate_pre)
            _same(p.act(torch.tensor(gate_pre)).numpy() * in_pre, record.mlp_act)
    # what is added: neurons and bias, each sent through the post-map alone
    z = np.einsum("hqk,khd->qhd", pattern, np.repeat(record.value, heads // record.value.shape[1], axis=1))
    for q in range(n_pos):
        attn = np.einsum("hd,hdm->m", z[q], record.attn_rows(q)) + record.attn_bias(q)
        _same(attn, record.attn_out[q])
        _same(record.mlp_act[q] @ record.mlp_rows(q) + record.mlp_bias(q), record.mlp_out[q])
    return record


def _check_stream(layers: tuple[LayerRecord, ...], final: Array) -> None:
    """The recording itself: before + attention + MLP = after, for every block."""
    after = [layer.resid_pre for layer in layers[1:]] + [final]
    for layer, post in zip(layers, after, strict=True):
        _same(layer.resid_pre + layer.attn_out + layer.mlp_out, post)


def _norm(module: Any, d_model: int) -> Norm | None:
    """From a norm's module, whatever its class calls things."""
    if module is None:
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    gain = np.ones(d_model) if weight is None else _np(weight)
    kind = type(module).__name__
    return Norm(
        centred="LayerNorm" in kind,
        eps=float(next((getattr(module, n) for n in ("eps", "variance_epsilon") if hasattr(module, n)), 1e-5)),
        gain=1 + gain if kind.startswith("Gemma") else gain,
        bias=np.zeros(d_model) if bias is None else _np(bias),
    )


def _post(module: Any, multiplier: float, given: Array) -> PostMap | None:
    norm = _norm(module, given.shape[1])
    if norm is None:
        return None if multiplier == 1.0 else PostMap(np.ones(given.shape[1]), np.ones(len(given)), multiplier)
    assert not norm.centred and not norm.bias.any()  # no architecture here has such a post-norm
    return PostMap(norm.gain, norm.scale(given), multiplier)


def _columns(module: Any, out: Array, columns: Array | None) -> tuple[Array, Array, Array]:
    """Weight [in, width], bias [width] and output [pos, width] of a module, of the columns meant."""
    columns = np.arange(out.shape[1]) if columns is None else columns
    return _matrix(module)[:, columns], _bias(module)[columns], out[:, columns]


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


def _same(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
