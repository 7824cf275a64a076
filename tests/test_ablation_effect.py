"""Effects, controls and curves: against the readout, runs by hand, and numbers worked out in the test."""

import json
from typing import Any

import pytest
import torch
import zoo

import tl_neuron_attr as na
from tl_neuron_attr import variants
from tl_neuron_attr.controls import draw_controls
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.outcomes import METRICS, Outcomes, interval
from tl_neuron_attr.selection import identities, select
from tl_neuron_attr.targets import ResolvedTarget

PROMPTS = ([5, 17, 42, 8, 63], [9, 9, 71], [3, 14, 15, 92, 65, 35, 8], [7, 81, 2])


# Sequential and parallel blocks, LayerNorm and RMSNorm, grouped query attention: every backend of each.
FEW = [pytest.param(case, id="-".join(case)) for case in zoo.CASES if case[0] in ("gpt2", "llama_gqa", "neox")]


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """The cases for what does not depend on the architecture."""
    return zoo.case(*request.param)


def traces_of(model: Any, target: Any = 11) -> list[na.Trace]:
    return [na.trace(model, prompt, target) for prompt in PROMPTS]


def ablated(trace: na.Trace, neurons: Any, **options: Any) -> torch.Tensor:
    """Log-probabilities of a run of one row, float64."""
    with na.ablating(trace.model, neurons, **options), torch.no_grad():
        logits = trace.model(trace.tokens[None])
    return logits[0, trace.position].double().log_softmax(-1)


# Against other ways to the same numbers


def test_last_layer_mlp_ablation_is_the_recomputed_readout(case: zoo.ZooCase) -> None:
    """Nothing comes after the last MLP but the final norm: take the neurons' rows off the residual, read out anew."""
    trace = na.trace(case.model, list(case.tokens), 11, position=5)
    view, last = trace.view, trace.view.n_layers - 1
    neurons = na.value_neurons(trace, "mlp", k=6, layers=[last])
    indices = [neuron.neuron for neuron in neurons.ids if isinstance(neuron, na.MLPNeuron)]
    post = trace.post[last]
    assert post is not None
    left = trace.resid_final - post[trace.position, indices] @ view.W_out(last)[indices]
    expected = view.own_logits(left).log_softmax(-1)[11].item()
    effect = na.ablation_effect(trace, neurons)
    assert abs(effect.after.log_prob.item() - expected) < 1e-5
    assert abs(effect.before.log_prob.item() - trace.target_log_prob) < 1e-6
    assert effect.after.log_prob.item() < effect.before.log_prob.item()


@pytest.mark.parametrize("target", [11, na.Contrast(7, 23), na.AnyOf([3, 50, 9]), None], ids=str)
def test_metrics_are_those_of_a_run_by_hand(few: zoo.ZooCase, target: Any) -> None:
    trace = na.trace(few.model, list(few.tokens), target)
    neurons = [na.value_neurons(trace, "mlp", k=4), na.Head(0, 2), na.Layer(1, "mlp")]
    effect = na.ablation_effect(trace, neurons, na.Scale(-1))
    log_probs = ablated(trace, neurons, mode=na.Scale(-1))
    positive = trace.target.positive
    best = max(log_probs[token].item() for token in positive)
    value = sum(log_probs[token].exp().item() for token in positive)
    log_prob = torch.tensor(value).log().item()
    if trace.target.negative:
        log_prob = (log_probs[7] - log_probs[23]).item()
    assert abs(effect.after.log_prob.item() - log_prob) < 2e-5
    assert abs(effect.after.probability.item() - value) < 2e-5
    assert effect.after.rank.item() == 1 + sum(p > best for p in log_probs.tolist())
    assert effect.after.reciprocal_rank.item() == 1 / effect.after.rank.item()
    assert effect.after.top_token.item() == log_probs.argmax().item()
    assert effect.top_after == (trace.vocabulary.text(int(log_probs.argmax())),)
    assert effect.top_before == (trace.vocabulary.text(int(trace.log_probs.argmax())),)


def test_rank_counts_tokens_above_and_contrast_ranks_its_positive_token() -> None:
    log_probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for positive, negative, rank in (((1,), (), 1), ((0,), (), 4), ((2, 3), (), 2), ((2,), (1,), 3)):
        found = Outcomes.of(log_probs, ResolvedTarget(positive, negative, "x"))
        assert found.rank.tolist() == [rank]
    assert found.log_prob.item() == pytest.approx(torch.tensor(0.5).log().item())
    assert found.probability.item() == pytest.approx(0.2)


