"""Base vectors read out: what scores and bounds of vectors added to them need, and nothing more.

With ``z`` the logits before a cap and ``p`` the probabilities, everything that depends on the base alone is

    ``T(base)``,    ``log Z``,    ``e = W_U (p * slope(z))``,    ``g_b = W_U[:, b] - e``    (slope 1 without a cap),

a number or a ``d_model`` vector each. ``<e, N(w)>`` is the rate at which the expected logit changes along ``w``, and
``a <g_b, N(w)>`` bounds the score of ``a w`` for a token ``b`` from above (:mod:`tl_neuron_attr.scoring`). ``z`` and
``p`` themselves are kept where they fit half of the budget; else their blocks are computed anew when asked for.

:class:`Reading` is what does not depend on the target; bases of many prompts share one, so that they are read out by
one product with the vocabulary. :class:`Bases` are one prompt's part of it, under its own target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.products import along, product
from tl_neuron_attr.readout import Readout


@dataclass(frozen=True, eq=False)
class Reading:
    """Base vectors behind the final norm (``inputs``) and what the vocabulary makes of them.

    Of ``readout`` only what is the model's counts: unembedding, constant, cap and budget.
    """

    readout: Readout
    inputs: Float[Tensor, "base d_model"]
    log_z: Float[Tensor, " base"]
    expected: Float[Tensor, "base d_model"]
    kept_z: Float[Tensor, "base d_vocab"] | None
    kept_p: Float[Tensor, "base d_vocab"] | None

    @staticmethod
    def of(readout: Readout, inputs: Float[Tensor, "base d_model"]) -> "Reading":
        """Read out inputs of the unembedding."""
        cap = readout.cap
        fits = Reading.kept_bytes(readout, len(inputs)) <= readout.memory_budget // 2
        z = readout.read(inputs) if fits else None
        log_z = inputs.new_full((len(inputs),), -torch.inf)
        for block in readout.blocks(len(inputs)):
            log_z = torch.logaddexp(log_z, torch.logsumexp(readout.capped(_z(readout, inputs, z, block)), -1))
        p = _probabilities(readout, z, log_z)
        if cap is None:
            z = None
        expected = torch.zeros_like(inputs)
        for block in readout.blocks(len(inputs)):
            weight = p[:, block] if p is not None else _p(readout, inputs, z, log_z, block)
            if cap is not None:
                weight = weight * cap.slope(_z(readout, inputs, z, block))
            expected += product(weight, readout.W_U[:, block].T)
        return Reading(readout, inputs, log_z, expected, z, p)

    @cached_property
    def longest(self) -> Float[Tensor, ""]:
        """The length of the unembedding's longest column."""
        W_U, dtype = self.readout.W_U, self.readout.dtype
        blocks = self.readout.blocks(W_U.shape[0])
        return torch.stack([torch.linalg.vector_norm(W_U[:, b].to(dtype), dim=0).amax() for b in blocks]).amax()

    @staticmethod
    def kept_bytes(readout: Readout, n_bases: int) -> int:
        """What ``z`` and ``p`` of so many bases take."""
        return (1 if readout.cap is None else 2) * n_bases * readout.W_U.shape[1] * readout.itemsize

    def z_rows(self, index: Int[Tensor, " row"], block: slice) -> Float[Tensor, "#row token"]:
        """Logits before a cap of the bases named by ``index``; one row where all are the same one."""
        if self.kept_z is not None:
            return _rows(self.kept_z[:, block], index)
        rows, place = _distinct(index)
        return _z(self.readout, self.inputs[rows], None, block)[place]

    def p_rows(self, index: Int[Tensor, " row"], block: slice) -> Float[Tensor, "#row token"]:
        """Probabilities of the bases named by ``index``; one row where all are the same one."""
        if self.kept_p is not None:
            return _rows(self.kept_p[:, block], index)
        rows, place = _distinct(index)
        return _p(self.readout, self.inputs[rows], None, self.log_z[rows], block)[place]


