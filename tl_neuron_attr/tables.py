"""Small tables for people: the same rows as text for a terminal and as HTML for a notebook.

Whatever comes from a tokenizer is shown as a quoted Python string, so that leading spaces and line breaks can
be seen, and is escaped in HTML, so that a token such as ``<script>`` stays text.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Cell: TypeAlias = str | int | float | bool | None


def quoted(text: str, width: int = 60) -> str:
    """``repr`` of the text; of a long one its end, which is the part next to the prediction.

    >>> quoted(" Paris")
    "' Paris'"
    """
    return repr(text) if len(text) <= width else "..." + repr(text[-width:])


def decimals(values: Sequence[float]) -> int:
    """Decimal places that show four significant digits of the largest finite value, between 2 and 10."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return min(max(3 - math.floor(math.log10(largest)), 2), 10) if largest > 0 else 4


def fixed(value: float, places: int, sign: str = "") -> str:
    """So many decimals; what rounds to zero has no minus.

    >>> fixed(-0.001, 2), fixed(-0.001, 2, "+"), fixed(-0.01, 2)
    ('0.00', '+0.00', '-0.01')
    """
    return f"{round(value, places) + 0.0:{sign}.{places}f}"


def probability(value: float, sign: str = "") -> str:
    """Four decimals, of a small one three digits.

    >>> probability(0.77312), probability(0.00001234), probability(0.0), probability(-0.00001, "+")
    ('0.7731', '1.23e-05', '0.0000', '-1.00e-05')
    """
    return f"{value:{sign}.2e}" if 0 < abs(value) < 0.0001 else fixed(value, 4, sign)


def strings(values: Sequence[Cell]) -> tuple[list[str], bool]:
    """The cells of one column as text, and whether they are numbers (set to the right)."""
    numbers = [value for value in values if isinstance(value, float)]
    if numbers and len(numbers) == len(values):
        places = decimals(numbers)
        return [fixed(value, places) for value in numbers], True
    plain = ["" if value is None else str(value) for value in values]
    return plain, bool(values) and all(isinstance(value, int | float) for value in values)


def as_text(head: Sequence[str], columns: Mapping[str, Sequence[Cell]], left_out: int) -> str:
    """Header lines, then one line a row."""
    lines = list(head)
    blocks: list[list[str]] = []
    for name, values in columns.items():
        cells, right = strings(values)
        width = max(len(cell) for cell in [name, *cells])
        blocks.append([cell.rjust(width) if right else cell.ljust(width) for cell in [name, *cells]])
    lines += ["  ".join(row).rstrip() for row in zip(*blocks, strict=True)]
    if left_out:
        lines.append(f"... and {left_out:,} more")
    return "\n".join(lines)


def as_html(head: Sequence[str], columns: Mapping[str, Sequence[Cell]], left_out: int) -> str:
    """The same as one HTML table without scripts, style sheets or outside files."""
    names = ""
    blocks: list[list[str]] = []
    for name, values in columns.items():
        cells, right = strings(values)
        align = "right" if right else "left"
        names += f'<th style="text-align:{align}">{html.escape(name)}</th>'
        blocks.append(
            [f'<td style="text-align:{align};white-space:pre-wrap">{html.escape(cell)}</td>' for cell in cells]
        )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*blocks, strict=True))
    more = f"<div>... and {left_out:,} more</div>" if left_out else ""
    # Not a caption, which is as narrow as its table.
    heading = "<br>".join(html.escape(line) for line in head)
    return f"<div><div>{heading}</div><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
