"""Models that nothing else here was tuned on: right against the Hugging Face model itself, or refused by name.

For each: the bridge's log-probabilities against the Hugging Face model; then, where a trace is made, zeroed columns
of the Hugging Face weights against `ablating`, and scores of MLP neurons against that model with its stream changed
behind a final norm held still. A model whose bridge computes something else must be refused, and no other.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo

import tl_neuron_attr as na

t: Any = transformers
TARGET = 42
WINDOWED = ["sliding_attention", "full_attention"]


def grouped(**changes: Any) -> Callable[[Any], Any]:
    """Two layers, two key-value heads for four query heads, a head that is wider than `d_model / n_heads`."""
    values: dict[str, Any] = dict(num_hidden_layers=2, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    values |= dict(pad_token_id=1, **changes)
    return lambda cls: zoo.llama_like(cls, **values)


def old(**changes: Any) -> Callable[[Any], Any]:
    """GPT-2's names."""
    values: dict[str, Any] = dict(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, n_inner=52)
    values |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **changes)
    return lambda cls: cls(**values)


def xglm(cls: Any) -> Any:
    return cls(vocab_size=100, d_model=32, ffn_dim=52, num_layers=2, attention_heads=4, max_position_embeddings=64)


def mpt(**attention: Any) -> Callable[[Any], Any]:
    return lambda cls: cls(
        vocab_size=100, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64, attn_config=attention
    )


MODELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "apertus": ("ApertusForCausalLM", grouped()),  # an activation function with parameters
    "arcee": ("ArceeForCausalLM", grouped(mlp_bias=True)),  # squared ReLU
    "cohere2": ("Cohere2ForCausalLM", grouped(layer_types=WINDOWED, sliding_window=3, logit_scale=0.7, head_dim=8)),
    "ernie": ("Ernie4_5ForCausalLM", grouped(use_bias=True, head_dim=8)),
    "exaone4": ("Exaone4ForCausalLM", grouped(layer_types=WINDOWED, sliding_window=3)),
    "glm4": ("Glm4ForCausalLM", grouped(head_dim=8, partial_rotary_factor=0.5)),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", grouped(head_dim=8)),  # norms behind the rotation
    "ministral3": ("Ministral3ForCausalLM", grouped(head_dim=8, sliding_window=3)),
    "mpt": ("MptForCausalLM", mpt(softmax_scale=0.9)),
    "nanochat": ("NanoChatForCausalLM", grouped(final_logit_softcapping=3.0)),  # norms without weights
    "nemotron": ("NemotronForCausalLM", grouped(head_dim=8, partial_rotary_factor=0.5)),  # a gain stored less one
    "olmo3": ("Olmo3ForCausalLM", grouped(layer_types=WINDOWED, sliding_window=3)),
    "seed_oss": ("SeedOssForCausalLM", grouped(head_dim=12, attention_out_bias=True, residual_dropout=0.0)),
    "starcoder2": ("Starcoder2ForCausalLM", grouped(sliding_window=3, residual_dropout=0.0, embedding_dropout=0.0)),
    "xglm": ("XGLMForCausalLM", xglm),
    "llama_odd": ("LlamaForCausalLM", grouped(head_dim=12, rms_norm_eps=0.5, mlp_bias=True, hidden_act="relu")),
    "llama_yarn": (
        "LlamaForCausalLM",
        grouped(
            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8)
        ),
    ),
    "gpt2_one_layer": ("GPT2LMHeadModel", old(n_layer=1, layer_norm_epsilon=0.5, activation_function="relu")),
    "gpt2_layer_scaled": ("GPT2LMHeadModel", old(scale_attn_by_inverse_layer_idx=True)),
    # What some release computes wrongly.
    "bitnet": ("BitNetForCausalLM", grouped()),
    "gpt2_unscaled": ("GPT2LMHeadModel", old(scale_attn_weights=False)),
    "bigcode_unscaled": ("GPTBigCodeForCausalLM", old(scale_attn_weights=False)),
    "llama_tanh": ("LlamaForCausalLM", grouped(hidden_act="tanh")),
    "llama_quick_gelu": ("LlamaForCausalLM", grouped(hidden_act="quick_gelu")),
    "gemma3_capped": (
        "Gemma3ForCausalLM",
        grouped(head_dim=8, layer_types=WINDOWED, sliding_window=3, attn_logit_softcapping=0.5),
    ),
}
REASONS = {
    "bitnet": "layer 0 of {}: this release computes processed MLPs without the model's ffn_sub_norm",
    "llama_tanh": "layer 0 of {}: this release computes processed MLPs with another activation function",
    "llama_quick_gelu": "layer 0 of {}: this release computes processed MLPs with another activation function",
    "gpt2_unscaled": "{} has scale_attn_weights=False",
    "bigcode_unscaled": "{} has scale_attn_weights=False",
    "gemma3_capped": "{} has attn_logit_softcapping=0.5",
    "hunyuan": "{} is a HunYuanDenseV1ForCausalLM, whose queries and keys",
    "cohere2": "{} is a Cohere2ForCausalLM, whose queries and keys",
}
KINDS = [kind for kind, (cls, _) in MODELS.items() if zoo.BRIDGE and hasattr(transformers, cls)]


