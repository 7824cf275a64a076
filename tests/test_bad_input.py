"""Bad input gets a named error, word for word, before any module runs, and leaves the model as it was."""

import functools
import re
from collections.abc import Callable
from typing import Any

import guards
import numpy as np
import pytest
import torch
import transformers
import zoo

import tl_neuron_attr as na

PROMPT = list(zoo.TOKENS)
EMPTY = "the prompt is empty: give at least one token to predict from"
KINDS_OF_TARGET = (
    "give a token id, a string of one token, Contrast(a, b), AnyOf([...]) or None (the model's top prediction)"
)


@pytest.fixture
def case(case: zoo.ZooCase) -> zoo.ZooCase:
    """Every model behind every backend, after its first forward pass, in which a bridge sets up hooks of its own."""
    return guards.warm(case)


@pytest.fixture(params=guards.FEW, ids="-".join)
def some(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """Enough where the architecture plays no part."""
    return guards.warm(zoo.case(*request.param))


def gpt2(backend: str) -> Any:
    return guards.warm(zoo.case("gpt2", backend)).model


def run_once(model: Any) -> Any:
    with torch.no_grad():
        model.run_with_cache(torch.tensor([PROMPT]))
    return model


def width(case: zoo.ZooCase) -> int:
    return case.hf_model.config.vocab_size


def context(case: zoo.ZooCase) -> int:
    return case.model.cfg.n_ctx


def name(model: Any) -> str:
    return str(model.cfg.model_name)


# Prompts


@pytest.mark.parametrize(
    "prompt", ["", [], (), torch.tensor([], dtype=torch.int64), torch.zeros(1, 0).long()], ids=str
)
def test_empty_prompt(some: zoo.ZooCase, prompt: Any) -> None:
    with guards.refused(some.model, ValueError, EMPTY):
        na.trace(some.model, prompt)
    with guards.refused(some.model, ValueError, EMPTY):
        na.trace_continuation(some.model, prompt, [3, 4])


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "several": (
        torch.tensor([[1, 2], [3, 4]]),
        "the prompt tensor has shape [2, 2]: give one prompt, [pos] or [1, pos]; trace several prompts one at a time",
    ),
    "no axis": (
        torch.tensor(3),
        "the prompt tensor has shape []: give one prompt, [pos] or [1, pos]; trace several prompts one at a time",
    ),
    "three axes": (
        torch.ones(1, 1, 3).long(),
        "the prompt tensor has shape [1, 1, 3]: give one prompt, [pos] or [1, pos]; "
        "trace several prompts one at a time",
    ),
    "float": (torch.tensor([1.0, 2.0]), "the prompt tensor has dtype torch.float32: token ids are integers"),
    "bool": (torch.tensor([True]), "the prompt tensor has dtype torch.bool: token ids are integers"),
    "list of floats": (
        [1, 2.0],
        "the prompt holds 2.0 of type float: give one string, a list of token ids, "
        "or a tensor of ids of shape [pos] or [1, pos]",
    ),
    "list of strings": (
        ["t3", "t2"],
        "the prompt holds 't3' of type str: give one string, a list of token ids, "
        "or a tensor of ids of shape [pos] or [1, pos]",
    ),
    "list of lists": (
        [[1, 2]],
        "the prompt holds [1, 2] of type list: give one string, a list of token ids, "
        "or a tensor of ids of shape [pos] or [1, pos]",
    ),
    "list of bools": (
        [True, False],
        "the prompt holds True of type bool: give one string, a list of token ids, "
        "or a tensor of ids of shape [pos] or [1, pos]",
    ),
}


@pytest.mark.parametrize("which", BAD_PROMPTS)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_what_is_not_one_prompt(backend: str, which: str) -> None:
    model = gpt2(backend)
    prompt, text = BAD_PROMPTS[which]
    with guards.refused(model, ValueError, text):
        na.trace(model, prompt)


