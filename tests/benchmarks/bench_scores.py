"""Time of the main jobs on the embedded model, beside one forward pass of the same prompt.

`make bench` runs this. Each row says how many of the neurons were scored exactly; compare rows of one run only,
since machines and their load differ. Where a call takes seconds, one layer in thirty is timed and the time of all is
extrapolated (`factor` says by how much, and the table marks it).
"""

import random

import pytest
import torch
from machine import DEVICE, LENGTHS, demo_model, prompt_of, timed, trace_of

import tl_neuron_attr as na
from tl_neuron_attr.together import value_neurons_of

KINDS = ("mlp", "attn")


@pytest.mark.parametrize("length", LENGTHS)
def test_forward_pass(benchmark, length):
    tokens = torch.tensor([prompt_of(length)], device=DEVICE)
    with torch.no_grad():
        timed(benchmark, demo_model(), tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_trace(benchmark, length):
    timed(benchmark, na.trace, demo_model(), prompt_of(length), " Paris")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_top_300_value_neurons(benchmark, length, kind):
    ranked = timed(benchmark, na.value_neurons, trace_of(length), kind, 300)
    benchmark.extra_info.update(n_evaluated=ranked.n_evaluated, n_neurons=ranked.n_neurons)


@pytest.mark.parametrize("length", LENGTHS)
def test_top_300_of_both_kinds_at_once(benchmark, length):
    timed(benchmark, value_neurons_of, [trace_of(length)], KINDS, 300)


@pytest.mark.parametrize("length", LENGTHS)
def test_layers_and_heads(benchmark, length):
    def both(trace):
        return na.layer_scores(trace), na.head_scores(trace)

    timed(benchmark, both, trace_of(length))


@pytest.mark.parametrize("n_value", [30, 300])
@pytest.mark.parametrize("length", LENGTHS)
def test_query_neurons(benchmark, length, n_value):
    value = na.value_neurons(trace_of(length), "attn", n_value)
    timed(benchmark, na.query_neurons, trace_of(length), value, "mlp", 300)


@pytest.mark.parametrize(("length", "kind", "layer"), [(5, "mlp", 27), (5, "attn", 23), (128, "attn", 23)])
def test_dense_scores(benchmark, length, kind, layer):
    """Every score exactly. MLP neurons have no source positions, so their time does not depend on the prompt."""

    def one_layer():
        return na.value_scores(trace_of(length), kind, layers=[layer])

    timed(benchmark, one_layer, warmup=int(length == 5), factor=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "tolerance"), [(5, 1e-3), (128, 1e-3), (5, 5e-6)])
def test_certified(benchmark, length, kind, tolerance):
    """Every score of all layers to 1e-3 nats, and closer than the published float32 arithmetic is."""

    def certified():
        return na.value_scores(trace_of(length), kind, tolerance=tolerance)

    found = timed(benchmark, certified, warmup=0)
    benchmark.extra_info.update(n_evaluated=found.n_evaluated, n_neurons=found.scores.numel())


if hasattr(na, "report"):

    @pytest.mark.parametrize("length", LENGTHS[:1])
    def test_report(benchmark, tmp_path, length):
        timed(benchmark, na.report, trace_of(length), tmp_path / "report.html", warmup=0)


# Many prompts: what a sweep does of each

N_PROMPTS = 16


def prompts(types):
    chosen = na.load_knowledge(types)
    random.Random(0).shuffle(chosen)
    return [each.prompt for each in chosen[:N_PROMPTS]]


@pytest.mark.parametrize("types", ["one type", "mixed"])
def test_one_prompt_at_a_time(benchmark, types):
    """Every fourth of the prompts."""

    def one_by_one():
        for prompt in prompts(["capital"] if types == "one type" else None)[::4]:
            trace = na.trace(demo_model(), prompt)
            for kind in KINDS:
                na.value_neurons(trace, kind, 300)

    timed(benchmark, one_by_one, warmup=0, per_call=N_PROMPTS // 4)


@pytest.mark.parametrize("types", ["one type", "mixed"])
def test_prompts_together(benchmark, types):
    def together():
        chosen = prompts(["capital"] if types == "one type" else None)
        traces = list(na.trace_batch(demo_model(), chosen, batch_size=N_PROMPTS, progress=False))
        return value_neurons_of(traces, KINDS, 300)

    ranked = timed(benchmark, together, warmup=0, per_call=N_PROMPTS)
    rows = [{(n.layer, n.neuron) if r.kind == "mlp" else (n.layer, n.head, n.dim) for n in r.ids} for r in ranked]
    distinct = [len(set().union(*rows[i :: len(KINDS)])) for i in range(len(KINDS))]
    each = [sum(map(len, rows[i :: len(KINDS)])) for i in range(len(KINDS))]
    benchmark.extra_info.update(directions_mlp=each[0], distinct_mlp=distinct[0])
    benchmark.extra_info.update(directions_attn=each[1], distinct_attn=distinct[1])