@pytest.mark.parametrize("options", [{}, {"positions": [-1, 2]}, {"scope": "source"}], ids=str)
def test_variants_of_every_batch_size_are_the_variants_alone(few: zoo.ZooCase, options: dict[str, Any]) -> None:
    """60 draws in batches under two budgets; each row is what its neurons alone do."""
    trace = na.trace(few.model, list(few.tokens), 11)
    neurons = [*na.value_neurons(trace, "attn", k=3), *na.value_neurons(trace, "mlp", k=3)]
    assert 1 < variants.rows_at_once(trace, 2**20) < 61
    effects = [
        na.ablation_effect(trace, neurons, controls=60, seed=3, memory_budget=budget, **options)
        for budget in (2**20, 2**30)
    ]
    for metric in ("log_prob", "probability"):
        one, other = (effect.controls.values(metric) for effect in effects)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    alone_options = dict(options)
    if "positions" in options:
        alone_options["positions"] = [len(trace.tokens) - 1, 2]
    elif "scope" in options:
        alone_options["positions"] = None
    named = neurons if "scope" not in options else na.value_neurons(trace, "attn", k=3)
    effect = na.ablation_effect(trace, named, **options)
    alone = ablated(trace, named, **alone_options)[11].item()
    assert abs(effect.after.log_prob.item() - alone) < 2e-5


# Controls


def test_controls_are_as_many_from_the_same_layers_and_none_of_the_set() -> None:
    view = ModelView(zoo.case("llama_gqa", zoo.BACKENDS[0]).model)
    named = [
        *(na.MLPNeuron(0, n) for n in (1, 5, 7)),
        na.MLPNeuron(1, 50),
        na.Head(1, 2),
        *(na.AttnNeuron(0, 1, 2, source) for source in (0, 3)),
    ]
    chosen = select(view, identities(named))
    draws = draw_controls(view, chosen, 300, torch.Generator().manual_seed(0))
    for draw in draws:
        for ours, theirs in ((chosen.mlp, draw.mlp), (chosen.attn, draw.attn)):
            assert {layer: len(units) for layer, units in theirs.items()} == {k: len(v) for k, v in ours.items()}
            assert all(not ours[layer] & units for layer, units in theirs.items())
    assert {n for draw in draws for n in draw.mlp[0]} == set(range(52)) - {1, 5, 7}
    assert {n for draw in draws for n in draw.attn[1]} == set(range(96)) - set(range(32, 48))
    assert len(set(map(str, draws))) == 300


def test_controls_of_sources_are_other_sources_of_the_same_layers() -> None:
    view = ModelView(zoo.case("llama_gqa", zoo.BACKENDS[0]).model)
    named = [na.AttnNeuron(0, 1, 2, 3), na.AttnNeuron(0, 1, 2, 1), na.AttnNeuron(1, 5, 0, 0), na.Head(1, 0)]
    chosen = select(view, identities(named), "source", [3])
    for draw in draw_controls(view, chosen, 200, torch.Generator().manual_seed(0)):
        assert [len(draw.sources[layer]) for layer in (0, 1)] == [2, 1]
        assert not draw.sources[0] & chosen.sources[0]
        for unit in draw.sources[0] | draw.sources[1]:
            assert unit.dest == 3
            assert 0 <= unit.source <= 3
            assert 0 <= unit.head < 6
            assert 0 <= unit.dim < 16
        [unit] = draw.sources[1]
        assert unit.head != 0  # wholly ablated in the set
    wide = select(view, identities([na.AttnNeuron(0, 0, 0, 0)]), "source", [1])
    draws = draw_controls(view, wide, 2000, torch.Generator().manual_seed(0))
    assert len({unit for draw in draws for unit in draw.sources[0]}) == 6 * 16 * 2 - 1


