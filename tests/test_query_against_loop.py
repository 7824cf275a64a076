"""Query scores against the plain float64 loop, on every model of the zoo behind every backend.

Processed weights are compared in everything, with the loop told what processing changes (`QueryLoop`): attention
neurons lose the constant of their values to the output bias, and LayerNorm models have centred keys under either
convention. What stays the same is the rest: layers' parts, MLP neurons, streams and keys.
"""

import functools
import warnings
from dataclasses import replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import zoo
from reference_forward import record
from reference_loop import Target
from reference_query_loop import Id, QueryLoop

import tl_neuron_attr as na
from tl_neuron_attr.query import TinyDenominatorWarning

pytestmark = pytest.mark.filterwarnings("error:the keys of")

# target, position, convention
QUESTIONS: dict[str, tuple[Target | None, int, str]] = {
    "top-exact": (None, -1, "exact"),
    "token-middle-paper": (70, 3, "paper"),
    "contrast-middle-exact": (("contrast", 90, 2), 4, "exact"),
    "any-paper": (("any", (3, 50, 9)), -1, "paper"),
}
GATED = ("llama", "llama_gqa", "qwen2")
# question, value neurons, key, normalise
TRIALS = {
    "mixed": ("top-exact", "mixed", "linearised", True),
    "attn-middle-paper": ("token-middle-paper", "attn", "linearised", True),
    "mlp-paper": ("any-paper", "mlp", "linearised", True),
    "mlp-gate-middle": ("contrast-middle-exact", "mlp", "gate", True),
    "mixed-in-products": ("any-paper", "mixed", "in", False),
    "attn-middle-products": ("contrast-middle-exact", "attn", "linearised", False),
}
KINDS_OF = {"mlp": ("mlp",), "attn": ("attn",), "mixed": ("mlp", "attn")}
FLOAT64_CASES = [pytest.param(*case, id="-".join(case)) for case in zoo.thinned(zoo.CASES)]


@functools.cache
def recording(name: str) -> Any:
    return record(zoo.hf_model(name), list(zoo.TOKENS))


@functools.cache
def loop(name: str, question: str, processed: bool) -> QueryLoop:
    target, position, convention = QUESTIONS[question]
    return QueryLoop(recording(name), target, position=position, convention=convention, processed=processed)


@functools.cache
def value_set(name: str, question: str, processed: bool, which: str) -> dict[Id, float]:
    """Some value neurons with their scores, of a kind or of both, in no order, none with a tiny denominator."""
    reference, rng = loop(name, question, processed), np.random.default_rng(len(name))
    ids = [i for kind in KINDS_OF[which] for i in rng.permutation(reference.ids(kind))[:10]]
    ids = [tuple(int(x) for x in i) for i in ids]
    rng.shuffle(ids)
    return {
        i: reference.value_score(i) for i in ids if min(abs(reference.cosine(i, k)) for k in keys_of(name)) > 5e-3
    }


@functools.cache
def dense(name: str, question: str, processed: bool, which: str, kind: str, key: str, normalise: bool) -> Any:
    found = loop(name, question, processed)
    return found.neurons(value_set(name, question, processed, which), kind, key, normalise)


def neuron_of(i: Id) -> Any:
    return na.MLPNeuron(*i) if len(i) == 2 else na.AttnNeuron(*i)


def id_of(neuron: Any) -> Id:
    if isinstance(neuron, na.MLPNeuron):
        return neuron.layer, neuron.neuron
    return neuron.layer, neuron.head, neuron.dim, neuron.source


def trace_of(case: zoo.ZooCase, question: str) -> Any:
    target, position, convention = QUESTIONS[question]
    if isinstance(target, tuple):
        target = na.Contrast(*target[1:]) if target[0] == "contrast" else na.AnyOf(target[1])
    return na.trace(case.model, list(case.tokens), target, position=position, convention=convention)


@functools.cache
def trace64(name: str, backend: str, question: str) -> Any:
    return trace_of(zoo.case(name, backend, torch.float64), question)


