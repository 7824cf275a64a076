"""The reference loop itself against values handed out with the project, before it judges anything."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import zoo
from reference_forward import Recording, record
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


# The recording of every architecture. `record` itself checks that values, activations, logits and what every block
# adds are those that the stream and the weights give; these check what the loop makes of them.


@functools.cache
def recording(name: str) -> Recording:
    return record(zoo.hf_model(name), list(zoo.TOKENS))


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_the_frozen_readout_of_the_final_stream_is_the_models_own(name: str) -> None:
    found = recording(name)
    for position in range(len(zoo.TOKENS)):
        for target in (3, int(found.log_probs[position].argmax())):
            at = Loop(found, target, position=position)
            assert abs(at.log_prob(found.final[position]) - found.log_probs[position, target]) < 1e-10


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_keys_times_the_stream_are_what_the_neurons_read(name: str) -> None:
    """Over the norm's scale, and but for a constant that no stream changes."""
    found = recording(name)
    loop, last = Loop(found), len(zoo.TOKENS) - 1
    for layer, r in enumerate(found.layers):
        scale_attn, scale_mlp = (
            np.ones(last + 1) if norm is None else norm.scale(x)
            for norm, x in ((r.norm_attn, r.resid_pre), (r.norm_mlp, r.mlp_read))
        )
        for source in range(last + 1):
            read = [loop.attn_key((layer, 1, d, source)) @ r.resid_pre[source] for d in range(r.W_O.shape[1])]
            kv = loop._kv_head(r, 1)
            value = np.array(read) / scale_attn[source] + r.value_constant[kv]
            if name == "olmo_clipped":
                value = value.clip(-1.5, 1.5)
            np.testing.assert_allclose(value, r.value[source, kv], atol=1e-10)
        read = np.array([loop.mlp_key((layer, n), "in") @ r.mlp_read[last] for n in range(r.W_out.shape[0])])
        constant = r.in_pre[last] - read / scale_mlp[last]
        other = np.array([loop.mlp_key((layer, n), "in") @ r.mlp_read[0] for n in range(r.W_out.shape[0])])
        np.testing.assert_allclose(r.in_pre[0] - other / scale_mlp[0], constant, atol=1e-10)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_neurons_and_biases_make_the_stream(name: str) -> None:
    """The vectors of one position add up, over every layer, to the final stream without embedding and biases."""
    found = recording(name)
    loop, last = Loop(found), len(zoo.TOKENS) - 1
    total = found.embed[last].copy()
    for layer, r in enumerate(found.layers):
        total += sum(loop.attn_vector(*i) for i in loop.attn_ids(layer))
        total += sum(loop.mlp_vector(layer, n) for n in range(r.W_out.shape[0]))
        total += r.attn_bias(last) + r.mlp_bias(last)
    np.testing.assert_allclose(total, found.final[last], rtol=1e-10, atol=1e-10)


def test_what_is_special_about_an_architecture_matters() -> None:
    """A cap that caps nothing, or a window longer than the prompt, would test nothing."""
    gemma2 = recording("gemma2")
    z = gemma2.norm(gemma2.final) @ gemma2.W_U + gemma2.b_U
    uncapped = z - np.log(np.exp(z).sum(-1, keepdims=True))
    assert gemma2.cap == 3.0 and abs(uncapped - gemma2.log_probs)[-1].max() > 0.5
    assert recording("granite").logit_scale == 2.0 and recording("cohere").logit_scale == 0.7
    for name in ("gemma2", "gemma3", "olmo2", "granite"):
        for r in recording(name).layers:
            assert r.attn_post is not None and r.mlp_post is not None
    assert all(r.norm_attn is None and r.norm_mlp is None for r in recording("olmo2").layers)
    assert (abs(recording("olmo_clipped").layers[0].value) == 1.5).sum() > 20
    windows = {"mistral": [3, 3], "gpt_neo": [7, 3], "gemma2": [3, 7], "gemma3": [3, 7], "llama": [7, 7, 7]}
    for name, widths in windows.items():
        assert [int((r.pattern[0, -1] > 0).sum()) for r in recording(name).layers] == widths
