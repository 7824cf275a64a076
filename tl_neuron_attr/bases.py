"""Base vectors read out: what scores and bounds of vectors added to them need, and nothing more.

With ``z`` the logits before a cap and ``p`` the probabilities, everything that depends on the base alone is

    ``T(base)``,    ``log Z``,    ``e = W_U (p * slope(z))``,    ``g_b = W_U[:, b] - e``    (slope 1 without a cap),

a number or a ``d_model`` vector each. ``<e, N(w)>`` is the rate at which the expected logit changes along ``w``, and
``a <g_b, N(w)>`` bounds the score of ``a w`` for a token ``b`` from above (:mod:`tl_neuron_attr.scoring`). ``z`` and
``p`` themselves are kept where they fit a quarter of the budget; else their blocks are computed anew when asked for.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.products import along, product
from tl_neuron_attr.readout import Readout


@dataclass(frozen=True, eq=False)
class Bases:
    """Base vectors under one readout; ``value`` is ``T`` (nats).

    ``positive`` and ``negative`` are the logits before a cap of the target's tokens, those that count for it and (for
    a contrast) the one against; ``g`` has one row for each option of the bound.
    """

    readout: Readout
    inputs: Float[Tensor, "base d_model"]
    log_z: Float[Tensor, " base"]
    value: Float[Tensor, " base"]
    positive: Float[Tensor, "base option"]
    negative: Float[Tensor, "base against"]
    expected: Float[Tensor, "base d_model"]
    g: Float[Tensor, "base option d_model"]
    kept_z: Float[Tensor, "base d_vocab"] | None
    kept_p: Float[Tensor, "base d_vocab"] | None

    @staticmethod
    def of(readout: Readout, x: Float[Tensor, "base d_model"]) -> "Bases":
        """Read out base vectors of the residual stream."""
        inputs, cap, target = readout.direction(x), readout.cap, readout.target
        kept = 1 if cap is None else 2
        fits = kept * len(inputs) * readout.W_U.shape[1] * readout.itemsize <= readout.memory_budget // 4
        z = readout.uncapped(x) if fits else None
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
        options = readout.unembedded(target.positive)
        positive, negative = _at(readout, inputs, target.positive), _at(readout, inputs, target.negative)
        value = torch.logsumexp(readout.capped(positive), -1) - log_z
        g = options - expected[:, None]
        if target.is_linear:
            value = (readout.capped(positive) - readout.capped(negative))[:, 0]
            g = (options - readout.unembedded(target.negative)).expand(len(inputs), 1, -1)
        return Bases(readout, inputs, log_z, value, positive, negative, expected, g, z, p)

    @property
    def log_p(self) -> Float[Tensor, "base option"]:
        """Log-probabilities (nats) of the target's tokens."""
        return self.readout.capped(self.positive) - self.log_z[:, None]

    def z_rows(self, index: Int[Tensor, " row"], block: slice) -> Float[Tensor, "place token"]:
        """Logits before a cap of the bases named by ``index``; one row where all are the same."""
        rows, place = _distinct(index)
        if self.kept_z is not None:
            return self.kept_z[:, block][rows][place]
        return _z(self.readout, self.inputs[rows], None, block)[place]

    def p_rows(self, index: Int[Tensor, " row"], block: slice) -> Float[Tensor, "place token"]:
        """Probabilities of the bases named by ``index``; one row where all are the same."""
        rows, place = _distinct(index)
        if self.kept_p is not None:
            return self.kept_p[:, block][rows][place]
        return _p(self.readout, self.inputs[rows], None, self.log_z[rows], block)[place]

    def log_p_rows(self, index: Int[Tensor, " row"], block: slice, moved: Tensor) -> Float[Tensor, "row token"]:
        """``log p`` of the bases where ``moved`` is added to every logit before a cap, ``log Z`` as it was."""
        z = _z(self.readout, self.inputs[index], None, block) + moved
        return self.readout.capped(z) - self.log_z[index, None]


def _distinct(index: Int[Tensor, " row"]) -> tuple[Int[Tensor, " distinct"], Int[Tensor, " place"]]:
    """Distinct bases and where each row's stands among them; a single place where all are the same."""
    if bool((index == index[0]).all()):
        return index[:1], torch.zeros_like(index[:1])
    return torch.unique(index, return_inverse=True)


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
