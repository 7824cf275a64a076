"""Several prompts as people hold them -> ids of each, its predicting position and its target, checked one by one.

Prompts come as a list of strings, lists of ids and tensors, as a generator of them, or as one tensor ``[row, pos]``.
What rows of one length hold of padding is named by ``attention_mask`` (1 is a token, 0 padding, on either side) and
cut off; a tensor that looks padded but comes without a mask is refused, since padding read as tokens changes every
number. Errors name the prompt, ``prompts[3]: ...``, and keep their type.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from tl_neuron_attr.targets import ResolvedTarget, Target, TargetError, resolve_target
from tl_neuron_attr.tokens import Prompt, Tokens
from tl_neuron_attr.trace import predicting_position


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to trace: which it is of those given, its ids, predicting position and target."""

    index: int
    prompt: Prompt
    tokens: Int[Tensor, " pos"]
    dest: int
    target: ResolvedTarget | None


def requests(
    prompts: Any,
    targets: Any,
    vocabulary: Tokens,
    *,
    attention_mask: Any = None,
    position: int = -1,
    prepend_bos: bool | None = None,
) -> tuple[Iterator[Request], int | None]:
    """What to trace, in order, and how many; a generator of prompts is read as it goes, all else checked now.

    Raises what :func:`tl_neuron_attr.trace` raises of a prompt or target, and :class:`ValueError` for another number
    of targets than of prompts, and for a mask that does not fit.
    """
    given = _listed(prompts, attention_mask, vocabulary)
    wanted = _wanted(targets, vocabulary, len(given) if isinstance(given, list) else None)

    def request(index: int, prompt: Prompt) -> Request:
        with _named(f"prompts[{index}]"):
            tokens = vocabulary.prompt_ids(prompt, prepend_bos)
            dest = predicting_position(position, len(tokens))
        return Request(index, prompt, tokens, dest, wanted[index] if isinstance(wanted, list) else wanted)

    made = (request(index, prompt) for index, prompt in enumerate(given))
    if not isinstance(given, list):
        return made, None
    return iter(list(made)), len(given)


def _listed(prompts: Any, mask: Any, vocabulary: Tokens) -> "list[Prompt] | Iterable[Prompt]":
    """The prompts one by one, without the padding of a tensor's rows; a generator stays one."""
    if isinstance(prompts, str):
        raise ValueError(
            f"prompts is the one string {prompts!r}: give a list of prompts, e.g. [{prompts!r}], or use trace"
        )
    if isinstance(prompts, Mapping):
        raise ValueError(
            f'prompts is a {type(prompts).__name__}, as tokenizers return: give its "input_ids", a tensor '
            f'[row, pos], and its "attention_mask" as attention_mask='
        )
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r}: give a list of prompts, or a tensor of ids of shape [row, pos]")
    table = _table(prompts)
    if mask is not None:
        if table is None:
            raise ValueError(
                "attention_mask= goes with padded prompts, a tensor [row, pos] or lists of ids of one length: give "
                "these, or leave it out"
            )
        return _unpadded(table, torch.as_tensor(mask))
    if table is not None and not isinstance(prompts, list | tuple):
        _refuse_padding(table, vocabulary)
    return list(prompts) if isinstance(prompts, Sized) else prompts


def _table(prompts: Any) -> Int[Tensor, "row pos"] | None:
    """Prompts of ids that may hold padding, as all rows are of one length; ``None`` for any others."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2:
            raise ValueError(
                f"prompts is a tensor of shape {list(prompts.shape)}: give prompts as [row, pos], or as a list"
            )
        return None if prompts.is_floating_point() else prompts  # those of floats are refused one by one
    if not isinstance(prompts, Sized):
        return None
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in cast("Iterable[Any]", prompts)]
    if not rows or not all(isinstance(row, list | tuple) and len(row) == len(rows[0]) for row in rows):
        return None
    if any(Tokens.as_index(token) is None for row in rows for token in row):
        return None
    return torch.tensor(rows, dtype=torch.int64)


def _unpadded(prompts: Tensor, mask: Tensor) -> list[Prompt]:
    if mask.shape != prompts.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, prompts {list(prompts.shape)}: give one entry a token"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask holds other values than 0 and 1: give 1 for each token, 0 for padding")
    real = mask.to(prompts.device).bool()
    rows: list[Prompt] = []
    for index, (row, kept) in enumerate(zip(prompts, real, strict=True)):
        at = kept.nonzero().flatten().tolist()
        if not at:
            raise ValueError(f"prompts[{index}]: attention_mask is 0 at every position, so the prompt has no token")
        if len(at) != at[-1] - at[0] + 1:
            hole = next(i for i in range(at[0], at[-1]) if i not in at)
            raise ValueError(
                f"prompts[{index}]: attention_mask is 0 at position {hole}, between tokens: padding is before or "
                f"after a prompt; mask nothing inside it, or leave those tokens out"
            )
        rows.append(row[at[0] : at[-1] + 1])
    return rows


def _refuse_padding(prompts: Tensor, vocabulary: Tokens) -> None:
    """Rows that begin or end with padding; one such token at the start may be BOS, and a row of one is no padding."""
    pad = vocabulary.pad_id
    if pad is None or prompts.shape[1] < 2:
        return
    may_begin = 1 if pad == vocabulary.bos_id else 0
    for index, row in enumerate((prompts == pad).tolist()):
        where = "ends" if row[-1] else "begins" if all(row[: may_begin + 1]) else None
        if where:
            raise ValueError(
                f"prompts[{index}]: the row {where} with the tokenizer's padding token {pad}: give attention_mask=, "
                f"1 for each token and 0 for padding (1 everywhere if every token is part of its prompt)"
            )


def _wanted(
    targets: Any, vocabulary: Tokens, count: int | None
) -> "list[ResolvedTarget | None] | ResolvedTarget | None":
    """One target for all prompts, or a list of one for each."""
    if isinstance(targets, Tensor):
        targets = targets.tolist()  # an int, if it has no axis
    if isinstance(targets, str | Mapping) or not isinstance(targets, Sized):
        return resolve_target(cast("Target", targets), vocabulary)
    if count is None:
        raise ValueError(
            f"{len(targets)} targets for prompts of unknown number (a generator): give the prompts as a list too, or "
            f"one target for all"
        )
    if len(targets) != count:
        raise ValueError(
            f"{len(targets)} targets for {count} prompts: give one target for each (None is the model's own "
            f"prediction), or one for all"
        )
    found: list[ResolvedTarget | None] = []
    for index, target in enumerate(cast("Iterable[Target]", targets)):
        with _named(f"targets[{index}]"):
            found.append(resolve_target(target, vocabulary))
    return found


@contextmanager
def _named(what: str) -> Generator[None]:
    """Errors of the block say which entry they are of; their type is kept."""
    try:
        yield
    except ValueError as error:
        if type(error) not in (ValueError, TargetError):
            raise
        raise type(error)(f"{what}: {error}") from error