@functools.cache
def hf_model(kind: str) -> Any:
    cls, config = MODELS[kind]
    hf = getattr(t, cls)._from_config(config(getattr(t, cls).config_class), attn_implementation="eager")
    hf.config.architectures = [cls]
    return zoo.randomise(hf.float(), seed=3)


def log_probs(hf: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf(torch.tensor([zoo.TOKENS]), use_cache=False).logits[0].log_softmax(-1)


def output_matrices(hf: Any, layer: int) -> dict[str, Any]:
    """The two modules whose outputs a block adds, by what they are called in Hugging Face's classes."""
    found = {}
    for name, module in hf.named_modules():
        place = re.fullmatch(r".*?\.(\d+)\.(.*\.)?(\w+)", name)
        if place and int(place[1]) == layer and type(module).__name__ in ("Linear", "Conv1D"):
            kind = "attn" if "attn" in name or "attention" in name else "mlp"
            if place[3] in ("o_proj", "out_proj", "c_proj", "down_proj", "fc2"):
                found[kind] = module
    return found


def zeroed(hf: Any, kind: str, rows: list[int]) -> torch.Tensor:
    """Log-probabilities of a copy that reads nothing from these inputs of an output matrix of layer 0."""
    copy = zoo.clone(hf, torch.float32)
    module = output_matrices(copy, 0)[kind]
    with torch.no_grad():
        (module.weight if type(module).__name__ == "Conv1D" else module.weight.T)[rows] = 0
    return log_probs(copy)


class Frozen:
    """The Hugging Face model's readout of any stream at the last position, its final norm's scale held still."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.norm = [m for n, m in hf.named_modules() if n.endswith(("model.norm", "ln_f", "norm_f", "layer_norm"))][
            -1
        ]
        seen: list[torch.Tensor] = []
        handle = self.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0, -1].detach()))
        log_probs(hf)
        handle.remove()
        self.x = seen[-1]  # NanoChat norms its embedding with the same module
        with torch.no_grad():
            self.y = self.norm(self.x[None, None])[0, 0]
            shifted = self.norm((self.x + 1)[None, None])[0, 0]
        self.centred = bool((shifted - self.y).abs().max() < 1e-4)

    def direction(self, v: torch.Tensor) -> torch.Tensor:
        """What `v` becomes behind the norm, at the scale that the norm has for `self.x`."""
        gain = (self.y - self._bias()) / self._centre(self.x)
        return self._centre(v) * gain

    def _centre(self, v: torch.Tensor) -> torch.Tensor:
        return v - v.mean() if self.centred else v

    def _bias(self) -> torch.Tensor:
        found = getattr(self.norm, "bias", None)
        return torch.zeros_like(self.y) if found is None else found.detach()

    def log_probs(self, x: torch.Tensor) -> torch.Tensor:
        y = self.direction(x) + self._bias()

        def put(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            return torch.cat([out[:, :-1], y[None, None]], 1)

        handle = self.norm.register_forward_hook(put)
        try:
            return log_probs(self.hf)[-1]
        finally:
            handle.remove()


if KINDS:

    @pytest.mark.parametrize("compat", [False, True], ids=["as_it_is", "processed"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_right_or_refused_by_name(kind: str, compat: bool) -> None:
        hf = hf_model(kind)
        model = zoo.bridge(hf, compat)
        gap = float((zoo.log_probs(model, zoo.TOKENS) - log_probs(hf)).abs().max())
        if gap > 1e-3:
            assert kind in REASONS, f"the bridge is off by {gap} and nothing says why"
            with pytest.raises(na.UnsupportedModelError, match=re.escape(REASONS[kind].format(model.cfg.model_name))):
                na.trace(model, list(zoo.TOKENS), TARGET)
            return
        assert gap < 5e-5
        trace = na.trace(model, list(zoo.TOKENS), TARGET)
        layers, readout = na.layer_scores(trace), Frozen(hf)
        if not compat:
            whole = log_probs(hf)[-1, TARGET] - readout.log_probs(trace.resid_pre[0][-1])[TARGET]
            assert float(layers.attn.sum() + layers.mlp.sum()) == pytest.approx(float(whole), abs=1e-4)
            check_mlp_scores(trace, hf, readout)
        for rows, ablated in {(3, 7): [na.MLPNeuron(0, 3), na.MLPNeuron(0, 7)]}.items():
            with na.ablating(model, ablated):
                own = zoo.log_probs(model, zoo.TOKENS)
            assert (own - zeroed(hf, "mlp", list(rows))).abs().max() < 5e-5
        if not compat:  # processing moves the values' constant part elsewhere
            width = trace.view.d_head
            with na.ablating(model, [na.Head(0, 1)]):
                own = zoo.log_probs(model, zoo.TOKENS)
            assert (own - zeroed(hf, "attn", list(range(width, 2 * width)))).abs().max() < 5e-5


def check_mlp_scores(trace: Any, hf: Any, readout: Frozen) -> None:
    """The best and worst neurons against the Hugging Face model's own readout, where nothing norms the output."""
    if not all(trace.view.block(layer).post("mlp").is_identity for layer in range(trace.view.n_layers)):
        return
    ranked = na.value_neurons(trace, "mlp", k=10**6)
    for rank in (0, 1, -1):
        neuron = ranked.ids[rank]
        module, seen = output_matrices(hf, neuron.layer)["mlp"], []
        handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))  # noqa: B023
        log_probs(hf)
        handle.remove()
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        vector = seen[0].reshape(-1, len(weight))[-1, neuron.neuron] * weight[neuron.neuron].detach()
        base = trace.resid_pre[neuron.layer][-1] + trace.attn_out[neuron.layer][-1]
        effect = readout.log_probs(base + vector)[TARGET] - readout.log_probs(base)[TARGET]
        assert float(ranked.scores[rank]) == pytest.approx(float(effect), abs=1e-4)


