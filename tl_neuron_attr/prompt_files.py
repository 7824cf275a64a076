"""Prompts with their answers, from a file: one a line, and a bad line costs itself only.

Two formats, told apart by the file's ending, both UTF-8 with or without a byte order mark:

=====================  =========================================================================================
``.jsonl``             one JSON object a line, ``{"prompt": "The capital of France is", "answer": " Paris"}``
``.csv``               a header that names the columns, then one row a prompt; text in ``"`` may hold commas and
                       line breaks, and a quote as ``""``
=====================  =========================================================================================

``prompt`` and ``answer`` are needed, ``type``, ``subject`` and ``template`` may be there, other columns are ignored.
Blank lines are passed over. A line that cannot be used is named by its number, counted from 1, with the reason.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_NEEDED = ("prompt", "answer")
_OPTIONAL = ("type", "subject", "template")
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
}


@dataclass(frozen=True, slots=True)
class KnowledgePrompt:
    """A prompt and the one token that is right after it.

    ``answer`` is the token's text, with its leading space (``" Paris"``). ``type`` groups prompts whose answers are
    words of one kind (``"capital"``), ``""`` for none. For the package's own prompts ``template.format(subject)`` is
    the prompt.
    """

    prompt: str
    answer: str
    type: str = ""
    subject: str = ""
    template: str = ""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a file of prompts, counted from 1, that could not be used, and why."""

    line: int
    reason: str


class _Unusable(Exception):
    """Why a line cannot be used."""


def read_prompts(path: str | Path, *, leading_space: bool = True) -> tuple[list[KnowledgePrompt], list[BadLine]]:
    """Read a file of prompts, JSONL or CSV (see the module's table).

    Args:
        path: the file.
        leading_space: put a space before answers that have none, as the token after a word has one. Turn it off for
            answers to be taken as they are, e.g. in languages without spaces.

    Returns:
        The prompts in the file's order, and the lines that could not be used.

    Raises:
        ValueError: another ending than ``.jsonl`` or ``.csv``, or a CSV header without ``prompt`` and ``answer``.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "mine.csv")
        ...     _ = path.write_text("prompt,answer\\nThe capital of France is,Paris\\nThe capital of Italy is,\\n")
        ...     prompts, bad = read_prompts(path)
        >>> prompts[0].answer, bad
        (' Paris', [BadLine(line=3, reason='the answer is empty')])
    """
    read = [entry for _, entry in read_lines(path, leading_space=leading_space)]
    found = [entry for entry in read if isinstance(entry, KnowledgePrompt)]
    return found, [entry for entry in read if isinstance(entry, BadLine)]


def read_lines(
    path: str | Path, *, needed: Sequence[str] = _NEEDED, leading_space: bool = True
) -> list[tuple[int, KnowledgePrompt | BadLine]]:
    """Every line that is not blank, with its number; :func:`read_prompts` has the rest.

    ``needed=("prompt",)`` lets the answer be left out, which is then ``""``.
    """
    path = Path(path)
    if path.suffix.lower() not in (".jsonl", ".csv"):
        raise ValueError(
            f"{path.name} ends in {path.suffix!r}: prompts come as .jsonl, one JSON object a line, or as .csv with a "
            f"header"
        )
    records = _jsonl(path) if path.suffix.lower() == ".jsonl" else _csv(path, needed)
    found: list[tuple[int, KnowledgePrompt | BadLine]] = []
    for line, record in records:
        try:
            if isinstance(record, _Unusable):
                raise record
            found.append((line, _prompt(record, needed, leading_space)))
        except _Unusable as reason:
            found.append((line, BadLine(line, str(reason))))
    return found


