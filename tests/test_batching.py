"""`trace_batch`: every trace is that of its prompt alone, whatever runs beside it, and nothing outlives the call."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any
from unittest import mock

import guards
import hypothesis
import pytest
import torch
import transformers
import zoo
from hypothesis import strategies as st

import tl_neuron_attr as na
from tl_neuron_attr import batching, rows

# Unequal lengths, one length at several places, a prompt twice, strings between ids, one that begins with padding's
# id (t1) and one of a single token.
PROMPTS: list[Any] = [
    [5, 17, 42, 8, 63, 90, 33],
    "t9 t4 t77",
    [11, 3, 60],
    [5, 17, 42, 8, 63, 90, 33],
    torch.tensor([1, 1, 44, 2]),
    [70],
    torch.tensor([[21, 22, 23]]),
    [2, 90, 14, 8, 6, 33, 12],
    "t1 t50 t51",
]
TARGETS: list[Any] = [11, None, "t7", na.Contrast(7, 23), na.AnyOf([3, 50, 9]), 0, None, 95, 1]
EXACT = 1e-5


@pytest.fixture(params=guards.FEW, ids="-".join)
def some(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """Enough where the architecture plays no part."""
    return guards.warm(zoo.case(*request.param))


def traces(model: Any, *args: Any, **kwargs: Any) -> list[na.Trace]:
    """All of them, without a bar; a batch that is not what its prompts give alone is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", na.BatchingWarning)
        return list(na.trace_batch(model, *args, progress=False, **kwargs))


@functools.cache
def alone(name: str, backend: str) -> list[na.Trace]:
    model = zoo.case(name, backend).model
    return [na.trace(model, prompt, target) for prompt, target in zip(PROMPTS, TARGETS, strict=True)]


