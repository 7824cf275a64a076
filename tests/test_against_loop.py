"""The package against the plain float64 loop, on every model of the zoo behind every backend.

What processed weights change. Folding norms and centring weights leave the frozen readout `N(x)` and every base the
same up to multiples of the all-ones vector, which LayerNorm's centring removes (RMSNorm models are not centred), so
layer scores, MLP neurons and their coefficients are those of the unprocessed model. `fold_value_biases` is
different: it moves what is constant in the values into the attention's output bias. A head or attention neuron is
`pattern * value * W_O`, without output bias, so on processed weights it lacks that constant and its score differs,
while the layer's does not. The loop is told so (`value_constant`), and everything is compared.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from reference_forward import record
from reference_loop import Loop, Target, top_attn, top_mlp

import tl_neuron_attr as na

# target, position, convention
QUESTIONS: dict[str, tuple[Target | None, int, str]] = {
    "top-exact": (None, -1, "exact"),
    "token-paper": (11, -1, "paper"),
    "token-middle-exact": (70, 3, "exact"),
    "token-first-paper": (23, 0, "paper"),
    "contrast-exact": (("contrast", 7, 23), -1, "exact"),
    "contrast-middle-paper": (("contrast", 90, 2), 2, "paper"),
    "any-paper": (("any", (3, 50, 9)), -1, "paper"),
    "any-middle-exact": (("any", (1, 88)), 4, "exact"),
}


@functools.cache
def loop(name: str, question: str, value_constant: bool) -> tuple[Loop, dict[str, np.ndarray]]:
    """The loop and its dense scores: the slow part, once for all backends."""
    target, position, convention = QUESTIONS[question]
    found = Loop(recording(name), target, position=position, convention=convention, value_constant=value_constant)
    attn, mlp = found.layer_scores()
    return found, {
        "layers_attn": attn,
        "layers_mlp": mlp,
        "heads": found.head_scores(),
        "positions": found.position_scores(1, 2),
        "sources": found.source_scores(),
        "mlp": found.mlp_scores(),
        "attn": found.attn_scores(),
    }


@functools.cache
def recording(name: str) -> Any:
    return record(zoo.hf_model(name), list(zoo.TOKENS))


def target_of(target: Target | None) -> Any:
    if not isinstance(target, tuple):
        return target
    return na.Contrast(*target[1:]) if target[0] == "contrast" else na.AnyOf(target[1])


def trace_of(case: zoo.ZooCase, question: str) -> Any:
    target, position, convention = QUESTIONS[question]
    return na.trace(case.model, list(case.tokens), target_of(target), position=position, convention=convention)


def close(found: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=tolerance)


def check(case: zoo.ZooCase, question: str, tolerance: float) -> None:
    reference, expected = loop(case.name, question, case.value_constant)
    trace = trace_of(case, question)

    layers = na.layer_scores(trace)
    close(layers.attn, expected["layers_attn"], tolerance)
    close(layers.mlp, expected["layers_mlp"], tolerance)
    close(na.head_scores(trace).scores, expected["heads"], tolerance)
    close(na.position_scores(trace, 1, 2), expected["positions"][: reference.position + 1], tolerance)
    close(na.source_scores(trace), expected["sources"][:, : reference.position + 1], tolerance)

    n_sources = reference.position + 1  # a source after the predicting position adds nothing
    assert not expected["attn"][:, n_sources:].any()
    n_layers = len(expected["layers_mlp"])
    for kind, dense, top in (
        ("mlp", expected["mlp"], top_mlp),
        ("attn", expected["attn"][:, :n_sources], top_attn),
    ):
        scores = na.value_scores(trace, kind)
        assert scores.layers == tuple(range(n_layers))
        close(scores.scores, dense, tolerance)
        ranked = na.value_neurons(trace, kind, k=40)
        # Near ties may change places within rounding, so scores are compared by rank and by identity.
        close(ranked.scores, np.array(list(top(dense, 40).values())), tolerance)
        assert len(set(ranked.ids)) == len(ranked.ids) == 40
        rows = zip(ranked.ids, ranked.scores.tolist(), ranked.coefficients.tolist(), strict=True)
        for neuron, score, coefficient in rows:
            if kind == "mlp":
                where = (neuron.layer, neuron.neuron)
                assert abs(coefficient - reference.mlp_coefficient(*where)) < tolerance
            else:
                where = (neuron.layer, neuron.source, neuron.head, neuron.dim)
                given = (neuron.layer, neuron.head, neuron.dim, neuron.source)
                assert abs(coefficient - reference.attn_coefficient(*given)) < tolerance
            assert abs(score - dense[where]) < tolerance


@pytest.mark.parametrize("question", ["top-exact", "token-paper", "contrast-middle-paper", "any-middle-exact"])
def test_float32(case: zoo.ZooCase, question: str) -> None:
    check(case, question, 1e-4)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.CASES))
def test_float64(name: str, backend: str, question: str) -> None:
    check(zoo.case(name, backend, torch.float64), question, 1e-8)


@pytest.mark.parametrize(("name", "backend"), zoo.ALL_CASES)
def test_float64_as_the_libraries_leave_it(name: str, backend: str) -> None:
    """A float64 model whose RMSNorm, softmax and rotary angles are float32 inside is a model like any other."""
    hf = zoo.hf_model(name)
    model = zoo.plain(hf, backend, torch.float64)
    check(zoo.ZooCase(name, backend, model, hf, zoo.TOKENS), "top-exact", 1e-5)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_a_subset_of_layers(case: zoo.ZooCase, kind: str) -> None:
    """Rows belong to the layers asked for, and ids name the model's layers, not the rows."""
    question = "token-middle-exact"
    reference, expected = loop(case.name, question, case.value_constant)
    dense = expected[kind] if kind == "mlp" else expected[kind][:, : reference.position + 1]
    trace, last = trace_of(case, question), len(dense) - 1
    for layers in ([last], [0, last]):
        scores = na.value_scores(trace, kind, layers=layers)
        assert scores.layers == tuple(layers)
        close(scores.scores, dense[layers], 1e-4)
    ranked = na.value_neurons(trace, kind, k=15, layers=[last])
    assert {neuron.layer for neuron in ranked.ids} == {last}
    close(ranked.scores, np.sort(dense[last].ravel())[::-1][:15], 1e-4)


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.endswith("exact")])
def test_layer_scores_telescope(case: zoo.ZooCase, question: str) -> None:
    """They sum to the target of the model's own log-probabilities, less that of the embedding."""
    reference, _ = loop(case.name, question, True)
    layers = na.layer_scores(trace_of(case, question))
    start = reference.log_prob(reference.recording.embed[reference.position])
    own = zoo.log_probs(case.model, case.tokens)[reference.position]
    target = reference.target
    if not isinstance(target, tuple):
        end = own[target]
    elif target[0] == "contrast":
        end = own[target[1]] - own[target[2]]
    else:
        end = own[list(target[1])].logsumexp(0)
    assert abs((layers.attn.sum() + layers.mlp.sum()).item() - (end.item() - start)) < 1e-4
