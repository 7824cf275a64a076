"""A user's own cache gives what a trace without one gives, whatever its form, on every backend."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import guards
import pytest
import torch
import transformers
import zoo

import tl_neuron_attr as na
from tl_neuron_attr.logits import LogitMap
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.readout import Readout

PROMPT = list(zoo.TOKENS)


@pytest.fixture(params=guards.FEW, ids="-".join)
def some(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """Enough where the architecture plays no part."""
    return zoo.case(*request.param)


def run(model: Any, prompt: Any = None, **options: Any) -> Any:
    return model.run_with_cache(torch.tensor([PROMPT if prompt is None else prompt]), **options)[1]


FORMS: dict[str, Callable[[Any], Any]] = {
    "full": lambda model: run(model),
    "required": lambda model: run(model, names_filter=na.required_hooks(model)),
    "without batch axis": lambda model: run(model, remove_batch_dim=True),
    "required, without batch axis": lambda model: run(
        model, names_filter=na.required_hooks(model), remove_batch_dim=True
    ),
    "a plain dict": lambda model: dict(run(model).items()),
    "a plain dict without batch axis": lambda model: {k: v[0] for k, v in run(model).items() if k in needed(model)},
    "some with, some without": lambda model: {
        k: v[0] if i % 2 else v for i, (k, v) in enumerate(run(model, names_filter=needed(model)).items())
    },
    "with gradients": lambda model: with_gradients(model),
    "in reverse order": lambda model: dict(reversed(list(run(model, names_filter=needed(model)).items()))),
}


def needed(model: Any) -> list[str]:
    return na.required_hooks(model)


def with_gradients(model: Any) -> Any:
    with torch.enable_grad():
        return {k: v.clone().requires_grad_() for k, v in run(model, names_filter=needed(model)).items()}


def same_scores(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Every score and number of two traces; no graph."""
    assert found.tokens.equal(expected.tokens)
    assert (found.position, found.target) == (expected.position, expected.target)
    assert found.target_log_prob == pytest.approx(expected.target_log_prob, abs=tolerance, rel=tolerance)
    near(found.log_probs, expected.log_probs, tolerance)
    near(found.resid_final, expected.resid_final, tolerance)
    layers, others = na.layer_scores(found), na.layer_scores(expected)
    near(layers.attn, others.attn, tolerance)
    near(layers.mlp, others.mlp, tolerance)
    near(na.head_scores(found).scores, na.head_scores(expected).scores, tolerance)
    near(na.position_scores(found, 1, 2), na.position_scores(expected, 1, 2), tolerance)
    for kind in ("mlp", "attn"):
        near(na.value_scores(found, kind).scores, na.value_scores(expected, kind).scores, tolerance)
        ranked, other = na.value_neurons(found, kind, k=20), na.value_neurons(expected, kind, k=20)
        assert ranked.ids == other.ids
        near(ranked.scores, other.scores, tolerance)
        near(ranked.coefficients, other.coefficients, tolerance)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert not a.requires_grad
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())  # float32 is relative


def test_the_hooks_asked_for_are_the_hooks_read(case: zoo.ZooCase) -> None:
    """All of them are hook points that fire, and none can be left out."""
    hooks = needed(case.model)
    assert len(set(hooks)) == len(hooks)
    cache = run(case.model, names_filter=hooks)
    held = {name: cache[name] for name in hooks}
    assert set(hooks) <= set(cache.keys())
    for name in hooks:
        part = {k: v for k, v in held.items() if k != name}
        with pytest.raises(ValueError, match=rf"lacks 1 of the {len(hooks)} needed activations \({name}\)"):
            na.trace(case.model, PROMPT, cache=part)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_forms_of_a_cache(name: str, backend: str, form: str) -> None:
    model = zoo.case(name, backend).model
    same_scores(na.trace(model, PROMPT, 11, cache=FORMS[form](model)), na.trace(model, PROMPT, 11))


@pytest.mark.parametrize(
    ("target", "position", "convention"),
    [(na.Contrast(7, 23), 3, "paper"), (na.AnyOf([3, 50, 9]), -1, "exact")],
)
def test_equals_a_trace_without(case: zoo.ZooCase, target: Any, position: int, convention: Any) -> None:
    options: dict[str, Any] = dict(position=position, convention=convention)
    cached = na.trace(case.model, PROMPT, target, cache=run(case.model), **options)
    same_scores(cached, na.trace(case.model, PROMPT, target, **options))


def test_one_token(some: zoo.ZooCase) -> None:
    """Where an axis of one position could pass for an axis of one prompt."""
    for remove in (False, True):
        cache = run(some.model, [5], remove_batch_dim=remove)
        same_scores(na.trace(some.model, [5], 11, cache=cache), na.trace(some.model, [5], 11))


