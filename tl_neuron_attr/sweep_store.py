"""A sweep's folder: a manifest, and tables whose files appear whole or not at all.

A file is written under another name in the same folder, flushed to the disk (fsync) and then renamed, which is one
step for every reader; the folder is flushed too. A part counts as done once all its files are there and are of this
sweep (``prompts`` comes last), so a process may die between any two instructions: what it leaves is either a part
that is done or files that the next run writes again. Names that begin with ``.`` are unfinished and nobody reads
them. The same part has the same bytes whenever it is written.

::

    DIR/manifest.json                     settings, versions, columns; written once, before the first part
    DIR/prompts/part-00000.parquet  ...   see tl_neuron_attr.sweep_schema
    DIR/layers/ DIR/heads/ DIR/neurons/   the same parts
    DIR/errors.jsonl                      prompts that have no result, with their lines; absent if all have one
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

from tl_neuron_attr import serialise, whole_file
from tl_neuron_attr.sweep_schema import SCHEMA, SCHEMA_VERSION, TABLES
from tl_neuron_attr.whole_file import write_whole


class SweepError(ValueError):
    """A folder that is not that of this sweep, or of no sweep that this release can read."""


class SweepFolder:
    """The folder of one sweep, named by its settings."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        self.folder = Path(folder)
        self._settings, self._versions = dict(settings), dict(versions)
        self._id = settings_id(settings)

    def begin(self) -> None:
        """Make the folder and its manifest, or confirm that those there are of this sweep.

        Raises :class:`SweepError` naming what changed, or for a folder with other files in it; OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.manifest_path.exists():
            self.check()
            return
        others = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if others:
            raise SweepError(
                f"{self.folder} holds {others[0]!r} but no manifest of a sweep: give a new or an empty folder"
            )
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "settings": self._settings,
            "versions": self._versions,
            "tables": {name: {field.name: str(field.type) for field in schema} for name, schema in TABLES.items()},
        }
        write_whole(self.manifest_path, (serialise.dump(record) + "\n").encode())

    def check(self) -> None:
        """Raise :class:`SweepError` if the manifest names other settings or versions."""
        begun = read_manifest(self.folder)
        check_same(self.folder, begun["settings"], self._settings)
        check_same(self.folder, begun["versions"], self._versions, "version of ")

    @property
    def manifest_path(self) -> Path:
        """Where the manifest is."""
        return self.folder / "manifest.json"

    def missing(self, n_parts: int) -> list[int]:
        """The parts that are not done."""
        return [part for part in range(n_parts) if not is_done(self.folder, part, self._id)]

    def write(self, part: int, tables: Mapping[str, Any]) -> None:
        """Write a part's tables, its prompts last. OSError where the disk does not take them."""
        for name, schema in TABLES.items():
            path = part_path(self.folder, name, part)
            path.parent.mkdir(exist_ok=True)
            write_whole(path, _as_bytes(tables[name], name, schema, part, self._id))

    def size(self, tables: Mapping[str, Any]) -> int:
        """How many bytes a part's files have."""
        return sum(len(_as_bytes(tables[name], name, schema, 0, self._id)) for name, schema in TABLES.items())

    def has_room(self, n_bytes: int) -> bool:
        """Whether the disk takes so many bytes (the only way to know, quotas included, is to write them)."""
        try:
            with whole_file.unfinished(self.folder / "room") as path:
                whole_file.write_bytes(path, bytes(n_bytes))
        except OSError:
            return False
        return True

    def errors(self, n_parts: int) -> list[dict[str, Any]]:
        """What the finished parts say of prompts without a result, in the prompts' order."""
        names = ["prompt", "line", "error_kind", "error", "text"]
        found: list[dict[str, Any]] = []
        for part in range(n_parts):
            if is_done(self.folder, part, self._id):
                table = read_part(self.folder, "prompts", part, names)
                found += [row for row in table.to_pylist() if row["error"] is not None]
        return found

    def write_errors(self, errors: Iterable[Mapping[str, Any]]) -> Path | None:
        """``errors.jsonl``, one object a line; no file where there are none."""
        path = self.folder / "errors.jsonl"
        lines = [json.dumps(dict(error), allow_nan=False) for error in errors]
        if not lines:
            path.unlink(missing_ok=True)
            return None
        write_whole(path, "".join(line + "\n" for line in lines).encode())
        return path

    def tidy(self) -> None:
        """Remove what killed runs left unfinished; for when every part is done."""
        for folder in (self.folder, *(self.folder / name for name in TABLES)):
            for path in folder.glob(".*.unfinished"):
                path.unlink(missing_ok=True)


def settings_id(settings: Mapping[str, Any]) -> str:
    """What every file of a sweep carries of its settings."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]


def check_same(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> None:
    """Raise :class:`SweepError` naming the settings of ``now`` that are not those a sweep was begun with."""
    changed = [name for name in now if name not in begun or begun[name] != now[name]]
    if changed:
        told = "; ".join(f"{of}{name} was {_told(begun.get(name))} and is now {_told(now[name])}" for name in changed)
        raise SweepError(
            f"{folder} was begun with other settings: {told}. Give what it was begun with to go on, or another "
            f"folder to begin anew"
        )


def _told(value: Any) -> str:
    return f"{value[:15]}..." if isinstance(value, str) and value.startswith("sha256:") else repr(value)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sweep's folder. Raises :class:`SweepError` where there is none that can be read."""
    try:
        return serialise.load(folder / "manifest.json", SCHEMA, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise SweepError(f"{folder} holds no manifest.json: give the folder that a sweep wrote") from error
    except (OSError, UnicodeDecodeError, serialise.SchemaError) as error:
        raise SweepError(f"{folder}/manifest.json cannot be read: {error}") from error


def part_path(folder: Path, table: str, part: int) -> Path:
    """Where a part of a table is."""
    return folder / table / f"part-{part:05d}.parquet"


def is_done(folder: Path, part: int, sweep: str) -> bool:
    """Whether every table of a part is there, of this sweep, and can be read."""
    if not part_path(folder, "prompts", part).exists():
        return False
    return all(_belongs(part_path(folder, name, part), name, part, sweep) for name in TABLES)


def read_part(folder: Path, table: str, part: int, columns: list[str] | None = None) -> Any:
    """A part's table, of these columns or all."""
    return pq.ParquetFile(part_path(folder, table, part)).read(columns=columns)


def _belongs(path: Path, table: str, part: int, sweep: str) -> bool:
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return metadata.get(b"tl_neuron_attr") == _label(table, part, sweep)


def _label(table: str, part: int, sweep: str) -> bytes:
    named = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "table": table, "part": part, "sweep": sweep}
    return json.dumps(named).encode()


def _as_bytes(table: Any, name: str, schema: Any, part: int, sweep: str) -> bytes:
    sink = pa.BufferOutputStream()
    labelled = table.cast(schema).replace_schema_metadata({"tl_neuron_attr": _label(name, part, sweep)})
    pq.write_table(labelled, sink, compression="zstd")
    return sink.getvalue().to_pybytes()
