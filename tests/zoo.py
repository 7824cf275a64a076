"""Tiny randomly initialised models, every bias and norm weight random, through every backend that exists.

Each architecture is one Hugging Face model. Backends, as far as the installed TransformerLens has them:

- `bridge`: TransformerBridge, the weights as they are;
- `bridge_compat`: TransformerBridge after `enable_compatibility_mode()`;
- `hooked`: HookedTransformer without processing;
- `hooked_processed`: HookedTransformer with folded norms, centred weights and folded value biases.

`BACKENDS` lists those of the installed version; nothing is skipped, cases of a missing class do not exist.
"""

import contextlib
import functools
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from reference_float64 import Float64Only, widen_rotary
from reference_parts import skeleton
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo_configs import CONFIGS, MAIN, llama_like, randomise

DATA = Path(__file__).parent / "data"


def _has_hooked() -> bool:
    import transformer_lens

    with contextlib.suppress(AttributeError, ImportError):
        return transformer_lens.HookedTransformer is not None
    return False


HOOKED = _has_hooked()
BRIDGE = importlib.util.find_spec("transformer_lens.model_bridge") is not None
BACKENDS = tuple(["bridge", "bridge_compat"] * BRIDGE + ["hooked", "hooked_processed"] * HOOKED)
UNPROCESSED = tuple(b for b in BACKENDS if b in ("bridge", "hooked"))
PROCESSED = tuple(b for b in BACKENDS if b not in UNPROCESSED)


@dataclass(frozen=True)
class ZooCase:
    """One model behind one backend. `hf_model` has the same weights, unprocessed."""

    name: str
    backend: str
    model: Any
    hf_model: Any
    tokens: tuple[int, ...]

    @property
    def value_constant(self) -> bool:
        """Whether the values hold their constant part; weight processing moves it to the output bias."""
        return self.backend in UNPROCESSED


# Hugging Face models


