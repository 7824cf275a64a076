"""What a prediction is attributed to: a token, a contrast of two tokens, or a set of tokens.

Each target is a function ``T`` of the logits ``z`` of one position, in nats:

==========================  ==========================================  =============================
target                      ``T(z)``                                    invariant to added constants
==========================  ==========================================  =============================
a token ``t``               ``z_t - log sum exp z``                     yes
``Contrast(a, b)``          ``z_a - z_b`` (the normaliser cancels)      yes
``AnyOf([b, ...])``         ``log sum_b exp z_b - log sum exp z``       yes
==========================  ==========================================  =============================

:class:`ResolvedTarget` holds the token ids of the two terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.tokens import Tokens, UnknownTokenError


class TargetError(ValueError):
    """The target is not one token (or a set of single tokens) of this model's vocabulary."""


@dataclass(frozen=True)
class Contrast:
    """``log p(positive) - log p(negative)``: linear in every neuron, hence exact without a vocabulary product.

    >>> Contrast(" Paris", " London")
    Contrast(positive=' Paris', negative=' London')
    """

    positive: int | str
    negative: int | str


@dataclass(frozen=True)
class AnyOf:
    """``log sum_b p(b)`` over a set of tokens, e.g. the spellings of one answer.

    >>> AnyOf([" Paris", " paris"])
    AnyOf(tokens=(' Paris', ' paris'))
    """

    tokens: tuple[int | str, ...]

    def __init__(self, tokens: Sequence[int | str]) -> None:
        if isinstance(tokens, str):
            raise TargetError(f"AnyOf takes a list of tokens, got the string {tokens!r}: write AnyOf([{tokens!r}])")
        object.__setattr__(self, "tokens", tuple(tokens))


Target: TypeAlias = int | str | Contrast | AnyOf | None


@dataclass(frozen=True)
class ResolvedTarget:
    """Token ids of ``T(z) = lse(z[positive]) - lse(z[negative])``; ``negative`` is empty for "all tokens"."""

    positive: tuple[int, ...]
    negative: tuple[int, ...]
    label: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token id named by the target."""
        return self.positive + self.negative

    @property
    def is_linear(self) -> bool:
        """Whether the normaliser cancels, so that scores are inner products."""
        return bool(self.negative)

    def value(self, log_probs: Float[Tensor, "*row d_vocab"]) -> Float[Tensor, "*row"]:
        """``T`` of log-probabilities, in nats."""
        value = torch.logsumexp(log_probs[..., list(self.positive)], -1)
        return value - torch.logsumexp(log_probs[..., list(self.negative)], -1) if self.negative else value


def resolve_target(target: Target, tokens: Tokens) -> ResolvedTarget | None:
    """Turn a user's target into token ids; ``None`` (the model's own prediction) stays ``None``.

    Raises :class:`TargetError` for an id outside the vocabulary, an unknown string, a string of several
    tokens, an empty set or a contrast of a token with itself.
    """
    if target is None:
        return None
    if isinstance(target, Contrast):
        positive, negative = _token_id(target.positive, tokens), _token_id(target.negative, tokens)
        if positive == negative:
            raise TargetError(f"{target} contrasts token {positive} with itself: name two different tokens")
        label = f"{tokens.quoted(positive)} - {tokens.quoted(negative)}"
        return ResolvedTarget((positive,), (negative,), label)
    if isinstance(target, AnyOf):
        ids = tuple(dict.fromkeys(_token_id(token, tokens) for token in target.tokens))
        if not ids:
            raise TargetError("AnyOf([]) names no token: give at least one")
        return ResolvedTarget(ids, (), " | ".join(tokens.quoted(token) for token in ids))
    return single(_token_id(target, tokens), tokens)


def single(token: int, tokens: Tokens) -> ResolvedTarget:
    """The target ``log p(token)``."""
    return ResolvedTarget((token,), (), tokens.quoted(token))


def _token_id(token: object, tokens: Tokens) -> int:
    if isinstance(token, str):
        try:
            return tokens.single_id(token)
        except UnknownTokenError as error:
            raise TargetError(str(error)) from error
    index = tokens.as_index(token)
    if index is None:
        raise TargetError(
            f"target {token!r} is a {type(token).__name__}: give a token id, a string of one token, "
            f"Contrast(a, b), AnyOf([...]) or None (the model's top prediction)"
        )
    if not 0 <= index < tokens.d_vocab:
        raise TargetError(
            f"target id {index} is outside the vocabulary of {tokens.d_vocab} tokens (0 to d_vocab - 1)"
        )
    return index
