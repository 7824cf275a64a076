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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--every-release` runs what does not depend on TransformerLens's release with any of them."""
    parser.addoption("--every-release", action="store_true", help="run tests marked any_release with any release")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are the same with every release of TransformerLens run with the newest one alone."""
    if not zoo.HOOKED or config.getoption("--every-release"):
        return
    same = [item for item in items if item.get_closest_marker("any_release")]
    items[:] = [item for item in items if item not in same]
    config.hook.pytest_deselected(items=same)
