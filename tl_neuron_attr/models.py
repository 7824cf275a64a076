"""The demonstration model: SmolLM2-135M-Instruct, with no account and no model hub.

`demo_weights` has the weights; here they become a ``TransformerBridge`` or a ``HookedTransformer``, with the
configuration written out in numbers. Every model handed out has shown that "The capital of France is" is the
five tokens 504, 3575, 282, 4649, 314 and that log p(" Paris") is the known value, so a library that builds it
differently is noticed: a rotary base of 10,000 instead of 100,000, say, gives p = 0.75 where 0.77 is right.
"""

import importlib
import importlib.util
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor

from tl_neuron_attr.demo_weights import demo_weights

_NAME = "SmolLM2-135M-Instruct"
_LAYERS, _HEADS, _KEY_VALUE_HEADS, _D_HEAD = 30, 9, 3, 64
_D_MODEL, _D_MLP, _VOCAB = 576, 1536, 49152
_EPS, _ROTARY_BASE, _CONTEXT = 1e-5, 100_000, 8192
# HookedTransformer keeps an n_ctx x n_ctx mask per layer: 2 GB at the model's own 8192.
_HOOKED_CONTEXT = 2048

_PROMPT, _PROMPT_TOKENS = "The capital of France is", [504, 3575, 282, 4649, 314]
_TARGET, _TARGET_LOG_PROB = 7042, -0.258081  # " Paris": p = 0.7725


