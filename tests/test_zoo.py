"""The fixtures themselves: every backend computes what the Hugging Face model computes."""

import numpy as np
import pytest
import torch
import zoo
from reference_forward import record


def test_the_backends_of_this_version_exist() -> None:
    assert zoo.HOOKED or zoo.BRIDGE
    assert set(zoo.BACKENDS) >= ({"hooked", "hooked_processed"} if zoo.HOOKED else {"bridge", "bridge_compat"})


def test_reproduces_the_hugging_face_log_probabilities(case: zoo.ZooCase) -> None:
    with torch.no_grad():
        expected = case.hf_model(torch.tensor([case.tokens])).logits[0].log_softmax(-1)
    assert (zoo.log_probs(case.model, case.tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "backend"), zoo.CASES)
def test_values_and_activations_are_those_of_the_recording(name: str, backend: str) -> None:
    """In float64 to rounding; and processing takes exactly the constant part out of the values."""
    case = zoo.case(name, backend, torch.float64)
    recording = record(case.hf_model, list(case.tokens))
    with torch.no_grad():
        logits, cache = case.model.run_with_cache(torch.tensor([case.tokens]))
    np.testing.assert_allclose(logits[0].log_softmax(-1).numpy(), recording.log_probs, atol=1e-10)
    for layer, expected in enumerate(recording.layers):
        value = expected.value - (0 if case.value_constant else expected.value_constant)
        np.testing.assert_allclose(cache[f"blocks.{layer}.attn.hook_v"][0].numpy(), value, atol=1e-10)
        np.testing.assert_allclose(cache[f"blocks.{layer}.mlp.hook_post"][0].numpy(), expected.mlp_act, atol=1e-10)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_bias_and_norm_weight_is_random(name: str) -> None:
    for key, parameter in zoo.hf_model(name).named_parameters():
        if parameter.ndim == 1:
            assert parameter.std() > 0.1, key
