"""Traces of runs whose heads were edited at `hook_z`, behind pattern and values: inside an ablation, say."""

import dataclasses
import gc
import weakref

import pytest
import torch
import zoo

import tl_neuron_attr as na
from tl_neuron_attr.writes import attn_coefficients

PROMPT = list(zoo.TOKENS)
HEAD = na.Head(1, 2)
ALL = 10**6


def inside(case, *args, **kwargs):
    with na.ablating(case.model, *args, **kwargs):
        return na.trace(case.model, PROMPT, 11)


def scores(ranked):
    return dict(zip(ranked.ids, ranked.scores.tolist(), strict=True))


def in_head(neuron, head=HEAD):
    return (neuron.layer, neuron.head) == (head.layer, head.head)


def test_a_zeroed_head_has_no_neurons_and_the_run_is_the_ablated_one(case):
    """Equal to a run whose pattern was zeroed instead, of which nothing is left to divide; others telescope."""

    def zero_pattern(tensor, hook):
        out = tensor.clone()
        out[:, HEAD.head] = 0
        return out

    trace = inside(case, HEAD)
    with case.model.hooks(fwd_hooks=[(f"blocks.{HEAD.layer}.attn.hook_pattern", zero_pattern)]):
        expected = na.trace(case.model, PROMPT, 11)
    assert trace.target_log_prob == pytest.approx(expected.target_log_prob, abs=1e-5)
    assert na.head_scores(trace).scores[HEAD.layer, HEAD.head] == 0
    assert not na.position_scores(trace, HEAD.layer, HEAD.head).any()
    for kind in ("mlp", "attn"):
        found, other = scores(na.value_neurons(trace, kind, ALL)), scores(na.value_neurons(expected, kind, ALL))
        assert found == pytest.approx(other, abs=1e-5)
        assert all(s == 0 for n, s in found.items() if kind == "attn" and in_head(n))
        dense = na.value_scores(trace, kind)
        assert dense.top(ALL).ids == na.value_neurons(trace, kind, ALL).ids


def test_query_neurons_of_a_zeroed_head(case):
    """Value neurons above it; its own neurons bring them nothing, the rest of the layer and its bias do."""
    trace = inside(case, na.Head(0, 1))
    value = na.value_neurons(trace, "mlp", 5, layers=[1])
    ranked = scores(na.query_neurons(trace, value, "attn", ALL))
    assert any(ranked.values())
    assert all(s == 0 for n, s in ranked.items() if in_head(n, na.Head(0, 1)))


def test_scaling_scales_every_source(case):
    """`Scale(2)` doubles a head at every position, so each neuron's coefficient."""
    usual, trace = na.trace(case.model, PROMPT, 11), inside(case, na.Head(0, 1), na.Scale(2.0))
    before, after = na.value_scores(usual, "attn", [0]).coefficients, na.value_scores(trace, "attn", [0]).coefficients
    expected = before.clone()
    expected[:, :, 1] *= 2
    assert torch.allclose(after, expected, atol=2e-4 * float(before.abs().max()))


def test_what_is_remembered_of_a_trace_is_its_own_and_goes_with_it(case):
    """An edited run and the usual one, asked in turns, and a copy whose heads were edited afterwards."""
    usual, edited = na.trace(case.model, PROMPT, 11), inside(case, HEAD)
    for _ in range(2):
        assert attn_coefficients(usual, HEAD.layer)[HEAD.head].any()
        assert not attn_coefficients(edited, HEAD.layer)[HEAD.head].any()
    z = tuple(own if layer != HEAD.layer else torch.zeros_like(own) for layer, own in enumerate(usual.z))
    assert not attn_coefficients(dataclasses.replace(usual, z=z), HEAD.layer).any()
    gone = weakref.ref(edited)
    del edited
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("mode", ["mean", "resample", "set"])
def test_what_has_no_sources_is_refused_where_it_is_divided(case, mode):
    """Layers, heads and MLP neurons have scores; attention neurons of that layer are refused by the head's name."""
    edits = {
        "mean": lambda: na.mean_activations(case.model, [PROMPT, PROMPT[::-1]]),
        "resample": lambda: na.resample(case.model, PROMPT[::-1]),
        "set": lambda: na.SetTo(0.7),
    }
    trace = inside(case, na.Head(0, 1), edits[mode]())
    layers = na.layer_scores(trace)
    heads = na.head_scores(trace).scores
    assert layers.attn.isfinite().all() and heads.isfinite().all()
    na.value_neurons(trace, "mlp", 5)
    na.value_neurons(trace, "attn", 5, layers=[1])
    refusal = r"^L0H1 of .*hook_z.* is not what pattern and values give"
    for ask in (
        lambda: na.value_neurons(trace, "attn", 5),
        lambda: na.value_scores(trace, "attn", [0]),
        lambda: na.position_scores(trace, 0, 1),
        lambda: na.promoted_tokens(trace, [na.AttnNeuron(0, 1, 0, 0)], 1),
        lambda: na.query_neurons(trace, na.value_neurons(trace, "mlp", 5, layers=[1]), "attn", 5),
    ):
        with pytest.raises(na.UnsupportedModelError, match=refusal):
            ask()