def close(found: Any, expected: Any, tolerance: float = 1e-8) -> None:
    """To a part of the largest: scores are sums over parts that may be many times larger."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))


def keys_of(name: str) -> tuple[str, ...]:
    return ("linearised", "gate", "in") if name in GATED else ("linearised",)


def check_layers(found: Any, expected: tuple[float, np.ndarray, np.ndarray], tolerance: float = 1e-8) -> None:
    embed, attn, mlp = expected
    close(np.array([found.embed, *found.attn.tolist(), *found.mlp.tolist()]), [embed, *attn, *mlp], tolerance)


def check_ranking(found: Any, expected: dict[Id, dict[int, float]], reference: QueryLoop, k: int) -> None:
    """Scores of all neurons, the best in order, and where each acts."""
    total = {i: sum(parts.values()) for i, parts in expected.items()}
    assert found.n_neurons == found.n_evaluated == len(total)
    assert len(found) == min(k, len(total)) == len(set(found.ids))
    close(found.scores, sorted(total.values(), reverse=True)[: len(found)])
    close(found.scores, [total[id_of(neuron)] for neuron in found.ids])
    rows = zip(found.ids, found.coefficients.tolist(), found.columns["pos"], strict=True)
    for neuron, coefficient, position in rows:
        i = id_of(neuron)
        if expected[i]:
            strongest = max(abs(part) for part in expected[i].values())
            assert abs(expected[i][position]) > strongest - 1e-9
            assert abs(coefficient - reference.coefficient(i, position)) < 1e-8


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize(("name", "backend"), FLOAT64_CASES)
def test_layers_and_neurons(name: str, backend: str, trial: str) -> None:
    """Shares of layers, which sum to the value neurons' own scores, and the best query neurons of both kinds."""
    question, which, key, normalise = TRIALS[trial]
    processed = backend not in zoo.UNPROCESSED
    reference, values = loop(name, question, processed), value_set(name, question, processed, which)
    trace, given = trace64(name, backend, question), [neuron_of(i) for i in values]
    found = na.query_layers(trace, given, key=key, normalise=normalise)
    check_layers(found, reference.layers(values, key, normalise))
    if normalise:
        close(found.embed + found.attn.sum().item() + found.mlp.sum().item(), sum(values.values()))
    for kind in ("mlp", "attn"):
        ranked = na.query_neurons(trace, given, kind, k=15, key=key, normalise=normalise)
        check_ranking(ranked, dense(name, question, processed, which, kind, key, normalise), reference, 15)


@pytest.mark.parametrize(("name", "backend"), FLOAT64_CASES)
def test_neurons_and_biases_make_a_layer(name: str, backend: str) -> None:
    """Every neuron of a layer, and what its output bias contributes, which no neuron has."""
    question, processed = "top-exact", backend not in zoo.UNPROCESSED
    reference, values = loop(name, question, processed), value_set(name, question, processed, "mixed")
    trace, given = trace64(name, backend, question), [neuron_of(i) for i in values]
    layers = na.query_layers(trace, given)
    layer = len(layers.attn) - 2
    for kind, parts in (("mlp", layers.mlp), ("attn", layers.attn)):
        found = na.query_neurons(trace, given, kind, k=10**6, layers=[layer])
        expected = dense(name, question, processed, "mixed", kind, "linearised", True)
        check_ranking(found, {i: parts for i, parts in expected.items() if i[0] == layer}, reference, 10**6)
        bias = reference.biases(values, kind, "linearised", True)[layer]
        assert abs(bias) > 1e-3 or name in GATED
        close(found.scores.sum().item() + bias, parts[layer])


def test_each_value_neuron_alone() -> None:
    """Shares of a set are the sums of each neuron's own."""
    for name, backend in zoo.ALL_CASES[:: len(zoo.BACKENDS)]:
        reference, values = loop(name, "top-exact", False), value_set(name, "top-exact", False, "mixed")
        trace = trace64(name, backend, "top-exact")
        for i, score in values.items():
            found = na.query_layers(trace, [neuron_of(i)])
            check_layers(found, reference.layers({i: score}, "linearised", True))


def test_float32(case: zoo.ZooCase) -> None:
    """A share's rounding grows with one over the cosine of key and stream: neurons with small ones are left out."""
    question, processed = "any-paper", case.backend not in zoo.UNPROCESSED
    reference, values = loop(case.name, question, processed), value_set(case.name, question, processed, "mixed")
    values = {i: score for i, score in values.items() if abs(reference.cosine(i)) > 0.05}
    assert len(values) > 4
    trace, given = trace_of(case, question), [neuron_of(i) for i in values]
    check_layers(na.query_layers(trace, given), reference.layers(values, "linearised", True), 1e-4)
    for kind in ("mlp", "attn"):
        total = {i: sum(parts.values()) for i, parts in reference.neurons(values, kind, "linearised", True).items()}
        found = na.query_neurons(trace, given, kind, k=30)
        close(found.scores, sorted(total.values(), reverse=True)[:30], 1e-4)
        close(found.scores, [total[id_of(neuron)] for neuron in found.ids], 1e-4)


# value neurons, however they are given