def _prompt(record: Mapping[str, Any], needed: Sequence[str], leading_space: bool) -> KnowledgePrompt:
    optional = (name for name in (*_NEEDED, *_OPTIONAL) if name not in needed and record.get(name) is not None)
    for name in (*needed, *optional):
        value = record.get(name)
        if value is None:
            raise _Unusable(f"there is no {name}")
        if not isinstance(value, str):
            raise _Unusable(f"the {name} is {_JSON_NAMES[type(value)]}, {value!r}: give a string")
        if name in needed and not value.strip():
            raise _Unusable(f"the {name} is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _Unusable(f"the {name} holds half of a surrogate pair, which is no letter")
    prompt, answer = str(record["prompt"]), str(record.get("answer") or "")
    if prompt.endswith(" "):
        raise _Unusable("the prompt ends in a space: the space before the answer belongs to the answer's token")
    if leading_space and answer and not answer[0].isspace():
        answer = " " + answer
    return KnowledgePrompt(prompt, answer, *(str(record.get(name) or "") for name in _OPTIONAL))


def _lines(path: Path) -> Iterator[tuple[int, str | _Unusable]]:
    """The lines with their numbers, line ends kept; one that is not UTF-8 is the reason why."""
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for number, line in enumerate(raw.splitlines(keepends=True), 1):
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield (
                number,
                _Unusable(f"not UTF-8: byte 0x{line[error.start]:02x} at place {error.start + 1} of the line"),
            )


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | _Unusable]]:
    for number, line in _lines(path):
        if isinstance(line, _Unusable):
            yield number, line
        elif line.strip():
            yield number, _object(line)


def _object(line: str) -> dict[str, Any] | _Unusable:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return _Unusable(f"not JSON: {error.msg} at place {error.colno} of the line")
    except (RecursionError, ValueError) as error:
        return _Unusable(f"not JSON that can be read: {error}")
    if not isinstance(record, dict):
        kind = "null" if record is None else _JSON_NAMES[type(record)]
        return _Unusable(f'the line is {kind}: give an object, {{"prompt": ..., "answer": ...}}')
    return cast("dict[str, Any]", record)


def _csv(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | _Unusable]]:
    rows = _rows([line for _, line in _lines(path)])
    number, first = next(rows, (1, list[str]()))
    if isinstance(first, _Unusable):
        raise ValueError(f"the header of {path.name}, line {number}, cannot be read: {first}")
    header = [name.strip() for name in first]
    if not set(needed) <= set(header) or len(set(header)) < len(header):
        raise ValueError(
            f"the header of {path.name} names the columns {header}: it must name {' and '.join(needed)}, and no "
            f"column twice, with commas between"
        )
    for number, row in rows:
        if isinstance(row, list) and len(row) != len(header):
            row = _Unusable(
                f"{len(row)} fields where the header names {len(header)}: put text that holds a comma in quotes"
            )
        yield number, row if isinstance(row, _Unusable) else dict(zip(header, row, strict=True))


def _rows(lines: list[str | _Unusable]) -> Iterator[tuple[int, list[str] | _Unusable]]:
    """Rows with the numbers of their first lines. A quote that never closes costs its own line, not the rest."""
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        at += 1
        if isinstance(line, _Unusable):
            yield number, line
        elif line.strip():
            row = _fields(line)
            if isinstance(row, _Unusable) and line.count('"') % 2:
                text, end = _until_closed(lines, at - 1)
                longer = _fields(text) if end > at else row
                if not isinstance(longer, _Unusable):
                    row, at = longer, end
            yield number, row


def _until_closed(lines: list[str | _Unusable], start: int) -> tuple[str, int]:
    """The text from a line with an open quote to the one that closes it, and where the next row begins."""
    text: list[str] = []
    n_quotes = 0
    for place, line in enumerate(lines[start:], start):
        if isinstance(line, _Unusable):
            break
        text.append(line)
        n_quotes += line.count('"')
        if n_quotes % 2 == 0:
            return "".join(text), place + 1
    return "", start


def _fields(text: str) -> list[str] | _Unusable:
    """The fields of one row; text in quotes may go over several lines."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="\n"), strict=True))
    except csv.Error as error:
        unclosed = "unexpected end" in str(error)
        return _Unusable("a quote is opened and never closed" if unclosed else f"not CSV: {error}")
    return rows[0] if len(rows) == 1 else _Unusable("a quote is opened and never closed")