@pytest.mark.parametrize("prompt", [None, 5], ids=str)
def test_what_is_no_prompt_at_all(prompt: Any) -> None:
    """The error names the parameter and its type, not an operation inside."""
    model = gpt2(zoo.BACKENDS[0])
    with guards.as_users_run_it(), guards.no_module_runs(), pytest.raises((TypeError, ValueError), match="prompt"):
        na.trace(model, prompt)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_ids_outside_the_vocabulary(some: zoo.ZooCase, kind: Callable[[list[int]], Any]) -> None:
    d_vocab = width(some)
    for bad in (d_vocab, -1, 10**9):
        text = f"prompt token {bad} is outside the vocabulary of {d_vocab} tokens"
        with guards.refused(some.model, ValueError, text):
            na.trace(some.model, kind([1, bad, 2]))
    with guards.refused(
        some.model, ValueError, f"prompt token {d_vocab} is outside the vocabulary of {d_vocab} tokens"
    ):
        na.trace_continuation(some.model, [1, 2], [d_vocab, 3])


def test_longer_than_the_context(case: zoo.ZooCase) -> None:
    n_ctx = context(case)
    text = f"the prompt has {n_ctx + 1} tokens, the model's context holds {n_ctx}: shorten the prompt"
    long = [3] * (n_ctx + 1)
    for prompt in (long, torch.tensor([long])):
        with guards.refused(case.model, ValueError, text):
            na.trace(case.model, prompt)
    with guards.refused(case.model, ValueError, text):  # the last token of an answer is predicted, not read
        na.trace_continuation(case.model, long[:-1], [1, 2])
    assert na.trace(case.model, long[:-1]).position == n_ctx - 1
    assert len(na.trace_continuation(case.model, long[:-1], [1])) == 1


def test_a_string_longer_than_the_context(some: zoo.ZooCase) -> None:
    """TransformerLens's to_tokens cuts it silently, which would explain another prompt."""
    n_ctx = context(some)
    text = f"the prompt has {n_ctx + 5} tokens, the model's context holds {n_ctx}: shorten the prompt"
    with guards.refused(some.model, ValueError, text):
        na.trace(some.model, " ".join(["t3"] * (n_ctx + 5)), prepend_bos=False)


@pytest.mark.parametrize("prepend", [True, False])
def test_bos_with_ids(some: zoo.ZooCase, prepend: bool) -> None:
    text = (
        f"prepend_bos={prepend} was given with token ids: ids are used as they are; add or remove the BOS token in "
        f"the list itself"
    )
    for prompt in (PROMPT, torch.tensor(PROMPT)):
        with guards.refused(some.model, ValueError, text):
            na.trace(some.model, prompt, prepend_bos=prepend)


# Positions


@pytest.mark.parametrize("position", [7, -8, 100, -100, True, 1.0, None, "1"], ids=repr)
def test_position_out_of_range(some: zoo.ZooCase, position: Any) -> None:
    text = f"position {position!r} is out of range for a prompt of 7 tokens: give -7 to 6"
    with guards.refused(some.model, ValueError, text):
        na.trace(some.model, PROMPT, position=position)


def test_positions_at_both_ends(case: zoo.ZooCase) -> None:
    assert [na.trace(case.model, PROMPT, position=p).position for p in (0, -7, 6, -1)] == [0, 0, 6, 6]


# Targets


@functools.cache
def without_tokenizer(backend: str) -> Any:
    model = zoo.build(zoo.hf_model("gpt2"), backend)
    model.tokenizer = None
    return model


