"""A sweep that dies anywhere and is started again gives the files of an unbroken one, and does nothing twice.

What a part holds is computed once and kept, so that dying at every single point of writing takes seconds. A death is
an exception that nothing catches or cleans up after, as after ``kill -9``; one kind leaves a file half written.
"""

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zoo
from sweep_prompts import LINES, files, write

import tl_neuron_attr as na
from tl_neuron_attr import sweep_parts, sweep_schema, whole_file

pytestmark = pytest.mark.any_release

PARTS = 3
PROMPTS = [
    LINES[0],
    LINES[1],
    {"prompt": "t5", "answer": "zebra"},
    LINES[3],
    LINES[4],
    "not json",
    LINES[6],
    LINES[7],
]


class Killed(BaseException):
    """The process is gone."""


class Sweep:
    """The same sweep again and again, its parts computed once and counted each time."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.folder = patch, folder
        self.model = zoo.case("gpt2", zoo.BACKENDS[0]).model
        self.path = write(folder / "p.jsonl", PROMPTS)
        self.computed: Counter[int] = Counter()
        self.points: Callable[[], None] = lambda: None
        known: dict[int, Any] = {}
        compute = sweep_parts.PartRunner.part

        def tables(runner: Any, entries: Any, done: Any) -> Any:
            first = entries[0].number
            self.points()
            if first not in known:
                known[first] = compute(runner, entries, done)
            self.computed[first] += 1
            return known[first]

        patch.setattr(sweep_parts.PartRunner, "part", tables)
        self.run("whole")
        self.whole = files(folder / "whole")
        assert self.computed == {0: 1, 3: 1, 6: 1}
        self.computed.clear()

    def run(self, name: str) -> na.SweepOutcome:
        options = {"k": 5, "part_size": 3, "leading_space": False, "progress": False}
        return na.sweep(self.model, self.path, self.folder / name, **options)


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    return Sweep(tmp_path, monkeypatch)


def dying(sweeping: Sweep, at: int, torn: bool) -> list[str]:
    """Dies at the point of this number: before and after every flush and rename, and before every part is computed.

    Returns the list of points passed, which grows as the sweep runs.
    """
    passed: list[str] = []

    def point(what: str) -> None:
        passed.append(what)
        if len(passed) == at:
            raise Killed

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if torn and len(passed) + 1 == at and os.path.isfile(name):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        point(f"flush {os.path.basename(name)}")
        flush(descriptor)
        point(f"flushed {os.path.basename(name)}")

    def replace(old: Any, new: Any) -> None:
        point(f"rename {new}")
        rename(old, new)
        point(f"renamed {new}")

    flush, rename = os.fsync, os.replace
    sweeping.points = lambda: point("compute")
    sweeping.patch.setattr(whole_file.os, "fsync", fsync)
    sweeping.patch.setattr(whole_file.os, "replace", replace)
    return passed


def test_dying_at_every_point_of_writing(sweeping: Sweep) -> None:
    at = 0
    while True:
        at += 1
        sweeping.computed.clear()
        name = f"{at}"
        with sweeping.patch.context() as patch:
            sweeping.patch, kept = patch, sweeping.patch
            passed = dying(sweeping, at, torn=True)
            try:
                sweeping.run(name)
            except Killed:
                pass
            else:
                break
            finally:
                sweeping.patch, sweeping.points = kept, lambda: None
        done = sweeping.run(name)
        assert done.n_prompts == len(PROMPTS)
        assert files(sweeping.folder / name) == sweeping.whole, passed[-1]
        # At most the part that was being written is computed again.
        assert sum(sweeping.computed.values()) <= PARTS + 1
        assert all(count <= 2 for count in sweeping.computed.values())
    # Every file of every part and the manifest and errors: flush and rename, before and after, and flush its folder.
    assert len(passed) == PARTS + 6 * (4 * PARTS + 2)
    assert files(sweeping.folder / name) == sweeping.whole


@pytest.mark.parametrize("seed", range(5))
def test_dying_ten_times_at_random_points(sweeping: Sweep, seed: int) -> None:
    draw = random.Random(seed)
    deaths = 0
    while deaths < 10:
        with sweeping.patch.context() as patch:
            sweeping.patch, kept = patch, sweeping.patch
            dying(sweeping, draw.randrange(1, 14), draw.random() < 0.5)
            try:
                sweeping.run("out")
            except Killed:
                deaths += 1
            else:
                break
            finally:
                sweeping.patch, sweeping.points = kept, lambda: None
    assert deaths > 3
    sweeping.run("out")
    assert files(sweeping.folder / "out") == sweeping.whole


def test_a_reader_sees_whole_parts_only(sweeping: Sweep) -> None:
    """Between any two points, `load_sweep` gives the first parts, complete."""
    seen: list[int] = []

    def look() -> None:
        if (sweeping.folder / "out" / "manifest.json").exists():
            found = na.load_sweep(sweeping.folder / "out")
            done = found.n_done
            numbers = {*found.prompts()["prompt"], *found.errors()["prompt"]}
            assert numbers == set(range(done))
            assert set(found.neurons()["prompt"]) == set(found.prompts()["prompt"])
            seen.append(done)

    flush, rename = os.fsync, os.replace
    with sweeping.patch.context() as patch:
        patch.setattr(whole_file.os, "fsync", lambda descriptor: (look(), flush(descriptor), look()))
        patch.setattr(whole_file.os, "replace", lambda old, new: (look(), rename(old, new), look()))
        sweeping.run("out")
    assert sorted(set(seen)) == [0, 3, 6, 8]


@pytest.mark.parametrize("table", ["prompts", "layers", "heads", "neurons"])
def test_a_part_that_cannot_be_read_is_done_again(sweeping: Sweep, table: str) -> None:
    part = sweeping.folder / "whole" / table / "part-00001.parquet"
    for spoilt in (b"", part.read_bytes()[:-20], None):
        if spoilt is None:
            part.unlink()
        else:
            part.write_bytes(spoilt)
        sweeping.computed.clear()
        assert na.load_sweep(sweeping.folder / "whole").parts == (0, 2)
        assert sweeping.run("whole").n_new == 3
        assert sweeping.computed == {3: 1}
        assert files(sweeping.folder / "whole") == sweeping.whole


def test_files_of_another_sweep_are_not_taken_for_its_own(sweeping: Sweep) -> None:
    options = {"k": 4, "part_size": 3, "leading_space": False, "progress": False}
    with sweeping.patch.context() as patch:
        patch.setattr(sweep_parts.PartRunner, "part", lambda runner, entries, done: empty())
        na.sweep(sweeping.model, sweeping.path, sweeping.folder / "other", **options)
    for path in (sweeping.folder / "other").rglob("part-00001.parquet"):
        target = sweeping.folder / "whole" / path.relative_to(sweeping.folder / "other")
        target.write_bytes(path.read_bytes())
    assert sweeping.run("whole").n_new == 3
    assert files(sweeping.folder / "whole") == sweeping.whole


def empty() -> dict[str, Any]:
    return {name: schema.empty_table() for name, schema in sweep_schema.TABLES.items()}


class Disk:
    """A disk that takes so many bytes and no more."""

    def __init__(self, folder: Path, capacity: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.capacity = folder, capacity
        write_bytes = whole_file.write_bytes

        def limited(path: Path, data: bytes) -> None:
            held = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file() and one != path)
            if held + len(data) > self.capacity:
                path.write_bytes(data[: max(0, self.capacity - held)])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write_bytes(path, data)

        patch.setattr(whole_file, "write_bytes", limited)


def test_a_full_disk_costs_the_prompts_it_does_not_take(sweeping: Sweep) -> None:
    out = sweeping.folder / "out"
    whole = sum(map(len, sweeping.whole.values()))
    fault = [2, 5]  # without a result on any disk
    for share in (0.95, 0.6, 0.4):
        with sweeping.patch.context() as patch:
            name = f"out{share}"
            Disk(sweeping.folder / name, int(share * whole), patch)
            sweeping.computed.clear()
            done = sweeping.run(name)
        disk = [error for error in done.errors if error.kind == "disk"]
        assert disk, share
        assert {error.error for error in disk} == {"the results cannot be written: No space left on device"}
        lost = sorted({error.prompt // 3 for error in disk})
        assert [error.prompt for error in disk] == [n for n in range(8) if n // 3 in lost]
        assert [error.line for error in disk] == [error.prompt + 1 for error in disk]
        assert na.load_sweep(sweeping.folder / name).parts == tuple(part for part in range(3) if part not in lost)
        assert done.n_new == 8 - len(disk)
        if done.errors_file is not None:
            assert len(done.errors_file.read_text().splitlines()) == len(done.errors)
        # Once a part was refused, parts for which there is no room are not computed.
        assert len(sweeping.computed) <= 3 - len(lost) + 1
        again = sweeping.run(name)
        assert [error.prompt for error in again.errors] == fault
        assert files(sweeping.folder / name) == sweeping.whole
    assert not out.exists()


def test_a_disk_that_is_full_from_the_start_is_an_error_that_leaves_no_part(sweeping: Sweep) -> None:
    with sweeping.patch.context() as patch:
        Disk(sweeping.folder / "out", 10, patch)
        with pytest.raises(OSError, match="No space left"):
            sweeping.run("out")
    assert files(sweeping.folder / "out") == {}
    sweeping.run("out")
    assert files(sweeping.folder / "out") == sweeping.whole


def test_what_is_unfinished_of_a_killed_run_is_removed_at_the_end(sweeping: Sweep) -> None:
    out = sweeping.folder / "out"
    (out / "neurons").mkdir(parents=True)
    (out / ".manifest.json.elsewhere-77.unfinished").write_text("{")
    (out / "neurons" / ".part-00000.parquet.elsewhere-77.unfinished").write_bytes(b"PAR1")
    (out / "neurons").rename(out / ".kept")
    with pytest.MonkeyPatch.context():
        sweeping.run("out")
    (out / ".kept" / ".part-00000.parquet.elsewhere-77.unfinished").rename(
        out / "neurons" / ".part-00000.parquet.elsewhere-77.unfinished"
    )
    (out / ".kept").rmdir()
    sweeping.run("out")
    assert files(out) == sweeping.whole
