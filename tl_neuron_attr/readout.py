"""The frozen readout: log-probabilities of a vector in the residual stream, and how a vector changes them.

The final norm's scale ``s`` is that of the true final residual at the predicting position and is kept for every
vector, so with ``N(x)`` the norm's linear part (:mod:`tl_neuron_attr.norms`) the logits before any cap are affine,

    ``z(x) = W_U' N(x) + b``,    ``z(x + a w) = z(x) + a u``,    ``u = W_U' N(w)``,

where ``b`` (norm bias through the unembedding, and ``b_U``) is kept under ``"exact"`` and dropped under
``"paper"``. A constant multiplier of the logits is part of ``1 / s`` and of ``b``; a soft cap comes after
(:mod:`tl_neuron_attr.logits`). What is read of base vectors is in :mod:`tl_neuron_attr.bases`, the score of vectors
added to them in :mod:`tl_neuron_attr.scoring`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.logits import Cap
from tl_neuron_attr.norms import Norm
from tl_neuron_attr.products import matmul, product_of_few, slices
from tl_neuron_attr.targets import ResolvedTarget

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace

DEFAULT_MEMORY_BUDGET = 2**30
# Columns of the vocabulary in one product: few on processors, so that its result stays in their caches. It is the
# same for any number of rows, so that sums over the vocabulary round alike whatever stands beside.
_COLUMNS = {"cpu": 2**11}
_MANY_COLUMNS = 2**15


@dataclass(frozen=True, eq=False)
class Readout:
    """The map from the residual stream to logits at one position; make it with :meth:`of`."""

    W_U: Float[Tensor, "d_model d_vocab"]
    norm: Norm
    scale: Float[Tensor, " 1"]
    constant: Float[Tensor, " d_vocab"] | None
    cap: Cap | None
    target: ResolvedTarget
    memory_budget: int

    @staticmethod
    def of(trace: "Trace", *, convention: str | None = None, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> "Readout":
        """The readout of a trace under its convention; raises :class:`ValueError` for a budget below one MiB."""
        return Readout.of_each([trace], convention=convention, memory_budget=memory_budget)[0]

    @staticmethod
    def of_each(
        traces: "Sequence[Trace]", *, convention: str | None = None, memory_budget: int = DEFAULT_MEMORY_BUDGET
    ) -> "list[Readout]":
        """:meth:`of` of each trace; that its model is still the same is looked at once for each model."""
        if memory_budget < 2**20:
            raise ValueError(f"memory_budget={memory_budget} bytes: give at least one MiB (2**20)")
        for view in {id(trace.view): trace.view for trace in traces}.values():
            view.check_unchanged()
        return [Readout._made(trace, convention or trace.convention, memory_budget) for trace in traces]

    @staticmethod
    def _made(trace: "Trace", convention: str, memory_budget: int) -> "Readout":
        view = trace.view
        norm, W_U, dtype, logits = view.final_norm, view.W_U, view.compute_dtype, view.logit_map
        final = trace.resid_final.to(W_U.device, dtype)
        constant: Tensor | None = None
        if convention == "exact":
            constant = None if view.b_U is None else view.b_U.to(W_U.device, dtype)
            if norm.bias is not None:
                through = matmul(norm.bias.to(W_U.device, dtype)[None], W_U, memory_budget)[0]
                constant = through if constant is None else constant + through
        if constant is not None and logits.multiplier != 1:
            constant = constant * logits.multiplier
        scale = norm.scale(final) / logits.multiplier
        return Readout(W_U, norm, scale, constant, logits.cap, trace.target, memory_budget)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of every score: float64 for a float64 model, else float32."""
        return self.scale.dtype

    def direction(self, w: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N(w)`` on the unembedding's device, rows contiguous (products round by layout, see ``product``)."""
        return self.norm.linear(w.to(self.W_U.device, self.dtype).contiguous(), self.scale)

    def plain_direction(self, w: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``s N(w)``, the same for every prompt: :meth:`direction` before the scale divides it."""
        return self.norm.linear(w.to(self.W_U.device, self.dtype).contiguous(), torch.ones_like(self.scale))

    def adjoint(self, g: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``N*(g)``, the direction in the residual stream that ``g`` reads."""
        return self.norm.adjoint(g, self.scale)

    def uncapped(self, x: Float[Tensor, "base d_model"]) -> Float[Tensor, "base d_vocab"]:
        """``z(x)``: the logits before a cap."""
        return self.read(self.direction(x))

    def read(self, inputs: Float[Tensor, "base d_model"]) -> Float[Tensor, "base d_vocab"]:
        """The logits before a cap of what is behind the norm."""
        z = matmul(inputs, self.W_U, self.memory_budget)
        return z if self.constant is None else z.add_(self.constant)

    def logits(self, x: Float[Tensor, "base d_model"]) -> Float[Tensor, "base d_vocab"]:
        """The logits, capped where the model caps them."""
        return self.capped(self.uncapped(x))

    def logits_of_few(self, inputs: Float[Tensor, "vector d_model"]) -> Float[Tensor, "vector d_vocab"]:
        """The logits of what is behind the norm, in one reading of the unembedding; rounded otherwise than others."""
        step = (
            self.memory_budget // (8 * self.itemsize * self.W_U.shape[0]) if self.W_U.dtype != self.dtype else 2**30
        )
        blocks = slices(self.W_U.shape[1], step)
        z = torch.cat([product_of_few(inputs, self.W_U[:, block].to(self.dtype)) for block in blocks], 1)
        return self.capped(z if self.constant is None else z.add_(self.constant))

    def capped(self, z: Float[Tensor, "*logits"]) -> Float[Tensor, "*logits"]:
        """Logits of what they are before the cap, if there is one."""
        return z if self.cap is None else self.cap(z)

    def moved_logits(self, written: Float[Tensor, "vector d_model"]) -> Float[Tensor, "vector d_vocab"]:
        """``W_U' N(v)``: how vectors added to the stream change every logit (before a cap)."""
        return matmul(self.direction(written), self.W_U, self.memory_budget)

    def unembedded(self, tokens: tuple[int, ...]) -> Float[Tensor, "token d_model"]:
        """Columns of the unembedding."""
        return self.W_U[:, list(tokens)].T.to(self.dtype)

    # ---- memory ---------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Bytes of one number of a score."""
        return self.dtype.itemsize

    def directions_at_once(self) -> int:
        """How many directions to score in one call under the budget."""
        return max(1, min(1024, self.memory_budget // (16 * self.itemsize * self.W_U.shape[0])))

    def blocks(self, rows: int) -> Iterator[slice]:
        """Slices of the vocabulary for a product of ``rows`` vectors (an eighth of the budget, or less)."""
        columns = rows + (self.W_U.shape[0] if self.W_U.dtype != self.dtype else 0)
        budget = self.memory_budget // (8 * self.itemsize)
        wanted = _COLUMNS.get(self.W_U.device.type, _MANY_COLUMNS)
        yield from slices(self.W_U.shape[1], min(budget // max(columns, 1), wanted))
