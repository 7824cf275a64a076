"""The frozen readout: log-probabilities of a vector in the residual stream, and how a vector changes them.

The final norm's scale ``s`` is that of the true final residual at the predicting position and is kept for every
vector, so with ``N(x)`` the norm's linear part (:mod:`tl_neuron_attr.norms`) the logits are affine,

    ``z(x) = W_U' N(x) + b``,    ``z(x + a w) = z(x) + a u``,    ``u = W_U' N(w)``,

where ``b`` (norm bias through the unembedding, and ``b_U``) is kept under ``"exact"`` and dropped under
``"paper"``. With ``p = softmax(z(base))`` and ``m = E_p[u]``, the score of ``a w`` at a base (Eq. 13) is

    ``S = a (u_t - m) - log E_p[exp(a (u - m))]``                           a token ``t``
    ``S = a (u_a - u_b)``                                                   ``Contrast(a, b)``
    ``S = log sum_B p(b | B) exp(a (u_b - m)) - log E_p[exp(a (u - m))]``   ``AnyOf(B)``

The last term is computed as ``log1p(E_p[expm1(a (u - m))])``, which keeps the full precision of small scores.
It is never negative (Jensen), so what precedes it bounds the score from one vector per base and option:

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
from tl_neuron_attr.products import MIN_ROWS, along, matmul, product, slices
from tl_neuron_attr.targets import ResolvedTarget

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

DEFAULT_MEMORY_BUDGET = 2**30
# Sizes that measured fastest on processors: entries of one matrix product, and of one pass of elementwise work.
_PRODUCT_ENTRIES = 2**22
_CACHED_ENTRIES = 2**18


@dataclass(frozen=True, eq=False)
class Bases:
    """Base vectors read out: ``inputs`` ``N(x)``, ``log_z``, target values (nats), ``expected`` ``W_U p`` and ``g``.

    ``positive`` are log-probabilities of the target's tokens. ``p`` is ``None`` where it would not fit the
    budget; its blocks are then computed anew when asked for.
    """

    inputs: Float[Tensor, "base d_model"]
    log_z: Float[Tensor, " base"]
    value: Float[Tensor, " base"]
    positive: Float[Tensor, "base option"]
    expected: Float[Tensor, "base d_model"]
    g: Float[Tensor, "base option d_model"]
    p: Float[Tensor, "base d_vocab"] | None


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
                through = matmul(norm.bias.to(W_U.device, dtype)[None], W_U, memory_budget)[0]
                constant = through if constant is None else constant + through
        return Readout(W_U, norm, norm.scale(final), constant, trace.target, memory_budget)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of every score: float64 for a float64 model, else float32."""
        return self.scale.dtype

    def direction(self, w: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N(w)`` on the unembedding's device, rows contiguous (products round by layout, see ``product``)."""
        return self.norm.linear(w.to(self.W_U.device, self.dtype).contiguous(), self.scale)

    def adjoint(self, g: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N*(g)``, the direction in the residual stream that ``g`` reads."""
        return self.norm.adjoint(g, self.scale)

    def logits(self, x: Float[Tensor, "base d_model"]) -> Float[Tensor, "base d_vocab"]:
        """``z(x)``."""
        z = matmul(self.direction(x), self.W_U, self.memory_budget)
        return z if self.constant is None else z.add_(self.constant)

    def moved_logits(self, written: Float[Tensor, "vector d_model"]) -> Float[Tensor, "vector d_vocab"]:
        """``W_U' N(v)``: how vectors added to the stream change every logit."""
        return matmul(self.direction(written), self.W_U, self.memory_budget)

    def unembedded(self, tokens: tuple[int, ...]) -> Float[Tensor, "token d_model"]:
        """Columns of the unembedding."""
        return self.W_U[:, list(tokens)].T.to(self.dtype)

    # ---- bases ----------------------------------------------------------------------------------------

    def bases(self, x: Float[Tensor, "base d_model"]) -> Bases:
        """Read out base vectors: everything that scores and bounds of vectors added to them need."""
        inputs = self.direction(x)
        keep = inputs.shape[0] * self.W_U.shape[1] * self._itemsize <= self.memory_budget // 4
        kept = self.logits(x) if keep else None
        log_z = inputs.new_full((len(inputs),), -torch.inf)
        for block in self.blocks(len(inputs)):
            log_z = torch.logaddexp(log_z, torch.logsumexp(self._logits(inputs, kept, block), -1))
        p = None if kept is None else kept.sub_(log_z[:, None]).exp_()
        expected = torch.zeros_like(inputs)
        for block in self.blocks(len(inputs)):
            expected += product(self._p(inputs, log_z, p, block), self.W_U[:, block].T)
        options = self.unembedded(self.target.positive)
        positive = self._at_tokens(inputs, self.target.positive)
        value = torch.logsumexp(positive, -1) - log_z
        g = options - expected[:, None]
        if self.target.is_linear:
            value = (positive - self._at_tokens(inputs, self.target.negative))[:, 0]
            g = (options - self.unembedded(self.target.negative)).expand(len(inputs), 1, -1)
        return Bases(inputs, log_z, value, positive - log_z[:, None], expected, g, p)

    def _at_tokens(
        self, inputs: Float[Tensor, "base d_model"], tokens: tuple[int, ...]
    ) -> Float[Tensor, "base token"]:
        """Logits of a few tokens."""
        z = inputs @ self.unembedded(tokens).T
        return z if self.constant is None else z + self.constant[list(tokens)]

    def _logits(self, inputs: Tensor, kept: Tensor | None, block: slice) -> Tensor:
        if kept is not None:
            return kept[:, block]
        z = product(inputs, self.W_U[:, block])
        return z if self.constant is None else z.add_(self.constant[block])

    def _p(self, inputs: Tensor, log_z: Tensor, kept: Tensor | None, block: slice) -> Tensor:
        if kept is not None:
            return kept[:, block]
        return self._logits(inputs, None, block).sub_(log_z[:, None]).exp_()

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
        n_vectors, missing = len(rows), max(0, 2 - len(rows))
        rows = torch.cat([rows, rows.new_zeros(missing)])
        coefficient = torch.cat([coefficient, coefficient.new_zeros(missing)])
        missing = max(0, MIN_ROWS - len(directions))
        directions = torch.cat([directions, directions.new_zeros(missing, directions.shape[1])])
        base_of = torch.cat([base_of, base_of.new_zeros(missing)])
        return self._changes(bases, base_of, directions, rows, coefficient)[:n_vectors]

    def _changes(
        self, bases: Bases, base_of: Tensor, directions: Tensor, rows: Tensor, coefficient: Tensor
    ) -> Float[Tensor, " vector"]:
        """:meth:`changes` of at least two vectors along enough directions that every score rounds alike."""
        options = self.unembedded(self.target.positive)
        if self.target.is_linear:
            against = self.unembedded(self.target.negative)
            return (directions * (options - against)).sum(-1)[rows] * coefficient
        mean = (directions * bases.expected[base_of]).sum(-1)
        moved = (along(directions, options) - mean[:, None])[rows] * coefficient[:, None]
        grown = self._growth(bases, base_of, directions, mean, rows, coefficient)
        if len(self.target.positive) == 1:
            return moved[:, 0] - grown
        before = torch.log_softmax(bases.positive, -1)[base_of[rows]]
        return torch.logsumexp(before + moved, -1) - grown

    def _growth(
        self, bases: Bases, base_of: Tensor, directions: Tensor, mean: Tensor, rows: Tensor, coefficient: Tensor
    ) -> Float[Tensor, " vector"]:
        """``log E_p[exp(a (u - m))]`` of every vector."""
        excess = torch.zeros_like(coefficient)
        for block in self.blocks(len(directions)):
            u = product(directions, self.W_U[:, block]).sub_(mean[:, None])
            for part in self._parts(len(rows), u.shape[1]):
                x = u[rows[part]].mul_(coefficient[part, None]).expm1_()
                excess[part] += x.mul_(self._p_rows(bases, base_of[rows[part]], block)).sum(-1)
        # Where a shifted logit moves by more than a float's exponent holds, the plain sum is inf or NaN.
        far = (~excess.isfinite()).nonzero()[:, 0]
        grown = torch.log1p(excess)
        for part in far.split(self.directions_at_once()):
            shift = mean[rows[part]] * coefficient[part]
            grown[part] = (
                self._log_growth(bases, base_of[rows[part]], directions[rows[part]], coefficient[part]) - shift
            )
        return grown

    def _log_growth(
        self, bases: Bases, base_of: Tensor, directions: Tensor, coefficient: Tensor
    ) -> Float[Tensor, " vector"]:
        """``log E_p[exp(a u)]`` in log space, for vectors so large that their exponentials overflow."""
        grown = torch.full_like(coefficient, -torch.inf)
        for block in self.blocks(len(directions)):
            x = self._logits(bases.inputs[base_of], None, block) - bases.log_z[base_of, None]
            x += product(directions, self.W_U[:, block]).mul_(coefficient[:, None])
            grown = torch.logaddexp(grown, torch.logsumexp(x, -1))
        return grown

    def _p_rows(self, bases: Bases, index: Tensor, block: slice) -> Tensor:
        """``p`` of the bases named by ``index``; one row where all are the same."""
        if bool((index == index[0]).all()):
            index = index[:1]
        if bases.p is not None:
            return bases.p[:, block][index]
        distinct, place = torch.unique(index, return_inverse=True)
        return self._p(bases.inputs[distinct], bases.log_z[distinct], None, block)[place]

    def p_block(self, bases: Bases, index: int, block: slice) -> Float[Tensor, " token"]:
        """``p`` of one base at the tokens of one block."""
        one = slice(index, index + 1)
        return self._p(bases.inputs[one], bases.log_z[one], None if bases.p is None else bases.p[one], block)[0]

    def reach(self, bases: Bases, index: int) -> Float[Tensor, ""]:
        """``R = max_j |W_U[:, j] - W_U p|``: how far any token's unembedding is from the expected one."""
        furthest = self.scale.new_zeros(())
        for block in self.blocks(self.W_U.shape[0]):
            away = self.W_U[:, block].to(self.dtype) - bases.expected[index, :, None]
            furthest = torch.maximum(furthest, away.square().sum(0).amax())
        return furthest.sqrt()

    # ---- memory ---------------------------------------------------------------------------------------

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize

    def directions_at_once(self) -> int:
        """How many directions to pass to :meth:`changes` in one call under the budget."""
        return max(1, min(1024, self.memory_budget // (16 * self._itemsize * self.W_U.shape[0])))

    def blocks(self, rows: int) -> Iterator[slice]:
        """Slices of the vocabulary for a product of ``rows`` vectors (an eighth of the budget, or less)."""
        columns = rows + (self.W_U.shape[0] if self.W_U.dtype != self.dtype else 0)
        budget = self.memory_budget // (8 * self._itemsize)
        yield from slices(self.W_U.shape[1], min(budget, _PRODUCT_ENTRIES) // max(columns, 1))

    def _parts(self, rows: int, width: int) -> Iterator[slice]:
        """Slices of the vectors scored against one block, small enough for a processor's cache."""
        budget = self.memory_budget // (8 * self._itemsize)
        step = min(budget, max(_CACHED_ENTRIES, 4 * width)) // max(width, 1)
        # Parts of nearly equal length: a sum over one row alone would round in another order than among others.
        n_parts = -(-rows // max(1, step))
        yield from slices(rows, -(-rows // n_parts))
