"""Every architecture that TransformerLens runs: right to rounding, or refused by name."""

import families
import pytest
import torch
import zoo


@pytest.mark.parametrize(("name", "backend"), zoo.FAMILY_CASES)
def test_float32(name: str, backend: str) -> None:
    found = families.errors(name, backend)
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(("name", "backend"), zoo.FAMILY_CASES)
def test_float64(name: str, backend: str) -> None:
    found = families.errors(name, backend, "paper", torch.float64)
    # TransformerLens's gelu_fast and Bloom's own have sqrt(2 / pi) to ten and to eight digits.
    assert max(found.values()) < (1e-6 if name == "bloom" else 1e-8), found
