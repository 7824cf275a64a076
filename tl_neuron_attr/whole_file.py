"""Files that appear whole or not at all.

A file is written under another name in the same folder, flushed to the disk (fsync) and then renamed, which is one
step for every reader; the folder is flushed too.
"""

import contextlib
import os
import shutil
import socket
from collections.abc import Generator
from pathlib import Path


def write_text_whole(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all, as it stands: line ends are not changed.

    A link stays one and its file is replaced, with the permissions it had. What is no plain file, such as
    ``/dev/stdout`` or a pipe, cannot be replaced and is written as it is. OSError where the disk does not take it.
    """
    path = path.resolve()
    data = text.encode()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a crash of the machine."""
    with unfinished(path) as mine:
        write_bytes(mine, data)
        if path.exists():
            shutil.copymode(path, mine)
        os.replace(mine, path)
    _flush_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and flush to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def unfinished(path: Path) -> Generator[Path]:
    """A name beside ``path`` that no other process has; the file is removed afterwards if it is still there."""
    mine = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.unfinished")
    try:
        yield mine
    except Exception:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
        raise
    mine.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
