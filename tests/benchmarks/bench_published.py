"""The package beside the published algorithm, in one run: the same scores, and the time of each.

Where the published algorithm would take more than a minute, some layers and source positions are timed and the
time of all is extrapolated (`factor` says by how much, and the table marks it). `make bench` writes the table.
"""

import published
import pytest
import torch
from bench_scores import LENGTHS, prompt_of

import tl_neuron_attr as na

SOURCES = {5: 5, 32: 4, 128: 2, 512: 1}  # source positions timed, of one layer in thirty


@pytest.fixture(scope="module")
def model():
    return na.load_demo_model()


@pytest.fixture(scope="module")
def traces(model):
    with torch.no_grad():
        return {length: na.trace(model, prompt_of(model, length), " Paris") for length in LENGTHS}


@pytest.mark.parametrize("length", LENGTHS)
def test_published_mlp(benchmark, traces, length):
    trace, layers = traces[length], range(27, 28)
    found = benchmark.pedantic(published.mlp_scores, args=(trace, layers), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(factor=30, job="mlp", length=length)
    ours = na.value_scores(trace, "mlp", layers=list(layers)).scores[0]
    assert all(abs(score - ours[neuron].item()) < 1e-4 for score, _, neuron in found)


@pytest.mark.parametrize("length", LENGTHS)
def test_published_attn(benchmark, traces, length):
    trace, layers, sources = traces[length], range(23, 24), range(SOURCES[length])
    found = benchmark.pedantic(published.attn_scores, args=(trace, layers, sources), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(factor=30 * length / len(sources), job="attn", length=length)
    ours = na.value_scores(trace, "attn", layers=list(layers), tolerance=1e-4).scores[0]
    assert all(abs(score - ours[source, head, dim].item()) < 2e-4 for score, _, head, dim, source in found)


@pytest.mark.parametrize("length", [5])
def test_published_query(benchmark, traces, length):
    trace = traces[length]
    value = na.value_neurons(trace, "attn", 30)
    args = (trace, value.ids, value.scores.tolist(), 30)
    found = benchmark.pedantic(published.query_scores, args=args, rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(factor=1, job="query", length=length)
    ours = na.query_neurons(trace, value, "mlp", k=10**6)
    scores = {(n.layer, n.neuron): s for n, s in zip(ours.ids, ours.scores.tolist(), strict=True)}
    assert all(abs(score - scores[layer, neuron]) < 1e-4 for score, layer, neuron in found)


@pytest.mark.parametrize("tolerance", [1e-3])
@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("length", LENGTHS)
def test_certified(benchmark, traces, length, kind, tolerance):
    def certified():
        return na.value_scores(traces[length], kind, tolerance=tolerance)

    found = benchmark.pedantic(certified, rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(
        job=kind, length=length, n_evaluated=found.n_evaluated, n_neurons=found.scores.numel()
    )