def test_a_string_prompt_with_its_cache(some: zoo.ZooCase) -> None:
    """The cache of the same string, BOS and all, fits; with the other choice of BOS it does not."""
    text = "t5 t42 t63"
    for prepend in (False, True):
        _, cache = some.model.run_with_cache(some.model.to_tokens(text, prepend_bos=prepend))
        found = na.trace(some.model, text, 11, cache=cache, prepend_bos=prepend)
        same_scores(found, na.trace(some.model, text, 11, prepend_bos=prepend))
        with pytest.raises(ValueError, match=r"mind the BOS token"):
            na.trace(some.model, text, 11, cache=cache, prepend_bos=not prepend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_other_precisions(backend: str, dtype: torch.dtype) -> None:
    """The final norm and unembedding run on the cached residual as in the model."""
    model = zoo.plain(zoo.hf_model("llama_gqa"), backend, dtype)
    found, expected = na.trace(model, PROMPT, 11, cache=run(model)), na.trace(model, PROMPT, 11)
    tolerance = 1e-6 if dtype is torch.float64 else 0.1
    assert (found.log_probs - expected.log_probs).abs().max() <= tolerance
    assert (na.value_scores(found, "mlp").scores - na.value_scores(expected, "mlp").scores).abs().max() <= 1e-6


# Embeddings that are awkward to recognise the tokens by


def changed(name: str, backend: str, change: Callable[[Any], None]) -> Any:
    hf = zoo.clone(zoo.hf_model(name), torch.float32)
    with torch.no_grad():
        change(hf.get_input_embeddings().weight)
    return zoo.build(hf, backend)


@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_a_token_whose_embedding_is_zero(name: str, backend: str) -> None:
    """Padding tokens have one in many models."""

    def zero(weight: torch.Tensor) -> None:
        weight[8] = 0

    model = changed(name, backend, zero)
    same_scores(na.trace(model, PROMPT, 11, cache=run(model)), na.trace(model, PROMPT, 11))


@pytest.mark.parametrize(("name", "backend"), guards.FEW)
def test_embeddings_that_are_nearly_alike(name: str, backend: str) -> None:
    """A common direction much larger than what tells tokens apart, as trained embeddings have."""

    def alike(weight: torch.Tensor) -> None:
        weight += 40 * torch.linspace(0.5, 1, weight.shape[1])

    model = changed(name, backend, alike)
    same_scores(na.trace(model, PROMPT, 11, cache=run(model)), na.trace(model, PROMPT, 11), 1e-5)
    other = [*PROMPT[:3], 51, *PROMPT[4:]]
    with pytest.raises(ValueError, match="other tokens than those given"):
        na.trace(model, PROMPT, 11, cache=run(model, other))


OTHERS: dict[str, Callable[[], Any]] = {
    "gemma": lambda: zoo.llama_like(transformers.GemmaConfig, num_key_value_heads=2, head_dim=8),
    "bloom": lambda: transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, attn_implementation="eager"
    ),
    "qwen3": lambda: zoo.llama_like(transformers.Qwen3Config, head_dim=8),
}


@functools.cache
def other(kind: str) -> Any:
    config = OTHERS[kind]()
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    config.architectures = [type(hf).__name__]
    return zoo.bridge(zoo.randomise(hf, seed=6), compat=False)


if zoo.BRIDGE:

    @pytest.mark.parametrize("kind", OTHERS)
    def test_models_that_change_their_embedding(kind: str) -> None:
        """Gemma scales it, Bloom normalises it, OPT has a padding token of zeros (id 1)."""
        model = other(kind)
        for prompt in (PROMPT, [1, 5, 1, 42]):
            cache = run(model, prompt)
            same_scores(na.trace(model, prompt, 11, cache=cache), na.trace(model, prompt, 11))


# Hooks on the model while a cache is read


class WithALock:
    """A hook that cannot be copied, as any that holds a file, a lock or a connection."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor, hook: Any) -> None:
        raise AssertionError("no hook fires where no forward pass is made")


def test_hooks_on_the_final_norm(some: zoo.ZooCase) -> None:
    expected, cache = na.trace(some.model, PROMPT, 11), run(some.model)
    names = [name for name in some.model.hook_dict if name.startswith("ln_final.")]
    assert names
    with some.model.hooks(fwd_hooks=[(name, WithALock()) for name in names]):
        same_scores(na.trace(some.model, PROMPT, 11, cache=cache), expected)


def test_a_multiplier_multiplies_the_constant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture has both a logit multiplier and a bias of the readout; the map is right for one that would."""
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    tokens = torch.tensor([case.tokens])
    _, cache = case.model.run_with_cache(tokens)
    plain = na.trace(case.model, tokens, 42, cache=cache)
    monkeypatch.setattr(ModelView, "logit_map", LogitMap(0.5))
    halved = na.trace(case.model, tokens, 42, cache=cache)
    assert not torch.allclose(halved.log_probs, plain.log_probs)
    total = na.layer_scores(halved).attn.sum() + na.layer_scores(halved).mlp.sum()
    start = Readout.of(halved).logits(halved.resid_pre[0][-1:]).log_softmax(-1)[0, 42]
    assert total.item() == pytest.approx(halved.target_log_prob - start.item(), abs=1e-5)
