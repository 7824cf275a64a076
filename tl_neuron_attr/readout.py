"""The frozen readout: log-probabilities of a vector in the residual stream, and how a vector changes them.

The final norm's scale ``s`` is that of the true final residual at the predicting position and is kept for every
vector, so with ``N(x)`` the norm's linear part (:mod:`tl_neuron_attr.norms`) the logits are affine,

    ``z(x) = W_U' N(x) + b``,    ``z(x + a w) = z(x) + a u``,    ``u = W_U' N(w)``,

where ``b`` (norm bias through the unembedding, and ``b_U``) is kept under ``"exact"`` and dropped under
``"paper"``. The score of ``a w`` at a base (Eq. 13) follows from the base's log-probabilities ``log p`` alone:

    ``S = a u_t - log sum_j exp(log p_j + a u_j)``                          a token ``t``
    ``S = a (u_a - u_b)``                                                   ``Contrast(a, b)``
    ``S = log sum_B exp(log p_b + a u_b) - log p(B) - log sum_j exp(...)``  ``AnyOf(B)``

and by Jensen's inequality ``log E_p[exp(a u)] >= a E_p[u]`` it is bounded from one vector per base and option,

    ``S <= max_b a <g_b, N(w)>``,    ``g_b = W_U[:, b] - W_U p``,

which is attained by a contrast (``g = W_U[:, a] - W_U[:, b]``). The vocabulary is passed in blocks so that a
memory budget holds whatever its width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.norms import Norm
from tl_neuron_attr.targets import ResolvedTarget

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

DEFAULT_MEMORY_BUDGET = 2**30
_MIN_ROWS = 32


@dataclass(frozen=True, eq=False)
class Bases:
    """Base vectors read out: ``inputs`` ``N(x)``, normalisers, target values (nats) and bound directions ``g``.

    ``log_p`` is ``None`` where it would not fit the budget; its blocks are then computed anew when asked for.
    """

    inputs: Float[Tensor, "base d_model"]
    log_z: Float[Tensor, " base"]
    value: Float[Tensor, " base"]
    positive: Float[Tensor, "base option"]
    g: Float[Tensor, "base option d_model"]
    log_p: Float[Tensor, "base d_vocab"] | None


@dataclass(frozen=True, eq=False)
class Readout:
    """The affine map from the residual stream to logits at one position; make it with :meth:`of`."""

    W_U: Float[Tensor, "d_model d_vocab"]
    norm: Norm
    scale: Float[Tensor, " 1"]
    constant: Float[Tensor, " d_vocab"] | None
    target: ResolvedTarget
    memory_budget: int

    @staticmethod
    def of(trace: "Trace", *, convention: str | None = None, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> "Readout":
        """The readout of a trace under its convention; raises :class:`ValueError` for a budget below one MiB."""
        if memory_budget < 2**20:
            raise ValueError(f"memory_budget={memory_budget} bytes: give at least one MiB (2**20)")
        view = trace.view
        norm, W_U, dtype = view.final_norm, view.W_U, view.compute_dtype
        final = trace.resid_final.to(W_U.device, dtype)
        constant: Tensor | None = None
        if (convention or trace.convention) == "exact":
            constant = None if view.b_U is None else view.b_U.to(W_U.device, dtype)
            if norm.bias is not None:
                through = _matmul(norm.bias.to(W_U.device, dtype)[None], W_U, memory_budget)[0]
                constant = through if constant is None else constant + through
        return Readout(W_U, norm, norm.scale(final), constant, trace.target, memory_budget)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of every score: float64 for a float64 model, else float32."""
        return self.scale.dtype

    def direction(self, w: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N(w)`` on the unembedding's device, rows contiguous (products round by layout, see ``_product``)."""
        return self.norm.linear(w.to(self.W_U.device, self.dtype).contiguous(), self.scale)

    def adjoint(self, g: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N*(g)``, the direction in the residual stream that ``g`` reads."""
        return self.norm.adjoint(g, self.scale)

    def logits(self, x: Float[Tensor, "base d_model"]) -> Float[Tensor, "base d_vocab"]:
        """``z(x)``."""
        z = _matmul(self.direction(x), self.W_U, self.memory_budget)
        return z if self.constant is None else z.add_(self.constant)

    def moved_logits(self, written: Float[Tensor, "vector d_model"]) -> Float[Tensor, "vector d_vocab"]:
        """``W_U' N(v)``: how vectors added to the stream change every logit."""
        return _matmul(self.direction(written), self.W_U, self.memory_budget)

    def unembedded(self, tokens: tuple[int, ...]) -> Float[Tensor, "token d_model"]:
        """Columns of the unembedding."""
        return self.W_U[:, list(tokens)].T.to(self.dtype)

    # ---- bases ----------------------------------------------------------------------------------------

    def bases(self, x: Float[Tensor, "base d_model"]) -> Bases:
        """Read out base vectors: everything that scores and bounds of vectors added to them need."""
        inputs = self.direction(x)
        keep = inputs.shape[0] * self.W_U.shape[1] * self._itemsize <= self.memory_budget // 4
        log_p = self.logits(x) if keep else None
        log_z = inputs.new_full((len(inputs),), -torch.inf)
        for block in self._blocks(len(inputs)):
            log_z = torch.logaddexp(log_z, torch.logsumexp(self._logit_block(inputs, log_p, block), -1))
        if log_p is not None:
            log_p -= log_z[:, None]
        options = self.unembedded(self.target.positive)
        positive = inputs @ options.T
        if self.constant is not None:
            positive = positive + self.constant[list(self.target.positive)]
        value = torch.logsumexp(positive, -1)
        if self.target.is_linear:
            others = self.unembedded(self.target.negative)
            value = value - (inputs @ others.T)[:, 0]
            if self.constant is not None:
                value = value - self.constant[list(self.target.negative)]
            g = (options - others).expand(len(inputs), 1, -1)
        else:
            value = value - log_z
            g = options[None] - self._expected_rows(inputs, log_z, log_p)[:, None]
        return Bases(inputs, log_z, value, positive - log_z[:, None], g, log_p)

    def _expected_rows(self, inputs: Tensor, log_z: Tensor, log_p: Tensor | None) -> Float[Tensor, "base d_model"]:
        """``W_U p`` for each base."""
        total = torch.zeros_like(inputs)
        for block in self._blocks(len(inputs)):
            logits = self._logit_block(inputs, log_p, block)
            p = (logits if log_p is not None else logits - log_z[:, None]).exp()
            total += _product(p, self.W_U[:, block].T)
        return total

    def _logit_block(self, inputs: Tensor, kept: Tensor | None, block: slice) -> Tensor:
        if kept is not None:
            return kept[:, block]
        z = _product(inputs, self.W_U[:, block])
        return z if self.constant is None else z.add_(self.constant[block])

    # ---- scores ---------------------------------------------------------------------------------------

    def changes(
        self,
        bases: Bases,
        base_of: Int[Tensor, " direction"],
        directions: Float[Tensor, "direction d_model"],
        rows: Int[Tensor, " vector"],
        coefficient: Float[Tensor, " vector"],
    ) -> Float[Tensor, " vector"]:
        """Exact ``S`` (nats) of vectors ``coefficient[i] * w[rows[i]]``, each at the base of its direction.

        ``directions`` are ``N(w)``; several vectors may share one, whose product with the vocabulary is then
        computed once.
        """
        options = self.unembedded(self.target.positive)
        if self.target.is_linear:
            options = options - self.unembedded(self.target.negative)
        moved = (directions[:, None] * options).sum(-1)[rows] * coefficient[:, None]
        if self.target.is_linear:
            return moved[:, 0]
        growth = coefficient.new_full((len(rows),), -torch.inf)
        for block in self._blocks(len(directions)):
            u = _product(directions, self.W_U[:, block])
            for part in self._parts(len(rows), u.shape[1]):
                index = rows[part]
                x = self._log_p_block(bases, base_of[index], block)
                x = torch.addcmul(x, u[index], coefficient[part, None])
                growth[part] = torch.logaddexp(growth[part], torch.logsumexp(x, -1))
        if len(self.target.positive) == 1:
            return moved[:, 0] - growth
        before = bases.positive[base_of[rows]]
        return torch.logsumexp(before + moved, -1) - torch.logsumexp(before, -1) - growth

    def _log_p_block(self, bases: Bases, index: Tensor, block: slice) -> Tensor:
        """``log p`` of the bases named by ``index``; one row where all are the same."""
        distinct, place = torch.unique(index, return_inverse=True)
        if bases.log_p is not None:
            rows = bases.log_p[distinct][:, block]
        else:
            rows = self._logit_block(bases.inputs[distinct], None, block) - bases.log_z[distinct, None]
        return rows if len(distinct) == 1 else rows[place]

    # ---- memory ---------------------------------------------------------------------------------------

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize

    def directions_at_once(self) -> int:
        """How many directions to pass to :meth:`changes` in one call under the budget."""
        return max(1, min(1024, self.memory_budget // (16 * self._itemsize * self.W_U.shape[0])))

    def _blocks(self, rows: int) -> Iterator[slice]:
        """Slices of the vocabulary for a product of ``rows`` vectors (an eighth of the budget)."""
        columns = rows + (self.W_U.shape[0] if self.W_U.dtype != self.dtype else 0)
        yield from _slices(self.W_U.shape[1], self.memory_budget // (8 * self._itemsize * max(columns, 1)))

    def _parts(self, rows: int, width: int) -> Iterator[slice]:
        """Slices of the vectors scored against one block (with three temporaries, three eighths of the budget)."""
        yield from _slices(rows, self.memory_budget // (8 * self._itemsize * max(width, 1)))


def _slices(length: int, step: int) -> Iterator[slice]:
    step = max(1, min(step, length))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _matmul(x: Tensor, W_U: Tensor, memory_budget: int) -> Tensor:
    """``x @ W_U`` in the precision of ``x``, without a converted copy of the whole unembedding."""
    if W_U.dtype == x.dtype:
        return _product(x, W_U)
    out = x.new_empty(len(x), W_U.shape[1])
    for block in _slices(W_U.shape[1], memory_budget // (8 * x.dtype.itemsize * W_U.shape[0])):
        out[:, block] = _product(x, W_U[:, block])
    return out


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix``, each row rounded alike whatever rows stand beside it.

    Libraries multiply a few rows by other kernels than many rows; with zero rows up to a minimum, a neuron's
    score is the same to the last bit whether it is scored alone or among thousands, so ties stay ties.
    """
    missing = _MIN_ROWS - len(x)
    if missing <= 0:
        return x @ matrix.to(x.dtype)
    return (torch.cat([x, x.new_zeros(missing, x.shape[1])]) @ matrix.to(x.dtype))[: len(x)]
