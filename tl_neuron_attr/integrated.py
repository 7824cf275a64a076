"""Integrated gradients over the activations of one layer at a time (Sundararajan, Taly and Yan, ICML 2017).

With ``x`` the activations of one layer at the predicting position and ``T(r x)`` the target when they are set to a
share ``r`` of themselves and everything after them is computed again,

    ``score = a  integral_0^1 dT/dx (r x) dr``,

by Gauss-Legendre quadrature. Scores of one layer sum to ``T(x) - T(0)``: what zeroing the whole layer there costs.
Attention neurons divide their entry of ``hook_z``, whose gradient they share, by their own ``pattern * value``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.gradients import Probe, hook_name, log_probs_of, weighted
from tl_neuron_attr.hooking import attached, never_fired
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.question import Question
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.search import Found
from tl_neuron_attr.variants import check_unchanged

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


@dataclass(frozen=True)
class IntegratedGradients:
    """Gradients averaged on the way from zero to the activations of one layer, times the coefficient.

    ``steps`` are the points of the quadrature; :class:`ValueError` below 1.

    >>> IntegratedGradients(steps=8)
    IntegratedGradients(steps=8)
    """

    steps: int = 32
    name: ClassVar[str] = "integrated_gradients"

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def find(self, question: Question) -> Found:
        """The best neurons."""
        trace, kind = question.trace, question.kind
        with torch.no_grad():
            check_unchanged(trace, log_probs_of(trace, 1)[0])
        at_once = rows_at_once(trace, question.memory_budget)
        return question.dense(
            lambda layer: weighted(question, layer, mean_gradient(trace, kind, layer, self.steps, at_once))
        )


def mean_gradient(trace: "Trace", kind: Kind, layer: int, steps: int, at_once: int) -> Float[Tensor, " row"]:
    """The gradient of ``T`` by the activations of a layer, averaged along the path; ``at_once`` points in a batch."""
    shares, weights = (part.to(trace.view.compute_dtype) for part in gauss_legendre(steps))
    parts: list[Tensor] = []
    for share, weight in zip(shares.split(at_once), weights.split(at_once), strict=True):
        probe = Probe(hook_name(kind, layer), trace.position, share)
        pairs = [(probe.name, probe)]
        with attached(trace.model, pairs), torch.inference_mode(False), torch.enable_grad():
            log_probs = log_probs_of(trace, len(share))
            if probe.added is None:
                raise never_fired(trace.view, probe.name)
            [g] = torch.autograd.grad(trace.target.value(log_probs).sum(), probe.added)
        g = g.flatten(1).to(trace.view.compute_dtype)
        parts.append(weight.to(g) @ g)
    return torch.stack(parts).sum(0)


def gauss_legendre(steps: int) -> tuple[Float[Tensor, " step"], Float[Tensor, " step"]]:
    """Points and weights on ``[0, 1]``, from the eigenvectors of Legendre's recurrence (Golub and Welsch)."""
    i = torch.arange(1, steps, dtype=torch.float64)
    off = i / (4 * i.square() - 1).sqrt()
    points, vectors = torch.linalg.eigh(off.diag(1) + off.diag(-1) if steps > 1 else torch.zeros(1, 1).double())
    return (points + 1) / 2, vectors[0].square()


def rows_at_once(trace: "Trace", memory_budget: int) -> int:
    """How many rows fit with the graph of every layer: some sixteen tensors of its widths, and four of logits."""
    view, n_pos = trace.view, len(trace.tokens)
    widest = max((post.shape[-1] for post in trace.post if post is not None), default=0)
    layer = 16 * (view.n_heads * n_pos + widest + view.n_heads * view.d_head + view.d_model)
    per_pos = 4 * view.W_U.shape[1] + view.n_layers * layer
    return max(1, memory_budget // (n_pos * per_pos * view.compute_dtype.itemsize))
