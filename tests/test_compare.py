"""Comparative neuron analysis: the top of the score differences is that of the dense ones, found with less work.

Order is compared strictly on float64 models, where two paths to a score differ by 1e-15 and neurons by far more.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_forward import record
from reference_query_loop import Id, QueryLoop

import tl_neuron_attr as na
from tl_neuron_attr.candidates import Candidates
from tl_neuron_attr.readout import Readout

TARGETS = {"token": 11, "contrast": na.Contrast(7, 23), "any": na.AnyOf([3, 50, 9])}
OTHER = (5, 17, 61, 8, 2, 90, 12)  # a prompt as long as the zoo's
FEW = [
    pytest.param(name, backend, id=f"{name}-{backend}") for name in ("gpt2", "llama_gqa") for backend in zoo.BACKENDS
]


def neuron_of(kind: str, layer: int, index: tuple[int, ...]) -> Any:
    if kind == "mlp":
        return na.MLPNeuron(layer, *index)
    source, head, dim = index
    return na.AttnNeuron(layer, head, dim, source)


def id_of(neuron: Any) -> Id:
    if isinstance(neuron, na.MLPNeuron):
        return neuron.layer, neuron.neuron
    return neuron.layer, neuron.head, neuron.dim, neuron.source


def dense(a: Any, b: Any, kind: str, layers: list[int] | None = None) -> dict[Any, tuple[float, float]]:
    """{neuron: its two scores}, the largest difference first, equal ones by id."""
    chosen = na.value_scores(a, kind, layers=layers)
    first, second = chosen.scores.numpy(), na.value_scores(b, kind, layers=layers).scores.numpy()
    rows = {}
    for (row, *index), score in np.ndenumerate(first):
        neuron = neuron_of(kind, chosen.layers[row], tuple(index))
        rows[neuron] = (float(score), float(second[(row, *index)]))
    return dict(sorted(rows.items(), key=lambda item: (item[1][1] - item[1][0], id_of(item[0]))))


def check(a: Any, b: Any, kind: str, k: int, layers: list[int] | None = None) -> Any:
    """Ids, order and scores; float64 only."""
    expected = list(dense(a, b, kind, layers).items())
    found = na.compare(a, b, kind, k, layers=layers)
    assert found.n_neurons == len(expected) and found.n_evaluated <= len(expected)
    expected = expected[:k]
    assert len(found) == len(expected) and list(found.ids) == [neuron for neuron, _ in expected]
    first, second = np.array([scores for _, scores in expected]).T
    for value, scores in (
        (found.scores.numpy(), first - second),
        (np.array(found.columns["score_a"]), first),
        (np.array(found.columns["score_b"]), second),
    ):
        np.testing.assert_allclose(value, scores, rtol=0, atol=1e-11)
    for trace, coefficients in ((a, found.coefficients.tolist()), (b, found.columns["coefficient_b"])):
        own = na.value_scores(trace, kind, layers=layers).coefficients
        for neuron, coefficient in zip(found.ids, coefficients, strict=True):
            row = neuron.layer if layers is None else layers.index(neuron.layer)
            place = (neuron.neuron,) if kind == "mlp" else (neuron.source, neuron.head, neuron.dim)
            assert abs(own[(row, *place)].item() - coefficient) < 1e-12
    return found


# conditions, each two traces


@functools.cache
def other_model(name: str, backend: str) -> Any:
    """The same architecture with other weights, as after fine-tuning."""
    return zoo.build(zoo.hf_model(name, seed=1), backend, torch.float64)


def prompts(case: zoo.ZooCase, target: Any, convention: str) -> tuple[Any, Any]:
    return tuple(na.trace(case.model, list(tokens), target, convention=convention) for tokens in (case.tokens, OTHER))


def models(case: zoo.ZooCase, target: Any, convention: str) -> tuple[Any, Any]:
    both = (case.model, other_model(case.name, case.backend))
    return tuple(na.trace(model, list(case.tokens), target, position=4, convention=convention) for model in both)


def head_ablated(case: zoo.ZooCase, target: Any, convention: str) -> tuple[Any, Any]:
    """A head of the first layer that attends nowhere; the base comes second, so the best are those that gain."""
    fired = []

    def nowhere(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        fired.append(hook.name)
        pattern = pattern.clone()
        pattern[:, 1] = 0
        return pattern

    base = na.trace(case.model, list(case.tokens), target, convention=convention)
    with case.model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", nowhere)]):
        ablated = na.trace(case.model, list(case.tokens), target, convention=convention)
    assert fired == ["blocks.0.attn.hook_pattern"]
    assert na.head_scores(ablated).scores[0, 1] == 0 != na.head_scores(base).scores[0, 1]
    return ablated, base


def neurons_ablated(case: zoo.ZooCase, target: Any, convention: str) -> tuple[Any, Any]:
    """Two MLP neurons, by the package's own ablation: there they have no score."""
    base = na.trace(case.model, list(case.tokens), target, convention=convention)
    with na.ablating(case.model, [na.MLPNeuron(0, 3), na.MLPNeuron(1, 5)]):
        ablated = na.trace(case.model, list(case.tokens), target, convention=convention)
    scores = na.value_scores(ablated, "mlp").scores
    assert max(abs(scores[0, 3]), abs(scores[1, 5])) < 1e-15 < abs(na.value_scores(base, "mlp").scores[0, 3])
    return base, ablated