@pytest.fixture(params=zoo.BACKENDS)
def gqa(request: pytest.FixtureRequest) -> zoo.ZooCase:
    return zoo.case("llama_gqa", request.param)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_a_ranking_of_this_trace_is_its_ids(gqa: zoo.ZooCase, kind: str) -> None:
    trace = trace_of(gqa, "top-exact")
    ranking = na.value_neurons(trace, kind, k=9)
    expected = na.query_layers(trace, ranking)
    assert abs(expected.embed) + expected.mlp.abs().sum() > 1e-3
    backwards = list(ranking.ids[::-1])
    kept = na.RankedNeurons.from_json(ranking.to_json())
    for given in (ranking.ids, iter(ranking), backwards, backwards + backwards[:3], kept, ranking.top(9)):
        check_same_layers(na.query_layers(trace, given), expected)
    three = na.query_layers(trace, ranking.top(3))
    check_same_layers(na.query_layers(trace, ranking.ids[:3]), three)
    assert abs(three.embed - expected.embed) > 1e-4


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_scores_of_another_question_are_not_used(gqa: zoo.ZooCase, kind: str) -> None:
    """A ranking from another prompt, position, target or convention, or by another score, names neurons only."""
    trace, tokens = trace_of(gqa, "contrast-middle-exact"), list(gqa.tokens)
    target = na.Contrast(90, 2)
    rankings = [
        na.value_neurons(na.trace(gqa.model, other, what, position=at, convention=convention), kind, k=6)
        for other, what, at, convention in (
            ([9, *tokens[1:]], target, 4, "exact"),
            (tokens, target, 3, "exact"),
            (tokens, na.Contrast(2, 90), 4, "exact"),
            (tokens, None, 4, "exact"),
            (tokens[:3], target, 2, "paper"),
        )
    ]
    rankings.append(na.query_neurons(trace, na.value_neurons(trace, "mlp", k=5), kind, k=6))
    own = na.value_scores(trace, kind).scores
    for ranking in rankings:
        scores = torch.stack([own[place_of(neuron)] for neuron in ranking.ids])
        assert (ranking.scores - scores).abs().max() > 1e-3
        found = na.query_layers(trace, ranking)
        check_same_layers(found, na.query_layers(trace, ranking.ids))
        whole = found.embed + (found.attn + found.mlp).sum().item()
        assert abs(whole - scores.sum().item()) < 1e-3


def place_of(neuron: Any) -> tuple[int, ...]:
    i = id_of(neuron)
    return i if len(i) == 2 else (i[0], i[3], i[1], i[2])


def check_same_layers(found: Any, expected: Any) -> None:
    check_layers(found, (expected.embed, expected.attn.numpy(), expected.mlp.numpy()), 1e-5)


def test_another_convention_is_another_score() -> None:
    """On a LayerNorm model, where the readout's constant counts."""
    case = zoo.case("gpt2", zoo.UNPROCESSED[0])
    exact, paper = (na.trace(case.model, list(case.tokens), 11, convention=c) for c in ("exact", "paper"))
    ranking = na.value_neurons(paper, "mlp", k=6)
    check_same_layers(na.query_layers(exact, ranking), na.query_layers(exact, ranking.ids))


