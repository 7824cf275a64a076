"""The fixtures themselves: every backend computes what the Hugging Face model computes."""

import numpy as np
import pytest
import torch
import zoo
from reference_forward import record


def test_the_backends_of_this_version_exist() -> None:
    assert zoo.HOOKED or zoo.BRIDGE
    assert set(zoo.BACKENDS) >= ({"hooked", "hooked_processed"} if zoo.HOOKED else {"bridge", "bridge_compat"})


def test_every_architecture_has_a_backend() -> None:
    """But those that a release gets wrong, and what only a HookedTransformer can be."""
    missing = set(zoo.FAMILIES) - {name for name, _ in zoo.FAMILY_CASES}
    if zoo.BRIDGE:
        assert missing == set(zoo.BRIDGE_FAULTS) | ({"attn_only"} if not zoo.HOOKED else set())
    else:
        assert missing == {"olmo", "olmo_clipped", "olmo2", "granite", "cohere", "smollm3", "gpt_bigcode"} | {
            name for name in zoo.FAMILIES if name.startswith(("falcon", "stablelm"))
        }


def test_reproduces_the_hugging_face_log_probabilities(case: zoo.ZooCase) -> None:
    with torch.no_grad():
        expected = case.hf_model(torch.tensor([case.tokens])).logits[0].log_softmax(-1)
    assert (zoo.log_probs(case.model, case.tokens) - expected).abs().max() < 1e-5


if zoo.BRIDGE:

    @pytest.mark.parametrize("name", zoo.BRIDGE_FAULTS)
    def test_what_is_left_out_for_a_fault_upstream_is_wrong(name: str) -> None:
        """So that a release that mends it is noticed."""
        hf = zoo.hf_model(name)
        with torch.no_grad():
            expected = hf(torch.tensor([zoo.TOKENS])).logits[0].log_softmax(-1)
        for compat in (False, True):
            assert (zoo.log_probs(zoo.bridge(hf, compat), zoo.TOKENS) - expected).abs().max() > 1


@pytest.mark.parametrize(("name", "backend"), zoo.FAMILY_CASES)
def test_values_and_activations_are_those_of_the_recording(name: str, backend: str) -> None:
    """In float64 to rounding; and processing takes exactly the constant part out of the values."""
    case = zoo.case(name, backend, torch.float64)
    recording = record(case.hf_model, list(case.tokens))
    with torch.no_grad():
        logits, cache = case.model.run_with_cache(torch.tensor([case.tokens]))
    # TransformerLens's gelu_fast and Bloom's own have sqrt(2 / pi) to ten and to eight digits.
    atol = 1e-7 if name == "bloom" and backend.startswith("hooked") else 1e-10
    np.testing.assert_allclose(logits[0].log_softmax(-1).numpy(), recording.log_probs, atol=atol)
    for layer, expected in enumerate(recording.layers):
        value = expected.value - (0 if case.value_constant else expected.value_constant)
        found = cache[f"blocks.{layer}.attn.hook_v"][0].numpy()
        if name == "olmo_clipped":  # hook_v is before the clipping
            assert not np.allclose(found, value)
            found = found.clip(-case.hf_model.config.clip_qkv, case.hf_model.config.clip_qkv)
        np.testing.assert_allclose(found, value, atol=atol)
        if name != "attn_only":
            found = cache[f"blocks.{layer}.mlp.hook_post"][0].numpy()
            np.testing.assert_allclose(found, expected.mlp_act, atol=atol)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_parameter_is_random(name: str) -> None:
    for key, parameter in zoo.hf_model(name).named_parameters():
        if name != "attn_only" or "mlp.c_proj" not in key:
            assert parameter.std() > 0.1, key
