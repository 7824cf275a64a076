"""Small vectors on one line, scored from sums that they share: as exact as an exponential for every token."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_neuron_attr as na
from tl_neuron_attr import growth, joint
from tl_neuron_attr.candidates import scores_of
from tl_neuron_attr.moments import Moments

PROMPT = [5, 17, 42, 8, 63, 90, 33, 2, 71, 14, 55, 60, 9, 38, 21, 77, 4, 80, 66, 12]
# Beside the growth: of sums of float32 numbers, and of what is left out of the series.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


@given(
    seed=st.integers(0, 2**32 - 1),
    scaled=st.floats(-1, 1),
    size=st.floats(1e-12, 1e12),
    peak=st.floats(0, 12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=200, deadline=None)
def test_equals_the_exponentials(seed: int, scaled: float, size: float, peak: float, dtype: torch.dtype) -> None:
    """Any deviations within the reach, up to where the bound holds, against a plain sum of exponentials."""
    random = torch.Generator().manual_seed(seed)
    p = (peak * torch.randn(3, 40, generator=random, dtype=torch.float64)).softmax(-1).to(dtype)
    c = (size * (2 * torch.rand(3, 40, generator=random, dtype=torch.float64) - 1)).to(dtype)
    c -= ((p * c).double().sum(-1, keepdim=True) / p.double().sum(-1, keepdim=True)).to(dtype)
    reach = c.abs().amax(-1) * 1.5
    line = torch.tensor([2, 0, 1, 2])
    a = scaled * torch.tensor([1.0, -0.3, 0.01, -1.0], dtype=dtype)
    moments = Moments(a, reach, line)
    for block in (slice(0, 7), slice(7, 40)):
        moments.add(slice(0, 2), c[:2, block].clone(), p[:2, block])
        moments.add(slice(2, 3), c[2:, block].clone(), p[2:, block])
    for i, found in enumerate(moments.grown().tolist()):
        row = int(line[i])
        x = float(a[i]) / float(reach[row])
        terms = [
            q * math.expm1(x * d) for q, d in zip(p[row].double().tolist(), c[row].double().tolist(), strict=True)
        ]
        expected = math.log1p(math.fsum(terms))
        size_of_terms = math.fsum(abs(term) for term in terms)
        assert abs(found - expected) <= ROUNDING[dtype] * size_of_terms + torch.finfo(dtype).tiny


def both_ways(ask: Any) -> tuple[Any, Any, int]:
    """What is found as usual and by exponentials alone, and how many vectors shared sums."""
    shared: list[int] = []
    make = growth.Moments

    def counted(scaled: torch.Tensor, *args: Any) -> Moments:
        shared.append(len(scaled))
        assert scaled.abs().max() <= 1
        return make(scaled, *args)

    with mock.patch.object(growth, "Moments", counted):
        found = ask()
        usual = sum(shared)
        with mock.patch.object(joint, "MANY_SOURCES", 10**6):
            other = ask()
    assert sum(shared) == usual
    return found, other, usual


@pytest.mark.any_release
@pytest.mark.parametrize("target", [11, na.AnyOf([3, 50, 9])], ids=["token", "any"])
@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.CASES))
def test_a_long_prompt(name: str, backend: str, target: Any) -> None:
    """Dense scores, in float64 to the last digits; of GPT-2's vectors some are too large to share sums."""
    trace = na.trace(zoo.case(name, backend, torch.float64).model, PROMPT, target)
    found, other, n_shared = both_ways(lambda: na.value_scores(trace, "attn").scores)
    assert (found - other).abs().max() < 1e-13
    assert 0.3 * found.numel() < n_shared <= found.numel() - (name == "gpt2")


def test_float32(case: zoo.ZooCase) -> None:
    trace = na.trace(case.model, PROMPT, 11)
    found, other, _ = both_ways(lambda: na.value_scores(trace, "attn").scores)
    assert (found - other).abs().max() < 1e-6


def test_rankings_are_those_of_dense_scores_to_the_last_bit(case: zoo.ZooCase) -> None:
    """Which way a neuron is scored does not depend on those asked for beside it."""
    trace = na.trace(case.model, PROMPT, 11)
    dense = na.value_scores(trace, "attn").scores
    for k in (1, 40, 400):
        ranked = na.value_neurons(trace, "attn", k=k)
        own = [float(dense[n.layer, n.source, n.head, n.dim]) for n in ranked.ids]
        assert ranked.scores.tolist() == own
    few = ranked.ids[390:391]
    alone = na.value_scores(trace, "attn", layers=[few[0].layer]).scores[0]
    assert float(alone[few[0].source, few[0].head, few[0].dim]) == ranked.scores[390]


@pytest.mark.any_release
def test_alone_as_among_others_in_a_wide_vocabulary() -> None:
    """Sums of many tokens round by how they are taken: one large or one small neuron alone has the same bits."""
    config = zoo.llama_like(transformers.LlamaConfig, vocab_size=5000)
    hf = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    hf.config.architectures = ["LlamaForCausalLM"]
    zoo.randomise(hf.float(), seed=7).lm_head.weight.data *= 20  # so that many neurons are large
    model = zoo.build(hf, zoo.BACKENDS[0])
    trace = na.trace(model, PROMPT, 11)
    dense, _, n_shared = both_ways(lambda: na.value_scores(trace, "attn").scores)
    assert 0.2 < n_shared / dense.numel() < 0.8
    for i in range(60):
        neuron = na.AttnNeuron(i % 3, i % 4, i % 8, i % 20)
        [score] = scores_of(trace, [neuron]).tolist()
        assert score == float(dense[neuron.layer, neuron.source, neuron.head, neuron.dim]), neuron


def test_where_there_is_nothing_to_share(case: zoo.ZooCase) -> None:
    """MLP neurons have lines of their own, contrasts no normaliser, short prompts few sources."""
    trace, short = na.trace(case.model, PROMPT, 11), na.trace(case.model, PROMPT[:3], 11)
    contrast = na.trace(case.model, PROMPT, na.Contrast(7, 23))
    for asked, kind in ((trace, "mlp"), (short, "attn"), (contrast, "attn")):
        assert both_ways(lambda asked=asked, kind=kind: na.value_scores(asked, kind).scores)[2] == 0


def test_behind_a_soft_cap() -> None:
    backend = next(b for n, b in zoo.FAMILY_CASES if n == "gemma2")
    trace = na.trace(zoo.case("gemma2", backend).model, PROMPT, 11)
    assert both_ways(lambda: na.value_scores(trace, "attn").scores)[2] == 0
