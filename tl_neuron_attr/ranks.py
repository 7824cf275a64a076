"""Where a token stands among all tokens when an output row is projected on the vocabulary.

The rank of a token ``t`` for a row with ``v`` as what it adds per unit of its coefficient is

    ``rank = 1 + #{j : u_j > u_t}``,    ``u = W_U' N(v)``,

with the readout's direction ``N`` (final norm's gain, no constant, any positive scale: ranks do not depend on it)
and, as in the paper, *without* the sign of the coefficient. Of a set of tokens the best one counts. So a rank depends
on the model, the row and the token, not on the prompt: :class:`InverseRanks` serves every prompt with that answer.

Exact top-k without projecting every row on every token: counting over a sample of the vocabulary only,
``1 + #{j in sample : u_j > u_t}``, cannot exceed the rank, so ``1 / (1 + count)`` bounds ``1 / rank`` from above (and
``|a| / (1 + count)`` bounds ``|a| / rank``); a margin for rounding keeps near ties out of the count. The sample is
projected once for all tokens, full ranks are computed for the few rows that the bound leaves, and kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.candidates import coefficients_of
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.numbering import checked_layers
from tl_neuron_attr.post import FrozenPost
from tl_neuron_attr.products import product, slices
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import integers
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.search import Found
from tl_neuron_attr.targets import ResolvedTarget, Target, resolve_target
from tl_neuron_attr.writes import coefficients

_SAMPLE = 4096
_BLOCK = 4096  # always the same, so that a rank does not depend on a memory budget by rounding
_FEW_TOKENS = 40  # up to so many, comparing with each is faster than sorting


class InverseRanks:
    """Ranks of some answers under every output row of a model, for every prompt with one of those answers.

    Args:
        model: the model, with the weights as they are now; ranks of weights changed since are refused.
        tokens: the answers: token ids, strings of one token, or ``AnyOf``; others are added when asked for.
        kind: ``"mlp"`` or ``"attn"``.
        layers: those to serve, by default all.
        memory_budget: bytes for one block of projections.

    Raises :class:`TargetError` for what is not a token, :class:`ValueError` for a contrast, which has no rank, and
    :class:`UnsupportedModelError` for layers without MLP neurons.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> ranks = na.InverseRanks(model, [" Paris", " Rome"], layers=[26, 27])
        >>> for city, country in ((" Paris", "France"), (" Rome", "Italy")):
        ...     trace = na.trace(model, f"The capital of {country} is", city)
        ...     found = na.value_neurons(trace, "mlp", k=3, method=na.InverseRank(ranks), layers=[26, 27])
    """

    @without_autocast
    def __init__(
        self,
        model: Any,
        tokens: Sequence[Target],
        kind: Kind = "mlp",
        *,
        layers: Sequence[int] | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        self._view, self._budget = ModelView(model), memory_budget
        self._kind: Kind = check_kind(kind)
        self._layers = checked_layers(self._view, self._kind, layers)
        vocabulary = self._view.vocabulary()
        self._known: dict[tuple[tuple[int, ...], int], _LayerRanks] = {}
        resolved = [resolve_target(token, vocabulary) for token in tokens]
        self._count(dict.fromkeys(_counted(target) for target in resolved if target is not None), self._layers)

    @property
    def model(self) -> Any:
        """The model whose rows these are."""
        return self._view.model

    def check(self, model: Any, kind: Kind) -> None:
        """Raise :class:`ValueError` for a trace of another model, neurons of another kind, or changed weights."""
        self._view.check_unchanged()
        if model is not self.model or kind != self._kind:
            raise ValueError(
                f"these ranks are of {self._kind} rows of {self._view.name}, the trace's model or kind ({kind}) is "
                f"another: make InverseRanks(trace.model, tokens, {kind!r})"
            )

    def upper(self, target: ResolvedTarget, layer: int) -> Float[Tensor, " row"]:
        """``1 / rank`` where it is known, else an upper bound, on the CPU."""
        known = self._of(target, layer)
        return 1 / torch.where(known.exact > 0, known.exact, known.least).to(self._view.compute_dtype)

    def of(
        self, target: ResolvedTarget, layer: Int[Tensor, " some"], row: Int[Tensor, " some"]
    ) -> Float[Tensor, " some"]:
        """``1 / rank`` of the target's (best) token for some rows, on the CPU; all layers share the products."""
        found = {i: self._of(target, i) for i in integers(layer.unique())}
        for part in torch.stack([layer, row], -1).unique(dim=0).split(self._rows_at_once()):
            parts = [(i, part[part[:, 0] == i, 1]) for i in integers(part[:, 0].unique())]
            missing = [(i, rows[found[i].exact[rows] == 0]) for i, rows in parts]
            vectors = torch.cat([self._vectors(i, rows) for i, rows in missing])
            if len(vectors):
                ranks = _ranks(self._view, vectors, target.positive)
                for (i, rows), rank in zip(missing, ranks.split([len(rows) for _, rows in missing]), strict=True):
                    found[i].exact[rows] = rank
        out = torch.empty(len(row), dtype=self._view.compute_dtype)
        for i, known in found.items():
            out[layer == i] = 1 / known.exact[row[layer == i]].to(out)
        return out

    def _of(self, target: ResolvedTarget, layer: int) -> "_LayerRanks":
        tokens = _counted(target)
        if (tokens, layer) not in self._known:
            self._count([tokens], [layer])
        return self._known[tokens, layer]

    def _count(self, answers: Sequence[tuple[int, ...]] | dict[tuple[int, ...], None], layers: Sequence[int]) -> None:
        """Count, over the sample, how many tokens stand above each answer."""
        if not answers:
            return
        view, dtype = self._view, self._view.compute_dtype
        W_U = view.W_U
        sample = W_U[:, :: max(1, W_U.shape[1] // _SAMPLE)].to(dtype).contiguous()
        named = list(dict.fromkeys(token for tokens in answers for token in tokens))
        column = {token: i for i, token in enumerate(named)}
        own = W_U[:, named].to(dtype)
        longest = torch.maximum(sample.norm(dim=0).max(), own.norm(dim=0).max())
        for layer in layers:
            least = [torch.empty(self._n_rows(layer), dtype=torch.int32) for _ in answers]
            for part in torch.arange(self._n_rows(layer)).split(self._rows_at_once()):
                v = self._vectors(layer, part)
                margin = 64 * torch.finfo(dtype).eps * longest * v.norm(dim=-1)
                u, u_own = product(v, sample), product(v, own)
                best = torch.stack([u_own[:, [column[t] for t in tokens]].amax(-1) for tokens in answers], -1)
                for i, above in enumerate(_above(u, best + margin[:, None]).unbind(-1)):
                    least[i][part] = 1 + above.to(torch.int32).cpu()
            for tokens, bound in zip(answers, least, strict=True):
                self._known[tokens, layer] = _LayerRanks(bound, torch.zeros_like(bound))

    def _n_rows(self, layer: int) -> int:
        return self._view.W_out(layer).shape[0] if self._kind == "mlp" else self._view.n_heads * self._view.d_head

    def _vectors(self, layer: int, rows: Int[Tensor, " some"]) -> Float[Tensor, "some d_model"]:
        """``N`` of what rows add, at scales of one."""
        view = self._view
        all_rows = view.W_out(layer) if self._kind == "mlp" else view.W_O(layer).flatten(0, 1)
        x = all_rows[rows.to(all_rows.device)].to(view.compute_dtype)
        post = view.block(layer).post(self._kind)
        x = FrozenPost(post, None if post.norm is None or post.norm.identity else x.new_ones(1)).linear(x)
        x = x.to(view.W_U.device)
        return view.final_norm.linear(x, x.new_ones(1)).contiguous()

    def _rows_at_once(self) -> int:
        width = max(_BLOCK, self._view.d_model)
        return max(1, min(1024, self._budget // (8 * self._view.compute_dtype.itemsize * width)))


@dataclass(frozen=True, eq=False)
class _LayerRanks:
    """For each row a lower bound of the rank, and the rank itself where it was computed (else 0)."""

    least: Int[Tensor, " row"]
    exact: Int[Tensor, " row"]


@dataclass(frozen=True)
class InverseRank:
    """(f) ``1 / rank`` of the answer when the output row is projected on the vocabulary.

    ``ranks`` are shared between prompts; without them they are computed for this answer alone.
    """

    ranks: InverseRanks | None = None
    name: ClassVar[str] = "inverse_rank"

    def find(self, question: Question) -> Found:
        """The best neurons."""
        return question.exact(_Ranked(question, self.ranks, times_coefficient=False))


@dataclass(frozen=True)
class CoefficientInverseRank:
    """(h) ``|a| / rank``; ``ranks`` as for :class:`InverseRank`."""

    ranks: InverseRanks | None = None
    name: ClassVar[str] = "coefficient_inverse_rank"

    def find(self, question: Question) -> Found:
        """The best neurons."""
        return question.exact(_Ranked(question, self.ranks, times_coefficient=True))


class _Ranked:
    """Inverse ranks, times the size of the coefficient or not, of all neurons asked about."""

    def __init__(self, question: Question, ranks: InverseRanks | None, *, times_coefficient: bool) -> None:
        trace, kind = question.trace, question.kind
        _counted(trace.target)
        if ranks is None:
            ranks = InverseRanks(trace.model, [], kind, layers=question.layers, memory_budget=question.memory_budget)
        ranks.check(trace.model, kind)
        self._question, self._ranks, self._times = question, ranks, times_coefficient

    def upper(self, index: int) -> Float[Tensor, " neuron"]:
        q, layer = self._question, self._question.layers[index]
        bound = self._ranks.upper(q.trace.target, layer)[:, None]
        size = coefficients(q.trace, q.kind, layer).abs().cpu()
        return (bound * size if self._times else bound.expand_as(size)).flatten()

    def score(self, number: Int[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
        q = self._question
        index, row, _ = q.numbering.places(number)
        found = self._ranks.of(q.trace.target, torch.tensor(q.layers)[index], row)
        return found * coefficients_of(q.trace, q.numbering, number).abs() if self._times else found


def _counted(target: ResolvedTarget) -> tuple[int, ...]:
    """The tokens whose rank counts; :class:`ValueError` for a contrast."""
    if target.is_linear:
        raise ValueError(
            f"ranks are not defined for the contrast {target.label}: trace a token or AnyOf([...]) for the methods "
            f"'inverse_rank' and 'coefficient_inverse_rank'"
        )
    return target.positive


def _above(u: Float[Tensor, "row sample"], threshold: Float[Tensor, "row answer"]) -> Int[Tensor, "row answer"]:
    """How many of each row are above each threshold."""
    if threshold.shape[1] <= _FEW_TOKENS:
        return torch.stack([(u > one[:, None]).sum(-1) for one in threshold.unbind(-1)], -1)
    return u.shape[1] - torch.searchsorted(u.sort(-1).values, threshold, right=True)


def _ranks(view: ModelView, v: Float[Tensor, "row d_model"], tokens: tuple[int, ...]) -> Int[Tensor, " row"]:
    """Full ranks of the best of ``tokens``, whose own logits come from the same products as all others'."""
    W_U, blocks = view.W_U, list(slices(view.W_U.shape[1], _BLOCK))
    home = [next(block for block in blocks if token < block.stop) for token in tokens]
    best = torch.stack(
        [product(v, W_U[:, block])[:, token - block.start] for token, block in zip(tokens, home, strict=True)]
    ).amax(0)
    rank = torch.ones(len(v), dtype=torch.int32, device=v.device)
    for block in blocks:
        rank += (product(v, W_U[:, block]) > best[:, None]).sum(-1, dtype=torch.int32)
    return rank.cpu()