CONDITIONS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "prompts": prompts,
    "models": models,
    "head": head_ablated,
    "neurons": neurons_ablated,
}


ASKED = [("prompts", "token"), ("prompts", "contrast"), ("models", "any"), ("head", "token"), ("neurons", "any")]


@pytest.mark.parametrize(("condition", "target"), ASKED)
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_equals_dense_differences(name: str, backend: str, condition: str, target: str) -> None:
    case = zoo.case(name, backend, torch.float64)
    a, b = CONDITIONS[condition](case, TARGETS[target], "paper" if condition == "models" else "exact")
    for kind in ("mlp", "attn"):
        found = check(a, b, kind, 10)
        assert found.kind == kind and found.method == "log_prob_increase_difference"
        assert found.provenance == a.provenance
        assert found.scores[0] > 1e-5
        if target == "contrast":
            assert found.n_evaluated < found.n_neurons / 2  # bounds are the scores


@pytest.mark.parametrize(("name", "backend"), [pytest.param(*case, id="-".join(case)) for case in zoo.CASES])
def test_every_case(name: str, backend: str) -> None:
    """All neurons of all models, in float64: the order is that of the differences, highest to lowest."""
    a, b = prompts(zoo.case(name, backend, torch.float64), 70, "exact")
    for kind, layers in (("mlp", None), ("attn", [1])):
        found = check(a, b, kind, 10**6, layers)
        assert len(found) == found.n_neurons
        back = na.compare(b, a, kind, 10**6, layers=layers)
        assert torch.equal(back.scores, -found.scores.flip(0))


tokens = st.integers(0, 95)  # every zoo model has at least these
pairs = st.lists(tokens, min_size=2, max_size=2, unique=True)
targets = st.tuples(st.sampled_from(["top", "token", "contrast", "any"]), pairs)


def target_of(drawn: tuple[str, list[int]]) -> Any:
    kind, (first, second) = drawn
    return {"top": None, "token": first, "contrast": na.Contrast(first, second), "any": na.AnyOf([first, second])}[
        kind
    ]


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(zoo.CASES),
    prompt=st.lists(tokens, min_size=1, max_size=8),
    change=st.tuples(st.integers(0, 7), tokens),
    asked=st.tuples(targets, targets),
    kind=st.sampled_from(["mlp", "attn"]),
    k=st.one_of(st.integers(1, 20), st.integers(21, 3000)),
    layers=st.sampled_from([None, [0], [1], [0, 1]]),
    convention=st.sampled_from(["exact", "paper"]),
)
def test_equals_dense_differences_whatever_is_asked(
    pair: Any, prompt: Any, change: Any, asked: Any, kind: str, k: int, layers: Any, convention: str
) -> None:
    """Two prompts that differ in a token, and two targets, which may be of different kinds."""
    model, other = zoo.case(*pair, torch.float64).model, list(prompt)
    other[change[0] % len(other)] = change[1]
    a = na.trace(model, prompt, target_of(asked[0]), convention=convention)
    b = na.trace(model, other, target_of(asked[1]), convention=convention)
    check_with_ties(a, b, kind, k, layers)


def check_with_ties(a: Any, b: Any, kind: str, k: int, layers: Any) -> None:
    """As `check`, where prompts share a beginning: what reads only that has differences of zero, or of rounding."""
    expected = dense(a, b, kind, layers)
    found = na.compare(a, b, kind, k, layers=layers)
    best = np.array([first - second for first, second in expected.values()])[:k]
    np.testing.assert_allclose(found.scores.numpy(), best, rtol=0, atol=1e-11)
    for neuron, score in zip(found.ids, found.scores.tolist(), strict=True):
        assert abs(expected[neuron][0] - expected[neuron][1] - score) < 1e-11


# ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_nothing_differs_from_itself(name: str, backend: str, dtype: torch.dtype) -> None:
    """Every difference is exactly zero, so the order is that of ids."""
    model = zoo.case(name, backend, dtype).model
    a, b = (na.trace(model, list(zoo.TOKENS), 11) for _ in range(2))
    for kind in ("mlp", "attn"):
        every = sorted(dense(a, b, kind), key=id_of)
        for k in (7, 10**6):
            found = na.compare(a, b, kind, k)
            assert not found.scores.any()
            assert list(found.ids) == every[:k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("backend", (zoo.BACKENDS[0], zoo.BACKENDS[-1]))
def test_equal_neurons_have_equal_differences(backend: str, target: str, dtype: torch.dtype) -> None:
    """Neurons 3, 20 and 70 of a layer are one neuron three times: always together, in that order, or cut there.

    Float32 scores are the same to the last bit however many are asked for; float64 ones to 1e-15.
    """
    hf = zoo.clone(zoo.hf_model("gpt2"), torch.float32)
    mlp = zoo.blocks(hf)[1].mlp
    with torch.no_grad():
        for twin in (20, 70):
            mlp.c_fc.weight[:, twin] = mlp.c_fc.weight[:, 3]
            mlp.c_fc.bias[twin] = mlp.c_fc.bias[3]
            mlp.c_proj.weight[twin] = mlp.c_proj.weight[3]
    model = zoo.build(hf, backend, dtype)
    traces = [na.trace(model, list(tokens), TARGETS[target]) for tokens in (zoo.TOKENS, OTHER)]
    for i, trace in enumerate(traces):
        post = trace.post[1].clone()  # the model's own matrix product may round equal columns differently
        torch.testing.assert_close(post[:, [20, 70]], post[:, [3, 3]], rtol=0, atol=1e-6)
        post[:, [20, 70]] = post[:, [3, 3]]
        traces[i] = replace(trace, post=(trace.post[0], post, *trace.post[2:]))
    triplet = [na.MLPNeuron(1, n) for n in (3, 20, 70)]
    for a, b in (traces, traces[::-1]):
        every = na.compare(a, b, "mlp", 10**6)
        place = every.ids.index(triplet[0])
        assert list(every.ids[place : place + 3]) == triplet
        assert len(set(every.scores[place : place + 3].tolist())) == 1
        for k in (place + 1, place + 2):
            found = na.compare(a, b, "mlp", k)
            assert found.ids == every.ids[:k]
            mine = [s for n, s in zip(found.ids, found.scores.tolist(), strict=True) if n in triplet]
            assert len(set(mine)) == 1
            assert (found.scores - every.scores[:k]).abs().max() <= (0 if dtype is torch.float32 else 1e-14)


# bounds


@pytest.mark.parametrize("backend", zoo.BACKENDS)
@pytest.mark.parametrize("target", TARGETS)
def test_bounds_that_count_few_tokens_one_by_one(backend: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies are counted in part; so is a small one here."""
    monkeypatch.setattr("tl_neuron_attr.spread._TOP_TOKENS", 6)
    a, b = prompts(zoo.case("qwen2", backend, torch.float64), TARGETS[target], "exact")
    for kind in ("mlp", "attn"):
        check(a, b, kind, 12)


@pytest.mark.parametrize("top_tokens", [6, 2048])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "backend"), FEW)
def test_scores_are_within_their_bounds(
    name: str, backend: str, target: str, top_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every neuron's, whether all tokens are counted one by one or only the most probable."""
    monkeypatch.setattr("tl_neuron_attr.spread._TOP_TOKENS", top_tokens)
    trace = na.trace(zoo.case(name, backend, torch.float64).model, list(zoo.TOKENS), TARGETS[target])
    for kind in ("mlp", "attn"):
        scores = na.value_scores(trace, kind).scores
        bounds = Candidates(trace, Readout.of(trace), kind, range(len(scores)))
        for layer, mine in enumerate(scores):
            ordered = mine if kind == "mlp" else mine.permute(1, 2, 0)  # head, dim, source
            assert (bounds.lower(layer) <= ordered.flatten()).all()
            assert (ordered.flatten() <= bounds.upper(layer)).all()


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_the_budget_does_not_matter(kind: str) -> None:
    a, b = prompts(zoo.case("llama_gqa", zoo.BACKENDS[0], torch.float64), 11, "exact")
    found, small = na.compare(a, b, kind, 25), na.compare(a, b, kind, 25, memory_budget=2**21)
    assert found.ids == small.ids
    np.testing.assert_allclose(found.scores, small.scores, rtol=0, atol=1e-12)


# each condition has its own stream, activations and readout


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_against_the_loop(backend: str, kind: str) -> None:
    """Two models under grouped-query attention, by the plain loop of each."""
    case, processed = zoo.case("llama_gqa", backend, torch.float64), backend not in zoo.UNPROCESSED
    a, b = models(case, 11, "exact")
    first, second = (
        QueryLoop(record(hf, list(case.tokens)), 11, position=4, processed=processed)
        for hf in (case.hf_model, zoo.hf_model("llama_gqa", seed=1))
    )
    found = na.compare(a, b, kind, 12)
    differences = {i: first.value_score(i) - second.value_score(i) for i in first.ids(kind)}
    assert [id_of(n) for n in found.ids] == sorted(differences, key=lambda i: -differences[i])[:12]
    np.testing.assert_allclose(found.scores, [differences[id_of(n)] for n in found.ids], rtol=0, atol=1e-8)


def test_prompts_of_different_length() -> None:
    """MLP neurons are the same neurons at any position; attention neurons are named by their source."""
    case = zoo.case("gpt2", zoo.BACKENDS[0], torch.float64)
    a = na.trace(case.model, list(case.tokens), 11)
    b = na.trace(case.model, list(OTHER[:4]), 11)
    check(a, b, "mlp", 20)
    with pytest.raises(ValueError, match=r"positions 6 and 3.* do not correspond"):
        na.compare(a, b, "attn", 5)
    # Longer prompts with the same predicting position do correspond.
    check(a, na.trace(case.model, [*OTHER, 4, 4], 11, position=6), "attn", 20)


def test_the_frame() -> None:
    a, b = prompts(zoo.case("gpt2", zoo.BACKENDS[0]), 11, "exact")
    extra = ["score_a", "score_b", "coefficient_b"]
    mlp, attn = na.compare(a, b, "mlp", 3).to_frame(), na.compare(a, b, "attn", 3).to_frame()
    assert list(mlp.columns) == ["layer", "neuron", "score", "coefficient", *extra]
    assert list(attn.columns) == ["layer", "head", "dim", "source", "score", "coefficient", "source_token", *extra]
    for frame in (mlp, attn):
        np.testing.assert_allclose(frame.score, frame.score_a - frame.score_b, rtol=0, atol=1e-6)


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "neuron"}, "unknown kind 'neuron'"),
        ({"k": 0}, "k is 0: ask for 1 or more"),
        ({"layers": [3]}, "from 0 to 2"),
        ({"layers": []}, "at least one layer"),
        ({"memory_budget": 1000}, "memory_budget"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    a, b = prompts(zoo.case("gpt2", zoo.BACKENDS[0]), 11, "exact")
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it: no shape checks that know the choices
    try:
        with pytest.raises(ValueError, match=message):
            na.compare(a, b, **{"kind": "mlp", **arguments})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_what_cannot_be_compared() -> None:
    backend = zoo.BACKENDS[0]
    gpt2, neox, gqa = (na.trace(zoo.case(name, backend).model, [1, 2], 11) for name in ("gpt2", "neox", "llama_gqa"))
    with pytest.raises(ValueError, match=r"n_layers=3, .* n_layers=2"):
        na.compare(gpt2, gqa, "mlp", 3)
    with pytest.raises(ValueError, match=r"\(72, 72, 72\) and \(64, 64, 64\) mlp neurons"):
        na.compare(gpt2, neox, "mlp", 3)
    paper = na.trace(zoo.case("gpt2", backend).model, [1, 2], 11, convention="paper")
    with pytest.raises(ValueError, match="conventions 'exact' and 'paper'"):
        na.compare(gpt2, paper, "mlp", 3)


# the embedded model


DEMO_BACKENDS = tuple(["bridge"] * zoo.BRIDGE + ["hooked"] * zoo.HOOKED)


@functools.cache
def demo(backend: str, target: str) -> tuple[Any, Any]:
    model = na.load_demo_model(backend=backend)
    what = na.Contrast(" Paris", " Rome") if target == "contrast" else " Paris"
    return tuple(na.trace(model, f"The capital of {land} is", what) for land in ("France", "Italy"))


DEMO = [
    (DEMO_BACKENDS[0], "mlp", 27, "token"),
    (DEMO_BACKENDS[0], "attn", 23, "token"),
    (DEMO_BACKENDS[-1], "mlp", 27, "contrast"),
]


@pytest.mark.parametrize(("backend", "kind", "layer", "target"), DEMO)
@pytest.mark.any_release
def test_demo_model(backend: str, kind: str, layer: int, target: str) -> None:
    """Few evaluations among up to 86,400 neurons; one layer of them is compared with its dense differences."""
    a, b = demo(backend, target)
    found = na.compare(a, b, kind, 30)
    assert found.n_neurons == 30 * {"mlp": 1536, "attn": 9 * 64 * 5}[kind]
    assert found.n_evaluated < (found.n_neurons / 50 if target == "token" else 100)
    expected = dense(a, b, kind, [layer])
    cut = found.scores[-1].item()
    mine = {n: s for n, s in zip(found.ids, found.scores.tolist(), strict=True) if n.layer == layer}
    assert mine
    for neuron, (first, second) in expected.items():
        if neuron in mine:
            assert abs(first - second - mine[neuron]) < 1e-5
        else:
            assert first - second < cut + 1e-5
