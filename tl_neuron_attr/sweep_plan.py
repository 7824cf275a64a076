"""What a sweep does: its prompts, numbered and cut into parts, and the settings that a restart must share.

Prompts are numbered from 0 in the order given; of a file, every line that is not blank has a number, also one that
cannot be read. Part ``i`` is the prompts ``i * part_size`` to ``(i + 1) * part_size - 1``, whoever does it, in
whatever batches and after whatever interruption, so a part's files do not depend on any of these.

Prompts come as

* a file, ``.jsonl`` or ``.csv`` (:mod:`tl_neuron_attr.prompt_files`): ``prompt`` is needed; ``answer`` is the token
  to attribute to, left out or empty for the model's own prediction; ``type`` groups prompts;
* a list of strings, lists of token ids and :class:`KnowledgePrompt`, with ``targets`` or without.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from tl_neuron_attr import __version__
from tl_neuron_attr.prompt_files import BadLine, KnowledgePrompt, read_lines
from tl_neuron_attr.sweep_schema import N_QUERIED

PART_SIZE = 64
MEMORY_BUDGET = 2**31


@dataclass(frozen=True)
class Entry:
    """One prompt of a sweep; ``line`` is that of its file, ``problem`` why it cannot be read."""

    number: int
    line: int | None
    prompt: Any
    target: Any = None
    type: str = ""
    problem: str | None = None

    @property
    def text(self) -> str | None:
        """The prompt where it is text."""
        return self.prompt if isinstance(self.prompt, str) and self.problem is None else None


@dataclass(frozen=True)
class Plan:
    """All prompts, what identifies them, and how they are cut into parts."""

    entries: tuple[Entry, ...]
    digest: str
    part_size: int

    @property
    def n_parts(self) -> int:
        """How many parts there are."""
        return -(-len(self.entries) // self.part_size)

    def part(self, index: int) -> tuple[Entry, ...]:
        """The prompts of one part."""
        return self.entries[index * self.part_size : (index + 1) * self.part_size]


def plan_of(prompts: Any, targets: Sequence[Any] | None, part_size: int, leading_space: bool = True) -> Plan:
    """Read and number the prompts.

    Raises :class:`ValueError` for none, for one string instead of a list, for targets that do not fit; OSError for a
    file that cannot be read.
    """
    if operator.index(part_size) < 1:
        raise ValueError(f"part_size is {part_size}: ask for 1 or more")
    if isinstance(prompts, Path) or (isinstance(prompts, str) and prompts.lower().endswith((".jsonl", ".csv"))):
        if targets is not None:
            raise ValueError("targets= goes with a list of prompts: in a file each prompt's target is its answer")
        entries, digest = _of_file(Path(prompts), leading_space)
    else:
        entries = _of_list(prompts, targets)
        digest = _sha256("\n".join(_canonical(entry) for entry in entries).encode())
    if not entries:
        raise ValueError("there are no prompts: give at least one")
    return Plan(tuple(entries), digest, part_size)


def _of_file(path: Path, leading_space: bool) -> tuple[list[Entry], str]:
    entries: list[Entry] = []
    for number, (line, read) in enumerate(read_lines(path, needed=("prompt",), leading_space=leading_space)):
        if isinstance(read, BadLine):
            entries.append(Entry(number, line, None, problem=read.reason))
        else:
            entries.append(Entry(number, line, read.prompt, read.answer or None, read.type))
    return entries, _sha256(path.read_bytes())


def _of_list(prompts: Any, targets: Sequence[Any] | None) -> list[Entry]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is {prompts!r}: give a list of prompts, or the path of a file that ends in .jsonl or .csv"
        )
    given = list(cast("Iterable[Any]", prompts))
    if targets is not None and (isinstance(targets, str) or len(targets) != len(given)):
        raise ValueError(f"targets must be a list of one for each of the {len(given)} prompts (None: the prediction)")
    entries: list[Entry] = []
    for number, prompt in enumerate(given):
        target = None if targets is None else targets[number]
        entry = Entry(number, None, prompt, target)
        if isinstance(prompt, KnowledgePrompt):
            chosen = prompt.answer or None if target is None else target
            entry = Entry(number, None, prompt.prompt, chosen, prompt.type)
        elif not isinstance(prompt, str) and hasattr(prompt, "tolist"):
            ids = prompt.tolist()
            one_row = isinstance(ids, list) and len(cast("list[Any]", ids)) == 1 and isinstance(ids[0], list)
            entry = Entry(number, None, ids[0] if one_row else ids, target)
        if entry.text is not None and any("\ud800" <= letter <= "\udfff" for letter in entry.text):
            problem = "the prompt holds half of a surrogate pair, which is no letter"
            entry = Entry(number, None, None, target, problem=problem)
        entries.append(entry)
    return entries


def _canonical(entry: Entry) -> str:
    """An entry as text that is the same for the same prompt, target and type."""
    return json.dumps([entry.prompt, entry.target, entry.type, entry.problem], default=repr)


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def settings_of(
    plan: Plan, *, k: int, query: bool, convention: str, leading_space: bool, prepend_bos: bool | None = None
) -> dict[str, Any]:
    """What must stay the same and is known without a model."""
    return {
        "convention": convention,
        "k": k,
        "query": query,
        "n_queried": N_QUERIED if query else None,
        "prepend_bos": prepend_bos,
        "leading_space": leading_space,
        "part_size": plan.part_size,
        "n_prompts": len(plan.entries),
        "prompts": plan.digest,
    }


def versions() -> dict[str, str]:
    """Of what makes the numbers and the files."""
    packages = ("transformer-lens", "transformers", "torch", "pyarrow")
    return {"tl_neuron_attr": __version__, **{name: version(name) for name in packages}}