@pytest.mark.parametrize("backend", zoo.BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_settings_that_must_not_matter(name: str, backend: str) -> None:
    """The memory budget, a subset of layers, and for a plain MLP the key."""
    trace = trace_of(zoo.case(name, backend), "any-paper")
    given = [*na.value_neurons(trace, "mlp", k=8), *na.value_neurons(trace, "attn", k=8)]
    for kind in ("mlp", "attn"):
        whole = na.query_neurons(trace, given, kind, k=60)
        small = na.query_neurons(trace, given, kind, k=25, memory_budget=2**20)
        close(small.scores, whole.scores[:25], 1e-5)
        part = na.query_neurons(trace, given, kind, k=12, layers=[0])
        expected = [row for row in zip(whole.ids, whole.scores.tolist(), strict=True) if row[0].layer == 0][:12]
        assert len(expected) == 12 and part.ids == tuple(neuron for neuron, _ in expected)
        close(part.scores, [score for _, score in expected], 1e-5)
        if name not in GATED:
            for key in ("gate", "in"):
                assert torch.equal(na.query_neurons(trace, given, kind, k=25, key=key).scores, whole.scores[:25])


def test_gradients_are_neither_left_on_nor_kept(gqa: zoo.ZooCase) -> None:
    """The linearised key differentiates the activation function."""
    trace = trace_of(gqa, "top-exact")
    given = na.value_neurons(trace, "mlp", k=5)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            layers, neurons = na.query_layers(trace, given), na.query_neurons(trace, given, k=5)
            assert torch.is_grad_enabled() is enabled
        for tensor in (layers.attn, layers.mlp, neurons.scores, neurons.coefficients):
            assert not tensor.requires_grad
    assert all(parameter.grad is None for parameter in gqa.model.parameters())


# denominators


def planted(kind: str) -> tuple[Any, int, list[Any]]:
    """A grouped-query model with one neuron whose key is at a right angle to what it reads, and its names.

    Changing what a neuron reads changes nothing that was written before it. All query heads of the key-value head
    have that value; among them are the first and last.
    """
    hf, layer = zoo.clone(zoo.hf_model("llama_gqa"), torch.float32), 1
    found = record(hf, list(zoo.TOKENS)).layers[layer]
    block = zoo.blocks(hf)[layer]
    if kind == "mlp":
        matrices, row = (block.mlp.up_proj.weight, block.mlp.gate_proj.weight), 17
        read, gain = found.resid_pre[-1] + found.attn_out[-1], found.gain_mlp
        names = [na.MLPNeuron(layer, 17)]
    else:
        matrices, row, source = (block.self_attn.v_proj.weight,), 16 + 3, 2
        read, gain = found.resid_pre[source], found.gain_attn
        names = [na.AttnNeuron(layer, head, 3, source) for head in (3, 4, 5)]
    with torch.no_grad():
        for weight in matrices:
            k = weight[row].double().numpy() * gain
            k = k - (k @ read) / (read @ read) * read
            weight[row] = torch.tensor(k / gain)
    return hf, layer, names


@pytest.mark.parametrize("backend", zoo.BACKENDS)
@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_a_tiny_denominator_warns_and_names_the_neurons(backend: str, kind: str) -> None:
    hf, layer, names = planted(kind)
    trace = na.trace(zoo.build(hf, backend), list(zoo.TOKENS), 11)
    sound = na.MLPNeuron(layer, 18) if kind == "mlp" else replace(names[0], dim=4)
    for ask in (na.query_layers, na.query_neurons):
        with pytest.warns(TinyDenominatorWarning, match="tiny denominator") as caught:
            ask(trace, [sound, *names])
        [message] = [str(w.message) for w in caught if w.category is TinyDenominatorWarning]
        assert all(str(name) in message for name in names) and str(sound) not in message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ask(trace, [sound, *names], normalise=False)
            ask(trace, [sound])


# bad input


# Of a model with 2 layers, 6 heads of 16 dimensions and 52 MLP neurons, at position 4: what is given, what is said.
SOME = (na.MLPNeuron(1, 0), na.AttnNeuron(1, 5, 15, 4))
BAD_VALUE_NEURONS = {
    "none": ((), "no value neurons"),
    "layer": ((na.MLPNeuron(2, 0),), "from 0 to 1"),
    "neuron": ((*SOME, na.MLPNeuron(1, 52)), "L1N52 does not exist here: neuron runs from 0 to 51"),
    "head": ((na.AttnNeuron(1, 6, 0, 0),), "head runs from 0 to 5"),
    "dim": ((na.AttnNeuron(1, 0, 16, 0), *SOME), "dim runs from 0 to 15"),
    "source": ((na.AttnNeuron(1, 0, 0, 5),), "source runs from 0 to 4"),
}
BAD_SETTINGS = {
    "kind": ({"kind": "head"}, "unknown kind 'head'"),
    "key": ({"key": "out"}, "unknown key 'out'"),
    "k": ({"k": 0}, "k is 0: ask for 1 or more"),
    "layers": ({"layers": [0, 2]}, "from 0 to 1"),
    "no layers": ({"layers": []}, "at least one layer"),
}


@pytest.mark.parametrize("which", BAD_VALUE_NEURONS)
def test_bad_value_neurons(gqa: zoo.ZooCase, which: str) -> None:
    neurons, message = BAD_VALUE_NEURONS[which]
    trace = na.trace(gqa.model, list(gqa.tokens), position=4)
    na.query_layers(trace, SOME)
    for ask in (na.query_layers, na.query_neurons):
        with pytest.raises(ValueError, match=message):
            ask(trace, neurons)


@pytest.mark.parametrize("which", BAD_SETTINGS)
def test_bad_settings(gqa: zoo.ZooCase, which: str) -> None:
    settings, message = BAD_SETTINGS[which]
    trace = na.trace(gqa.model, list(gqa.tokens), position=4)
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it: no shape checks that know the choices
    try:
        with pytest.raises(ValueError, match=message):
            na.query_neurons(trace, SOME, **settings)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
