"""Architectures without neuron scores, or that a release computes wrongly: refused by name, before any number."""

import functools
import re
from collections.abc import Callable
from typing import Any

import guards
import pytest
import torch
import transformers
import zoo

import tl_neuron_attr as na

PROMPT = [5, 17, 42, 8]


def small(cls: Any, **changes: Any) -> Any:
    return zoo.llama_like(cls, num_key_value_heads=2, **changes)


def changed(config: Any, **changes: Any) -> Any:
    config.update(changes)
    return config


# Some need kernels or parts that a release of transformers lacks: those cannot be built there at all.
CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, lru_width=32
    ),
    "jamba": lambda: small(
        transformers.JambaConfig,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
    ),
    "rwkv": lambda: transformers.RwkvConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2),
    "lfm2": lambda: small(transformers.Lfm2Config, layer_types=["conv", "full_attention", "conv"]),
    "opt_projected": lambda: changed(zoo.CONFIGS["opt"](), word_embed_proj_dim=16),
    "bloom_post": lambda: transformers.BloomConfig(
        vocab_size=100, hidden_size=32, n_layer=2, n_head=4, apply_residual_connection_post_layernorm=True
    ),
    "deepseek_v2": lambda: small(
        transformers.DeepseekV2Config,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        moe_intermediate_size=20,
        n_group=1,
        topk_group=1,
    ),
    "qwen3_moe": lambda: small(
        transformers.Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=52,
        mlp_only_layers=[0, 2],
        head_dim=8,
    ),
}

TEXTS = {
    "mamba": "layer 0 of {} is not attention alone (it holds mixer: MambaMixer): state-space, recurrent and",
    "recurrent_gemma": "layer 0 of {} is not attention alone (it holds temporal_block: RecurrentGemmaRecurrentBlock)",
    "jamba": "layer 0 of {} is not attention alone (it holds mixer: JambaMambaMixer)",
    "rwkv": "layer 0 of {} is not attention alone (it holds time_mix: RwkvSelfAttention)",
    "lfm2": "layer 0 of {} is not attention alone (it holds conv: Lfm2ShortConv)",
    "opt_projected": "{} has a residual stream of width 32 and an unembedding that reads width 16",
    "cohere": "{} is a CohereForCausalLM, whose queries and keys this release of TransformerLens rotates in another",
    "falcon_new": "{} is a FalconForCausalLM with new_decoder_architecture=True, whose queries, keys and values",
}


@functools.cache
def boot(kind: str, compat: bool = False) -> Any:
    if kind in zoo.CONFIGS:
        return zoo.bridge(zoo.hf_model(kind), compat)
    hf = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")
    hf.config.architectures = [type(hf).__name__]
    return zoo.bridge(zoo.randomise(hf.float(), seed=3), compat)


def name(model: Any) -> str:
    return str(model.cfg.model_name)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "trace": lambda model: na.trace(model, PROMPT, 3),
    "trace_batch": lambda model: list(na.trace_batch(model, [PROMPT, PROMPT], 3)),
    "required_hooks": lambda model: na.required_hooks(model),
    "ablation_hooks": lambda model: na.ablation_hooks(model, [na.MLPNeuron(0, 1)]),
}

if zoo.BRIDGE:
    KINDS = [kind for kind in TEXTS if kind in CONFIGS or kind in zoo.BRIDGE_FAULTS]

    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_refused_before_the_forward_pass(kind: str, entry: str) -> None:
        model = boot(kind)
        with guards.refused_like(model, na.UnsupportedModelError, re.escape(TEXTS[kind].format(name(model)))):
            ENTRIES[entry](model)

    @pytest.mark.parametrize("kind", ["bloom_post", "deepseek_v2"])
    def test_refused_on_the_numbers(kind: str) -> None:
        """A stream normed between sublayers, and attention through a latent vector, show in the numbers only."""
        for compat in (False, True):
            model = boot(kind, compat)
            with pytest.raises(na.UnsupportedModelError, match=re.escape(name(model))):
                na.trace(model, PROMPT, 3)

    def test_every_fault_upstream_is_refused() -> None:
        assert set(zoo.BRIDGE_FAULTS) <= set(TEXTS)

    @pytest.mark.parametrize("compat", [False, True])
    def test_dense_layers_among_experts(compat: bool) -> None:
        """Layers 0 and 2 are dense, layer 1 is a mixture whose hook_post exists; attention is everywhere."""
        model = boot("qwen3_moe", compat)
        trace = na.trace(model, PROMPT, 42)
        refusal = f"layer 1 of {name(model)} is a mixture of experts"
        for call in (
            lambda: na.value_neurons(trace, "mlp"),
            lambda: na.value_scores(trace, "mlp", layers=[1]),
            lambda: na.query_neurons(trace, na.value_neurons(trace, "attn", k=3), "mlp"),
            lambda: na.ablation_hooks(model, [na.MLPNeuron(1, 0)]),
        ):
            with pytest.raises(na.UnsupportedModelError, match=re.escape(refusal)):
                call()
        dense = na.value_neurons(trace, "mlp", k=10**6, layers=[0, 2])
        assert {neuron.layer for neuron in dense.ids} == {0, 2}
        assert len(dense) == 2 * 52
        _, cache = model.run_with_cache(torch.tensor([PROMPT]))
        for neuron, score in list(zip(dense.ids, dense.scores.tolist(), strict=True))[:5]:
            stream = cache[f"blocks.{neuron.layer}.hook_resid_mid"][0, -1].detach()
            act = cache[f"blocks.{neuron.layer}.mlp.hook_post"][0, -1, neuron.neuron].detach()
            vector = act * model.blocks[neuron.layer].mlp.W_out[neuron.neuron].detach()
            scale = cache["blocks.2.hook_resid_post"][0, -1].detach().square().mean().add(1e-6).sqrt()
            gain = model.ln_final.original_component.weight.detach()
            logits = [(x * gain / scale) @ model.W_U.detach() for x in (stream, stream + vector)]
            before, after = (z.log_softmax(-1)[42].item() for z in logits)
            assert score == pytest.approx(after - before, abs=1e-4)
        queried = na.query_neurons(trace, na.value_neurons(trace, "attn", k=3, layers=[1, 2]), "mlp", layers=[0])
        assert {neuron.layer for neuron in queried.ids} == {0}


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_packed_weights(backend: str) -> None:
    """Integers in place of a matrix, as four-bit and eight-bit loading leaves them, or a buffer beside it."""
    for form in ("parameter", "buffer"):
        model = zoo.build(zoo.hf_model("llama"), backend)
        owner = model.original_model.model.layers[1].mlp if backend.startswith("bridge") else model.blocks[1].mlp
        if form == "buffer":
            owner.register_buffer("qweight", torch.zeros(4, dtype=torch.int32))
        else:
            owner.register_parameter("packed", torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), False))
        for entry in ("trace", "required_hooks"):
            text = f"{name(model)} holds packed quantised weights ("
            with guards.refused_like(model, na.UnsupportedModelError, re.escape(text)):
                ENTRIES[entry](model)
