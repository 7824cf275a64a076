"""Links: which query neuron feeds which value neuron, against a plain loop, and their sums against query scores."""

import functools
import itertools
import warnings
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import zoo
from reference_forward import record
from reference_query_loop import Id, QueryLoop

import tl_neuron_attr as na
from tl_neuron_attr.neurons import parse
from tl_neuron_attr.query import TinyDenominatorWarning

GATED = ("llama", "llama_gqa", "qwen2")
POSITION = 5
CASES = [pytest.param(*case, id="-".join(case)) for case in zoo.CASES]
# key, normalise, convention
WAYS = {
    "shares": ("linearised", True, "exact"),
    "gate-paper": ("gate", True, "paper"),
    "in-products": ("in", False, "exact"),
}


@functools.cache
def loop(name: str, convention: str, processed: bool) -> QueryLoop:
    recording = record(zoo.hf_model(name), list(zoo.TOKENS))
    return QueryLoop(recording, 11, position=POSITION, convention=convention, processed=processed)


@functools.cache
def trace(name: str, backend: str, convention: str) -> Any:
    model = zoo.case(name, backend, torch.float64).model
    return na.trace(model, list(zoo.TOKENS), 11, position=POSITION, convention=convention)


@functools.cache
def chosen(name: str, seed: int) -> tuple[Id, ...]:
    """Four neurons of each kind by chance (a fixed one), in no order, none with a tiny denominator; value neurons
    (seed 1) above the first layer."""
    rng, loops = np.random.default_rng(seed), (loop(name, "paper", False), loop(name, "exact", True))
    found: list[Id] = []
    for kind in ("mlp", "attn"):
        ids = (tuple(map(int, i)) for i in rng.permutation(loops[0].ids(kind)))
        ids = (i for i in ids if i[0] >= seed % 2)
        sound = (i for i in ids if min(abs(a.cosine(i, key)) for a in loops for key in keys_of(name)) > 0.01)
        found += itertools.islice(sound, 4)
    return tuple(found[j] for j in rng.permutation(8))


def keys_of(name: str) -> tuple[str, ...]:
    return ("linearised", "gate", "in") if name in GATED else ("linearised",)


def neuron_of(i: Id) -> Any:
    return na.MLPNeuron(*i) if len(i) == 2 else na.AttnNeuron(*i)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_each_link(name: str, backend: str, way: str) -> None:
    """Of query neurons of both kinds to value neurons of both kinds, pair by pair."""
    key, normalise, convention = WAYS[way]
    reference = loop(name, convention, backend not in zoo.UNPROCESSED)
    values, queries = chosen(name, 1), chosen(name, 2)
    expected = {
        (str(neuron_of(q)), str(neuron_of(n))): reference.link(q, n, reference.value_score(n), key, normalise)
        for q in queries
        for n in values
    }
    assert sum(abs(link) > 1e-6 for link in expected.values()) >= 6
    frame = na.links(
        trace(name, backend, convention),
        [neuron_of(n) for n in values],
        [neuron_of(q) for q in queries],
        key=key,
        normalise=normalise,
    )
    assert list(frame.columns) == ["query", "value", "contribution"]
    found = {(row.query, row.value): row.contribution for row in frame.itertuples()}
    assert len(frame) == len(found) == len(expected)
    assert frame.contribution.is_monotonic_decreasing and list(frame.index) == list(range(len(frame)))
    for pair, link in expected.items():
        assert abs(found[pair] - link) < 1e-8 * max(1.0, abs(link)), pair
        if link == 0:
            assert found[pair] == 0, pair


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_sums_are_query_scores(name: str, backend: str) -> None:
    """Over value neurons; in float64 to rounding."""
    normalise = name != "gpt2"
    traced, values = trace(name, backend, "exact"), [neuron_of(n) for n in chosen(name, 1)]
    for kind in ("mlp", "attn"):
        ranked = na.query_neurons(traced, values, kind, k=12, normalise=normalise)
        frame = na.links(traced, values, ranked, normalise=normalise)
        assert len(frame) == 12 * len(values)
        sums = frame.groupby("query").contribution.sum()
        for neuron, score in zip(ranked.ids, ranked.scores.tolist(), strict=True):
            assert abs(sums[str(neuron)] - score) < 1e-9 * max(1.0, abs(score))


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_all_query_neurons_and_rankings(backend: str) -> None:
    """Value neurons as a ranking keep their scores; all neurons of a small model at once; labels read back."""
    case = zoo.case("llama_gqa", backend)
    traced = na.trace(case.model, list(case.tokens), 11)
    values = na.value_neurons(traced, "mlp", k=7)
    every = na.query_neurons(traced, values, "attn", k=10**6, layers=[0])
    frame = na.links(traced, values, every)
    assert {parse(label) for label in frame["value"]} == set(values.ids)
    assert {parse(label) for label in frame["query"]} == set(every.ids)
    sums = frame.groupby("query").contribution.sum()
    scores = [sums[str(neuron)] for neuron in every.ids]
    np.testing.assert_allclose(scores, every.scores.numpy(), rtol=0, atol=1e-4 * every.scores.abs().max().item())
    same = na.links(traced, values.ids, iter(every.ids[:5]))
    part = frame[frame["query"].isin([str(neuron) for neuron in every.ids[:5]])]
    assert len(same) == len(part) == 35
    np.testing.assert_allclose(same.contribution, part.contribution, rtol=0, atol=1e-5)


