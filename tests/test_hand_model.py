"""Models small enough to compute by hand, their scores written out from the definition.

Both have four dimensions, an identity unembedding of four tokens, two heads of two dimensions whose queries and
keys are zero (attention is uniform: 1/2 and 1/2 at the second of two positions), and streams chosen so that every
norm's scale is a round number.
"""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from reference_forward import parts_of, record
from reference_loop import Loop

import tl_neuron_attr as na

PROMPT = [1, 2]
TOLERANCE = 1e-6


def log_softmax(z: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in z))
    return [x - total for x in z]


# A Llama-like model


@functools.cache
def llama() -> Any:
    """Reads (2,0,0,0) then (0,2,0,0), whose root mean square is 1; attention and MLP as in the comments."""
    config = transformers.LlamaConfig(
        vocab_size=4,
        hidden_size=4,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_act="relu",
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    block = model.model.layers[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[1, 0] = 2.0
        model.model.embed_tokens.weight[2, 1] = 2.0
        model.lm_head.weight.copy_(torch.eye(4))
        v, o = block.self_attn.v_proj.weight, block.self_attn.o_proj.weight  # [out, in] both
        v[0, 0], o[2, 0] = 1.0, 1.0  # head 0, dim 0: value 2 at source 0, 1/2 * 2 * (0,0,1,0)
        v[1, 1], o[3, 1] = 0.5, 2.0  # head 0, dim 1: value 1 at source 1, 1/2 * 1 * (0,0,0,2)
        v[2, 1], o[0, 2] = -1.0, 1.0  # head 1, dim 0: value -2 at source 1, 1/2 * -2 * (1,0,0,0)
        v[3, 0], o[1, 3] = 0.5, -2.0  # head 1, dim 1: value 1 at source 0, 1/2 * 1 * (0,-2,0,0)
        # h + A = (0,2,0,0) + (-1,-1,1,1) = (-1,1,1,1), root mean square 1
        mlp = block.mlp
        mlp.gate_proj.weight[0, 1], mlp.up_proj.weight[0, 2] = 1.0, 2.0  # relu(1) * 2 = 2
        mlp.gate_proj.weight[1, 3], mlp.up_proj.weight[1, 0] = 3.0, 1.0  # relu(3) * -1 = -3
        mlp.down_proj.weight[:, 0] = torch.tensor([0.0, 0.0, 0.5, 0.0])
        mlp.down_proj.weight[:, 1] = torch.tensor([0.0, 1.0, 0.0, -1.0])
        # final = (-1,1,1,1) + (0,0,1,0) + (0,-3,0,3) = (-1,-2,2,4), root mean square sqrt(25/4) = 2.5
    return model


H = (0.0, 2.0, 0.0, 0.0)
MID = (-1.0, 1.0, 1.0, 1.0)
FINAL = (-1.0, -2.0, 2.0, 4.0)


def llama_score(target: Any, after: tuple[float, ...], base: tuple[float, ...]) -> float:
    """z(x) = x / 2.5, for every token is a dimension."""

    def value(x: tuple[float, ...]) -> float:
        log_p = log_softmax([xi / 2.5 for xi in x])
        if isinstance(target, na.Contrast):
            return log_p[target.positive] - log_p[target.negative]
        if isinstance(target, na.AnyOf):
            return math.log(sum(math.exp(log_p[token]) for token in target.tokens))
        return log_p[target]

    return value(after) - value(base)


@pytest.mark.parametrize("convention", ["exact", "paper"])
@pytest.mark.parametrize("target", [3, na.Contrast(3, 2), na.AnyOf([2, 3])], ids=str)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_llama(backend: str, target: Any, convention: str) -> None:
    trace = na.trace(zoo.build(llama(), backend), PROMPT, target, convention=convention)
    score = functools.partial(llama_score, target)

    layers = na.layer_scores(trace)
    assert layers.attn.tolist() == pytest.approx([score(MID, H)], abs=TOLERANCE)
    assert layers.mlp.tolist() == pytest.approx([score(FINAL, MID)], abs=TOLERANCE)
    heads = na.head_scores(trace).scores
    expected_heads = [score((0, 2, 1, 1), H), score((-1, 1, 0, 0), H)]
    assert heads.tolist()[0] == pytest.approx(expected_heads, abs=TOLERANCE)
    sources = na.position_scores(trace, 0, 0)
    assert sources.tolist() == pytest.approx([score((0, 2, 1, 0), H), score((0, 2, 0, 1), H)], abs=TOLERANCE)

    mlp = na.value_scores(trace, "mlp")
    expected_mlp = [score((-1, 1, 2, 1), MID), score((-1, -2, 1, 4), MID)]
    assert mlp.scores.tolist()[0] == pytest.approx(expected_mlp, abs=TOLERANCE)
    assert mlp.coefficients.tolist()[0] == pytest.approx([2.0, -3.0], abs=TOLERANCE)

    attn = na.value_scores(trace, "attn")
    expected = np.zeros((2, 2, 2))  # source, head, dim
    expected[0, 0, 0] = score((0, 2, 1, 0), H)
    expected[1, 0, 1] = score((0, 2, 0, 1), H)
    expected[1, 1, 0] = score((-1, 2, 0, 0), H)
    expected[0, 1, 1] = score((0, 1, 0, 0), H)
    np.testing.assert_allclose(attn.scores[0].numpy(), expected, atol=TOLERANCE)
    coefficients = np.zeros((2, 2, 2))
    coefficients[0, 0, 0], coefficients[1, 0, 1], coefficients[1, 1, 0], coefficients[0, 1, 1] = 1, 0.5, -1, 0.5
    np.testing.assert_allclose(attn.coefficients[0].numpy(), coefficients, atol=TOLERANCE)


def test_llama_contrast_in_figures() -> None:
    """The normaliser cancels, so every score is (v_3 - v_2) / 2.5."""
    trace = na.trace(zoo.build(llama(), zoo.BACKENDS[0]), PROMPT, na.Contrast(3, 2))
    assert na.value_scores(trace, "mlp").scores[0].tolist() == pytest.approx([-0.4, 1.2], abs=TOLERANCE)
    assert na.layer_scores(trace).attn.item() == pytest.approx(0.0, abs=TOLERANCE)
    assert na.layer_scores(trace).mlp.item() == pytest.approx(0.8, abs=TOLERANCE)
    best = na.value_neurons(trace, "attn", k=2)
    assert [str(neuron) for neuron in best] == ["L0H0D1@1", "L0H0D0@1"]  # 0.4, then the first of the zeros
    assert best.scores.tolist() == pytest.approx([0.4, 0.0], abs=TOLERANCE)


# A GPT-2-like model: centring, biases, and the readout's constant


@functools.cache
def gpt2() -> Any:
    """Reads (1,-1,1,-1) then (1,1,-1,-1), of variance 1."""
    config = transformers.GPT2Config(
        vocab_size=4,
        n_embd=4,
        n_layer=1,
        n_head=2,
        n_inner=2,
        n_positions=8,
        activation_function="relu",
        layer_norm_epsilon=0.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    block = model.transformer.h[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
        model.transformer.wte.weight[1] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        model.transformer.wte.weight[2] = torch.tensor([1.0, 1.0, -1.0, -1.0])
        model.lm_head.weight.copy_(torch.eye(4))
        model.transformer.ln_f.weight.copy_(torch.tensor([1.0, 1.0, 2.0, 1.0]))
        model.transformer.ln_f.bias[3] = 1.0
        # head 0, dim 0 reads dimension 1 twice, bias 1: values -1 and 3, weighted -1/2 and 3/2
        block.attn.c_attn.weight[1, 8] = 2.0
        block.attn.c_attn.bias[8] = 1.0
        block.attn.c_proj.weight[0] = torch.tensor([2.0, 0.0, 1.0, 1.0])  # (1,-1,0,0) and a constant 1
        block.attn.c_proj.bias.copy_(torch.tensor([0.0, 0.0, 1.0, -1.0]))
        # h + A = (1,1,-1,-1) + (2,0,1,1) + (0,0,1,-1) = (3,1,1,-1), mean 1, variance 2
        block.mlp.c_fc.weight[0, 0] = math.sqrt(2.0)
        block.mlp.c_fc.bias[0] = 1.0  # relu(sqrt(2) * 2 / sqrt(2) + 1) = 3
        block.mlp.c_proj.weight[0] = torch.tensor([0.0, -1.0, 1.0, 0.0])
        block.mlp.c_proj.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.0]))
        # final = (3,1,1,-1) + (0,-3,3,0) + (0,1,-1,0) = (3,-1,3,-1), mean 1, variance 4
    return model


@pytest.mark.parametrize("convention", ["exact", "paper"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_gpt2(backend: str, convention: str) -> None:
    trace = na.trace(zoo.build(gpt2(), backend), PROMPT, 3, convention=convention)
    constant = 1.0 if convention == "exact" else 0.0

    def value(a: float, b: float, c: float, d: float) -> float:
        """N divides what is centred by 2; the gain is (1,1,2,1), the constant (0,0,0,1)."""
        mean = (a + b + c + d) / 4
        z = [(a - mean) / 2, (b - mean) / 2, 2 * (c - mean) / 2, (d - mean) / 2 + constant]
        return log_softmax(z)[3]

    h, mid, final = value(1, 1, -1, -1), value(3, 1, 1, -1), value(3, -1, 3, -1)
    layers = na.layer_scores(trace)
    assert layers.attn.tolist() == pytest.approx([mid - h], abs=TOLERANCE)
    assert layers.mlp.tolist() == pytest.approx([final - mid], abs=TOLERANCE)
    mlp = na.value_scores(trace, "mlp")
    assert mlp.scores.tolist()[0] == pytest.approx([value(3, -2, 4, -1) - mid, 0.0], abs=TOLERANCE)
    assert mlp.coefficients.tolist()[0] == pytest.approx([3.0, 0.0], abs=TOLERANCE)
    # Processed weights have moved the value bias to the output bias: values -2 and 2 instead of -1 and 3.
    bias = 1.0 if backend in zoo.UNPROCESSED else 0.0
    attn = na.value_scores(trace, "attn")
    for source, read in ((0, -2.0), (1, 2.0)):
        m = (read + bias) / 2
        assert attn.coefficients[0, source, 0, 0].item() == pytest.approx(m, abs=TOLERANCE)
        expected = value(1 + 2 * m, 1, -1 + m, -1 + m) - h
        assert attn.scores[0, source, 0, 0].item() == pytest.approx(expected, abs=TOLERANCE)
    rest = attn.scores[0].clone()
    rest[:, 0, 0] = 0.0
    assert rest.abs().max() < TOLERANCE
    head = value(1 + 2 * bias, 1, -1 + bias, -1 + bias) - h
    assert na.head_scores(trace).scores.tolist()[0] == pytest.approx([head, 0.0], abs=TOLERANCE)


# Planted neurons


def planted(name: str, kind: str, value_constant: bool) -> tuple[Any, int, Any]:
    """A zoo model in which one neuron of layer 1 writes five times the target's unembedding."""
    hf, target, layer = zoo.clone(zoo.hf_model(name), torch.float32), 29, 1
    loop = Loop(record(hf, list(zoo.TOKENS)), target, value_constant=value_constant)
    block = zoo.blocks(hf)[layer]
    row = 5 * torch.tensor(loop.recording.W_U[:, target]).float()
    if kind == "mlp":
        neuron = na.MLPNeuron(layer, 13)
        module, index, m = parts_of(hf, block).down, 13, loop.mlp_coefficient(layer, 13)
    else:
        head, dim = 3, 5
        sources = range(len(zoo.TOKENS))
        source = max(sources, key=lambda s: abs(loop.attn_coefficient(layer, head, dim, s)))
        neuron = na.AttnNeuron(layer, head, dim, source)
        d_head = loop.recording.layers[layer].W_O.shape[1]
        module, index = parts_of(hf, block).out, head * d_head + dim
        m = loop.attn_coefficient(layer, head, dim, source)
    with torch.no_grad():
        if isinstance(module, torch.nn.Linear):
            module.weight[:, index] = row / m
        else:
            module.weight[index] = row / m
    return hf, target, neuron


def same_row(a: Any, b: Any) -> bool:
    """Whether two neurons of one kind write along the same row of W_out or W_O."""
    if isinstance(a, na.MLPNeuron):
        return a == b
    return (a.layer, a.head, a.dim) == (b.layer, b.head, b.dim)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(("name", "backend"), zoo.CASES)
def test_a_planted_neuron_comes_first_under_its_own_name(name: str, backend: str, kind: str) -> None:
    hf, target, neuron = planted(name, kind, backend in zoo.UNPROCESSED)
    trace = na.trace(zoo.build(hf, backend), list(zoo.TOKENS), target)
    for layers in (None, [1], [0, 1]):
        ranked = na.value_neurons(trace, kind, k=len(zoo.TOKENS) + 1, layers=layers)
        assert ranked.ids[0] == neuron
        # Attention neurons of other sources share the planted row; every other neuron is far behind.
        others = [s for i, s in zip(ranked.ids, ranked.scores, strict=True) if not same_row(i, neuron)]
        assert ranked.scores[0] > 1.5 * others[0]
        dense = na.value_scores(trace, kind, layers=layers)
        best = np.unravel_index(int(dense.scores.argmax()), dense.scores.shape)
        assert dense.layers[best[0]] == 1
    assert neuron not in na.value_neurons(trace, kind, k=10, layers=[0]).ids