def tensors(trace: na.Trace) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for field in fields(trace):
        value = getattr(trace, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        found.update({f"{field.name} {i}": part for i, part in enumerate(parts) if isinstance(part, torch.Tensor)})
    return found


def same(found: Iterable[na.Trace], expected: Iterable[na.Trace]) -> None:
    for trace, other in zip(found, expected, strict=True):
        assert (trace.prompt, trace.position, trace.target) == (other.prompt, other.position, other.target)
        assert trace.tokens.equal(other.tokens)
        assert trace.convention == other.convention
        ours, theirs = tensors(trace), tensors(other)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape, name
            assert (ours[name] - tensor).abs().max() <= EXACT * max(1, tensor.abs().max()), name


def ids(trace: na.Trace) -> list[Any]:
    return [na.value_neurons(trace, kind, k=15).ids for kind in ("mlp", "attn")]


@functools.cache
def ids_alone(name: str, backend: str) -> list[Any]:
    return [ids(trace) for trace in alone(name, backend)]


def rows_run(model: Any, call: Callable[[], Any]) -> list[tuple[int, int]]:
    """Rows and positions of every forward pass of `call`."""
    seen: list[tuple[int, int]] = []
    with model.hooks(fwd_hooks=[("hook_embed", lambda tensor, hook: seen.append(tuple(tensor.shape[:2])))]):
        call()
    return seen


# Each trace is that of its prompt alone


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_each_trace_is_that_of_its_prompt_alone(case: zoo.ZooCase, batch_size: int) -> None:
    found = traces(case.model, PROMPTS, TARGETS, batch_size=batch_size)
    expected = alone(case.name, case.backend)
    same(found, expected)
    if batch_size in (2, 100):  # the rest would cost most of this file's time
        assert [ids(trace) for trace in found] == ids_alone(case.name, case.backend)


def test_each_trace_says_what_its_own_model_says(case: zoo.ZooCase) -> None:
    """Against the Hugging Face model, not through the package."""
    found = traces(case.model, PROMPTS[:4], [[11, 3, 50, 9][i] for i in range(4)])
    for trace, target in zip(found, [11, 3, 50, 9], strict=True):
        with torch.no_grad():
            logits = case.hf_model(trace.tokens[None]).logits[0, -1]
        assert trace.target_log_prob == pytest.approx(logits.log_softmax(-1)[target].item(), abs=1e-4)


@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.FAMILY_CASES))
def test_every_family(name: str, backend: str) -> None:
    """Absolute, rotary and linearly biased positions, sliding windows, caps: rows are their prompts alone."""
    model = zoo.case(name, backend).model
    expected = [na.trace(model, prompt, 11) for prompt in PROMPTS]
    for batch_size in (2, 100):
        same(traces(model, PROMPTS, 11, batch_size=batch_size), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_plays_no_part(case: zoo.ZooCase, side: str) -> None:
    """Not even for prompts that begin with the padding's id, which a HookedTransformer would mask."""
    with mock.patch.object(case.model.tokenizer, "padding_side", side):
        assert case.model.tokenizer.padding_side == side
        same(traces(case.model, PROMPTS, TARGETS, batch_size=3), alone(case.name, case.backend))
        same([na.trace(case.model, PROMPTS[4], TARGETS[4])], [alone(case.name, case.backend)[4]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_ablation_takes_no_token_for_padding_either(some: zoo.ZooCase, side: str) -> None:
    with mock.patch.object(some.model.tokenizer, "padding_side", side):
        (trace,) = traces(some.model, [PROMPTS[4]], 11)
        effect = na.ablation_effect(trace, [na.MLPNeuron(0, 3)], na.Scale(1.0))
    assert float(effect.after.log_prob[0]) == pytest.approx(trace.target_log_prob, abs=1e-5)


@pytest.mark.parametrize(("left", "dtype"), [(True, torch.int64), (False, torch.bool)], ids=["left", "right"])
def test_padded_rows_and_their_mask(case: zoo.ZooCase, left: bool, dtype: torch.dtype) -> None:
    plain = [trace.tokens for trace in alone(case.name, case.backend)]
    width = max(map(len, plain))
    padded, mask = torch.full((len(plain), width), 1), torch.zeros(len(plain), width, dtype=dtype)
    for row, tokens in enumerate(plain):
        at = slice(width - len(tokens), None) if left else slice(len(tokens))
        padded[row, at], mask[row, at] = tokens, 1
    before = padded.clone(), mask.clone()
    found = traces(case.model, padded, TARGETS, batch_size=3, attention_mask=mask)
    assert padded.equal(before[0]) and mask.equal(before[1])
    for trace, other in zip(found, alone(case.name, case.backend), strict=True):
        assert trace.tokens.equal(other.tokens)
        assert trace.target_log_prob == pytest.approx(other.target_log_prob, abs=1e-5)


def test_a_tensor_of_whole_prompts(some: zoo.ZooCase) -> None:
    tokens = torch.tensor([PROMPTS[0], PROMPTS[7], PROMPTS[3]])
    expected = [na.trace(some.model, row, 11) for row in tokens]
    same(traces(some.model, tokens, 11), expected)
    with guards.as_users_run_it():
        same(traces(some.model, tokens.numpy(), 11), expected)
    same(traces(some.model, list(tokens), torch.tensor([11, 11, 11])), expected)
    with_padding = torch.tensor([[1, 5, 1], [7, 9, 1]])
    expected = [na.trace(some.model, row, 11) for row in with_padding]
    same(traces(some.model, with_padding.tolist(), 11), expected)  # lists are taken as they are
    for prompts in (with_padding, with_padding.tolist(), list(with_padding)):
        same(traces(some.model, prompts, 11, attention_mask=torch.ones_like(with_padding)), expected)


def test_forms_of_targets(some: zoo.ZooCase) -> None:
    prompts = PROMPTS[:3]
    for target in (None, 11, "t7", na.Contrast(7, 23), na.AnyOf([3, 50])):
        expected = [na.trace(some.model, prompt, target) for prompt in prompts]
        same(traces(some.model, prompts, target), expected)
        same(traces(some.model, prompts, (target,) * 3), expected)
        same(traces(some.model, iter(prompts), target), expected)


@pytest.mark.parametrize("position", [-1, -3, 0, 2])
def test_options_are_those_of_trace(some: zoo.ZooCase, position: int) -> None:
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[7]]
    options: dict[str, Any] = {"position": position, "convention": "paper"}
    found = traces(some.model, prompts, 11, **options)
    same(found, [na.trace(some.model, prompt, 11, **options) for prompt in prompts])
    strings = ["t9 t4", "t8 t3 t3", "t7 t2"]
    for prepend_bos in (True, False):
        expected = [na.trace(some.model, prompt, prepend_bos=prepend_bos) for prompt in strings]
        same(traces(some.model, strings, prepend_bos=prepend_bos), expected)
    assert traces(some.model, [], 3) == traces(some.model, (), []) == []


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_a_model_in_low_precision(backend: str) -> None:
    model = zoo.build(zoo.hf_model("llama_gqa"), backend, torch.bfloat16)
    for trace, prompt in zip(traces(model, PROMPTS, 11), PROMPTS, strict=True):
        assert trace.log_probs.dtype == torch.float32
        assert trace.target_log_prob == pytest.approx(na.trace(model, prompt, 11).target_log_prob, abs=0.1)


def test_answers_of_several_tokens_sum_to_the_whole(case: zoo.ZooCase) -> None:
    """The steps of `trace_continuation`, against the Hugging Face model."""
    prompt, answer = PROMPTS[0], [11, 70, 11, 2]
    with torch.no_grad():
        whole = case.hf_model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    expected = sum(whole[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))
    steps = na.trace_continuation(case.model, prompt, answer)
    assert sum(step.target_log_prob for step in steps) == pytest.approx(expected, abs=2e-4)
    prefixes = [[*prompt, *answer[:i]] for i in range(len(answer))]
    same(traces(case.model, prefixes, answer), steps)


# What runs together, and what is kept


def test_prompts_of_like_length_run_together_and_are_given_in_order(some: zoo.ZooCase) -> None:
    prompts = [[i, *[3] * (2 if i % 2 else 4)] for i in range(10, 24)]
    found: list[na.Trace] = []
    seen = rows_run(some.model, lambda: found.extend(traces(some.model, prompts, batch_size=3)))
    assert [trace.tokens.tolist() for trace in found] == prompts
    batches = [shape for shape in seen if shape[0] > 1]
    assert batches == [(3, 5), (3, 3), (3, 5), (3, 3), (2, 5)]  # what is left is of unequal lengths
    assert [shape for shape in seen if shape[0] == 1] == [(1, 5), (1, 5), (1, 5), (1, 3)]  # two and two confirm


def request(index: int, tokens: list[int]) -> batching.Request:
    return batching.Request(index, tokens, torch.tensor(tokens), len(tokens) - 1, None)


def test_batches_are_confirmed_again_when_they_double_and_when_they_mix(some: zoo.ZooCase) -> None:
    batches = [[3, 3], [3, 3], [5, 5, 5], [6, 6], [6] * 4, [7, 7], [7, 5], [5, 4, 3], [14, 9]]
    confirmed = [True, False, False, True, True, False, True, False, True]
    expected: list[tuple[int, int]] = []
    for lengths, again in zip(batches, confirmed, strict=True):
        expected += [(len(lengths), lengths[0]), *[(1, lengths[i]) for i in (0, -1) if again]]
    runner = batching.rows_of(*batching.prepare(some.model, "exact"), "exact")
    groups = [[request(i, [9, *[i] * (n - 1)]) for i, n in enumerate(lengths)] for lengths in batches]
    assert rows_run(some.model, lambda: [runner(group) for group in groups]) == expected


@hypothesis.given(st.lists(st.integers(1, 80), min_size=1, max_size=30), st.integers(1, 12), st.booleans())
def test_which_prompts_share_a_pass(lengths: list[int], size: int, mixes: bool) -> None:
    waiting = [request(i, [5] * n) for i, n in enumerate(lengths)]
    taken = [(-len(row.tokens), row.index) for row in rows.alike(waiting, size, mixes=mixes)]
    assert taken == sorted(taken) and 0 in [index for _, index in taken]
    assert len(taken) <= size and len(set(taken)) == len(taken)
    longest, shortest = -taken[0][0], -taken[-1][0]
    assert longest == shortest or (mixes and longest - shortest <= max(8, longest / 4))
    left = [n for i, n in enumerate(lengths) if i not in [index for _, index in taken]]
    if len(taken) < size:  # nobody is left behind who could have come
        assert not any(shortest <= n <= longest and (mixes or n == lengths[0]) for n in left)


def test_a_generator_is_read_as_far_as_the_look_ahead(some: zoo.ZooCase) -> None:
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in itertools.count():
            read.append(i)
            yield [i % 90, 3, 4]

    for batch_size, most in ((1, 1), (2, 16)):
        read.clear()
        made = na.trace_batch(some.model, prompts(), batch_size=batch_size, progress=False)
        assert read == []
        for n in range(20):
            assert next(made).tokens.tolist() == [n, 3, 4]
            assert len(read) <= n + most
        made.close()


def test_traces_that_wait_for_their_turn_are_few_where_they_are_large(some: zoo.ZooCase) -> None:
    prompts = [[7, *[3] * (i % 4)] for i in range(24)]
    usual = rows_run(some.model, lambda: traces(some.model, prompts, batch_size=4))
    with mock.patch("tl_neuron_attr.rows._WAITING_BYTES", 1):
        found = traces(some.model, prompts, batch_size=4)
        limited = rows_run(some.model, lambda: traces(some.model, prompts, batch_size=4))
    same(found, [na.trace(some.model, prompt) for prompt in prompts])
    assert len([rows for rows, _ in limited if rows == 4]) < len([rows for rows, _ in usual if rows == 4])


def test_a_trace_keeps_no_batch_alive(case: zoo.ZooCase) -> None:
    found = traces(case.model, [[9, 8, 7, i] for i in range(8)], 3, position=-2)
    owners: dict[int, int] = {}
    for row, trace in enumerate(found):
        n_pos = len(trace.tokens)
        for name, tensor in tensors(trace).items():
            whole = tensor.numel() * tensor.element_size()
            at_most = n_pos if name.startswith("resid_final") else (n_pos / (trace.position + 1)) ** 2
            assert tensor.untyped_storage().nbytes() <= at_most * whole, name
            assert owners.setdefault(tensor.untyped_storage().data_ptr(), row) == row, f"{name} is shared by rows"


# Nothing is left behind


def test_nothing_of_the_model_changes(case: zoo.ZooCase) -> None:
    guards.warm(case)
    with guards.unchanged(case.model):
        found = traces(case.model, PROMPTS, TARGETS)
    for trace in found:
        assert not any(tensor.requires_grad for tensor in tensors(trace).values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_callers_modes_hold_between_traces(some: zoo.ZooCase, mode: Callable[[], Any]) -> None:
    made = na.trace_batch(some.model, PROMPTS, progress=False)
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for _ in made:
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_an_iterator_that_is_left(some: zoo.ZooCase) -> None:
    with guards.unchanged(some.model):
        made = na.trace_batch(some.model, PROMPTS, progress=False)
        next(made)
        with guards.unchanged(some.model):
            pass
        del made
        never_begun = na.trace_batch(some.model, PROMPTS)
        del never_begun


def test_an_error_between_traces(some: zoo.ZooCase) -> None:
    """A hook that fails at one length only: traces before it are given, the error is the hook's own."""

    def fails(tensor: torch.Tensor, hook: Any) -> None:
        if tensor.shape[1] == 4:
            raise RuntimeError("the user's hook fails")

    hooks = some.model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fails)])
    found: list[na.Trace] = []
    with guards.unchanged(some.model), hooks, pytest.raises(RuntimeError, match=r"^the user's hook fails$"):
        found.extend(na.trace_batch(some.model, [[1, 2, 3]], progress=False))
        for trace in na.trace_batch(some.model, [[1, 2, 3], [5, 6, 7, 8], [4, 3, 2], [8, 7, 6, 5]], progress=False):
            found.append(trace)
    assert [trace.tokens.tolist() for trace in found] == [[1, 2, 3], [1, 2, 3]]


