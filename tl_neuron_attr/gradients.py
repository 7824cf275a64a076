"""Methods by gradients: one backward pass, of the whole model with nothing frozen.

With ``x`` the activation of a neuron at the predicting position (``hook_post``, or ``hook_z`` for attention) and
``g = dT / dx`` at the actual run, ``a`` the coefficient,

=====================================  ===========================================================================
:class:`GradientTimesActivation`       ``a g``: estimated fall of ``T`` when the neuron is set to zero
:class:`AttributionPatching` (mean)    ``(a - mean) g``: estimated fall when it is set to its mean
=====================================  ===========================================================================

An attention neuron takes the gradient of its entry of ``hook_z``, which all its sources share, times its own
``pattern * value``. A mean is one of the whole entry, not of a source, so patching is for MLP neurons.

Gradients are taken of zeros added to the activations, so they do not depend on what the user's parameters require,
and no parameter's ``.grad`` is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.hooking import attached, never_fired
from tl_neuron_attr.modes import MeanActivations, mean_of
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.question import Question
from tl_neuron_attr.search import Found
from tl_neuron_attr.variants import check_unchanged
from tl_neuron_attr.writes import coefficients

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


@dataclass(frozen=True)
class GradientTimesActivation:
    """``a dT/dx``: the first-order estimate of what the neuron's activation at the predicting position is worth."""

    name: ClassVar[str] = "gradient"

    def find(self, question: Question) -> Found:
        """The best neurons."""
        slope = gradients(question.trace, question.kind, question.layers)
        return question.dense(lambda layer: weighted(question, layer, slope[layer]))


@dataclass(frozen=True)
class AttributionPatching:
    """``(a - mean) dT/dx``: the estimated fall of ``T`` when an MLP neuron is set to its mean.

    ``mean`` is what ``mean_activations(model, prompts)`` gave.
    """

    mean: MeanActivations
    name: ClassVar[str] = "attribution_patching"

    def find(self, question: Question) -> Found:
        """The best neurons."""
        if question.kind != "mlp":
            raise ValueError(
                "method 'attribution_patching' is defined for MLP neurons: a mean of hook_z holds all sources of an "
                "attention neuron together; use kind \"mlp\", or 'gradient' for attention neurons"
            )
        slope = gradients(question.trace, question.kind, question.layers)

        def scores(layer: int) -> Float[Tensor, "row source"]:
            own = coefficients(question.trace, "mlp", layer)
            mean = mean_of(self.mean, own[:, 0], hook_name("mlp", layer)).to(own)
            return (own - mean[:, None]) * slope[layer].to(own)[:, None]

        return question.dense(scores)


def gradients(trace: "Trace", kind: Kind, layers: Sequence[int]) -> dict[int, Float[Tensor, " row"]]:
    """``dT/dx`` of every activation of some layers at the predicting position, by one forward and backward pass."""
    probes = {layer: Probe(hook_name(kind, layer), trace.position) for layer in layers}
    pairs = [(probe.name, probe) for probe in probes.values()]
    with attached(trace.model, pairs), torch.inference_mode(False), torch.enable_grad():
        log_probs = log_probs_of(trace, 1)
        for probe in probes.values():
            if probe.added is None:
                raise never_fired(trace.view, probe.name)
        check_unchanged(trace, log_probs[0].detach())
        inputs = [probe.added for probe in probes.values() if probe.added is not None]
        found = torch.autograd.grad(trace.target.value(log_probs).sum(), inputs)
    return {layer: g[0].flatten().to(trace.view.compute_dtype) for layer, g in zip(layers, found, strict=True)}


def weighted(question: Question, layer: int, slope: Float[Tensor, " row"]) -> Float[Tensor, "row source"]:
    """Coefficients times a number for each row."""
    own = coefficients(question.trace, question.kind, layer)
    return own * slope.to(own)[:, None]


def hook_name(kind: Kind, layer: int) -> str:
    """Where the activations of a layer's neurons are."""
    return f"blocks.{layer}.{'mlp.hook_post' if kind == 'mlp' else 'attn.hook_z'}"


class Probe:
    """Adds zeros that a gradient can be taken of at one position of one hook point.

    With ``path`` the activation at the position is first set to these factors (one a row) of what it is.
    """

    def __init__(self, name: str, position: int, path: Float[Tensor, " row"] | None = None) -> None:
        self.name, self._position, self._path = name, position, path
        self.added: Tensor | None = None

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor:
        here = tensor[:, self._position]
        if self._path is not None:
            factor = self._path.to(here.device).view(-1, *(1 for _ in here.shape[1:]))
            here = (here.detach() * factor).to(here)
        self.added = torch.zeros_like(here).requires_grad_()
        out = tensor.clone()
        out[:, self._position] = here + self.added
        return out


def log_probs_of(trace: "Trace", rows: int) -> Float[Tensor, "row d_vocab"]:
    """Log-probabilities at the predicting position of a forward pass of equal rows; gradients as the caller set."""
    view = trace.view
    tokens = trace.tokens.clone().expand(rows, -1)
    return torch.log_softmax(view.logits(tokens)[:, trace.position].to(view.compute_dtype), -1)
