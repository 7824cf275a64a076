"""Fixtures of the whole suite: `case` runs a test on every zoo model behind every backend there is."""

import os

import pytest
import torch
import zoo

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # most models here are tiny: threads that wait for each other cost more than they bring


@pytest.fixture(params=zoo.CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """A tiny model behind a backend, float32. Shared by the session: leave its model as it was."""
    return zoo.case(*request.param)