def test_neurons_named_twice_count_once() -> None:
    traced = trace("gpt2", zoo.BACKENDS[0], "exact")
    values, queries = ([neuron_of(i) for i in chosen("gpt2", seed)] for seed in (1, 2))
    twice = na.links(traced, values + values[:3], queries + queries[::-1])
    assert twice.equals(na.links(traced, values, queries))


def test_what_is_written_too_late_is_zero() -> None:
    """Attention of the same layer reaches its MLP, but not the same layer's attention; an MLP neither."""
    traced = trace("neox_sequential", zoo.BACKENDS[0], "exact")
    last = [na.MLPNeuron(1, 3), na.AttnNeuron(1, 2, 1, 4)]
    value = na.AttnNeuron(1, 0, 2, POSITION)
    late = na.links(traced, [value], [*last, na.MLPNeuron(2, 0), na.AttnNeuron(2, 0, 0, 0)])
    assert len(late) == 4 and not late.contribution.any()
    same = na.links(traced, [na.MLPNeuron(1, 5)], last).set_index("query").contribution
    assert same[str(last[0])] == 0 and abs(same[str(last[1])]) > 1e-9
    # A source after the position that a value neuron reads: attention does not look ahead.
    ahead = na.links(traced, [na.AttnNeuron(1, 0, 2, 2)], [na.AttnNeuron(0, 1, 1, 3), na.AttnNeuron(0, 1, 1, 2)])
    ahead = ahead.set_index("query").contribution
    assert ahead["L0H1D1@3"] == 0 and abs(ahead["L0H1D1@2"]) > 1e-9
    parallel = trace("neox", zoo.BACKENDS[0], "exact")
    assert not na.links(parallel, [na.MLPNeuron(1, 5)], last).contribution.any()


@pytest.mark.parametrize(
    ("value", "query", "settings", "message"),
    [
        ([], [na.MLPNeuron(0, 0)], {}, "no value neurons"),
        ([na.MLPNeuron(1, 52)], [na.MLPNeuron(0, 0)], {}, "L1N52 does not exist"),
        ([na.MLPNeuron(1, 0)], [na.MLPNeuron(0, 52)], {}, "L0N52 does not exist"),
        ([na.MLPNeuron(1, 0)], [na.AttnNeuron(0, 6, 0, 0)], {}, "head runs from 0 to 5"),
        ([na.MLPNeuron(1, 0)], [na.AttnNeuron(0, 0, 0, 6)], {}, "source runs from 0 to 5"),
        ([na.MLPNeuron(1, 0)], [na.MLPNeuron(2, 0)], {}, "from 0 to 1"),
        ([na.MLPNeuron(1, 0)], [na.MLPNeuron(0, 0)], {"key": "up"}, "unknown key 'up'"),
    ],
)
def test_bad_input(value: Any, query: Any, settings: Any, message: str) -> None:
    traced = trace("llama_gqa", zoo.BACKENDS[0], "exact")
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it: no shape checks that know the choices
    try:
        with pytest.raises(ValueError, match=message):
            na.links(traced, value, query, **settings)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_no_query_neurons_is_an_empty_frame() -> None:
    frame = na.links(trace("gpt2", zoo.BACKENDS[0], "exact"), [na.MLPNeuron(1, 0)], [])
    assert list(frame.columns) == ["query", "value", "contribution"] and not len(frame)


def test_a_tiny_denominator_warns() -> None:
    """A value neuron whose input row is at a right angle to its stream; its plain product is just small."""
    hf = zoo.clone(zoo.hf_model("phi"), torch.float32)
    found = record(hf, list(zoo.TOKENS)).layers[1]
    read = found.resid_pre[-1] - found.resid_pre[-1].mean()
    fc1 = zoo.blocks(hf)[1].mlp.fc1.weight
    with torch.no_grad():
        k = fc1[7].double().numpy() * found.gain_mlp
        k = k - k.mean()
        fc1[7] = torch.tensor((k - (k @ read) / (read @ read) * read) / found.gain_mlp)
    traced = na.trace(zoo.build(hf, zoo.BACKENDS[0]), list(zoo.TOKENS), 11)
    values, query = [na.MLPNeuron(1, 7), na.MLPNeuron(1, 8)], [na.MLPNeuron(0, 1)]
    with pytest.warns(TinyDenominatorWarning, match="keys of L1N7 hardly"):
        na.links(traced, values, query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        na.links(traced, values, query, normalise=False)
