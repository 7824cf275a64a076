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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo_hooked
from reference_float64 import Float64Only, widen_rotary
from reference_parts import skeleton
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo_configs import CONFIGS, MAIN, randomise
from zoo_configs import llama_like as llama_like

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
    model.config.architectures = [type(model).__name__]  # as every saved model has it
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
    wide = clone(hf, dtype) if dtype is torch.float64 else hf  # Gemma's conversion adds 1 to gains in float32
    return zoo_hooked.hooked(wide, processed, tokenizer(hf.config.vocab_size), dtype)


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


def thinned(cases: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """All cases on a release with one model class; every second one where both exist and would take twice as long.

    Each architecture then stands behind two of the four backends there, its neighbour behind the other two; the other
    releases run it behind the rest.
    """
    cases = tuple(cases)
    if not (HOOKED and BRIDGE):
        return cases
    names = list(dict.fromkeys(name for name, _ in cases))
    return tuple(c for c in cases if (names.index(c[0]) + BACKENDS.index(c[1])) % 2 == 0)


# The whole suite runs on CASES (thinned where there are two classes; tests against plain loops take ALL_CASES);
# FAMILIES are all architectures, for tests of what architectures do.
NAMES = tuple(MAIN)
ALL_CASES = tuple((name, backend) for name in NAMES for backend in BACKENDS)
CASES = thinned(ALL_CASES)
FAMILIES = tuple(CONFIGS)
HOOKED_FAMILIES = tuple(n for n in FAMILIES if HOOKED and zoo_hooked.expresses(CONFIGS[n]()))
# Builds, and computes something else than the Hugging Face model, in every mode of the bridge.
BRIDGE_FAULTS = {"falcon_new": "splits the fused matrix as if all queries came first, then all keys, all values"}
if HOOKED:  # TransformerLens 3; 4.3 is right
    BRIDGE_FAULTS["cohere"] = "rotates the halves of a head, not neighbours"
BRIDGE_FAMILIES = tuple(n for n in FAMILIES if BRIDGE and n not in (*BRIDGE_FAULTS, "attn_only"))
FAMILY_CASES = tuple(
    (name, backend)
    for name in FAMILIES
    for backend in BACKENDS
    if name in (BRIDGE_FAMILIES if backend.startswith("bridge") else HOOKED_FAMILIES)
)


def log_probs(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[pos, d_vocab], in nats, of a model of any backend."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).squeeze(0).log_softmax(-1)
