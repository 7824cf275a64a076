"""The other attribution methods, as plain float64 loops; imports nothing of the package.

Static methods are written from their formulas over `reference_loop`. Gradients, integrals and interventions are taken
on the Hugging Face model itself, in float64, by hooks on the inputs of its output modules.

Weight processing changes some neurons, not the function: rows that write to a LayerNorm model are centred, the
unembedding is centred over the vocabulary, and what is constant in the values moves to the output bias, so an entry
of `hook_z` that is zero stands for one that holds its constant. `processed` tells the loop.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from reference_float64 import Float64Only, widen_rotary
from reference_forward import Array, parts_of, skeleton
from reference_loop import Loop, Target

Edit = Callable[[torch.Tensor], torch.Tensor]
Entry = tuple[int, ...]  # layer, neuron; or layer, head, dim


class MethodLoop(Loop):
    """Every neuron's score by every static method; ids are (layer, neuron) or (layer, head, dim, source)."""

    def __init__(self, recording: Any, target: Target | None, *, processed: bool, **options: Any) -> None:
        super().__init__(recording, target, value_constant=not processed, **options)
        self.processed = processed

    def ids(self, kind: str) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for layer, record in enumerate(self.recording.layers):
            if kind == "mlp":
                found += [(layer, n) for n in range(record.W_out.shape[0])]
            else:
                found += [i for i in self.attn_ids(layer) if i[3] <= self.position]
        return found

    def row(self, i: tuple[int, ...]) -> Array:
        """What a coefficient of one adds."""
        record = self.recording.layers[i[0]]
        v = record.mlp_rows(self.position)[i[1]] if len(i) == 2 else record.attn_rows(self.position)[i[1], i[2]]
        return v - v.mean() if self.processed and self.recording.norm.centred else v

    def coefficient(self, i: tuple[int, ...]) -> float:
        return self.mlp_coefficient(*i) if len(i) == 2 else self.attn_coefficient(*i)

    def base(self, i: tuple[int, ...]) -> Array:
        return self._before_mlp(i[0]) if len(i) == 2 else self._before_attn(i[0])

    def rank(self, i: tuple[int, ...]) -> int:
        u = self.linear(self.row(i))
        tokens = self.target[1] if isinstance(self.target, tuple) else (self.target,)
        return 1 + int((u > max(u[token] for token in tokens)).sum())

    def logit(self, i: tuple[int, ...]) -> float:
        u = self.recording.logit_scale * self.linear(self.row(i))
        if self.processed and self.recording.cap is None:
            u = u - u.mean()
        if not isinstance(self.target, tuple):
            return float(u[self.target])
        if self.target[0] == "contrast":
            return float(u[self.target[1]] - u[self.target[2]])
        p = np.exp(self.recording.log_probs[self.position][list(self.target[1])])
        return float(sum(p * u[list(self.target[1])]) / p.sum())

    def score(self, method: str, i: tuple[int, ...]) -> float:
        a = self.coefficient(i)
        if method == "log_prob_increase":
            return self.log_prob(self.base(i) + a * self.row(i)) - self.log_prob(self.base(i))
        if method == "log_prob_alone":
            return self.log_prob(a * self.row(i))
        if method == "prob_increase":
            after, before = self.log_prob(self.base(i) + a * self.row(i)), self.log_prob(self.base(i))
            return float(np.exp(after) - np.exp(before))
        if method == "norm":
            return float(np.sqrt((self.row(i) ** 2).sum()))
        if method == "coefficient":
            return abs(a)
        if method == "inverse_rank":
            return 1 / self.rank(i)
        if method == "coefficient_norm":
            return abs(a) * float(np.sqrt((self.row(i) ** 2).sum()))
        if method == "coefficient_inverse_rank":
            return abs(a) / self.rank(i)
        assert method == "direct_logit"
        return a * self.logit(i)


class Model:
    """The Hugging Face model in float64 and the target of one prompt, with activations edited."""

    def __init__(self, hf_model: Any, loop: MethodLoop) -> None:
        self.hf = copy.deepcopy(hf_model).double().eval()
        self.hf.set_attn_implementation("eager")
        widen_rotary(self.hf)
        self.loop, self.tokens = loop, torch.tensor([loop.recording.tokens])
        self.parts = [parts_of(self.hf, block) for block in skeleton(self.hf)[0]]

    def target(self, kind: str, layer: int, edit: Edit) -> torch.Tensor:
        """T with `edit` applied to [pos, width] of a layer's activations."""
        module = self.parts[layer].down if kind == "mlp" else self.parts[layer].out

        def hook(_module: Any, args: Any) -> Any:
            x = args[0]
            return (edit(x.reshape(len(self.loop.recording.tokens), -1)).reshape(x.shape), *args[1:])

        handle = module.register_forward_pre_hook(hook)
        try:
            with Float64Only():
                logits = self.hf(self.tokens, use_cache=False).logits[0, self.loop.position]
        finally:
            handle.remove()
        log_p, target = logits.log_softmax(-1), self.loop.target
        if not isinstance(target, tuple):
            return log_p[target]
        if target[0] == "contrast":
            return log_p[target[1]] - log_p[target[2]]
        return log_p[list(target[1])].logsumexp(0)

    def nothing(self, kind: str, layer: int) -> torch.Tensor:
        """[width]: the activations that stand for zero."""
        record = self.loop.recording.layers[layer]
        if kind == "mlp":
            return torch.zeros(record.W_out.shape[0]).double()
        heads, dims = record.W_O.shape[:2]
        constant = np.zeros((heads, dims))
        if self.loop.processed:
            constant = np.repeat(record.value_constant, heads // record.value_constant.shape[0], axis=0)
        return torch.tensor(constant).flatten()

    def gradient(self, kind: str, layer: int, share: float | None = None) -> Array:
        """[width]: dT / dx at the position, x set to a share of the way from nothing where one is given."""
        leaf = self.nothing(kind, layer).zero_().requires_grad_()
        start = self.nothing(kind, layer)

        def edit(x: torch.Tensor) -> torch.Tensor:
            here = x[self.loop.position]
            if share is not None:
                here = start + share * (here.detach() - start)
            rows = list(x.unbind(0))
            rows[self.loop.position] = here + leaf
            return torch.stack(rows)

        (found,) = torch.autograd.grad(self.target(kind, layer, edit), leaf)
        return found.numpy()

    def integrated(self, kind: str, layer: int, steps: int) -> Array:
        """[width]: the gradient averaged along the path, one Gauss-Legendre point after the other."""
        points, weights = np.polynomial.legendre.leggauss(steps)
        return sum(w / 2 * self.gradient(kind, layer, (x + 1) / 2) for x, w in zip(points, weights, strict=True))

    def fall(self, kind: str, layer: int, units: list[int], everywhere: bool = True) -> float:
        """How far T falls when these units are set to nothing."""
        start = self.nothing(kind, layer)

        def edit(x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            for pos in range(len(x)) if everywhere else [self.loop.position]:
                x[pos, units] = start[units]
            return x

        with torch.no_grad():
            return float(self.target(kind, layer, lambda x: x) - self.target(kind, layer, edit))

    def unit(self, i: tuple[int, ...]) -> int:
        """Where a neuron stands in its layer's activations."""
        return i[1] if len(i) == 2 else i[1] * self.loop.recording.layers[i[0]].W_O.shape[1] + i[2]
