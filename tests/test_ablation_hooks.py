"""Hooks against weights edited by hand, modes against hooks written by hand, on every model of the zoo."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tl_neuron_attr as na
from tl_neuron_attr.ablation import hooks_for
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.modes import Zero
from tl_neuron_attr.selection import identities, select

# Transformers says so of an argument that TransformerLens passes.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


# Sequential and parallel blocks, LayerNorm and RMSNorm, grouped query attention: every backend of each.
FEW = [pytest.param(case, id="-".join(case)) for case in zoo.CASES if case[0] in ("gpt2", "llama_gqa", "neox")]


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """The cases for what does not depend on the architecture."""
    return zoo.case(*request.param)


def logits(model: Any, tokens: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), **kwargs)


def hooked(model: Any, tokens: Any, hooks: Any) -> Tensor:
    with torch.no_grad():
        return model.run_with_hooks(torch.tensor([list(tokens)]), fwd_hooks=hooks)


@contextlib.contextmanager
def weights(matrix: Tensor, *rows: Any, factor: float = 0.0) -> Iterator[None]:
    """Rows of a weight matrix of the model multiplied in place, and restored."""
    before = matrix.detach().clone()
    try:
        with torch.no_grad():
            for row in rows:
                matrix[row] *= factor
        yield
    finally:
        with torch.no_grad():
            matrix.copy_(before)


def moved(a: Tensor, b: Tensor) -> bool:
    """Whether something really changed: guards against comparing two models that do nothing."""
    return bool((a - b).abs().max() > 1e-3)


# Equality with weights edited by hand


def test_zero_is_zeroed_rows_of_W_out(case: zoo.ZooCase) -> None:
    model, plain = case.model, logits(case.model, case.tokens)
    with weights(model.blocks[0].mlp.W_out, 3, 41), weights(model.blocks[1].mlp.W_out, 0):
        edited = logits(model, case.tokens)
    neurons = [na.MLPNeuron(0, 3), na.MLPNeuron(1, 0), na.MLPNeuron(0, 41)]
    assert moved(plain, edited)
    torch.testing.assert_close(
        hooked(model, case.tokens, na.ablation_hooks(model, neurons)), edited, rtol=0, atol=1e-6
    )
    assert torch.equal(logits(model, case.tokens), plain)


@pytest.mark.parametrize("head", [0, 1, 3])
def test_zero_is_zeroed_rows_of_W_O_per_query_head(case: zoo.ZooCase, head: int) -> None:
    """Under grouped query attention heads 0 and 1 share keys and values; ablating one leaves the other."""
    model, plain = case.model, logits(case.model, case.tokens)
    with weights(model.blocks[1].attn.W_O, head):
        edited = logits(model, case.tokens)
    ablated = hooked(model, case.tokens, na.ablation_hooks(model, na.Head(1, head)))
    assert moved(plain, edited)
    torch.testing.assert_close(ablated, edited, rtol=0, atol=1e-6)


def test_an_attention_neuron_is_a_row_of_W_O_whatever_its_source(case: zoo.ZooCase) -> None:
    model = case.model
    with weights(model.blocks[0].attn.W_O, (2, 5), (3, 1)):
        edited = logits(model, case.tokens)
    neurons = [na.AttnNeuron(0, 2, 5, 4), na.AttnNeuron(0, 2, 5, 0), na.AttnNeuron(0, 3, 1, 6)]
    torch.testing.assert_close(
        hooked(model, case.tokens, na.ablation_hooks(model, neurons)), edited, rtol=0, atol=1e-6
    )


def test_scaling_is_scaled_rows(case: zoo.ZooCase) -> None:
    model = case.model
    with weights(model.blocks[1].mlp.W_out, 7, factor=-3.0), weights(model.blocks[0].attn.W_O, 2, factor=-3.0):
        edited = logits(model, case.tokens)
    hooks = na.ablation_hooks(model, [na.MLPNeuron(1, 7), na.Head(0, 2)], na.Scale(-3))
    torch.testing.assert_close(hooked(model, case.tokens, hooks), edited, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "out", "bias"), [("mlp", "hook_mlp_out", "b_out"), ("attn", "hook_attn_out", "b_O")]
)
def test_a_whole_layer_leaves_exactly_its_bias(case: zoo.ZooCase, kind: str, out: str, bias: str) -> None:
    model = case.model
    name = f"blocks.1.{out}"
    with na.ablating(model, na.Layer(1, kind)), torch.no_grad():  # type: ignore[arg-type]
        _, cache = model.run_with_cache(torch.tensor([case.tokens]), names_filter=[name])
    left = getattr(getattr(model.blocks[1], kind), bias, None)
    expected = torch.zeros_like(cache[name]) if left is None else left.detach().expand_as(cache[name])
    torch.testing.assert_close(cache[name], expected, rtol=0, atol=0)


def test_every_neuron_is_its_layer_and_every_dimension_its_head(few: zoo.ZooCase) -> None:
    model = few.model
    view = ModelView(model)
    every = [na.MLPNeuron(1, n) for n in range(view.W_out(1).shape[0])]
    dims = [na.AttnNeuron(0, 1, dim, 0) for dim in range(view.d_head)]
    one = hooked(model, few.tokens, na.ablation_hooks(model, [every, dims]))
    other = hooked(model, few.tokens, na.ablation_hooks(model, [na.Layer(1, "mlp"), na.Head(0, 1)]))
    assert torch.equal(one, other)
    heads = [na.Head(0, head) for head in range(view.n_heads)]
    one = hooked(model, few.tokens, na.ablation_hooks(model, heads))
    assert torch.equal(one, hooked(model, few.tokens, na.ablation_hooks(model, na.Layer(0, "attn"))))


def test_two_sets_together_are_their_union(case: zoo.ZooCase) -> None:
    model = case.model
    a = [na.MLPNeuron(0, 3), na.Head(1, 2), na.MLPNeuron(1, 5)]
    b = [na.MLPNeuron(0, 9), na.AttnNeuron(1, 2, 0, 0), na.AttnNeuron(1, 0, 3, 1), na.Layer(1, "mlp")]
    union = hooked(model, case.tokens, na.ablation_hooks(model, [*a, *b]))
    both = hooked(model, case.tokens, na.ablation_hooks(model, a) + na.ablation_hooks(model, b))
    assert torch.equal(union, both)
    with na.ablating(model, a), na.ablating(model, b):
        assert torch.equal(union, logits(model, case.tokens))


# One set, several ways to run it


def test_every_way_to_run_gives_the_same(case: zoo.ZooCase) -> None:
    model = case.model
    trace = na.trace(model, list(case.tokens))
    neurons = [na.value_neurons(trace, "mlp", k=3), na.Head(0, 1), iter([na.MLPNeuron(1, 2)])]
    hooks = na.ablation_hooks(model, neurons)
    expected = hooked(model, case.tokens, hooks)
    with model.hooks(fwd_hooks=hooks):
        assert torch.equal(logits(model, case.tokens), expected)
    try:
        for name, hook in hooks:
            model.add_hook(name, hook)
        assert torch.equal(logits(model, case.tokens), expected)
    finally:
        model.reset_hooks()
    with na.ablating(model, [na.value_neurons(trace, "mlp", k=3), na.Head(0, 1), na.MLPNeuron(1, 2)]) as ours:
        assert torch.equal(logits(model, case.tokens), expected)
    assert [hook.fired for hook in ours] == [1] * len(ours)
    assert [hook.fired for _, hook in hooks] == [3] * len(hooks)


def test_rows_of_a_batch_are_the_variants_alone(case: zoo.ZooCase) -> None:
    model = case.model
    view = ModelView(model)
    sets: list[Any] = [na.MLPNeuron(0, 1), na.Layer(1, "attn"), [na.Head(0, 0), na.MLPNeuron(1, 4)]]
    selections = [select(view, identities(neurons)) for neurons in sets]
    with torch.no_grad():
        rows = model.run_with_hooks(
            torch.tensor([case.tokens] * 3), fwd_hooks=hooks_for(view, selections, Zero(), None)
        )
    for row, neurons in zip(rows, sets, strict=True):
        alone = hooked(model, case.tokens, na.ablation_hooks(model, neurons))[0]
        torch.testing.assert_close(row, alone, rtol=0, atol=2e-5)  # a batch rounds otherwise than one row


def test_one_set_applies_to_every_row_of_a_batch(few: zoo.ZooCase) -> None:
    model = few.model
    prompts = [list(few.tokens), list(few.tokens[::-1])]
    neurons = [na.Head(0, 1), na.MLPNeuron(1, 3), na.AttnNeuron(1, 2, 3, 2)]
    for options in ({}, {"scope": "source", "positions": [5]}):
        with na.ablating(model, neurons, **options), torch.no_grad():  # type: ignore[arg-type]
            batch = model(torch.tensor(prompts))
            for row, prompt in zip(batch, prompts, strict=True):
                torch.testing.assert_close(row, logits(model, prompt)[0], rtol=0, atol=2e-5)


# Modes


@pytest.mark.parametrize("options", [{}, {"positions": [1, 6]}, {"scope": "source", "positions": [6]}], ids=str)
def test_scale_by_one_changes_nothing_bit_for_bit(case: zoo.ZooCase, options: dict[str, Any]) -> None:
    model = case.model
    everything = [na.Layer(layer, kind) for layer in (0, 1) for kind in ("mlp", "attn")]
    some = [na.AttnNeuron(0, 1, 2, 3), na.AttnNeuron(1, 3, 0, 6), na.MLPNeuron(0, 4)]
    for neurons in (everything, some):
        hooks = na.ablation_hooks(model, neurons, na.Scale(1), **options)
        assert torch.equal(hooked(model, case.tokens, hooks), logits(model, case.tokens))


def test_scale_by_zero_is_zero_and_set_writes_its_value(few: zoo.ZooCase) -> None:
    model = few.model
    neurons = [na.MLPNeuron(0, 3), na.Head(1, 1)]
    zero = hooked(model, few.tokens, na.ablation_hooks(model, neurons, "zero"))
    assert torch.equal(zero, hooked(model, few.tokens, na.ablation_hooks(model, neurons, na.Zero())))
    assert torch.equal(zero, hooked(model, few.tokens, na.ablation_hooks(model, neurons, na.Scale(0))))
    assert torch.equal(zero, hooked(model, few.tokens, na.ablation_hooks(model, neurons, na.SetTo(0))))
    by_hand = [
        ("blocks.0.mlp.hook_post", write((..., 3), 0.7)),
        ("blocks.1.attn.hook_z", write((..., 1, slice(None)), 0.7)),
    ]
    expected = hooked(model, few.tokens, by_hand)
    assert torch.equal(hooked(model, few.tokens, na.ablation_hooks(model, neurons, na.SetTo(0.7))), expected)


def write(where: Any, value: Any) -> Callable[..., Tensor]:
    def hook(tensor: Tensor, hook: Any) -> Tensor:
        tensor = tensor.clone()
        tensor[where] = value
        return tensor

    return hook


def activations(model: Any, tokens: Any, *names: str) -> Any:
    with torch.no_grad():
        return model.run_with_cache(torch.tensor([list(tokens)]), names_filter=list(names))[1]


POST, Z = "blocks.1.mlp.hook_post", "blocks.1.attn.hook_z"
PROMPTS = ([5, 17, 42, 8, 63], [9, 9], [3, 14, 15, 92, 65, 35, 8], [7, 81])


def test_mean_is_over_all_positions_of_prompts_of_unequal_length(few: zoo.ZooCase) -> None:
    model = few.model
    seen = [activations(model, prompt, POST, Z) for prompt in PROMPTS]
    post = torch.cat([cache[POST][0] for cache in seen]).mean(0)
    z = torch.cat([cache[Z][0] for cache in seen]).mean(0)
    by_hand = [(POST, write((..., 4), post[4])), (Z, write((..., 2, slice(None)), z[2]))]
    expected = hooked(model, few.tokens, by_hand)
    neurons = [na.MLPNeuron(1, 4), na.Head(1, 2)]
    mode = na.mean_activations(model, PROMPTS)
    assert mode.n_positions == 16
    assert moved(expected, logits(model, few.tokens))
    for _ in range(2):  # computed once, reusable
        torch.testing.assert_close(
            hooked(model, few.tokens, na.ablation_hooks(model, neurons, mode)), expected, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_mean_excludes_padding(few: zoo.ZooCase, side: str) -> None:
    longest = max(map(len, PROMPTS))
    tokens, mask = torch.full((len(PROMPTS), longest), 1), torch.zeros(len(PROMPTS), longest, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        span = slice(0, len(prompt)) if side == "right" else slice(longest - len(prompt), None)
        tokens[row, span], mask[row, span] = torch.tensor(prompt), 1
    padded = na.mean_activations(few.model, tokens, attention_mask=mask)
    plain = na.mean_activations(few.model, PROMPTS)
    assert padded.n_positions == plain.n_positions
    for name, mean in plain.means.items():
        torch.testing.assert_close(padded.means[name], mean, rtol=0, atol=1e-6)


def test_mean_can_skip_the_first_positions(few: zoo.ZooCase) -> None:
    cache = [activations(few.model, prompt, POST)[POST][0, 1:] for prompt in PROMPTS]
    mode = na.mean_activations(few.model, PROMPTS, skip_first=1)
    torch.testing.assert_close(mode.means[POST], torch.cat(cache).mean(0), rtol=0, atol=1e-5)


def test_resample_takes_the_other_prompts_values(case: zoo.ZooCase) -> None:
    model, other = case.model, [90, 3, 3, 61, 17, 22, 71, 5]
    cache = activations(model, other, POST, Z)
    by_hand = [(POST, write((..., 4), cache[POST][0, :7, 4])), (Z, write((..., 2, slice(None)), cache[Z][0, :7, 2]))]
    neurons = [na.MLPNeuron(1, 4), na.Head(1, 2)]
    mode = na.resample(model, other)
    expected = hooked(model, case.tokens, by_hand)
    assert moved(expected, logits(model, case.tokens))
    assert torch.equal(hooked(model, case.tokens, na.ablation_hooks(model, neurons, mode)), expected)
    own = na.resample(model, list(case.tokens))
    assert torch.equal(hooked(model, case.tokens, na.ablation_hooks(model, neurons, own)), logits(model, case.tokens))
    one = na.resample(model, other, position=-2)
    by_hand = [(POST, write((..., 4), cache[POST][0, 6, 4])), (Z, write((..., 2, slice(None)), cache[Z][0, 6, 2]))]
    expected = hooked(model, case.tokens, by_hand)
    assert torch.equal(hooked(model, case.tokens, na.ablation_hooks(model, neurons, one)), expected)


def test_resample_refuses_positions_that_the_other_prompt_lacks(few: zoo.ZooCase) -> None:
    mode = na.resample(few.model, [4, 5, 6])
    with pytest.raises(
        ValueError, match=r"position 6 is to be ablated, but the other prompt has 3 tokens: give posit"
    ):
        hooked(few.model, few.tokens, na.ablation_hooks(few.model, na.MLPNeuron(0, 1), mode))
    hooked(few.model, few.tokens, na.ablation_hooks(few.model, na.MLPNeuron(0, 1), mode, positions=[2]))


# Positions and sources


def test_positions_restrict(case: zoo.ZooCase) -> None:
    model = case.model
    by_hand = [(POST, write((slice(None), [2, 5], 4), 0.0)), (Z, write((slice(None), [2, 5], 2), 0.0))]
    hooks = na.ablation_hooks(model, [na.MLPNeuron(1, 4), na.Head(1, 2)], positions=[5, 2])
    expected = hooked(model, case.tokens, by_hand)
    assert moved(expected, logits(model, case.tokens))
    assert torch.equal(hooked(model, case.tokens, hooks), expected)
    assert [hook.fired for _, hook in hooks] == [1] * 4


@pytest.mark.parametrize("head", [1, 2, 3])
def test_source_scope_takes_away_one_sources_share(case: zoo.ZooCase, head: int) -> None:
    """Of 6 query heads over 2 key-value heads, 1 and 2 read the first one's values, 3 the second one's."""
    model = case.model
    pattern, v = "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_v"
    cache = activations(model, case.tokens, pattern, v, Z)
    n_heads, n_values = cache[pattern].shape[1], cache[v].shape[2]
    dim, dest = 3, 6
    shares = [
        cache[pattern][0, head, dest, source] * cache[v][0, source, head * n_values // n_heads, dim]
        for source in range(dest + 1)
    ]
    neurons = [na.AttnNeuron(1, head, dim, source) for source in (1, 4)]
    left = cache[Z][0, dest, head, dim] - shares[1] - shares[4]
    expected = hooked(model, case.tokens, [(Z, write((slice(None), dest, head, dim), left))])
    assert moved(expected, logits(model, case.tokens))
    hooks = na.ablation_hooks(model, neurons, scope="source", positions=[dest])
    torch.testing.assert_close(hooked(model, case.tokens, hooks), expected, rtol=0, atol=1e-5)
    every = [na.AttnNeuron(1, head, dim, source) for source in range(dest + 1)]
    hooks = na.ablation_hooks(model, every, scope="source", positions=[dest])
    expected = hooked(model, case.tokens, [(Z, write((slice(None), dest, head, dim), 0.0))])
    torch.testing.assert_close(hooked(model, case.tokens, hooks), expected, rtol=0, atol=1e-5)
    doubled = hooked(
        model, case.tokens, na.ablation_hooks(model, every, na.Scale(2), scope="source", positions=[dest])
    )
    twice = [(Z, write((slice(None), dest, head, dim), 2 * cache[Z][0, dest, head, dim]))]
    torch.testing.assert_close(doubled, hooked(model, case.tokens, twice), rtol=1e-5, atol=1e-4)


def test_source_scope_of_a_ranking_knows_the_predicting_position(few: zoo.ZooCase) -> None:
    model = few.model
    ranked = na.value_neurons(na.trace(model, list(few.tokens), position=4), "attn", k=5)
    hooks = na.ablation_hooks(model, ranked, scope="source")
    given = na.ablation_hooks(model, ranked.ids, scope="source", positions=[4])
    out = hooked(model, few.tokens, hooks)
    assert torch.equal(out, hooked(model, few.tokens, given))
    plain = logits(model, few.tokens)
    assert torch.equal(out[:, :4], plain[:, :4])
    assert moved(out[:, 4], plain[:, 4])


def test_a_source_inside_an_ablated_head_is_not_taken_away_twice(few: zoo.ZooCase) -> None:
    model = few.model
    both = [na.Head(1, 2), na.AttnNeuron(1, 2, 3, 1)]
    hooks = na.ablation_hooks(model, both, scope="source", positions=[6])
    head = na.ablation_hooks(model, na.Head(1, 2), positions=[6])
    assert torch.equal(hooked(model, few.tokens, hooks), hooked(model, few.tokens, head))


# generate


def generated(model: Any, tokens: Any, use_cache: bool) -> list[int]:
    options = dict(max_new_tokens=4, do_sample=False, verbose=False, use_past_kv_cache=use_cache)
    return model.generate(torch.tensor([list(tokens)]), stop_at_eos=False, **options)[0].tolist()


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_generate_is_that_of_edited_weights(case: zoo.ZooCase, use_cache: bool) -> None:
    model = case.model
    with weights(model.blocks[0].mlp.W_out, slice(None)), weights(model.blocks[1].attn.W_O, 1):
        edited = generated(model, case.tokens, use_cache)
    with na.ablating(model, [na.Layer(0, "mlp"), na.Head(1, 1)]) as hooks:
        assert generated(model, case.tokens, use_cache) == edited
    assert [hook.fired for hook in hooks] == [4, 4]


def sees_cache(model: Any, tokens: Any) -> bool:
    """Whether a cached step attends to earlier positions: the bridge with recent transformers does not always."""
    widths: list[int] = []

    def look(tensor: Tensor, hook: Any) -> None:
        widths.append(tensor.shape[-1])

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", look)]):
        generated(model, tokens, True)
    return widths[-1] > 1


def last_streams(model: Any, tokens: Any, use_cache: bool) -> list[Tensor]:
    """The residual stream after block 1 at the last position of every pass of generate."""
    streams: list[Tensor] = []

    def look(tensor: Tensor, hook: Any) -> None:
        streams.append(tensor[0, -1].clone())

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", look)]):
        generated(model, tokens, use_cache)
    return streams


def test_positions_are_absolute_in_cached_steps_or_refused(case: zoo.ZooCase) -> None:
    """Position 8 is the second token generated, a pass of its own with the cache."""
    model = case.model
    neurons = [na.Layer(0, "mlp"), na.Layer(1, "mlp"), na.Head(1, 1)]
    visible = sees_cache(model, case.tokens)
    with na.ablating(model, neurons, positions=[2, 8]):
        expected = last_streams(model, case.tokens, False)
    with na.ablating(model, neurons, positions=[2, 8]):
        if visible:
            for found, stream in zip(last_streams(model, case.tokens, True), expected, strict=True):
                torch.testing.assert_close(found, stream, rtol=0, atol=1e-4)
        else:
            with pytest.raises(ValueError, match="whose attention does not see the key-value cache"):
                generated(model, case.tokens, True)


def test_a_source_is_out_of_reach_in_a_cached_step(case: zoo.ZooCase) -> None:
    model = case.model
    message = "values of earlier positions are no longer there" if sees_cache(model, case.tokens) else "does not see"
    with na.ablating(model, na.AttnNeuron(1, 1, 2, 3), scope="source", positions=[8]):
        generated(model, case.tokens, False)
    with (
        na.ablating(model, na.AttnNeuron(1, 1, 2, 3), scope="source", positions=[8]),
        pytest.raises(ValueError, match=message),
    ):
        generated(model, case.tokens, True)


# Refusals


REFUSALS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "mode": (lambda: na.MLPNeuron(0, 0), {"mode": "knock"}, r"unknown mode 'knock': the modes are \"zero\""),
    "mode needs a factor": (
        lambda: na.MLPNeuron(0, 0),
        {"mode": "scale"},
        r"Scale\(factor\), SetTo\(value\), mean_act",
    ),
    "scope": (lambda: na.MLPNeuron(0, 0), {"scope": "all"}, "unknown scope 'all': choose \"neuron\""),
    "layer": (lambda: na.MLPNeuron(9, 0), {}, "L9N0 is not in .*: it has layers 0 to"),
    "neuron": (lambda: na.MLPNeuron(0, 999), {}, "L0N999 is not in .*: it has neurons 0 to"),
    "head": (lambda: na.Head(0, 6), {}, "L0H6 is not in .*: it has heads 0 to"),
    "dim": (lambda: na.AttnNeuron(0, 0, 16, 0), {}, "L0H0D16@0 is not in .*: it has dims 0 to"),
    "empty": (lambda: [], {}, "no neuron is given: name at least one"),
    "string": (lambda: "L0 N0", {}, "cannot read 'L0 N0' as a neuron, head or layer"),
    "number": (lambda: [3], {}, "cannot ablate 3 of type int"),
    "negative position": (lambda: na.MLPNeuron(0, 0), {"positions": [-1]}, "position -1 counts from the end, which"),
    "no position": (lambda: na.MLPNeuron(0, 0), {"positions": []}, r"positions=\[\] ablates nowhere"),
    "no destination": (lambda: na.AttnNeuron(0, 0, 0, 0), {"scope": "source"}, "needs the position that its source"),
    "source after": (
        lambda: na.AttnNeuron(0, 0, 0, 5),
        {"scope": "source", "positions": [4]},
        "L0H0D0@5 reads position 5, which position 4 cannot see",
    ),
    "source mode": (
        lambda: na.AttnNeuron(0, 0, 0, 0),
        {"scope": "source", "positions": [4], "mode": na.SetTo(1)},
        'scope="source" with mode set to 1: one source\'s share',
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    neurons, options, message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        na.ablation_hooks(zoo.case("llama_gqa", zoo.BACKENDS[0]).model, neurons(), **options)


def test_refusals_of_modes() -> None:
    model = zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    with pytest.raises(ValueError, match=r"prompts is the one string 't5': give a list"):
        na.mean_activations(model, "t5")
    with pytest.raises(ValueError, match=r"give attention_mask= of the same shape"):
        na.mean_activations(model, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no prompts are given"):
        na.mean_activations(model, [])
    with pytest.raises(ValueError, match="skip_first=2 leaves 0 positions of 1 prompts"):
        na.mean_activations(model, [[4, 5]], skip_first=2)
    with pytest.raises(ValueError, match="position 2 is out of range for a prompt of 2 tokens: give -2 to 1"):
        na.resample(model, [4, 5], position=2)
    other = na.mean_activations(zoo.case("gpt2", zoo.BACKENDS[0]).model, [[4, 5]])
    with pytest.raises(ValueError, match=r"blocks.0.mlp.hook_post has \[52\] units but the mode holds shape \[72\]"):
        hooked(model, [1, 2], na.ablation_hooks(model, na.MLPNeuron(0, 0), other))


def test_hooks_that_only_ablate_need_those_that_observe() -> None:
    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    hooks = na.ablation_hooks(model, na.MLPNeuron(0, 0), positions=[1])
    with pytest.raises(RuntimeError, match=r"needs the hook on blocks.0.attn.hook_pattern to fire before it"):
        hooked(model, [1, 2, 3], hooks[1:])


def test_labels() -> None:
    model = zoo.case("gpt2", zoo.BACKENDS[0]).model
    [(_, hook)] = na.ablation_hooks(model, na.Head(1, 2), na.Scale(2))
    assert repr(hook) == "AblationHook(blocks.1.attn.hook_z, 8 units, scale by 2, fired 0 times)"
    assert str(na.mean_activations(model, [[4, 5], [6]])) == "mean over 3 positions of 2 prompts"
    assert str(na.resample(model, [4, 5], position=-1)) == "resample from 't4t5', position 1"


def test_a_cache_that_forgets_positions_is_refused() -> None:
    """Beyond a sliding window, keys minus queries no longer counts the positions before this one."""
    [(_, observer), (_, hook)] = na.ablation_hooks(
        zoo.case("gpt2", zoo.BACKENDS[0]).model, na.MLPNeuron(0, 3), positions=[4]
    )
    hook._window = 6
    for n_keys, expected in ((4, 1.0), (5, 0.0)):
        observer(torch.zeros(1, 4, 1, n_keys), hook=None)
        assert hook(torch.ones(1, 1, 72), hook=None)[0, 0, 3] == expected
    observer(torch.zeros(1, 4, 1, 6), hook=None)
    with pytest.raises(ValueError, match="filled the attention window of 6 positions"):
        hook(torch.ones(1, 1, 72), hook=None)