def load_demo_model(
    backend: Literal["bridge", "hooked"] | None = None,
    *,
    process_weights: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """SmolLM2-135M-Instruct (Apache-2.0): 30 layers of 1,536 MLP neurons, 9 query and 3 key-value heads.

    The first call dequantises the weights to float32 in the user's cache (half a minute, 540 MB); later ones
    take seconds. The model comes in evaluation mode, and takes no BOS: ``model.to_tokens(text)`` adds none
    unless asked.

    Args:
        backend: ``"bridge"`` for a ``TransformerBridge`` (TransformerLens 3 and 4), ``"hooked"`` for a
            ``HookedTransformer`` (2 and 3; contexts up to 2,048 tokens). By default the bridge where there is
            one.
        process_weights: fold norm weights into the next layer and centre the unembedding, as TransformerLens
            does: ``enable_compatibility_mode()`` on a bridge. The log-probabilities stay the same.
        device: where to put it.
        dtype: the precision of its weights and activations.

    Returns:
        A ``TransformerBridge`` or a ``HookedTransformer``.

    Raises:
        ValueError: an unknown ``backend``, or one that the installed TransformerLens does not have; a ``device``
            that is not there.
        ModuleNotFoundError: the package with the weights, or the one that reads them, is not installed; the
            message has the command that brings it.
        RuntimeError: the file with the weights, or the model made of it, is not the known one.
        OSError: the cache cannot be written.

    Example:
        >>> model = load_demo_model()
        >>> model.to_tokens("The capital of France is").tolist()
        [[504, 3575, 282, 4649, 314]]
    """
    build = _builder(backend)
    _check_device(device)
    state, tokenizer_json = demo_weights()
    model = build(_hugging_face_model(state), _tokenizer(tokenizer_json), process_weights, str(device))
    _check(model)
    return model if dtype is torch.float32 else model.to(dtype, print_details=False)


def load_model(
    name: str | None = None,
    backend: Literal["bridge", "hooked"] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A model that TransformerLens knows by name, its weights unprocessed, in evaluation mode.

    Args:
        name: such as ``"gpt2"``, or the path of a folder that holds a model; ``None`` is the embedded model of
            :func:`load_demo_model`.
        backend: as for :func:`load_demo_model`.
        device: where to put it; by default where TransformerLens puts models (a GPU where there is one), and the
            embedded model on the CPU.
        dtype: the precision of its weights and activations.

    Raises:
        ValueError: TransformerLens does not know the name, or its files cannot be fetched; or as
            :func:`load_demo_model`, for ``backend`` and ``device`` too.

    Example:
        >>> import tl_neuron_attr as na
        >>> na.load_model().cfg.n_layers
        30
    """
    if name is None:
        return load_demo_model(backend, device="cpu" if device is None else device, dtype=dtype)
    bridged = _builder(backend) is _bridge
    _check_device(device)
    try:
        if bridged:
            home: Any = importlib.import_module("transformer_lens.model_bridge")
            return home.TransformerBridge.boot_transformers(name, device=device, dtype=dtype).eval()
        transformer_lens: Any = importlib.import_module("transformer_lens")
        hooked: Any = transformer_lens.HookedTransformer
        return hooked.from_pretrained_no_processing(name, device=device, dtype=dtype).eval()
    except Exception as error:  # whatever the hub, transformers or TransformerLens raises for this name
        reason = str(error).strip() or type(error).__name__
        reason = textwrap.shorten(reason.splitlines()[0], 160, placeholder=" ...")
        raise ValueError(
            f"model {name!r} cannot be loaded: {reason} "
            "Give a name that TransformerLens knows and see that the model hub can be reached, or give a folder that "
            "holds the model."
        ) from error


def _check_device(device: str | torch.device | None) -> None:
    """Refuse a device that is not there before anything is read or fetched."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # the latter two where PyTorch was built without it
        reason = textwrap.shorten(str(error).splitlines()[0], 160, placeholder=" ...")
        raise ValueError(
            f'device={str(device)!r} cannot be used ({reason.rstrip(".")}): give "cpu", or one that PyTorch has '
            f'here, such as "cuda", "cuda:1" or "mps"'
        ) from error


def _builder(backend: str | None) -> Any:
    """The function that wraps the model for this backend, refused before any work if there is none."""
    if backend not in (None, "bridge", "hooked"):
        raise ValueError(f"backend={backend!r} is not known; use 'bridge', 'hooked', or None for the default.")
    home = {"bridge": "transformer_lens.model_bridge", "hooked": "transformer_lens.HookedTransformer"}
    there = [name for name, module in home.items() if importlib.util.find_spec(module)]
    chosen = backend or there[0]
    if chosen not in there:
        raise ValueError(
            f"backend={chosen!r} does not exist in TransformerLens {version('transformer-lens')}: "
            "TransformerBridge came with 3.0 and HookedTransformer left with 4.0. "
            f"Use backend={there[0]!r}, or install another release of transformer-lens."
        )
    return {"bridge": _bridge, "hooked": _hooked}[chosen]


def _tokenizer(tokenizer_json: str) -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json),
        name_or_path=_NAME,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    # Unless this one says here that it has add_bos_token, TransformerLens fetches another tokenizer, with it,
    # from the hub. Nothing else reads this: the tokenizer adds no BOS, which TransformerLens finds by trying.
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer


def _hugging_face_model(state: dict[str, Tensor]) -> Any:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=_D_MODEL,
        intermediate_size=_D_MLP,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_VALUE_HEADS,
        head_dim=_D_HEAD,
        max_position_embeddings=_CONTEXT,
        rms_norm_eps=_EPS,
        rope_theta=float(_ROTARY_BASE),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        attn_implementation="eager",
        architectures=["LlamaForCausalLM"],
    )
    with _quiet(transformers):
        return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state).eval()


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """No progress bars from transformers, whose switch is left as it was."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _bridge(hugging_face_model: Any, tokenizer: Any, process_weights: bool, device: str) -> Any:
    bridge_class: Any = importlib.import_module("transformer_lens.model_bridge").TransformerBridge
    model = bridge_class.boot_transformers(
        _NAME, hf_model=hugging_face_model.to(device), tokenizer=tokenizer, device=device
    )
    model.cfg.default_prepend_bos = False
    if process_weights:
        model.enable_compatibility_mode()
    return model.eval()


def _hooked(hugging_face_model: Any, tokenizer: Any, process_weights: bool, device: str) -> Any:
    transformer_lens: Any = importlib.import_module("transformer_lens")
    conversions: Any = importlib.import_module("transformer_lens.pretrained.weight_conversions")
    config = transformer_lens.HookedTransformerConfig(
        model_name=_NAME,
        n_layers=_LAYERS,
        n_heads=_HEADS,
        n_key_value_heads=_KEY_VALUE_HEADS,
        d_head=_D_HEAD,
        d_model=_D_MODEL,
        d_mlp=_D_MLP,
        d_vocab=_VOCAB,
        n_ctx=_HOOKED_CONTEXT,
        eps=_EPS,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMSPre" if process_weights else "RMS",
        final_rms=True,
        positional_embedding_type="rotary",
        rotary_base=_ROTARY_BASE,
        rotary_dim=_D_HEAD,
        rotary_adjacent_pairs=False,
        tie_word_embeddings=True,
        original_architecture="LlamaForCausalLM",
        default_prepend_bos=False,
        init_weights=False,
        device=device,
    )
    model = transformer_lens.HookedTransformer(config, tokenizer=tokenizer)
    state = conversions.convert_llama_weights(hugging_face_model.to(device), config)
    if process_weights:
        model.load_and_process_state_dict(state, center_writing_weights=False)  # LayerNorm models only
    else:
        model.load_state_dict(state, strict=False)  # strict: the masks and rotary tables are buffers
    return model.eval()


def _check(model: Any) -> None:
    tokens = model.to_tokens(_PROMPT).tolist()[0]
    with torch.no_grad():
        logits = model(torch.tensor([_PROMPT_TOKENS], device=model.cfg.device))
    log_prob = logits[0, -1].float().log_softmax(dim=-1)[_TARGET].item()
    # 1e-3: rounding stays below 1e-5, and a wrong rotary base is 0.03 away. Not a number must fail, too.
    if tokens != _PROMPT_TOKENS or not abs(log_prob - _TARGET_LOG_PROB) < 1e-3:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("transformer-lens", "transformers", "torch"))
        raise RuntimeError(
            f"The demonstration model is not the known one: {_PROMPT!r} gives tokens {tokens} and "
            f"log p(' Paris') = {log_prob:.4f}, not the expected {_PROMPT_TOKENS} and {_TARGET_LOG_PROB:.4f}, "
            f"with {libraries}. Known to work: transformer-lens 4.3.0 with transformers 5.24.0."
        )
