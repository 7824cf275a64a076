"""What people would run instead, in the same run, and that it gives the same scores.

The published algorithm, TransformerLens's own `stack_neuron_results` (the direct effect on the target's logit, which
is another score), and captum's integrated gradients of one layer beside the package's. Where the published algorithm
would take more than a minute, one layer in thirty and some source positions are timed and the time of all is
extrapolated (`factor` says by how much, and the table marks it).
"""

import captum.attr
import published
import pytest
import torch
from machine import DEVICE, LENGTHS, demo_model, prompt_of, timed, trace_of

import tl_neuron_attr as na

SOURCES = {5: 5, 32: 4, 128: 2, 512: 1}  # source positions timed, of one layer in thirty
STEPS, LAYER = 32, 27


@pytest.mark.parametrize("length", LENGTHS)
def test_published_mlp(benchmark, length):
    trace, layers = trace_of(length), range(LAYER, LAYER + 1)
    found = timed(benchmark, published.mlp_scores, trace, layers, factor=30)
    ours = na.value_scores(trace, "mlp", layers=list(layers)).scores[0].tolist()
    off = max(abs(score - ours[neuron]) for score, _, neuron in found)
    benchmark.extra_info.update(largest_difference=off)
    assert off < 1e-4


@pytest.mark.parametrize("length", LENGTHS)
def test_published_attn(benchmark, length):
    trace, layers, sources = trace_of(length), range(23, 24), range(SOURCES[length])
    factor = 30 * length / len(sources)
    found = timed(benchmark, published.attn_scores, trace, layers, sources, factor=factor)
    ours = na.value_scores(trace, "attn", layers=list(layers)).scores[0].tolist()
    off = max(abs(score - ours[source][head][dim]) for score, _, head, dim, source in found)
    benchmark.extra_info.update(largest_difference=off)
    assert off < 1e-4


@pytest.mark.parametrize("n_value", [30, 300])
def test_published_query(benchmark, n_value):
    trace = trace_of(5)
    value = na.value_neurons(trace, "attn", n_value)
    args = (trace, value.ids, value.scores.tolist(), 30)
    found = timed(benchmark, published.query_scores, *args, warmup=int(n_value == 30))
    ours = na.query_neurons(trace, value, "mlp", k=10**6)
    scores = {(n.layer, n.neuron): s for n, s in zip(ours.ids, ours.scores.tolist(), strict=True)}
    assert all(abs(score - scores[layer, neuron]) < 1e-4 for score, layer, neuron in found)


def test_stack_neuron_results(benchmark):
    """All MLP neurons' direct effect on the target's logit at the last position, from a cache of everything."""
    model, tokens = demo_model(), torch.tensor([prompt_of(5)], device=DEVICE)
    _, cache = model.run_with_cache(tokens)
    target = trace_of(5).target.positive[0]

    def direct():
        stack = cache.stack_neuron_results(layer=-1, pos_slice=-1)
        return cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)[:, 0] @ model.W_U[:, target]

    with torch.no_grad():
        theirs = timed(benchmark, direct)
    ours = na.value_neurons(trace_of(5), "mlp", 1, method="direct_logit")
    place = ours.ids[0].layer * 1536 + ours.ids[0].neuron
    # TransformerLens leaves the final norm's weights out where they are not folded into the unembedding.
    assert theirs.shape == (30 * 1536,) and torch.isfinite(theirs[place])


@pytest.mark.parametrize("whose", ["package", "captum"])
def test_integrated_gradients(benchmark, whose):
    """MLP neurons of one layer, 32 steps: the package's, and captum's at the same hook point."""
    model, trace = demo_model(), trace_of(5)
    tokens, target = torch.tensor([prompt_of(5)], device=DEVICE), trace.target.positive[0]
    name = f"blocks.{LAYER}.mlp.hook_post"
    x = trace.post[LAYER][-1:].detach().clone()

    def forward(rows):
        def put(activation, hook):
            return torch.cat([activation[:, :-1], rows[:, None]], 1)

        logits = model.run_with_hooks(tokens.expand(len(rows), -1), fwd_hooks=[(name, put)])
        return logits[:, -1].log_softmax(-1)[:, target]

    def theirs():
        return captum.attr.IntegratedGradients(forward).attribute(x, n_steps=STEPS, method="gausslegendre")[0]

    def ours():
        return na.value_neurons(trace, "mlp", 1536, layers=[LAYER], method=na.IntegratedGradients(steps=STEPS))

    if whose == "captum":
        found = timed(benchmark, theirs, warmup=0).detach()
        best = ours()
        assert abs(found[best.ids[0].neuron].item() - best.scores[0].item()) < 1e-3
    else:
        timed(benchmark, ours, warmup=0)
