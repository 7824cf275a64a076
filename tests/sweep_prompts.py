"""Prompts for the tests of sweeps on tiny models, and folders compared byte by byte."""

import json
from pathlib import Path
from typing import Any

# No word begins with t0 or t1, which are special tokens of that tokenizer, found inside words too.
LENGTHS = (4, 3, 4, 5, 3, 4, 3, 5, 4, 4, 3)
TYPES = ("a", "b", "a")
LINES = [
    {
        "prompt": " ".join(f"t{20 + (7 * i + 11 * j) % 70}" for j in range(n)),
        "answer": f"t{70 + i}",
        "type": TYPES[i % 3],
    }
    for i, n in enumerate(LENGTHS)
]


def write(path: Path, lines: list[Any] = LINES) -> Path:
    """A file of prompts; what is text already goes in as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder by name, unfinished files too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
