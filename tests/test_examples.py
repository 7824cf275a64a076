"""Every example runs: the docstrings' in every module of the package, and the README's Python blocks."""

import doctest
import functools
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import tl_neuron_attr as na
from tl_neuron_attr import models

MODULES = sorted(
    module.name.removeprefix("tl_neuron_attr.")
    for module in pkgutil.walk_packages(na.__path__, "tl_neuron_attr.")
    if not module.name.endswith("__main__")
)
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module", autouse=True)
def one_demo_model():
    """Examples load the embedded model each; here they share one."""
    load = functools.cache(models.load_demo_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_demo_model", load)
        patch.setattr(na, "load_demo_model", load, raising=False)
        yield


@pytest.mark.any_release
@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(f"tl_neuron_attr.{name}")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=options, verbose=False)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} fail (see stdout)"


def test_public_functions_have_an_example():
    missing = [
        name
        for name in na.__all__
        if callable(getattr(na, name))
        and not isinstance(getattr(na, name), type)
        and ">>>" not in (getattr(na, name).__doc__ or "")
    ]
    assert missing == []


def test_readme(tmp_path, monkeypatch):
    """The README's Python blocks, run one after the other in one namespace, as a reader would."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    [shown] = re.findall(r"```text\n>>> mlp\n(.*?)\.\.\.\n```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert str(namespace["mlp"]).startswith(shown), "the README shows what is printed"
