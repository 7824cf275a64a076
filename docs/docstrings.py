"""The package's docstrings as Markdown, for mkdocstrings: a Griffe extension.

They are written for ``help()``, in the plain subset of reStructuredText that reads well there. Markdown would take
their simple tables for text, their indented equations for code with backticks in it, and their roles for nothing:

* a simple table (rows of ``=``)       -> a Markdown table
* an indented block                    -> a fenced one, its double backticks taken away
* ``::`` before an indented block      -> ``:`` and a fenced block of Python
* ``:func:`name```, ``:mod:`name```    -> the name in backticks, a link where a page has it
* ``>>>`` without a section             -> a fenced block of Python
* ``Example:``                         -> ``Examples:``, the section's name in the Google style
"""

import re
from typing import Any

import griffe

# Sections of the Google style, whose bodies are indented and stay so.
_SECTION = re.compile(r"(Args|Raises|Returns|Yields|Warns|Examples?|Attributes|Note|Warning):$")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")
_RULE = re.compile(r"=+( +=+)+$")
# Names as they are written -> where mkdocstrings has them; hooks.py fills it before the pages are built.
PAGES: dict[str, str] = {}
# Whether names mean figures first: `ranks` is one in the text of `plots`, and a module elsewhere.
_figures = False


class Markdown(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        global _figures
        if obj.docstring:
            _figures = obj.path == "tl_neuron_attr.plots"
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    lines, out = text.split("\n"), list[str]()
    at = 0
    while at < len(lines):
        line = lines[at]
        if _RULE.match(line.strip()):
            at = _table(lines, at, out)
        elif _SECTION.match(line):
            at = _section(lines, at, out)
        elif line.startswith(">>> "):
            at = _example(lines, at, out)
        elif line.startswith("    ") and out and not out[-1].strip():
            at = _indented(lines, at, out)
        else:
            out.append(_roles(line))
            at += 1
    return "\n".join(out)


def _section(lines: list[str], at: int, out: list[str]) -> int:
    """The section's heading and its indented body, with roles replaced only."""
    out.append("Examples:" if lines[at] == "Example:" else lines[at])
    at += 1
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith("    ")):
        out.append(_roles(lines[at]))
        at += 1
    return at


def _table(lines: list[str], at: int, out: list[str]) -> int:
    """A simple table: rules of ``=`` give the columns, a line without a first cell continues the row above."""
    indent = len(lines[at]) - len(lines[at].lstrip())
    starts = [indent + found.start() for found in re.finditer("=+", lines[at].strip())]
    ends = [*starts[1:], None]
    close = [i for i in range(at + 1, len(lines)) if _RULE.match(lines[i].strip())]
    head, last = (
        (close[0], close[1]) if len(close) > 1 and not _blank_between(lines, close[0], close[1]) else (at, close[0])
    )
    rows: list[list[str]] = []
    for line in lines[at + 1 : last]:
        if _RULE.match(line.strip()):
            continue
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], cells, strict=True)]
    cells_of = [[_roles(cell).replace("|", "\\|") for cell in row] for row in rows]
    if head == at:  # no header: Markdown asks for one
        cells_of.insert(0, ["" for _ in starts])
    out.append("| " + " | ".join(cells_of[0]) + " |")
    out.append("|" + " --- |" * len(starts))
    out += ["| " + " | ".join(row) + " |" for row in cells_of[1:]]
    return last + 1


def _example(lines: list[str], at: int, out: list[str]) -> int:
    """Doctests outside a section, to the next blank line."""
    end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
    out += ["```python", *lines[at:end], "```"]
    return end


def _blank_between(lines: list[str], first: int, last: int) -> bool:
    return any(not line.strip() for line in lines[first:last])


def _indented(lines: list[str], at: int, out: list[str]) -> int:
    """An indented block after a blank line: an equation, or Python where ``::`` announces it."""
    before = next((i for i in range(len(out) - 1, -1, -1) if out[i].strip()), None)
    python = before is not None and out[before].endswith("::")
    if python and before is not None:
        out[before] = out[before][:-1]
    block: list[str] = []
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith("    ")):
        block.append(lines[at][4:])
        at += 1
    while block and not block[-1].strip():
        block.pop()
        at -= 1
    if not python:
        block = [_plain(line) for line in block]
    out += [f"```{'python' if python else 'text'}", *block, "```"]
    return at


def _plain(line: str) -> str:
    return _ROLE.sub(lambda role: role[1], line).replace("``", "").rstrip()


def _roles(line: str) -> str:
    return _ROLE.sub(lambda role: _link(role[1]), line)


def _link(name: str) -> str:
    page = PAGES.get(name.removeprefix("tl_neuron_attr."), PAGES.get(name))
    if _figures:
        page = PAGES.get(f"plots.{name}", page)
    shown = name.removeprefix("tl_neuron_attr.") if page is None or name in PAGES else name
    return f"[`{shown}`][{page}]" if page else f"`{shown}`"
