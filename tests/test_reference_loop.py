"""The reference loop itself against values handed out with the project, before it judges anything."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import zoo
from reference_forward import record
from reference_loop import Loop, top_attn, top_mlp

VALUES = (("tiny-gpt2", "paper"), ("tiny-gpt2", "exact"), ("tiny-llama", "paper"))
TOLERANCE = 2e-6  # the values carry about 1e-6 of rounding


@functools.cache
def values(model: str, convention: str) -> dict[str, Any]:
    return json.loads((zoo.DATA / model / f"{convention}.json").read_text())


@functools.cache
def loop(model: str, convention: str) -> Loop:
    expected = values(model, convention)
    return Loop(record(zoo.hf_model(model), expected["tokens"]), convention=convention)


@pytest.mark.parametrize(("model", "convention"), VALUES)
def test_values(model: str, convention: str) -> None:
    expected, found = values(model, convention), loop(model, convention)
    assert found.target == expected["target"]
    attn, mlp = found.layer_scores()
    np.testing.assert_allclose(attn, expected["layer_scores"]["attn"], atol=TOLERANCE)
    np.testing.assert_allclose(mlp, expected["layer_scores"]["mlp"], atol=TOLERANCE)
    rounding = 5.1e-5 if convention == "paper" else TOLERANCE  # head scores of the paper have four places
    np.testing.assert_allclose(found.head_scores(), expected["head_scores"], atol=rounding)
    if "position_scores" in expected:
        where = expected["position_scores"]
        scores = found.position_scores(where["layer"], where["head"])
        np.testing.assert_allclose(scores, where["scores"], atol=TOLERANCE)
    mlp_scores, attn_scores = found.mlp_scores(), found.attn_scores()
    for layer, neuron, score in expected["mlp_neurons"]:
        assert abs(mlp_scores[layer, neuron] - score) < TOLERANCE
    for layer, head, dim, source, score in expected["attn_neurons"]:
        assert abs(attn_scores[layer, source, head, dim] - score) < TOLERANCE


@pytest.mark.parametrize(("model", "convention"), VALUES)
def test_queries(model: str, convention: str) -> None:
    expected, found = values(model, convention), loop(model, convention)
    mlp_scores, attn_scores = found.mlp_scores(), found.attn_scores()
    where = expected["query_mlp_neurons"]
    scores = found.query_mlp_neurons(top_attn(attn_scores, where["of_top_attn"]))
    for layer, neuron, score in where["neurons"]:
        assert abs(scores[layer, neuron] - score) < TOLERANCE
    for key, top, neurons in (
        ("query_layers_of_attn", "of_top_attn", functools.partial(top_attn, attn_scores)),
        ("query_layers_of_mlp", "of_top_mlp", functools.partial(top_mlp, mlp_scores)),
    ):
        if key in expected:
            where = expected[key]
            embed, attn, mlp = found.query_layers(neurons(where[top]))
            # A share divides by a sum of parts that may nearly cancel, which enlarges rounding: 3e-5.
            np.testing.assert_allclose(embed, where["embed"], atol=3e-5)
            np.testing.assert_allclose(attn, where["attn"], atol=3e-5)
            np.testing.assert_allclose(mlp, where["mlp"], atol=3e-5)