def named(kind: str, config: Callable[[Any], Any], cls: str) -> Any:
    hf = getattr(t, cls)._from_config(config(getattr(t, cls).config_class), attn_implementation="eager")
    hf.config.architectures = [cls]
    return zoo.bridge(zoo.randomise(hf.float(), seed=3), False)


OPT = dict(vocab_size=100, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, ffn_dim=52)
OPT |= dict(max_position_embeddings=32, num_attention_heads=4, dropout=0.0, do_layer_norm_before=False)
UNREADABLE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "gpt1": ("OpenAIGPTLMHeadModel", old(), "{} recorded nothing at 'blocks.1.hook_resid_post'"),
    "opt_post": ("OPTForCausalLM", lambda cls: cls(**OPT), "{} has no final norm"),
    "gemma4_wide": (
        "Gemma4ForCausalLM",
        lambda cls: cls(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=16,
            vocab_size_per_layer_input=100,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            max_position_embeddings=64,
            layer_types=WINDOWED,
        ),
        "W_O of this model cannot be read",
    ),
}


if zoo.BRIDGE:

    @pytest.mark.parametrize("kind", [k for k, (cls, *_) in UNREADABLE.items() if hasattr(t, cls)])
    def test_parts_that_a_bridge_does_not_have_are_named(kind: str) -> None:
        """A hook that never fires, a norm that is not there, weights whose heads differ from layer to layer."""
        cls, config, reason = UNREADABLE[kind]
        model = named(kind, config, cls)
        with pytest.raises(na.UnsupportedModelError, match=re.escape(reason.format(model.cfg.model_name))):
            na.trace(model, list(zoo.TOKENS), TARGET)


if zoo.HOOKED:

    def test_ungrouped_values_are_each_heads_own() -> None:
        """A HookedTransformer may repeat grouped values before `hook_v`; every number is the same."""
        case = zoo.case("llama_gqa", "hooked")
        expected = na.trace(case.model, list(case.tokens), TARGET)
        case.model.cfg.ungroup_grouped_query_attention = True
        try:
            model = case.model
            blocks = model.blocks
            before = [block.attn.cfg.ungroup_grouped_query_attention for block in blocks]
            assert all(before)
            trace = na.trace(model, list(case.tokens), TARGET)
            assert trace.value[0].shape[1] == model.cfg.n_heads
            for kind in ("mlp", "attn"):
                found, wanted = (na.value_neurons(each, kind, k=30) for each in (trace, expected))
                assert found.ids == wanted.ids
                assert (found.scores - wanted.scores).abs().max() < 1e-5
                query, same = (na.query_neurons(each, wanted, "attn", k=20) for each in (trace, expected))
                assert query.ids == same.ids
                assert (query.scores - same.scores).abs().max() < 1e-4
        finally:
            case.model.cfg.ungroup_grouped_query_attention = False


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_caches_of_another_precision(backend: str) -> None:
    """A wider cache gives the same numbers; a narrower one is named, not taken for one of other tokens."""
    model, tokens = zoo.case("llama", backend).model, torch.tensor([zoo.TOKENS])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    expected = na.trace(model, tokens, TARGET)
    wide = na.trace(model, tokens, TARGET, cache={name: each.double() for name, each in cache.items()})
    assert wide.target_log_prob == pytest.approx(expected.target_log_prob, abs=1e-5)
    found, wanted = (na.value_neurons(each, "mlp", k=10) for each in (wide, expected))
    assert (found.scores - wanted.scores).abs().max() < 1e-5
    assert (
        na.query_neurons(wide, found, "attn", k=5).scores - na.query_neurons(expected, wanted, "attn", k=5).scores
    ).abs().max() < 1e-4
    for narrow in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=f"the cache is of {narrow}"):
            na.trace(model, tokens, TARGET, cache={name: each.to(narrow) for name, each in cache.items()})
