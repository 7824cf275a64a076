"""Strict JSON with a name and a version inside.

A record is a dictionary with the keys ``schema`` and ``schema_version``. Floats are written as the shortest
decimal that reads back as the same double, so a tensor of float64, or of any shorter type that is widened
on the way out and narrowed on the way in, comes back bit for bit. NaN and infinities are not JSON and are
refused in both directions.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tl_neuron_attr.whole_file import write_text_whole


class SchemaError(ValueError):
    """Text that cannot be read: not strict JSON, another schema, another version, or altered."""


def dump(record: Mapping[str, object], path: str | Path | None = None) -> str:
    """The record as text, written to ``path`` too where one is given, whole or not at all.

    ValueError for NaN and infinities.
    """
    try:
        text = json.dumps(record, allow_nan=False, indent=1)
    except ValueError as error:
        raise ValueError(f"a value is NaN or infinite, which strict JSON cannot hold ({error})") from error
    if path is not None:
        write_text_whole(Path(path), text + "\n")
    return text


def writable(path: str | Path) -> Path:
    """The path, if a file can be written there; an OSError that says what is wrong otherwise."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: permission denied; choose another place")
    folder = path.resolve().parent
    if (path.is_file() or not path.exists()) and not os.access(folder, os.W_OK):  # files are replaced whole
        raise PermissionError(f"cannot replace {path}: nothing may be written in {folder}; choose another place")
    return path


def load(source: str | Path, schema: str, version: int) -> dict[str, Any]:
    """Read a record from its text or from a file, and check its schema and version.

    Text is told from a path by its opening brace. Raises :class:`SchemaError`, and OSError for a file that
    cannot be read.
    """
    text = source if isinstance(source, str) and source.lstrip().startswith("{") else _read(Path(source))
    try:
        record: object = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise SchemaError(f"this is not JSON: {error}") from error
    fields = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    if fields.get("schema") != schema:
        raise SchemaError(f"the schema is {fields.get('schema')!r}, but {schema!r} is needed here")
    if fields.get("schema_version") != version:
        raise SchemaError(
            f"version {fields.get('schema_version')!r} of {schema}: this release reads version {version}; "
            "use the release of tl_neuron_attr that wrote it, or write it again"
        )
    return fields


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _refuse(constant: str) -> float:
    raise SchemaError(f"{constant} in the text: strict JSON holds finite numbers only")