BAD_TARGETS: dict[str, tuple[Any, str]] = {
    "too high": (96, "target id 96 is outside the vocabulary of 96 tokens (0 to d_vocab - 1)"),
    "negative": (-1, "target id -1 is outside the vocabulary of 96 tokens (0 to d_vocab - 1)"),
    "bool": (True, f"target True is a bool: {KINDS_OF_TARGET}"),
    "float": (3.0, f"target 3.0 is a float: {KINDS_OF_TARGET}"),
    "list": ([3], f"target [3] is a list: {KINDS_OF_TARGET}"),
    "empty string": ("", "the target is an empty string: give a string of one token, or a token id"),
    "several tokens": (
        "t5 t42",
        "target 't5 t42' is 2 tokens ('t5', 't42'): a target is one token; attribute to its first, 't5', or in "
        "Python to all of them with trace_continuation(model, prompt, 't5 t42')",
    ),
    "no set": (na.AnyOf([]), "AnyOf([]) names no token: give at least one"),
    "set with one outside": (
        na.AnyOf([3, 96]),
        "target id 96 is outside the vocabulary of 96 tokens (0 to d_vocab - 1)",
    ),
    "set with several tokens": (
        na.AnyOf(["t3", "t5 t42"]),
        "target 't5 t42' is 2 tokens ('t5', 't42'): a target is one token; attribute to its first, 't5', or in "
        "Python to all of them with trace_continuation(model, prompt, 't5 t42')",
    ),
    "contrast with itself": (
        na.Contrast(3, 3),
        "Contrast(positive=3, negative=3) contrasts token 3 with itself: name two different tokens",
    ),
    "contrast with itself, spelled": (
        na.Contrast("t3", 3),
        "Contrast(positive='t3', negative=3) contrasts token 3 with itself: name two different tokens",
    ),
    "contrast with one outside": (
        na.Contrast(3, -2),
        "target id -2 is outside the vocabulary of 96 tokens (0 to d_vocab - 1)",
    ),
    "contrast of bools": (na.Contrast(True, False), f"target True is a bool: {KINDS_OF_TARGET}"),
}


@pytest.mark.parametrize("which", BAD_TARGETS)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_what_is_not_a_target(backend: str, which: str) -> None:
    model = gpt2(backend)
    target, text = BAD_TARGETS[which]
    with guards.refused(model, na.TargetError, text):
        na.trace(model, PROMPT, target)
    _, cache = model.run_with_cache(torch.tensor([PROMPT]))
    with guards.refused(model, na.TargetError, text):
        na.trace(model, PROMPT, target, cache=cache)