@dataclass(frozen=True, eq=False)
class Bases:
    """The bases of one prompt, ``reading`` from ``start`` on, under its target; ``value`` is ``T`` (nats).

    ``positive`` and ``negative`` are the logits before a cap of the target's tokens, those that count for it and (for
    a contrast) the one against; ``g`` has one row for each option of the bound.
    """

    readout: Readout
    reading: Reading
    start: int
    value: Float[Tensor, " base"]
    positive: Float[Tensor, "base option"]
    negative: Float[Tensor, "base against"]
    g: Float[Tensor, "base option d_model"]

    @staticmethod
    def of(readout: Readout, x: Float[Tensor, "base d_model"]) -> "Bases":
        """Read out base vectors of the residual stream."""
        return Bases.of_each([readout], [x])[0]

    @staticmethod
    def of_each(readouts: Sequence[Readout], x: Sequence[Float[Tensor, "_ d_model"]]) -> "list[Bases]":
        """Read out base vectors of several prompts of one model and convention, each under its own target."""
        inputs = [readout.direction(own) for readout, own in zip(readouts, x, strict=True)]
        reading = Reading.of(readouts[0], inputs[0] if len(inputs) == 1 else torch.cat(inputs))
        found: list[Bases] = []
        start = 0
        for readout, own in zip(readouts, inputs, strict=True):
            found.append(Bases._under(readout, reading, start, start + len(own)))
            start += len(own)
        return found

    @staticmethod
    def _under(readout: Readout, reading: Reading, start: int, end: int) -> "Bases":
        target, own = readout.target, slice(start, end)
        inputs, expected = reading.inputs[own], reading.expected[own]
        options = readout.unembedded(target.positive)
        positive, negative = _at(readout, inputs, target.positive), _at(readout, inputs, target.negative)
        value = torch.logsumexp(readout.capped(positive), -1) - reading.log_z[own]
        g = options - expected[:, None]
        if target.is_linear:
            value = (readout.capped(positive) - readout.capped(negative))[:, 0]
            g = (options - readout.unembedded(target.negative)).expand(end - start, 1, -1)
        return Bases(readout, reading, start, value, positive, negative, g)

    @property
    def expected(self) -> Float[Tensor, "base d_model"]:
        """``e`` of every base."""
        return self.reading.expected[self.start : self.start + len(self.value)]

    @property
    def log_p(self) -> Float[Tensor, "base option"]:
        """Log-probabilities (nats) of the target's tokens."""
        log_z = self.reading.log_z[self.start : self.start + len(self.value)]
        return self.readout.capped(self.positive) - log_z[:, None]

    def p(self, index: int) -> Float[Tensor, " d_vocab"]:
        """All probabilities of one base."""
        at = torch.tensor([self.start + index], device=self.value.device)
        return torch.cat([self.reading.p_rows(at, block)[0] for block in self.readout.blocks(1)])


def _rows(kept: Float[Tensor, "base token"], index: Int[Tensor, " row"]) -> Float[Tensor, "#row token"]:
    return kept if len(kept) == 1 else kept.index_select(0, index)


def _distinct(index: Int[Tensor, " row"]) -> tuple[Int[Tensor, " distinct"], Int[Tensor, " place"]]:
    """Distinct bases and where each row's stands among them; a single place where all are the same."""
    rows, place = torch.unique(index, return_inverse=True)
    return rows, place[:1] if len(rows) == 1 else place


def _z(readout: Readout, inputs: Tensor, kept: Tensor | None, block: slice) -> Float[Tensor, "base token"]:
    if kept is not None:
        return kept[:, block]
    z = product(inputs, readout.W_U[:, block])
    return z if readout.constant is None else z.add_(readout.constant[block])


def _p(readout: Readout, inputs: Tensor, kept: Tensor | None, log_z: Tensor, block: slice) -> Tensor:
    return (readout.capped(_z(readout, inputs, kept, block)) - log_z[:, None]).exp_()


def _probabilities(readout: Readout, z: Tensor | None, log_z: Tensor) -> Tensor | None:
    """``p`` of kept logits, in their memory where nobody needs them any more (no cap)."""
    if z is None:
        return None
    return (z.sub_(log_z[:, None]) if readout.cap is None else readout.cap(z).sub_(log_z[:, None])).exp_()


def _at(readout: Readout, inputs: Tensor, tokens: tuple[int, ...]) -> Float[Tensor, "base token"]:
    """Logits of a few tokens before a cap."""
    if not tokens:
        return inputs.new_zeros(len(inputs), 0)
    z = along(inputs, readout.unembedded(tokens))
    return z if readout.constant is None else z + readout.constant[list(tokens)]
