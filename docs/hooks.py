"""What the build of the pages needs beside mkdocs: equations, the home page, and that no public name is missing.

Equations are written in LaTeX and become MathML, which browsers draw themselves, so nothing is fetched for them.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any, Literal

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import docstrings  # noqa: E402

import tl_neuron_attr as na  # noqa: E402

_ID = re.compile(r'id="(tl_neuron_attr\.[\w.]+)"')
_found: set[str] = set()


def inline_math(source: str, *_: Any, **__: Any) -> str:
    return _mathml(source, "inline")


def block_math(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="equation">{_mathml(source, "block")}</div>'


def _mathml(source: str, display: Literal["inline", "block"]) -> str:
    """MathML, with the space between a function's name and what it is applied to that the converter leaves out."""
    return re.sub(r"(<mi>(?:log|exp)</mi>)(?!<mo)", r'\1<mspace width="0.17em"/>', convert(source, display=display))


def public_names() -> dict[str, set[str]]:
    """Every public name -> the paths under which a page may have it."""
    names = {name: {f"tl_neuron_attr.{home}.{name}"} for name, home in na._HOME.items()}
    for name in names:
        value = getattr(na, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            names[name].add(f"{value.__module__}.{name}")
    for name, value in vars(na.plots).items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__.startswith("tl_neuron_attr."):
            names[f"plots.{name}"] = {f"{value.__module__}.{name}", f"tl_neuron_attr.plots.{name}"}
    return names


def on_config(config: Any) -> Any:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((HERE / "pages").glob("*.md")))
    for path in re.findall(r"^::: (\S+)", pages, re.MULTILINE):
        docstrings.PAGES[path.removeprefix("tl_neuron_attr.")] = path  # modules by their path in the package
        if path.rpartition(".")[2] in na.__all__:
            docstrings.PAGES[path.rpartition(".")[2]] = path
    for name in na.plots.__all__:
        docstrings.PAGES[f"plots.{name}"] = f"tl_neuron_attr.plots.{name}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The README is the home page; its links into the repository become plain text there."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"<!--.*?-->", "", readme, flags=re.DOTALL).replace("](docs/pages/", "](")
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)", r"\1", readme)


def on_page_content(html: str, **_: Any) -> str:
    _found.update(_ID.findall(html))
    return html


def on_post_build(config: Any) -> None:
    missing = [name for name, paths in public_names().items() if not paths & _found]
    if missing:
        raise PluginError(f"no page has the public names {', '.join(missing)}: add `::: path` to docs/pages/*.md")