@pytest.mark.parametrize("target", ["nonsense", "t5.", "t222"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_unknown_target(backend: str, target: str) -> None:
    """The message suggests no token that does not exist either."""
    model = gpt2(backend)
    text = rf"target '{target}' is not a token of this model's vocabulary(?!.*did you mean)"
    with guards.refused_like(model, na.TargetError, text):
        na.trace(model, PROMPT, target)


@pytest.mark.parametrize("target", [" ", "\n"], ids=repr)
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_a_target_that_the_tokenizer_drops(backend: str, target: str) -> None:
    """White space gives no piece at all with many tokenizers."""
    with guards.refused_like(gpt2(backend), na.TargetError, re.escape(f"target {target!r} is ")):
        na.trace(gpt2(backend), PROMPT, target)


def test_a_string_is_no_set_of_tokens() -> None:
    with pytest.raises(na.TargetError) as caught, guards.as_users_run_it():
        na.AnyOf(" Paris")  # type: ignore[arg-type]
    assert str(caught.value) == "AnyOf takes a list of tokens, got the string ' Paris': write AnyOf([' Paris'])"


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_strings_without_a_tokenizer(backend: str) -> None:
    model = without_tokenizer(backend)
    with guards.refused(model, ValueError, "the model has no tokenizer: give the prompt as token ids"):
        na.trace(model, "t3 t4")
    text = "the model has no tokenizer to look up 't3': give the target as a token id"
    for target in ("t3", na.AnyOf([1, "t3"]), na.Contrast(1, "t3")):
        with guards.refused(model, na.TargetError, text):
            na.trace(model, PROMPT, target)
    with guards.refused(model, ValueError, "the model has no tokenizer: give the continuation as token ids"):
        na.trace_continuation(model, PROMPT, "t3")


@pytest.mark.parametrize("answer", ["", [], torch.tensor([], dtype=torch.int64)], ids=str)
def test_empty_continuation(some: zoo.ZooCase, answer: Any) -> None:
    with guards.refused(some.model, ValueError, "the continuation is empty: give at least one token to attribute to"):
        na.trace_continuation(some.model, PROMPT, answer)


def test_continuation_outside_the_vocabulary(some: zoo.ZooCase) -> None:
    """Also its last token, which the model never reads."""
    d_vocab = width(some)
    for bad in (d_vocab, -1):
        text = f"target id {bad} is outside the vocabulary of {d_vocab} tokens (0 to d_vocab - 1)"
        with guards.refused(some.model, na.TargetError, text):
            na.trace_continuation(some.model, PROMPT, [3, bad])


# Choices


def test_unknown_choices(some: zoo.ZooCase) -> None:
    model = some.model
    convention = 'unknown convention \'papers\': choose "exact" or "paper"'
    with guards.refused(model, ValueError, convention):
        na.trace(model, PROMPT, convention="papers")  # type: ignore[arg-type]
    with guards.refused(model, ValueError, convention):
        na.trace_continuation(model, PROMPT, [3], convention="papers")  # type: ignore[arg-type]

    trace = na.trace(model, PROMPT)
    kind = 'unknown kind \'neuron\': the kinds are "mlp" and "attn"'
    with guards.refused(model, ValueError, kind):
        na.value_neurons(trace, "neuron")  # type: ignore[arg-type]
    with guards.refused(model, ValueError, kind):
        na.value_scores(trace, "neuron")  # type: ignore[arg-type]
    with guards.as_users_run_it(), pytest.raises(ValueError, match=r"^unknown method 'gradients': choose one of "):
        na.value_neurons(trace, "mlp", method="gradients")


@pytest.mark.parametrize("layers", [[], [3], [-1], [0, 99], [True]], ids=str)
def test_unknown_layers(some: zoo.ZooCase, layers: list[Any]) -> None:
    n_layers = some.model.cfg.n_layers
    layers = [n_layers if layer == 3 else layer for layer in layers]
    trace = na.trace(some.model, PROMPT)
    text = (
        f"layers={layers}: name at least one layer, each from 0 to {n_layers - 1} ({name(some.model)} has {n_layers})"
    )
    for kind in ("mlp", "attn"):
        with guards.refused(some.model, ValueError, text):
            na.value_scores(trace, kind, layers=layers)
        with guards.refused(some.model, ValueError, text):
            na.value_neurons(trace, kind, layers=layers)


def test_unknown_head_or_layer(some: zoo.ZooCase) -> None:
    trace, cfg = na.trace(some.model, PROMPT), some.model.cfg
    for head in (cfg.n_heads, -1):
        text = f"head {head} is out of range: {name(some.model)} has heads 0 to {cfg.n_heads - 1}"
        with guards.refused(some.model, ValueError, text):
            na.position_scores(trace, 0, head)
    for layer in (cfg.n_layers, -1):
        with guards.as_users_run_it(), pytest.raises(ValueError, match=rf"^layers=\[{layer}\]: name at least one"):
            na.position_scores(trace, layer, 0)


@pytest.mark.parametrize("k", [0, -1, -100])
def test_k_below_one(some: zoo.ZooCase, k: int) -> None:
    trace = na.trace(some.model, PROMPT)
    text = f"k is {k}: ask for 1 or more"
    ranked = na.value_neurons(trace, "mlp", k=2)
    for kind in ("mlp", "attn"):
        with guards.refused(some.model, ValueError, text):
            na.value_neurons(trace, kind, k=k)
    with guards.refused(some.model, ValueError, text):
        na.promoted_tokens(trace, ranked, k=k)
    with guards.refused(some.model, ValueError, f"n is {k}: ask for 1 or more"):
        ranked.top(k)


@pytest.mark.parametrize("budget", [0, -1, 2**20 - 1])
def test_too_small_a_budget(some: zoo.ZooCase, budget: int) -> None:
    trace = na.trace(some.model, PROMPT)
    ranked = na.value_neurons(trace, "mlp", k=2)
    text = f"memory_budget={budget} bytes: give at least one MiB (2**20)"
    calls: list[Callable[[], Any]] = [
        lambda: na.layer_scores(trace, memory_budget=budget),
        lambda: na.head_scores(trace, memory_budget=budget),
        lambda: na.position_scores(trace, 0, 0, memory_budget=budget),
        lambda: na.value_scores(trace, "mlp", memory_budget=budget),
        lambda: na.value_neurons(trace, "attn", memory_budget=budget),
        lambda: na.promoted_tokens(trace, ranked, memory_budget=budget),
    ]
    for call in calls:
        with guards.refused(some.model, ValueError, text):
            call()


def test_neurons_that_do_not_exist(some: zoo.ZooCase) -> None:
    trace, cfg = na.trace(some.model, PROMPT, position=3), some.model.cfg
    d_mlp = trace.post[0].shape[-1]
    for neuron, text in (
        (na.MLPNeuron(0, d_mlp), f"L0N{d_mlp} does not exist here: neuron runs from 0 to {d_mlp - 1}"),
        (na.AttnNeuron(0, 0, 0, 4), "L0H0D0@4 does not exist here: source runs from 0 to 3"),
        (
            na.AttnNeuron(0, cfg.n_heads, 0, 0),
            f"L0H{cfg.n_heads}D0@0 does not exist here: head runs from 0 to {cfg.n_heads - 1}",
        ),
        (
            na.AttnNeuron(0, 0, cfg.d_head, 0),
            f"L0H0D{cfg.d_head}@0 does not exist here: dim runs from 0 to {cfg.d_head - 1}",
        ),
    ):
        with guards.refused(some.model, ValueError, text):
            na.promoted_tokens(trace, [neuron])


# Caches


def cache_of(model: Any, tokens: list[int], **options: Any) -> Any:
    return model.run_with_cache(torch.tensor([tokens]), **options)[1]


def test_a_partial_cache(case: zoo.ZooCase) -> None:
    needed = na.required_hooks(case.model)
    last = needed[-1]
    text = "the cache lacks {} of the {} needed activations ({}): run the model with {}"
    advice = "names_filter=required_hooks(model), or without a filter"
    cache = cache_of(case.model, PROMPT, names_filter=needed[:-1])
    with guards.refused(case.model, ValueError, text.format(1, len(needed), last, advice)):
        na.trace(case.model, PROMPT, cache=cache)
    listed = ", ".join(needed[:3]) + ", ..."
    with guards.refused(case.model, ValueError, text.format(len(needed), len(needed), listed, advice)):
        na.trace(case.model, PROMPT, cache={})


@pytest.mark.parametrize("place", range(7))
def test_a_cache_of_another_prompt(some: zoo.ZooCase, place: int) -> None:
    """Of the same length, different in one token only."""
    other = list(PROMPT)
    other[place] = 51
    cache = cache_of(some.model, other)
    text = (
        f"the cache was made with other tokens than those given (hook_embed differs at position {place}): pass the "
        f"tokens that the cache was made with; with edited embeddings, call trace without cache= while your hooks "
        f"are on the model"
    )
    with guards.refused(some.model, ValueError, text):
        na.trace(some.model, PROMPT, cache=cache)


WRONG_CACHES: dict[str, Callable[[Any], Any]] = {
    "longer": lambda model: cache_of(model, [*PROMPT, 4]),
    "shorter": lambda model: cache_of(model, PROMPT[:-1]),
    "of the last position": lambda model: cache_of(model, PROMPT, pos_slice=-1),
    "of a slice": lambda model: cache_of(model, PROMPT, pos_slice=(0, 3)),
}


@pytest.mark.parametrize("which", WRONG_CACHES)
def test_a_cache_of_another_length(some: zoo.ZooCase, which: str) -> None:
    cache = WRONG_CACHES[which](some.model)
    pattern = ".* which is not of 7 positions as the prompt given: .*mind the BOS token.* no pos_slice"
    with guards.refused_like(some.model, ValueError, pattern):
        na.trace(some.model, PROMPT, cache=cache)


def test_a_cache_of_several_prompts(some: zoo.ZooCase) -> None:
    _, cache = some.model.run_with_cache(torch.tensor([PROMPT, PROMPT]))
    shape = [2, 7, some.model.cfg.d_model]
    text = (
        f"the cache holds 2 prompts (hook_embed has shape {shape}): give the cache of one prompt, e.g. each tensor "
        f"indexed [i : i + 1]"
    )
    with guards.refused(some.model, ValueError, text):
        na.trace(some.model, PROMPT, cache=cache)
    one = {key: value[1:2] for key, value in cache.items() if key in na.required_hooks(some.model)}
    assert na.trace(some.model, PROMPT, cache=one).position == 6


@pytest.mark.parametrize("cache", [torch.zeros(1, 7, 32), [1, 2], "cache"], ids=["tensor", "list", "string"])
def test_what_is_no_cache(cache: Any) -> None:
    model = gpt2(zoo.BACKENDS[0])
    with guards.as_users_run_it(), guards.no_module_runs(), pytest.raises((TypeError, ValueError), match="cache"):
        na.trace(model, PROMPT, cache=cache)


# Models


def only_if(there_is: bool) -> Callable[[Any], Any]:
    """A test of a class that the installed TransformerLens does not have is no test there: it is not collected."""
    return lambda test: test if there_is else None


bridge_only, hooked_only = only_if(zoo.BRIDGE), only_if(zoo.HOOKED)

ENTRIES: dict[str, Callable[[Any], Any]] = {
    "trace": lambda model: na.trace(model, [1, 2, 3]),
    "trace_continuation": lambda model: na.trace_continuation(model, [1, 2, 3], [4, 5]),
    "required_hooks": lambda model: na.required_hooks(model),
}
RUNS = ["trace", "trace_continuation"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_not_a_transformerlens_model(entry: str) -> None:
    hf = zoo.hf_model("gpt2")
    for given in (hf, None, "gpt2", torch.nn.Linear(2, 2)):
        kind = type(given).__name__
        text = (
            f"got a {kind}: tl_neuron_attr attributes TransformerLens models, so load it as a TransformerBridge "
            f"(TransformerLens 3 and 4) or a HookedTransformer (2 and 3)"
        )
        with guards.as_users_run_it(), guards.no_module_runs(), pytest.raises(na.UnsupportedModelError) as caught:
            ENTRIES[entry](given)
        assert str(caught.value) == text
    assert not hasattr(hf, "hook_dict")


def small(cls: Any, **changes: Any) -> Any:
    """A configuration of any architecture, by the names that most of them share."""
    return zoo.llama_like(cls, num_hidden_layers=2, **changes)


@functools.cache
def boot(kind: str) -> Any:
    """A random model of an architecture beside the zoo, behind the bridge."""
    config = BRIDGED[kind]()
    auto = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    hf = auto.get(kind, transformers.AutoModelForCausalLM).from_config(config, attn_implementation="eager")
    config.architectures = [type(hf).__name__]
    return zoo.bridge(zoo.randomise(hf.float(), seed=3), compat=False)


BRIDGED: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: small(transformers.MixtralConfig, num_key_value_heads=2, num_local_experts=4),
    "olmoe": lambda: small(transformers.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: small(
        transformers.Qwen2MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=52,
        shared_expert_intermediate_size=52,
    ),
    "gpt2": lambda: zoo.CONFIGS["gpt2"](),
    "bert": lambda: transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}


def hooked(**changes: Any) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    values: dict[str, Any] = dict(
        n_layers=2, d_model=32, n_heads=4, d_head=8, d_mlp=64, n_ctx=32, d_vocab=100, act_fn="gelu", device="cpu"
    )
    return HookedTransformer(HookedTransformerConfig(**{**values, **changes})).eval()


def refuses(model: Any, entry: str, start: str) -> None:
    with guards.refused_like(model, na.UnsupportedModelError, re.escape(start)):
        ENTRIES[entry](model)


@bridge_only
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe"])
def test_mixture_of_experts_behind_the_bridge(kind: str, entry: str) -> None:
    model = boot(kind)
    refuses(
        model,
        entry,
        f"every MLP of {name(model)} is a mixture of experts, whose hook_post is not one set of MLP neurons, so "
        f"their scores are not defined; use a model with dense layers",
    )


@hooked_only
@pytest.mark.parametrize("entry", ENTRIES)
def test_mixture_of_experts_hooked(entry: str) -> None:
    model = hooked(num_experts=4, experts_per_token=2, gated_mlp=False)
    refuses(model, entry, "every MLP of custom is a mixture of experts, whose hook_post is not one set of")


@hooked_only
@pytest.mark.parametrize("cap", [-1.0, 0.0, 0])
def test_spellings_of_no_cap(cap: float) -> None:
    assert na.trace(hooked(output_logits_soft_cap=cap), [1, 2, 3]).position == 2


@bridge_only
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_encoders_behind_the_bridge(kind: str, entry: str) -> None:
    model = boot(kind)
    with guards.refused_like(model, na.UnsupportedModelError, f"{name(model)} .*encoder"):
        ENTRIES[entry](model)


@hooked_only
@pytest.mark.parametrize("entry", ENTRIES)
def test_encoders_hooked(entry: str) -> None:
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    encoder = HookedEncoder(
        HookedTransformerConfig(
            n_layers=2,
            d_model=32,
            n_heads=4,
            d_head=8,
            d_mlp=64,
            n_ctx=32,
            d_vocab=100,
            act_fn="gelu",
            device="cpu",
            attention_dir="bidirectional",
        )
    )
    for model in (hooked(attention_dir="bidirectional"), encoder):
        refuses(model, entry, "custom attends in both directions: an encoder predicts no next token")


@hooked_only
@pytest.mark.parametrize("attn_only", [True, False])
def test_a_model_without_norms(attn_only: bool) -> None:
    """TransformerLens's toy models: no final norm module at all. Supported, or refused by name."""
    model = hooked(normalization_type=None, attn_only=attn_only)
    trace = na.trace(model, [1, 2, 3], 5)
    layers = na.layer_scores(trace)
    _, cache = model.run_with_cache(torch.tensor([[1, 2, 3]]))
    start = (cache["blocks.0.hook_resid_pre"][0, -1] @ model.W_U + model.b_U).log_softmax(-1)[5]
    gained = trace.target_log_prob - start.item()
    assert (layers.attn.sum() + layers.mlp.sum()).item() == pytest.approx(gained, abs=1e-4)


# Training mode


DROPOUT = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def with_dropout(kind: str) -> Any:
    """A bridged model with dropout, in evaluation mode."""
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, **DROPOUT)
    else:  # dropout by functional calls: there is no Dropout module in the model
        config = small(transformers.LlamaConfig, attention_dropout=0.2)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    return run_once(zoo.bridge(zoo.randomise(hf, seed=4), compat=False))


@bridge_only
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_mode_with_dropout(kind: str) -> None:
    model = with_dropout(kind)
    first, again = (na.trace(model, PROMPT, 3).target_log_prob for _ in range(2))
    assert first == again
    model.train()
    for entry in RUNS:
        with guards.refused_like(model, ValueError, ".* is in training mode with dropout .* call model.eval()"):
            ENTRIES[entry](model)
    model.eval()
    assert na.trace(model, PROMPT, 3).target_log_prob == first


@bridge_only
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_mode_of_the_wrapped_model_only(kind: str) -> None:
    """What decides is what runs: the Hugging Face model inside, whatever the wrapper's own flag says."""
    model = with_dropout(kind)
    model.original_model.train()
    with guards.refused_like(model, ValueError, ".* is in training mode with dropout"):
        na.trace(model, PROMPT, 3)


def test_training_mode_without_dropout(case: zoo.ZooCase) -> None:
    """Nothing random, so nothing to refuse: a HookedTransformer is in training mode unless told otherwise."""
    usual = na.trace(case.model, PROMPT, 3)
    flags = {module: module.training for module in case.model.modules()}
    case.model.train()
    try:
        with guards.unchanged(case.model):
            trained = na.trace(case.model, PROMPT, 3)
        assert all(module.training for module in case.model.modules())
    finally:
        for module, flag in flags.items():
            module.training = flag
    assert trained.target_log_prob == usual.target_log_prob
