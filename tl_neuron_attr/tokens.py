"""Strings to token ids and back, once; from then on the package works with ids only.

A prompt keeps the model's own habit for a beginning-of-sequence token. A single token is looked up by the
exact string it stands for: ``" Paris"`` is not ``"Paris"``, also with tokenizers that put a space before every
text they are given. No tokenizer is needed where ids are given.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

Prompt: TypeAlias = str | Sequence[int] | Tensor

_SPACE = "\u2581"  # sentencepiece's mark for a leading space


class UnknownTokenError(ValueError):
    """A string that is not exactly one token of the vocabulary."""


class Tokens:
    """The vocabulary of one model: its tokenizer (or none), width and habits."""

    def __init__(self, model: Any, d_vocab_in: int, d_vocab: int, n_ctx: int | None) -> None:
        self._model = model
        self._tokenizer: Any = getattr(model, "tokenizer", None)
        self.pad_id: int | None = getattr(self._tokenizer, "pad_token_id", None)
        self.bos_id: int | None = getattr(self._tokenizer, "bos_token_id", None)
        self.d_vocab_in = d_vocab_in
        self.d_vocab = d_vocab
        self.n_ctx = n_ctx

    def prompt_ids(self, prompt: Prompt, prepend_bos: bool | None) -> Int[Tensor, " pos"]:
        """Token ids of a prompt: a string, a list of ids, or a tensor of shape ``[pos]`` or ``[1, pos]``.

        Raises :class:`ValueError` for an empty prompt, several prompts, ids outside the vocabulary, a prompt
        longer than the context, or a string without a tokenizer.
        """
        ids = (
            self._string_ids(prompt, prepend_bos) if isinstance(prompt, str) else self._given_ids(prompt, prepend_bos)
        )
        if ids.numel() == 0:
            raise ValueError("the prompt is empty: give at least one token to predict from")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.d_vocab_in:
            bad = lowest if lowest < 0 else highest
            raise ValueError(f"prompt token {bad} is outside the vocabulary of {self.d_vocab_in} tokens")
        if self.n_ctx is not None and ids.numel() > self.n_ctx:
            raise ValueError(
                f"the prompt has {ids.numel()} tokens, the model's context holds {self.n_ctx}: shorten the prompt"
            )
        return ids

    def _string_ids(self, prompt: str, prepend_bos: bool | None) -> Tensor:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer: give the prompt as token ids")
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token to predict from")
        options = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
        return self._model.to_tokens(prompt, truncate=False, **options)[0].detach().to("cpu", torch.int64)

    def _given_ids(self, prompt: Any, prepend_bos: bool | None) -> Tensor:
        if prepend_bos is not None:
            raise ValueError(
                f"prepend_bos={prepend_bos} was given with token ids: ids are used as they are; add or remove the "
                f"BOS token in the list itself"
            )
        if not isinstance(prompt, Tensor | Iterable):
            raise ValueError(
                f"the prompt is {prompt!r}: give one string, a list of token ids, or a tensor of ids of shape "
                f"[pos] or [1, pos]"
            )
        if not isinstance(prompt, Tensor):
            items = [self.as_index(token) for token in prompt]
            if None in items:
                bad = list(prompt)[items.index(None)]
                raise ValueError(
                    f"the prompt holds {bad!r} of type {type(bad).__name__}: give one string, a list of token ids, "
                    f"or a tensor of ids of shape [pos] or [1, pos]"
                )
            return torch.tensor(items, dtype=torch.int64)
        if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise ValueError(f"the prompt tensor has dtype {prompt.dtype}: token ids are integers")
        ids = prompt[0] if prompt.ndim == 2 and prompt.shape[0] == 1 else prompt
        if ids.ndim != 1:
            raise ValueError(
                f"the prompt tensor has shape {list(prompt.shape)}: give one prompt, [pos] or [1, pos]; "
                f"trace several prompts one at a time"
            )
        return ids.detach().to("cpu", torch.int64).clone()

    def continuation_ids(
        self, continuation: str | Sequence[int], start: Int[Tensor, " pos"]
    ) -> Int[Tensor, " answer"]:
        """Token ids of an answer that follows the prompt ``start``: a string (no BOS is added) or a list of ids."""
        if isinstance(continuation, str):
            if self._tokenizer is None:
                raise ValueError("the model has no tokenizer: give the continuation as token ids")
            ids = torch.tensor(self._spelled(continuation, int(start[-1])), dtype=torch.int64)
        else:
            ids = self._given_ids(continuation, None)
        if ids.numel() == 0:
            raise ValueError("the continuation is empty: give at least one token to attribute to")
        return ids

    def _spelled(self, text: str, last: int) -> list[int]:
        """Ids that read as ``text`` after the token ``last``.

        A tokenizer may put a space before every text it is given, so the text is also tried without its own first
        space, and behind a letter, a stop and a line break, which are then taken away again.
        """
        tries = [self._pieces(text), self._pieces(text[1:]) if text.startswith(" ") else []]
        for anchor in ("x", ".", "\n"):
            head, whole = self._pieces(anchor), self._pieces(anchor + text)
            tries.append(whole[len(head) :] if whole[: len(head)] == head else [])
        before = self._decode([last])
        for ids in tries:
            if ids and self._decode([last, *ids]) == before + text:
                return ids
        if not text:
            return []
        raise ValueError(
            f"no tokens of this tokenizer read as {text!r} after the prompt: give the continuation as ids"
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @staticmethod
    def as_index(token: object) -> int | None:
        """An integer (Python, NumPy or a tensor of one element), or ``None`` for anything else."""
        if isinstance(token, bool | float | str):
            return None
        try:
            return operator.index(token)  # type: ignore[arg-type]  # the except clause is the check
        except TypeError:
            return None

    def text(self, token: int) -> str:
        """The string that a token stands for, a leading space included; ``[id]`` without a tokenizer."""
        if self._tokenizer is None:
            return f"[{token}]"
        piece = self._piece(token)
        if piece is None:
            return f"[{token}]"
        return piece.replace(_SPACE, " ") if _SPACE in piece else self._decode([token])

    def quoted(self, token: int) -> str:
        """The token's string in quotes, so that a leading space shows; ``[id]`` without a tokenizer."""
        text = self.text(token)
        return text if text == f"[{token}]" else repr(text)

    @functools.cached_property
    def _n_known(self) -> int:
        """How many tokens the tokenizer knows; counting them takes 17 ms of Transformers 4 with 50,000 of them."""
        return len(self._tokenizer)

    def _piece(self, token: int) -> str | None:
        if token >= self._n_known:
            return None
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None

    def single_id(self, text: str) -> int:
        """The id of the one token that stands for exactly ``text``.

        Raises :class:`UnknownTokenError`, listing the pieces, where there is none.
        """
        if self._tokenizer is None:
            raise UnknownTokenError(f"the model has no tokenizer to look up {text!r}: give the target as a token id")
        if not text:
            raise UnknownTokenError("the target is an empty string: give a string of one token, or a token id")
        found = self._find(text)
        if found is not None:
            return found
        raise UnknownTokenError(self._no_single_token(text))

    def _find(self, text: str) -> int | None:
        """The token whose string is ``text``: as the tokenizer cuts it, by name, or one byte of it."""
        tries = [self._pieces(text), self._pieces(text[1:]) if text.startswith(" ") else []]
        names = [text, text.replace(" ", _SPACE), *(f"<0x{byte:02X}>" for byte in text.encode()[:1])]
        candidates: list[Any] = [ids[0] for ids in tries if len(ids) == 1]
        candidates += [self._tokenizer.convert_tokens_to_ids(name) for name in names]
        if "\ufffd" in text:  # what a part of a letter is shown as stands for many tokens
            return None
        matching = (t for t in candidates if isinstance(t, int) and 0 <= t < self.d_vocab and self.text(t) == text)
        return next(matching, None)

    def _pieces(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _no_single_token(self, text: str) -> str:
        pieces, unknown = self._pieces(text), self._tokenizer.unk_token_id
        if len(pieces) < 2 or (unknown is not None and unknown in pieces):
            spaced = " " + text
            hint = f" (did you mean {spaced!r}, with its leading space?)" if self._find(spaced) is not None else ""
            return f"target {text!r} is not a token of this model's vocabulary{hint}"
        listed = ", ".join(self.quoted(token) for token in pieces)
        return (
            f"target {text!r} is {len(pieces)} tokens ({listed}): a target is one token; attribute to its first, "
            f"{self.quoted(pieces[0])}, or in Python to all of them with trace_continuation(model, prompt, {text!r})"
        )