def test_controls_are_seeded_and_do_nothing_to_the_global_state() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    neurons, state = na.value_neurons(trace, "mlp", k=5), torch.get_rng_state()
    one, same, other = (na.ablation_effect(trace, neurons, controls=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.controls.log_prob, same.controls.log_prob)
    assert not torch.equal(one.controls.log_prob, other.controls.log_prob)
    assert torch.equal(state, torch.get_rng_state())


def test_too_few_other_neurons_for_controls() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    with pytest.raises(
        ValueError, match="72 are wanted from the MLP of layer 1, but only 0 of its 72 are not in the"
    ):
        na.ablation_effect(trace, na.Layer(1, "mlp"), controls=2)
    with pytest.raises(ValueError, match="controls is -1: give the number of random draws"):
        na.ablation_effect(trace, na.Layer(1, "mlp"), controls=-1)


def test_where_the_effect_stands_among_controls() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    effect = na.ablation_effect(trace, na.value_neurons(trace, "mlp", k=5), controls=30)
    row = effect.of("log_prob")
    change = (effect.after.log_prob - effect.before.log_prob).item()
    draws = (effect.controls.log_prob - effect.before.log_prob)[:, 0]
    assert row.change == change
    assert row.percent == pytest.approx(100 * change / abs(effect.before.log_prob.item()))
    assert row.control_change == pytest.approx(draws.mean().item())
    assert row.control_sd == pytest.approx(((draws - draws.mean()).square().sum() / 29).sqrt().item())
    assert row.z == pytest.approx((change - draws.mean().item()) / row.control_sd)
    as_large = sum(abs(draw) >= abs(change) for draw in draws.tolist())
    assert (row.rank_among_controls, row.fraction) == (1 + as_large, as_large / 30)
    assert (row.control_min, row.control_max) == (draws.min().item(), draws.max().item())
    assert row.before_low is None  # one prompt has no interval
    without = na.ablation_effect(trace, na.value_neurons(trace, "mlp", k=5)).of("log_prob")
    assert (without.z, without.control_change, without.rank_among_controls) == (None, None, None)


# Many traces


def test_many_traces_give_means_and_intervals(few: zoo.ZooCase) -> None:
    traces = traces_of(few.model)
    neurons = [na.MLPNeuron(0, 3), na.Head(1, 1)]
    effect = na.ablation_effect(traces, neurons, controls=3)
    assert effect.controls.rank.shape == (3, 4)
    for i, trace in enumerate(traces):
        one = na.ablation_effect(trace, neurons)
        assert abs((one.after.log_prob - effect.after.log_prob[i]).item()) < 2e-5
    mrr = effect.of("reciprocal_rank")
    assert mrr.before == pytest.approx(sum(1 / r for r in effect.before.rank.tolist()) / 4)
    assert mrr.after == pytest.approx(effect.after.mrr.item())
    for row in effect.summary():
        assert row.before_low is not None
        assert row.before_low <= row.before <= row.before_high
        assert row.change_low <= row.change <= row.change_high
    assert list(effect.to_frame()["prompt"]) == [trace.provenance.text for trace in traces]


def test_bootstrap_interval_covers_a_known_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = interval(torch.randn(400, generator=generator, dtype=torch.float64) + 3, seed=0)
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert low < 3 < high
    assert interval(torch.ones(1, dtype=torch.float64), seed=0) == (None, None)
    assert interval(torch.full((5,), 2.0, dtype=torch.float64), seed=0) == (2.0, 2.0)


def test_a_ranking_for_each_trace_as_in_the_paper() -> None:
    traces = traces_of(zoo.case("llama_gqa", zoo.BACKENDS[0]).model)
    rankings = [na.value_neurons(trace, "mlp", k=4) for trace in traces]
    effect = na.ablation_effect(traces, rankings, controls=2)
    for i, (trace, ranked) in enumerate(zip(traces, rankings, strict=True)):
        assert effect.neurons[i] == tuple(map(str, ranked))
        assert abs(effect.after.log_prob[i].item() - ablated(trace, ranked)[11].item()) < 2e-5
    mixed = [[ranked, na.Head(0, 1)] for ranked in rankings]
    assert len(na.ablation_effect(traces, mixed).neurons[0]) == 5
    with pytest.raises(ValueError, match="3 rankings or lists of neurons for 4 traces: give one for each trace"):
        na.ablation_effect(traces, rankings[:3])
    with pytest.raises(ValueError, match=r"ranking 0 is of another prompt or position than trace 0"):
        na.ablation_effect(traces, rankings[::-1])
    union = [neuron for ranked in rankings for neuron in ranked]
    assert len(na.ablation_effect(traces[:2], union).neurons[1]) == len(set(union))


def test_refusals() -> None:
    model = zoo.case("llama_gqa", zoo.BACKENDS[0]).model
    other = na.trace(zoo.case("gpt2", zoo.BACKENDS[0]).model, [4, 5], 1)
    trace = na.trace(model, list(zoo.TOKENS), 11, position=4)
    with pytest.raises(ValueError, match="no traces are given"):
        na.ablation_effect([], na.Head(0, 0))
    with pytest.raises(ValueError, match="the traces are of several models"):
        na.ablation_effect([trace, other], na.Head(0, 0))
    for position in (7, -8, 5, -1):
        with pytest.raises(
            ValueError, match=f"position {position} is outside the 7 tokens of .*or after its predict"
        ):
            na.ablation_effect(trace, na.Head(0, 0), positions=[position])
    with pytest.raises(ValueError, match=r"positions=\[\] ablates nowhere"):
        na.ablation_effect(trace, na.Head(0, 0), positions=[])
    with pytest.raises(ValueError, match="unknown metric 'loss': choose one of log_prob, probability"):
        na.ablation_effect(trace, na.Head(0, 0)).of("loss")
    with pytest.raises(ValueError, match="memory_budget=5 bytes: give at least one MiB"):
        na.ablation_effect(trace, na.Head(0, 0), memory_budget=5)


@pytest.mark.parametrize("mode", [na.Scale(1e300), na.SetTo(3e38)])
def test_predictions_that_are_no_numbers_are_refused(mode: na.Scale | na.SetTo) -> None:
    """NaN is above nothing, so its rank would be 1."""
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    with pytest.raises(ValueError, match=r"1 of 1 predictions are NaN: .* or use a model in float32"):
        na.ablation_effect(trace, na.Layer(1, "mlp"), mode)


def test_values_past_the_precision_are_refused() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    with pytest.raises(ValueError, match=r"set to 1e\+39 is past what torch.float32 holds: .* at most 3.403e\+38"):
        na.ablation_effect(trace, na.MLPNeuron(1, 3), na.SetTo(1e39))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_no_generator_takes_are_refused(seed: int) -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    with pytest.raises(ValueError, match=f"seed is {seed}: give an integer of 64 bits"):
        na.ablation_effect(trace, na.MLPNeuron(1, 3), controls=1, seed=seed)


@pytest.mark.parametrize(
    ("target", "contrast"), [(11, False), (na.AnyOf([11, 3]), False), (na.Contrast(11, 3), True)]
)
def test_a_contrast_is_told_by_its_numbers(target: Any, contrast: bool) -> None:
    assert Outcomes.before(traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model, target)).is_contrast is contrast
    sure = torch.tensor([-1e3, -700.0, -1e-9, 0.0]).double()
    assert not Outcomes(sure, sure.exp(), torch.ones(4).long(), torch.ones(4).long()).is_contrast


