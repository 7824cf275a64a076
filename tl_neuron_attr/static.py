"""Methods that read one trace and the weights: no gradient, no further forward pass.

With ``a`` a neuron's coefficient and ``v`` what a coefficient of one adds to the stream (its output row, through
whatever is behind the sublayer, :mod:`tl_neuron_attr.post`), at the frozen readout and in nats or probabilities:

=====================  ===================================================================================
name                   score
=====================  ===================================================================================
log_prob_increase      ``S = T(base + a v) - T(base)``
log_prob_alone         ``T(a v)``: the base is zero
prob_increase          ``p(base + a v) - p(base) = p(base) (exp(S) - 1)``
norm                   ``|v|``
coefficient            ``|a|``
coefficient_norm       ``|a| |v|``
direct_logit           ``a u_t``, ``u = W_U' N(v)``
=====================  ===================================================================================

The first three grow with ``S`` within a layer, so an upper bound of ``S`` bounds them, and the search stays exact.
``log_prob_alone`` keeps the readout's constant under ``"exact"`` and drops it under ``"paper"``; it and
``prob_increase`` are float64, for a shifted float32 would lose the digits that order small scores. For ``AnyOf`` the
probability is the summed one; ``Contrast`` has none.

``direct_logit`` is the direct effect on the logit before any soft cap, constant left out: ``a (u_a - u_b)`` for
``Contrast``, and for ``AnyOf`` the mean of ``a u_b`` weighted by the model's own ``p(b | set)``, so that it stays a
sum over neurons.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.bases import Bases
from tl_neuron_attr.candidates import Candidates
from tl_neuron_attr.question import Question
from tl_neuron_attr.search import Found
from tl_neuron_attr.together import found_together
from tl_neuron_attr.writes import coefficients


def log_prob_increase(question: Question) -> Found:
    """(a) The method of the paper (Eq. 13)."""
    return found_together([question])[0]


def log_prob_alone(question: Question) -> Found:
    """(b) Log-probability of the neuron's vector alone."""
    view, readout = question.trace.view, question.readout
    zero = torch.zeros(len(question.layers), view.d_model, dtype=readout.dtype, device=readout.W_U.device)
    return question.exact(_Alone(_candidates(question, Bases.of(readout, zero))))


def prob_increase(question: Question) -> Found:
    """(c) How much the probability grows."""
    if question.trace.target.is_linear:
        raise ValueError(
            f"method 'prob_increase' is not defined for the contrast {question.trace.target.label}: two tokens have "
            f"no one probability; trace a token or AnyOf([...]), or use 'log_prob_increase'"
        )
    return question.exact(_Probability(_candidates(question)))


def norm(question: Question) -> Found:
    """(d) Length of what the neuron adds per unit of its coefficient."""
    return question.dense(lambda layer: _length(question, layer)[:, None].expand_as(_size(question, layer)))


def coefficient(question: Question) -> Found:
    """(e) Size of the coefficient."""
    return question.dense(lambda layer: _size(question, layer))


def coefficient_norm(question: Question) -> Found:
    """(g) Length of what the neuron adds."""
    return question.dense(lambda layer: _size(question, layer) * _length(question, layer)[:, None])


def direct_logit(question: Question) -> Found:
    """Direct logit attribution."""
    target, readout = question.trace.target, question.readout
    log_p = question.trace.log_probs[list(target.positive)]
    q = torch.softmax(log_p, -1).to(readout.scale) @ readout.unembedded(target.positive)
    if target.is_linear:
        q = q - readout.unembedded(target.negative)[0]
    read = readout.adjoint(q)

    def scores(layer: int) -> Float[Tensor, "row source"]:
        own = coefficients(question.trace, question.kind, layer)
        along = torch.cat([(part * read.to(part.device)).sum(-1) for part in question.vectors(layer)])
        return own * along[:, None].to(own.device)

    return question.dense(scores)


class _Alone:
    """``T(a v) = T(0) + S`` at base zero."""

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        self._start = pool.bases.value[0].double().cpu()

    def upper(self, index: int) -> Float[Tensor, " neuron"]:
        return self._pool.upper(index).double() + self._start

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        return self._pool.score(number).double() + self._start


class _Probability:
    """``p (exp(S) - 1)`` with ``p`` the target's probability at each layer's base; it is at most ``1 - p``."""

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        self._log_p = pool.bases.value.double().cpu().clamp(max=0)

    def upper(self, index: int) -> Float[Tensor, " neuron"]:
        bound = self._gained(self._log_p[index], self._pool.upper(index))
        return bound + bound.abs() * 1e-12

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        index, _, _ = self._pool.numbering.places(number)
        return self._gained(self._log_p[index], self._pool.score(number))

    @staticmethod
    def _gained(log_p: Tensor, score: Tensor) -> Tensor:
        score = score.double()
        small = log_p.exp() * torch.expm1(score.clamp(max=1))
        large = (log_p + score).exp() - log_p.exp()
        return torch.minimum(torch.where(score < 1, small, large), -torch.expm1(log_p))


def _candidates(question: Question, bases: Bases | None = None) -> Candidates:
    return Candidates(question.trace, question.readout, question.kind, question.layers, bases)


def _size(question: Question, layer: int) -> Float[Tensor, "row source"]:
    return coefficients(question.trace, question.kind, layer).abs()


def _length(question: Question, layer: int) -> Float[Tensor, " row"]:
    length = torch.cat([part.square().sum(-1).sqrt() for part in question.vectors(layer)])
    return length.to(coefficients(question.trace, question.kind, layer).device)