def test_an_edit_at_another_position_reaches_query_neurons_only(case):
    """Zeroed at a source position: nothing changes where it predicts, but that position's attention parts do."""
    source = 2
    trace = inside(case, na.Head(0, 1), positions=[source])
    value = [na.AttnNeuron(1, 0, dim, source) for dim in range(4)]
    ranked = scores(na.query_neurons(trace, value, "attn", ALL, layers=[0], normalise=False))
    assert any(ranked.values())
    assert all(s == 0 for n, s in ranked.items() if in_head(n, na.Head(0, 1)))
    assert na.value_scores(trace, "attn", [0]).coefficients[0, :, 1].any()


def test_layers_and_single_neurons(case):
    trace = inside(case, [na.Layer(0, "attn"), na.AttnNeuron(1, 0, 3, 2)])
    assert not na.value_scores(trace, "attn", [0]).scores.any()
    one = na.value_scores(trace, "attn", [1]).scores[0]
    assert not one[:, 0, 3].any() and one[:, 0, 2].any()


def test_a_zeroed_neuron_says_nothing(case):
    """One neuron asked about by name: its coefficient is zero where it writes, and so is every logit change."""
    neuron = na.AttnNeuron(HEAD.layer, HEAD.head, 0, 2)
    trace = inside(case, HEAD)
    for end in (na.promoted_tokens(trace, [neuron], 3).up[0], na.promoted_tokens(trace, [neuron], 3).down[0]):
        assert [change for _, change in end] == [0, 0, 0]
    assert any(change for _, change in na.promoted_tokens(na.trace(case.model, PROMPT, 11), [neuron], 3).up[0])


def test_an_own_cache_and_a_comparison(case):
    """A cache made inside the ablation is the same trace; `compare` names what the head's loss costs."""
    usual = na.trace(case.model, PROMPT, 11)
    with na.ablating(case.model, HEAD):
        trace = na.trace(case.model, PROMPT, 11)
        _, cache = case.model.run_with_cache(torch.tensor([PROMPT]), names_filter=na.required_hooks(case.model))
    again = na.trace(case.model, PROMPT, 11, cache=cache)
    assert na.layer_scores(again).attn.tolist() == pytest.approx(na.layer_scores(trace).attn.tolist(), abs=1e-6)
    lost = scores(na.compare(usual, trace, "attn", ALL))
    own, ablated = scores(na.value_neurons(usual, "attn", ALL)), scores(na.value_neurons(trace, "attn", ALL))
    assert lost == pytest.approx({neuron: own[neuron] - ablated[neuron] for neuron in own}, abs=1e-5)


def test_terms_that_cancel_are_no_edit():
    """A sum that is exactly zero in the model and a rounding error here keeps its terms, as before the last bit."""
    trace = na.trace(zoo.case("gpt2", zoo.BACKENDS[0]).model, PROMPT, 11)
    pattern, value, z = (list(t) for t in (trace.pattern, trace.value, trace.z))
    pattern[0], value[0], z[0] = pattern[0].clone(), value[0].clone(), z[0].clone()
    pattern[0][0, -1] = torch.tensor([0.25, 0.25, 0.5, 0, 0, 0, 0])
    value[0][:3, 0, 0] = torch.tensor([1.0, 1.0, -1 - 2e-7])
    z[0][-1, 0] = torch.einsum("s,sd->d", pattern[0][0, -1], value[0][:, 0])
    z[0][-1, 0, 0] = 0
    cancelling = dataclasses.replace(trace, pattern=tuple(pattern), value=tuple(value), z=tuple(z))
    assert attn_coefficients(cancelling, 0)[0, 0, :3].tolist() == pytest.approx([0.25, 0.25, -0.5])
    z[0][:, 0, 0] = 0
    everywhere = dataclasses.replace(trace, pattern=tuple(pattern), value=tuple(value), z=tuple(z))
    assert not attn_coefficients(everywhere, 0)[0, 0].any()


def test_zeroed_in_low_precision():
    """Exactly zero is zero, however small the head's values are beside the layer's largest."""
    for backend in zoo.BACKENDS:
        model = zoo.plain(zoo.hf_model("gpt2"), backend, torch.bfloat16)
        with na.ablating(model, HEAD):
            trace = na.trace(model, PROMPT, 11)
        assert not na.position_scores(trace, HEAD.layer, HEAD.head).any()