def test_a_model_that_changed_since_the_trace_is_refused(few: zoo.ZooCase) -> None:
    trace = na.trace(few.model, list(few.tokens), 11)
    with (
        na.ablating(few.model, na.Layer(0, "mlp")),
        pytest.raises(
            ValueError, match="no longer predicts what was traced: without any ablation, log-probabilities"
        ),
    ):
        na.ablation_effect(trace, na.Head(1, 0))


def test_a_hook_that_never_fires_is_named(few: zoo.ZooCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, real = "blocks.1.attn.hook_result", variants.hooks_for
    assert dead in few.model.hook_dict

    def moved(*args: Any) -> Any:
        pairs = real(*args)
        return [(dead if name.endswith("1.attn.hook_z") else name, hook) for name, hook in pairs]

    monkeypatch.setattr(variants, "hooks_for", moved)
    trace = na.trace(few.model, list(few.tokens), 11)
    na.ablation_effect(trace, na.Head(0, 0))
    with pytest.raises(na.UnsupportedModelError, match=f"the hook on {dead} of .* never fired"):
        na.ablation_effect(trace, [na.Head(0, 0), na.Head(1, 0)])


# Curves


def test_a_curve_is_its_effects(few: zoo.ZooCase) -> None:
    traces = traces_of(few.model)[:2]
    ranked = [na.value_neurons(trace, "mlp", k=20) for trace in traces]
    curve = na.ablation_curve(traces, ranked, sizes=[1, 5, 20], controls=4, progress=False)
    assert curve.sizes == (1, 5, 20)
    assert [outcomes.rank.shape for outcomes in curve.controls] == [(4, 2)] * 3
    for i, size in enumerate(curve.sizes):
        effect = na.ablation_effect(traces, [r.top(size) for r in ranked])
        torch.testing.assert_close(curve.after[i].log_prob, effect.after.log_prob, rtol=0, atol=2e-5)
    frame = curve.to_frame()
    assert frame["size"].tolist() == [1] * 4 + [5] * 4 + [20] * 4
    assert frame["metric"].tolist() == [*METRICS] * 3
    row = frame[(frame["size"] == 5) & (frame["metric"] == "log_prob")].iloc[0]
    change = (curve.after[1].log_prob - curve.before.log_prob).mean().item()
    assert row["change"] == pytest.approx(change)
    draws = (curve.controls[1].log_prob - curve.before.log_prob).mean(-1)
    assert (row["control_min"], row["control_max"]) == (draws.min().item(), draws.max().item())


def test_sizes_of_a_curve() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    ranked = na.value_neurons(trace, "mlp", k=10)
    with pytest.raises(ValueError, match=r"sizes go up to 300, but 10 neurons are ranked: rank more \(k=300\)"):
        na.ablation_curve(trace, ranked)
    for sizes, message in (
        ([], "asks for nothing"),
        ([5, 1], "do not ascend"),
        ([2, 2], "do not ascend"),
        ([0], "is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            na.ablation_curve(trace, ranked, sizes)
    with pytest.raises(ValueError, match=r"size 3 was not run: the sizes are \[1, 2\]"):
        na.ablation_curve(trace, ranked, [1, 2], progress=False).summary(3)


def test_the_progress_bar_can_be_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    ranked = na.value_neurons(trace, "mlp", k=10)
    capfd.readouterr()
    na.ablation_curve(trace, ranked, [1, 2], controls=2, progress=False)
    na.ablation_effect(trace, ranked)
    assert capfd.readouterr() == ("", "")
    na.ablation_curve(trace, ranked, [1, 2], controls=2)
    shown = capfd.readouterr()
    assert "6/6" in shown.err
    assert shown.out == ""


# Results


def test_results_read_well_and_hold_no_graph() -> None:
    trace = traces_of(zoo.case("gpt2", zoo.BACKENDS[0]).model)[0]
    ranked = na.value_neurons(trace, "mlp", k=6)
    effect = na.ablation_effect(trace, ranked, controls=5)
    curve = na.ablation_curve(trace, ranked, [1, 6], controls=5, progress=False)
    for outcomes in (effect.before, effect.after, effect.controls, *curve.after, *curve.controls):
        for tensor in (outcomes.log_prob, outcomes.probability, outcomes.rank, outcomes.top_token):
            assert not tensor.requires_grad
    lines = repr(effect).splitlines()
    assert lines[0].startswith(f"Ablating {ranked[0]}, {ranked[1]}, ")
    assert "(6) of" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == list(METRICS)
    assert "controls' change" in lines[2]
    assert [line.split()[0] for line in repr(curve).splitlines()[2:]] == ["1", "6"]
    assert "<table>" in effect._repr_html_()
    assert "<table>" in curve._repr_html_()
    record = json.loads(effect.to_json())
    assert record["schema"] == "tl_neuron_attr.ablation_effect"
    assert record["after"]["log_prob"] == effect.after.log_prob.tolist()
    assert record["provenance"][0]["tokens"] == PROMPTS[0]
    assert record["neurons"] == [[str(neuron) for neuron in ranked]]
    assert record["protocol"] == {"mode": "zero", "positions": None, "scope": "neuron", "controls": 5, "seed": 0}
    assert json.loads(curve.to_json())["sizes"] == [1, 6]
    frame = effect.to_frame()
    assert frame["log_prob_change"].item() == frame["log_prob_after"].item() - frame["log_prob_before"].item()
    assert effect.summary_frame()["metric"].tolist() == list(METRICS)


def test_top_neurons_of_the_embedded_model_stand_far_outside_random_ones() -> None:
    """10 of 46,080 MLP value neurons carry the answer; 10 random ones of the same layers do not."""
    trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
    ranked = na.value_neurons(trace, "mlp", k=10)
    assert ranked.n_neurons == 46080
    row = na.ablation_effect(trace, ranked, controls=20).of("log_prob")
    assert row.change < -2
    assert row.rank_among_controls == 1
    assert row.control_min > -0.2
    assert row.z < -20
