"""Tables of a page: columns of cells with what they are sorted by.

A number is shown with as many decimals as its column needs and sorted by its full value; tokens are shown as quoted
Python strings, so that spaces and line breaks are seen and control characters are none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tl_neuron_attr.tables import decimals, fixed, probability, quoted
from tl_neuron_attr.vocab import TokenChange


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, the number it is sorted by (``None``: as text), a bar from -1 to 1, and tokens in place of text."""

    text: str
    value: int | float | None = None
    bar: float | None = None
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, its cells, whether they are numbers, and what the numbers are."""

    name: str
    cells: tuple[Cell, ...]
    numeric: bool
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length under a caption; the first names the row, ``sorted_by`` is in order already."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    sorted_by: str | None = None
    descending: bool = True

    def __post_init__(self) -> None:
        lengths = {len(column.cells) for column in self.columns}
        if len(lengths) != 1:
            raise ValueError(f"table {self.id} has columns of {sorted(lengths)} cells: they must match")

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def numbers(
    name: str, values: Sequence[float | None], hint: str = "", *, bars: bool = False, signed: bool = False
) -> Column:
    """Numbers with as many decimals as their column needs; a missing one is a dash and sorted last."""
    present = [value for value in values if value is not None]
    places, largest = decimals(present), max(map(abs, present), default=0.0) or 1.0
    sign = "+" if signed else ""
    cells = (
        Cell("–") if value is None else Cell(fixed(value, places, sign), value, value / largest if bars else None)
        for value in values
    )
    return Column(name, tuple(cells), True, hint)


def counts(name: str, values: Iterable[int | None], hint: str = "") -> Column:
    """Whole numbers."""
    return Column(name, tuple(Cell("–") if v is None else Cell(f"{v:,}", v) for v in values), True, hint)


def probabilities(name: str, values: Sequence[float], hint: str = "", *, bars: bool = False) -> Column:
    """Probabilities, the small ones in powers of ten."""
    cells = (Cell(probability(value), value, value if bars else None) for value in values)
    return Column(name, tuple(cells), True, hint)


def labels(name: str, values: Iterable[object], hint: str = "") -> Column:
    """Names of rows."""
    return Column(name, tuple(Cell(str(value)) for value in values), False, hint)


def token(name: str, values: Iterable[str], hint: str = "") -> Column:
    """One token a cell."""
    return Column(name, tuple(Cell(quoted(value), tokens=(quoted(value),)) for value in values), False, hint)


def promoted(name: str, values: Iterable[Sequence[TokenChange]], hint: str = "") -> Column:
    """Several tokens a cell, sorted by the first."""
    shown = (tuple(quoted(text) for text, _ in changes) for changes in values)
    return Column(name, tuple(Cell(" ".join(texts), tokens=texts) for texts in shown), False, hint)
