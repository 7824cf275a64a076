"""The package as it is imported: light, complete, and the same in whatever order its parts are loaded."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tl_neuron_attr as na

PACKAGE = Path(na.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "transformer_lens", "transformers", "numpy", "pandas", "plotly", "jaxtyping", "safetensors"}


def run(code: str) -> str:
    """The output of Python code in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    loaded = run("import sys, tl_neuron_attr; print(*sys.modules)").split()
    assert "tl_neuron_attr" in loaded
    assert not HEAVY & set(loaded)
    assert [name for name in loaded if name.startswith("tl_neuron_attr.")] == []


def test_asking_for_the_version_imports_nothing_heavy():
    code = "import sys; from tl_neuron_attr.cli import main; code = main(['--version']); print(code, *sys.modules)"
    answer, modules = run(code).splitlines()
    assert answer.startswith(f"tl-neuron-attr {na.__version__}")
    code, *loaded = modules.split()
    assert code == "0"
    assert not HEAVY & set(loaded)


def test_every_submodule_imports():
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "tl_neuron_attr.")]
    assert len(names) >= 15
    for name in names:
        importlib.import_module(name)


@pytest.mark.parametrize("name", na.__all__)
def test_every_public_name_is_there_and_is_no_module(name: str):
    value = getattr(na, name)
    assert not isinstance(value, ModuleType)
    assert name in dir(na)
    assert getattr(na, name) is value


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'tl_neuron_attr' has no attribute 'value_neuron'"):
        _ = na.value_neuron
    assert not hasattr(na, "value_neuron")


def test_type_checkers_see_the_same_public_names():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    named = {name: f"tl_neuron_attr.{home}" for name, home in na._HOME.items()}
    assert seen == {**named, **dict.fromkeys(na._SUBMODULES, "tl_neuron_attr")}


def test_trace_is_the_function_in_every_order_of_imports():
    orders = [
        "import tl_neuron_attr.trace",
        "from tl_neuron_attr.trace import Trace",
        "from tl_neuron_attr import Trace",
        "from tl_neuron_attr import trace",
        "from tl_neuron_attr import *",
        "import importlib; importlib.import_module('tl_neuron_attr.trace')",
        "import tl_neuron_attr; tl_neuron_attr.trace; import tl_neuron_attr.trace",
        "import tl_neuron_attr.value",
        "import tl_neuron_attr, importlib, sys; importlib.reload(sys.modules.setdefault('tl_neuron_attr.trace', "
        "importlib.import_module('tl_neuron_attr.trace')))",
    ]
    out = run(
        f"""
import sys, types
for order in {orders!r}:
    for name in [name for name in sys.modules if name.split('.')[0] == 'tl_neuron_attr']:
        del sys.modules[name]
    scope = {{}}
    exec(order, scope)
    import tl_neuron_attr as na
    from tl_neuron_attr import trace
    import tl_neuron_attr.trace as aliased
    module = sys.modules['tl_neuron_attr.trace']
    assert isinstance(module, types.ModuleType), order
    for got in (na.trace, trace, aliased, scope.get('trace', trace)):
        assert isinstance(got, types.FunctionType) and got.__name__ == 'trace', (order, got)
    print('ok')
"""
    )
    assert out.split() == ["ok"] * len(orders)


def test_a_public_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(na, "trace", len)
    assert na.trace is len


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_model_class_of_transformer_lens_is_imported_with_a_module(path: Path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            code = ast.unparse(node)
            assert "HookedTransformer" not in code, code
            assert "TransformerBridge" not in code, code


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
