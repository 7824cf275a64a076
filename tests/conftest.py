"""Fixtures of the whole suite: `case` runs a test on every zoo model behind every backend there is."""

import os

import pytest
import zoo

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(params=zoo.CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> zoo.ZooCase:
    """A tiny model behind a backend, float32. Shared by the session: leave its model as it was."""
    return zoo.case(*request.param)