@functools.cache
def hf_model(name: str, seed: int = 0) -> Any:
    """The Hugging Face model of an architecture, float32, eager attention. Shared: do not change it."""
    if (DATA / name).is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name, attn_implementation="eager")
        return model.float().eval()
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomise(model.float(), seed=1000 * seed + sum(map(ord, name)))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@functools.cache
def tokenizer(d_vocab: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: "t5 t17" is [0, 5, 17] with its BOS; reloaded, as TransformerLens needs."""
    folder = os.path.join(_folder().name, f"tokenizer-{d_vocab}")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(d_vocab)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t0", pad_token="t1", unk_token="t0"
    )
    plain.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, add_bos_token=True)


def blocks(hf: Any) -> list[Any]:
    """The transformer blocks of a Hugging Face model."""
    return skeleton(hf)[0]


# Backends


def bridge(hf: Any, compat: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A TransformerBridge around a copy of `hf`."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = os.path.join(_folder().name, f"model-{id(hf)}")
    hf.config.save_pretrained(folder)
    model = TransformerBridge.boot_transformers(
        folder, hf_model=clone(hf, dtype), tokenizer=tokenizer(hf.config.vocab_size), dtype=dtype
    )
    if compat:
        model.enable_compatibility_mode(disable_warnings=True)
    return model.to(dtype)


def clone(hf: Any, dtype: torch.dtype) -> Any:
    """A copy of a Hugging Face model that shares nothing with it."""
    copy = type(hf)._from_config(hf.config, attn_implementation="eager").to(dtype)
    copy.load_state_dict(hf.state_dict())
    if dtype is torch.float64:
        widen_rotary(copy)
    return copy.eval()


def hooked(hf: Any, processed: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A HookedTransformer with the weights of `hf`, through TransformerLens's own conversion."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions as wc

    cfg = HookedTransformerConfig(**_hooked_config(hf.config), dtype=dtype, device="cpu")
    convert = {
        "gpt2": wc.convert_gpt2_weights,
        "llama": wc.convert_llama_weights,
        "qwen2": wc.convert_qwen2_weights,
        "gpt_neox": wc.convert_neox_weights,
        "phi": wc.convert_phi_weights,
    }[hf.config.model_type]
    model = HookedTransformer(cfg, tokenizer=tokenizer(hf.config.vocab_size), move_to_device=False)
    with torch.no_grad():
        state = {k: v.detach().clone().to(dtype) for k, v in convert(hf, cfg).items()}
        model.load_and_process_state_dict(
            state,
            fold_ln=processed,
            center_writing_weights=processed,
            center_unembed=processed,
            fold_value_biases=processed,
        )
    return model.eval()


def _hooked_config(config: Any) -> dict[str, Any]:
    heads, width = config.num_attention_heads, config.hidden_size
    kv = getattr(config, "num_key_value_heads", heads)
    kind = config.model_type
    d_head = getattr(config, "head_dim", None) or width // heads
    values: dict[str, Any] = dict(
        n_layers=config.num_hidden_layers,
        d_model=width,
        n_heads=heads,
        d_head=d_head,
        n_ctx=config.max_position_embeddings,
        d_vocab=config.vocab_size,
        default_prepend_bos=False,
        original_architecture=config.architectures[0] if config.architectures else None,
    )
    if kind == "gpt2":
        return values | dict(
            d_mlp=config.n_inner,
            act_fn=config.activation_function,
            normalization_type="LN",
            eps=config.layer_norm_epsilon,
        )
    rotary = config.rope_parameters if getattr(config, "rope_parameters", None) else vars(config)
    values |= dict(
        d_mlp=config.intermediate_size,
        act_fn=config.hidden_act,
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_base=float(rotary.get("rope_theta", 10000.0)),
        rotary_dim=d_head,
    )
    if kind == "gpt_neox":
        return values | dict(
            normalization_type="LN",
            eps=config.layer_norm_eps,
            parallel_attn_mlp=config.use_parallel_residual,
            rotary_dim=d_head // 2,
        )
    if kind == "phi":
        return values | dict(
            normalization_type="LN", eps=config.layer_norm_eps, parallel_attn_mlp=True, rotary_dim=d_head // 2
        )
    return values | dict(
        normalization_type="RMS",
        final_rms=True,
        gated_mlp=True,
        eps=config.rms_norm_eps,
        n_key_value_heads=None if kv == heads and kind == "llama" else kv,
    )


def build(hf: Any, backend: str, dtype: torch.dtype = torch.float32) -> Any:
    """`hf` behind `backend`.

    Transformers and TransformerLens compute some parts in float32 whatever the model's type is (softmax,
    norms, rotary angles, weight processing). A float64 model here is float64 throughout: it is built, and its
    forward pass runs, with those casts widened.
    """
    if dtype is not torch.float64:
        return plain(hf, backend, dtype)
    with Float64Only():
        model = plain(hf, backend, dtype)
    forward = model.forward

    @functools.wraps(forward)
    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with Float64Only():
            return forward(*args, **kwargs)

    model.forward = forward_in_float64
    return model


def plain(hf: Any, backend: str, dtype: torch.dtype) -> Any:
    """`hf` behind `backend`, with whatever the libraries compute in float32."""
    with torch.random.fork_rng():
        if backend.startswith("bridge"):
            return bridge(hf, backend == "bridge_compat", dtype)
        return hooked(hf, backend == "hooked_processed", dtype)


TOKENS = (5, 17, 42, 8, 63, 90, 33)


@functools.cache
def case(name: str, backend: str, dtype: torch.dtype = torch.float32) -> ZooCase:
    """A case, built once a session. Shared: tests leave its model as it was."""
    hf = hf_model(name)
    return ZooCase(name, backend, build(hf, backend, dtype), hf, TOKENS)


NAMES = tuple(MAIN)
CASES = tuple((name, backend) for name in NAMES for backend in BACKENDS)


def log_probs(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[pos, d_vocab], in nats, of a model of any backend."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).squeeze(0).log_softmax(-1)
