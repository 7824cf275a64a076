"""Time of the main jobs on the embedded model, beside one forward pass of the same prompt.

`make bench` runs this. Each row says how many of the neurons were scored exactly; compare rows of one run only,
since machines and their load differ.
"""

import pytest
import torch

import tl_neuron_attr as na

PROMPT = "The capital of France is"
LENGTHS = (5, 32, 128, 512)


@pytest.fixture(scope="module")
def model():
    return na.load_demo_model()


def prompt_of(model, length):
    """The prompt itself for five tokens, else its tokens repeated in front of it."""
    tokens = model.to_tokens(PROMPT)[0].tolist()
    return (tokens * (length // len(tokens) + 1))[-length:]


@pytest.fixture(scope="module")
def traces(model):
    return {length: na.trace(model, prompt_of(model, length), " Paris") for length in LENGTHS}


@pytest.mark.parametrize("length", LENGTHS)
def test_forward_pass(benchmark, model, length):
    tokens = torch.tensor([prompt_of(model, length)])
    with torch.no_grad():
        benchmark.pedantic(model, args=(tokens,), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_trace(benchmark, model, length):
    benchmark.pedantic(na.trace, args=(model, prompt_of(model, length), " Paris"), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("length", LENGTHS)
def test_top_300_value_neurons(benchmark, traces, length, kind):
    ranked = benchmark.pedantic(na.value_neurons, args=(traces[length], kind, 300), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(job=kind, length=length, n_evaluated=ranked.n_evaluated, n_neurons=ranked.n_neurons)


@pytest.mark.parametrize("length", LENGTHS)
def test_layers_and_heads(benchmark, traces, length):
    def both(trace):
        return na.layer_scores(trace), na.head_scores(trace)

    benchmark.pedantic(both, args=(traces[length],), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("n_value", [30, 300])
@pytest.mark.parametrize("length", [5, 512])
def test_query_neurons(benchmark, traces, length, n_value):
    trace = traces[length]
    value = na.value_neurons(trace, "attn", n_value)
    benchmark.pedantic(na.query_neurons, args=(trace, value, "mlp", 300), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_dense_scores(benchmark, traces, kind):
    benchmark.pedantic(na.value_scores, args=(traces[5], kind), rounds=1)