def test_progress(some: zoo.ZooCase, capsys: pytest.CaptureFixture[str]) -> None:
    list(na.trace_batch(some.model, PROMPTS, progress=False))
    assert capsys.readouterr() == ("", "")
    list(na.trace_batch(some.model, PROMPTS))
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in err
    list(na.trace_batch(some.model, iter(PROMPTS)))
    assert f"{len(PROMPTS)}prompt" in capsys.readouterr().err.replace(" ", "")


# The user's hooks, and batches that are wrong


def test_the_users_hooks_take_effect(case: zoo.ZooCase) -> None:
    def doubled(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[..., 3] *= 2
        return tensor

    point = case.model.hook_dict["blocks.1.mlp.hook_post"]
    n_hooks = len(point.fwd_hooks)
    case.model.add_hook("blocks.1.mlp.hook_post", doubled)
    try:
        found = traces(case.model, PROMPTS, 11)
        expected = [na.trace(case.model, prompt, 11) for prompt in PROMPTS]
        assert len(point.fwd_hooks) == n_hooks + 1
    finally:
        point.fwd_hooks.pop().hook.remove()
    same(found, expected)
    usual = [na.trace(case.model, prompt, 11) for prompt in PROMPTS]
    assert max(abs(a.target_log_prob - b.target_log_prob) for a, b in zip(found, usual, strict=True)) > 1e-3


def only_row(row: int, tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    """What a user may write who has one prompt in mind; row -1 is the last."""
    tensor = tensor.clone()
    tensor[row] *= 0.5
    return tensor


def other_rows(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[1:] *= 1.5
    return tensor


def by_size(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor * (1 + 0.2 * (tensor.shape[0] > 2))


def last_column(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    """What a user may write who means the predicting position."""
    tensor = tensor.clone()
    tensor[:, -1] *= 0.5
    return tensor


def mean_of_positions(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor + tensor.mean(1, keepdim=True)


def no_short_rows(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    """Reads a position that only longer prompts have."""
    return tensor * 1.5 if tensor.shape[1] < 4 else tensor


def one_row_only(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor.reshape(tensor.shape[1:])[None]


WRONG: dict[str, Any] = {
    "first row": functools.partial(only_row, 0),
    "last row": functools.partial(only_row, -1),
    "other rows": other_rows,
    "many rows": by_size,
    "fails": one_row_only,
}


@pytest.mark.parametrize("which", WRONG)
def test_prompts_run_alone_where_batches_are_wrong(some: zoo.ZooCase, which: str) -> None:
    """Edits before the first block, so that each row fits together and passes its own checks."""
    model = some.model
    prompts = [[9, 8, 7], [1, 2, 3, 4], [6, 5, 4], [3, 6, 9], [2, 4, 6], [8, 7, 6, 5], [4, 4, 4]]
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", WRONG[which])]):
        expected = [na.trace(model, prompt, 11) for prompt in prompts]
        with pytest.warns(na.BatchingWarning) as caught:
            found = list(na.trace_batch(model, prompts, 11, batch_size=5, progress=False))
    same(found, expected)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    start = f"5 prompts of 3 tokens run as one batch do not give what they give alone in {model.cfg.model_name} ("
    assert str(caught[0].message).startswith(start + type(model).__name__ + "): ")


@pytest.mark.parametrize("edit", [last_column, mean_of_positions, no_short_rows])
def test_prompts_of_one_length_run_together_where_those_of_unequal_lengths_are_wrong(
    some: zoo.ZooCase, edit: Any
) -> None:
    """Hooks that are right for every prompt alone and for batches of one length: nothing to warn of."""
    model = some.model
    prompts = [[9, 8, 7], [1, 2, 3, 4], [6, 5, 4], [3, 6, 9, 2, 1], [8, 7, 6, 5], [4, 4, 4], [5, 17]]
    found: list[na.Trace] = []
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", edit)]):
        expected = [na.trace(model, prompt, 11) for prompt in prompts]
        seen = rows_run(model, lambda: found.extend(traces(model, prompts, 11, batch_size=5)))
    same(found, expected)
    usual = na.trace(model, prompts[0], 11)
    assert abs(found[0].target_log_prob - usual.target_log_prob) > 1e-3
    assert [shape for shape in seen if shape[0] > 1] == [(5, 4), (2, 4), (3, 3)]  # the first is tried, and given up


@pytest.mark.any_release
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_angles_that_are_scaled_with_the_length_of_the_text(rope: str) -> None:
    """Later tokens change earlier positions there, so unequal lengths are not even tried."""
    scaled = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if rope == "longrope" else {}
    config = zoo.llama_like(
        transformers.LlamaConfig,
        max_position_embeddings=4,
        rope_parameters=dict(
            rope_type=rope, rope_theta=100.0, factor=4.0, original_max_position_embeddings=4, **scaled
        ),
    )
    hf = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    hf.config.architectures = ["LlamaForCausalLM"]
    model = zoo.build(zoo.randomise(hf.float(), seed=3), "bridge")
    model.cfg.n_ctx = 64
    prompts = [[9, 8, 7], [3, 6, 9, 2, 1, 5, 7], [6, 5, 4], [8, 7, 6, 5, 3, 3, 2]]
    expected = [na.trace(model, prompt, 11) for prompt in prompts]
    found: list[na.Trace] = []
    seen = rows_run(model, lambda: found.extend(traces(model, prompts, 11, batch_size=4)))
    same(found, expected)
    assert [shape for shape in seen if shape[0] > 1] == [(2, 3), (2, 7)]
    with torch.no_grad():
        short, long = (model(torch.tensor([row]))[0, :3] for row in (prompts[1][:3], prompts[1]))
    assert (short - long).abs().max() > 1e-2  # and they would be wrong


def test_a_release_whose_batches_are_wrong(some: zoo.ZooCase) -> None:
    """Its forward pass shifts positions of the rows after the first, as a wrong padding would."""
    model = some.model
    forward = model.forward

    def shifted(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(torch.cat([tokens[:1], tokens[1:].roll(1, -1)]), *args, **kwargs)

    prompts = [[9, 8, 7], [6, 5, 4], [3, 6, 9]]
    expected = [na.trace(model, prompt, 11) for prompt in prompts]
    with mock.patch.object(model, "forward", shifted), pytest.warns(na.BatchingWarning, match=r"prompts\[2\]"):
        found = list(na.trace_batch(model, prompts, 11, progress=False))
    same(found, expected)


def test_batches_that_go_wrong_with_length(some: zoo.ZooCase) -> None:
    def long_rows(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return tensor * (1 + 0.2 * (tensor.shape[0] > 1 and tensor.shape[1] > 5))

    prompts = [[9, 8, 7], [6, 5, 4], PROMPTS[0], PROMPTS[7], [3, 6, 9], [1, 6, 9], [*PROMPTS[0][:-1], 3]]
    with some.model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", long_rows)]):
        expected = [na.trace(some.model, prompt, 11) for prompt in prompts]
        with pytest.warns(na.BatchingWarning, match="prompts of 7 tokens"):
            found = list(na.trace_batch(some.model, prompts, 11, batch_size=2, progress=False))
    same(found, expected)


# Bad input is refused before anything runs


def test_what_is_refused_of_prompts(some: zoo.ZooCase) -> None:
    model, good = some.model, [[1, 2, 3], [4, 5]]
    d_vocab = model.cfg.d_vocab

    def refuses(text: str, *args: Any, error: type[Exception] = ValueError, **kwargs: Any) -> None:
        with guards.refused(model, error, text):
            na.trace_batch(model, *args, **kwargs)

    refuses("prompts is the one string 't3 t4': give a list of prompts, e.g. ['t3 t4'], or use trace", "t3 t4")
    refuses("prompts is 7: give a list of prompts, or a tensor of ids of shape [row, pos]", 7)
    refuses(
        'prompts is a dict, as tokenizers return: give its "input_ids", a tensor [row, pos], and its '
        '"attention_mask" as attention_mask=',
        {"input_ids": torch.tensor([[1, 2]])},
    )
    refuses(
        "prompts is a tensor of shape [3]: give prompts as [row, pos], or as a list",
        torch.tensor([2, 3, 4]),
    )
    refuses("prompts[2]: the prompt is empty: give at least one token to predict from", [*good, []])
    refuses(f"prompts[1]: prompt token {d_vocab} is outside the vocabulary of {d_vocab} tokens", [[1], [2, d_vocab]])
    refuses(
        "prompts[0]: the prompt is 1: give one string, a list of token ids, or a tensor of ids of shape [pos] or "
        "[1, pos]",
        [1, 2, 3],
    )
    refuses("prompts[1]: the prompt tensor has dtype torch.float32: token ids are integers", [[1], torch.rand(3)])
    refuses(
        "prompts[2]: prepend_bos=True was given with token ids: ids are used as they are; add or remove the BOS "
        "token in the list itself",
        ["t3", "t4 t5", [5]],
        prepend_bos=True,
    )
    refuses(
        "prompts[1]: position -3 is out of range for a prompt of 2 tokens: give -2 to 1",
        good,
        position=-3,
    )
    for size in (0, -2, 1.5, True, "8"):
        refuses(f"batch_size is {size!r}: give how many prompts to run at once, 1 or more", good, batch_size=size)
    refuses('unknown convention \'papers\': choose "exact" or "paper"', good, convention="papers")


def test_what_is_refused_of_targets(some: zoo.ZooCase) -> None:
    model, good = some.model, [[1, 2, 3], [4, 5]]
    for targets in ([3], [3, 4, 5], (), torch.tensor([1])):
        text = (
            f"{len(targets)} targets for 2 prompts: give one target for each (None is the model's own prediction), "
            f"or one for all"
        )
        with guards.refused(model, ValueError, text):
            na.trace_batch(model, good, targets)
    d_vocab = model.cfg.d_vocab
    outside = f"target id {d_vocab} is outside the vocabulary of {d_vocab} tokens (0 to d_vocab - 1)"
    with guards.refused(model, na.TargetError, f"targets[1]: {outside}"):
        na.trace_batch(model, good, [None, d_vocab])
    with guards.refused(model, na.TargetError, outside):
        na.trace_batch(model, good, d_vocab)
    text = (
        "2 targets for prompts of unknown number (a generator): give the prompts as a list too, or one target for all"
    )
    with guards.refused(model, ValueError, text):
        na.trace_batch(model, iter(good), [1, 2])


def test_what_is_refused_of_masks(some: zoo.ZooCase) -> None:
    model, tokens = some.model, torch.tensor([[5, 6, 7, 8], [1, 1, 9, 4]])
    ones = torch.ones_like(tokens)

    def refuses(text: str, prompts: Any, mask: Any) -> None:
        with guards.refused(model, ValueError, text):
            na.trace_batch(model, prompts, attention_mask=mask)

    listed = (
        "attention_mask= goes with padded prompts, a tensor [row, pos] or lists of ids of one length: give these, or "
        "leave it out"
    )
    for prompts in (["t3", "t4"], [[1, 2], [1, 2, 3]], iter([[1, 2]])):
        refuses(listed, prompts, ones)
    refuses("attention_mask has shape [2, 3], prompts [2, 4]: give one entry a token", tokens, ones[:, :3])
    refuses(
        "attention_mask holds other values than 0 and 1: give 1 for each token, 0 for padding",
        tokens,
        ones.float() / 2,
    )
    hole, none = ones.clone(), ones.clone()
    hole[1, 2], none[1] = 0, 0
    refuses(
        "prompts[1]: attention_mask is 0 at position 2, between tokens: padding is before or after a prompt; mask "
        "nothing inside it, or leave those tokens out",
        tokens,
        hole,
    )
    refuses("prompts[1]: attention_mask is 0 at every position, so the prompt has no token", tokens, none)
    way_out = (
        "with the tokenizer's padding token 1: give attention_mask=, 1 for each token and 0 for padding (1 "
        "everywhere if every token is part of its prompt)"
    )
    for form in (torch.Tensor.clone, torch.Tensor.numpy):
        refuses(f"prompts[1]: the row begins {way_out}", form(tokens), None)
        refuses(f"prompts[1]: the row ends {way_out}", form(tokens.flip(1)), None)


def test_padding_that_is_also_the_bos_token(some: zoo.ZooCase) -> None:
    """As GPT-2's: one at the start is a BOS token, two are padding."""
    tokenizer, usual = some.model.tokenizer, some.model.tokenizer.pad_token
    try:
        tokenizer.pad_token = tokenizer.bos_token
        assert [t.tokens.tolist() for t in traces(some.model, torch.tensor([[0, 5], [0, 6]]))] == [[0, 5], [0, 6]]
        assert len(traces(some.model, torch.tensor([[0], [0]]))) == 2
        with pytest.raises(ValueError, match=r"^prompts\[1\]: the row begins with the tokenizer's padding token 0"):
            na.trace_batch(some.model, torch.tensor([[0, 5, 6], [0, 0, 5]]))
    finally:
        tokenizer.pad_token = usual


def test_a_bad_prompt_of_a_generator(some: zoo.ZooCase) -> None:
    made = na.trace_batch(some.model, iter([[1, 2], [3, 4], []]), batch_size=1, progress=False)
    assert [next(made).tokens.tolist() for _ in range(2)] == [[1, 2], [3, 4]]
    with guards.refused(
        some.model, ValueError, "prompts[2]: the prompt is empty: give at least one token to predict from"
    ):
        next(made)


def test_a_model_that_is_none() -> None:
    with guards.no_module_runs(), pytest.raises(na.UnsupportedModelError, match=r"^got a Linear: "):
        na.trace_batch(torch.nn.Linear(2, 2), [[1, 2]])
