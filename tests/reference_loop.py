"""The definitions, as plain float64 loops: slow, readable, and independent of the package.

Frozen readout at the predicting position, with `s` the final norm's scale of the true final residual:

    z(x) = cap(m (W_U' N(x) + b))    N(x) = (x - mean(x)) * gain / s  (LayerNorm)  or  x * gain / s  (RMSNorm)

with `m` the model's logit scale and cap(z) = c tanh(z / c) where the model caps its logits.

Value score of a vector `v` (arXiv 2312.12141, Eq. 13), in nats:

    S = log p(t | base + v) - log p(t | base)

The base is `h` (the stream before the block) for attention and `h + A` for the MLP, `A` what attention adds.
Convention "paper" drops the readout's constant `b`, before scale and cap; "exact" keeps it. Vectors are those
added to the stream: sent through the post-norm (its scale that of the run) and the multiplier where there is one.

Query score: a stream part `r` gets `S_n <r, k_n> / sum_r' <r', k_n>`, summed over the value neurons `n`.
Convention "exact" centres the keys `k_n` under LayerNorm, "paper" does not.

Targets: a token id, `("contrast", a, b)` for log p(a) - log p(b), `("any", (a, b, ...))` for the log of
p(a) + p(b) + ...
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from reference_forward import Array, LayerRecord, Norm, Recording

Target = int | tuple
MLPId = tuple[int, int]  # layer, neuron
AttnId = tuple[int, int, int, int]  # layer, head, dim, source


class Loop:
    """Scores of one recording, position, target and convention.

    `value_constant=False` gives the attention neurons and heads of a model in which TransformerLens's weight
    processing moved what is constant in the values (the value bias, and the bias of the norm before attention
    sent through `W_V`) into the attention's output bias: the same function and layers, but other neurons.
    """

    def __init__(
        self,
        recording: Recording,
        target: Target | None = None,
        *,
        position: int = -1,
        convention: str = "exact",
        value_constant: bool = True,
    ) -> None:
        assert convention in ("exact", "paper")
        self.recording, self.convention, self.value_constant = recording, convention, value_constant
        self.position = position % len(recording.tokens)
        self.target = int(recording.log_probs[self.position].argmax()) if target is None else target
        self.scale = recording.norm.scale(recording.final[self.position])
        self.constant = recording.W_U.T @ recording.norm.bias + recording.b_U
        if convention == "paper":
            self.constant = np.zeros_like(self.constant)

    # readout

    def linear(self, x: Array) -> Array:
        """[d_vocab]: a vector's logits before constant, scale and cap."""
        norm = self.recording.norm
        return (norm.centre(x) * norm.gain / self.scale) @ self.recording.W_U

    def logits(self, x: Array) -> Array:
        return self.recording.capped(self.recording.logit_scale * (self.linear(x) + self.constant))

    def log_prob(self, x: Array) -> float:
        """log p(target | x) in nats."""
        z = self.logits(x)
        z = z - z.max()
        log_p = z - np.log(np.exp(z).sum())
        if not isinstance(self.target, tuple):
            return float(log_p[self.target])
        if self.target[0] == "contrast":
            return float(log_p[self.target[1]] - log_p[self.target[2]])
        return float(np.log(sum(np.exp(log_p[token]) for token in self.target[1])))

    def _score(self, base: Array, v: Array) -> float:
        return self.log_prob(base + v) - self.log_prob(base)

    # bases and vectors

    def _before_attn(self, layer: int) -> Array:
        return self.recording.layers[layer].resid_pre[self.position]

    def _before_mlp(self, layer: int) -> Array:
        return self._before_attn(layer) + self.recording.layers[layer].attn_out[self.position]

    def mlp_vector(self, layer: int, neuron: int, position: int | None = None) -> Array:
        record, position = self.recording.layers[layer], self.position if position is None else position
        return record.mlp_act[position, neuron] * record.mlp_rows(position)[neuron]

    def mlp_coefficient(self, layer: int, neuron: int) -> float:
        return float(self.recording.layers[layer].mlp_act[self.position, neuron])

    def attn_coefficient(self, layer: int, head: int, dim: int, source: int, dest: int | None = None) -> float:
        record = self.recording.layers[layer]
        kv = self._kv_head(record, head)
        value = record.value[source, kv, dim]
        if not self.value_constant:
            value = value - record.value_constant[kv, dim]
        return float(record.pattern[head, self.position if dest is None else dest, source] * value)

    def attn_vector(self, layer: int, head: int, dim: int, source: int, dest: int | None = None) -> Array:
        row = self.recording.layers[layer].attn_rows(self.position if dest is None else dest)[head, dim]
        return self.attn_coefficient(layer, head, dim, source, dest) * row

    @staticmethod
    def _kv_head(record: LayerRecord, head: int) -> int:
        heads, kv = record.W_O.shape[0], record.value.shape[1]
        return head // (heads // kv)

    def attn_ids(self, layer: int, dest: int | None = None) -> Iterable[AttnId]:
        heads, dims = self.recording.layers[layer].W_O.shape[:2]
        for source in range(len(self.recording.tokens)):
            for head in range(heads):
                for dim in range(dims):
                    yield layer, head, dim, source

    # value scores

    def layer_scores(self) -> tuple[Array, Array]:
        """Attention and MLP, each [layer]."""
        attn, mlp = [], []
        for layer, record in enumerate(self.recording.layers):
            attn.append(self._score(self._before_attn(layer), record.attn_out[self.position]))
            mlp.append(self._score(self._before_mlp(layer), record.mlp_out[self.position]))
        return np.array(attn), np.array(mlp)

    def head_scores(self) -> Array:
        """[layer, head]; a head is the sum of its neurons over dimensions and source positions."""
        rows = []
        for layer, record in enumerate(self.recording.layers):
            row = []
            for head in range(record.W_O.shape[0]):
                v = sum(self.attn_vector(*i) for i in self.attn_ids(layer) if i[1] == head)
                row.append(self._score(self._before_attn(layer), v))
            rows.append(row)
        return np.array(rows)

    def position_scores(self, layer: int, head: int) -> Array:
        """[pos]: what the head takes from each source position."""
        scores = []
        for source in range(len(self.recording.tokens)):
            v = sum(self.attn_vector(*i) for i in self.attn_ids(layer) if i[1] == head and i[3] == source)
            scores.append(self._score(self._before_attn(layer), v))
        return np.array(scores)

    def source_scores(self) -> Array:
        """[layer, pos]: what all heads of a layer together take from each source position."""
        rows = []
        for layer in range(len(self.recording.layers)):
            taken = [np.zeros_like(self._before_attn(layer)) for _ in self.recording.tokens]
            for i in self.attn_ids(layer):
                taken[i[3]] = taken[i[3]] + self.attn_vector(*i)
            rows.append([self._score(self._before_attn(layer), v) for v in taken])
        return np.array(rows)

    def mlp_scores(self) -> Array:
        """[layer, neuron]."""
        rows = []
        for layer, record in enumerate(self.recording.layers):
            base = self._before_mlp(layer)
            rows.append([self._score(base, self.mlp_vector(layer, n)) for n in range(record.W_out.shape[0])])
        return np.array(rows)

    def attn_scores(self) -> Array:
        """[layer, source, head, dim]."""
        rows = []
        for layer, record in enumerate(self.recording.layers):
            base = self._before_attn(layer)
            scores = np.zeros((len(self.recording.tokens), *record.W_O.shape[:2]))
            for i in self.attn_ids(layer):
                scores[i[3], i[1], i[2]] = self._score(base, self.attn_vector(*i))
            rows.append(scores)
        return np.array(rows)

    # query scores

    def _key(self, k: Array, norm: Norm | None) -> Array:
        """A weight column seen from the stream: through the gain and, where it counts, the centring."""
        if norm is None:
            return k
        return norm.centre(k * norm.gain) if self.convention == "exact" else k * norm.gain

    def attn_key(self, neuron: AttnId) -> Array:
        layer, head, dim, _ = neuron
        record = self.recording.layers[layer]
        return self._key(record.W_V[self._kv_head(record, head)][:, dim], record.norm_attn)

    def mlp_key(self, neuron: MLPId, key: str = "linearised") -> Array:
        layer, n = neuron
        record = self.recording.layers[layer]
        k_in = self._key(record.W_in[:, n], record.norm_mlp)
        if record.W_gate is None or record.gate_pre is None or key == "in":
            return k_in
        k_gate = self._key(record.W_gate[:, n], record.norm_mlp)
        if key == "gate":
            return k_gate
        assert key == "linearised"
        gate = torch.tensor(record.gate_pre[self.position, n], requires_grad=True)
        activation = self.recording.act(gate)
        (slope,) = torch.autograd.grad(activation, gate)
        return slope.item() * record.in_pre[self.position, n] * k_gate + activation.item() * k_in

    def _reach(self, neuron: tuple) -> tuple[int, int, int]:
        """Position at which a value neuron reads, and how many attention and MLP layers it reads from."""
        layer = neuron[0]
        if len(neuron) == 4:
            return neuron[3], layer, layer
        return self.position, layer if self.recording.layers[layer].parallel else layer + 1, layer

    def _share(self, neuron: tuple, key: str) -> tuple[Array, float]:
        """The neuron's key, and the sum of <part, key> over all parts of the stream it reads."""
        k = self.attn_key(neuron) if len(neuron) == 4 else self.mlp_key(neuron, key)
        position, n_attn, n_mlp = self._reach(neuron)
        total = self.recording.embed[position] @ k
        total += sum(self.recording.layers[i].attn_out[position] @ k for i in range(n_attn))
        total += sum(self.recording.layers[i].mlp_out[position] @ k for i in range(n_mlp))
        return k, float(total)

    def query_layers(self, neurons: dict[tuple, float], key: str = "linearised") -> tuple[float, Array, Array]:
        """Embedding, attention [layer] and MLP [layer], for value neurons given as {id: score}."""
        embed, n_layers = 0.0, len(self.recording.layers)
        attn, mlp = np.zeros(n_layers), np.zeros(n_layers)
        for neuron, score in neurons.items():
            k, total = self._share(neuron, key)
            position, n_attn, n_mlp = self._reach(neuron)
            embed += score * (self.recording.embed[position] @ k) / total
            for i in range(n_attn):
                attn[i] += score * (self.recording.layers[i].attn_out[position] @ k) / total
            for i in range(n_mlp):
                mlp[i] += score * (self.recording.layers[i].mlp_out[position] @ k) / total
        return embed, attn, mlp

    def query_mlp_neurons(self, neurons: dict[tuple, float], key: str = "linearised") -> Array:
        """[layer, neuron]: how far each MLP neuron activates the value neurons, given as {id: score}."""
        scores = np.zeros((len(self.recording.layers), self.recording.layers[0].W_out.shape[0]))
        for neuron, score in neurons.items():
            k, total = self._share(neuron, key)
            position, _, n_mlp = self._reach(neuron)
            for layer in range(n_mlp):
                for n in range(scores.shape[1]):
                    scores[layer, n] += score * (self.mlp_vector(layer, n, position) @ k) / total
        return scores

    def query_attn_neurons(self, neurons: dict[tuple, float], key: str = "linearised") -> dict[AttnId, float]:
        """{(layer, head, dim, source): score}: how far each attention neuron activates the value neurons."""
        scores: dict[AttnId, float] = defaultdict(float)
        for neuron, score in neurons.items():
            k, total = self._share(neuron, key)
            position, n_attn, _ = self._reach(neuron)
            for layer in range(n_attn):
                for i in self.attn_ids(layer):
                    scores[i] += score * (self.attn_vector(*i, dest=position) @ k) / total
        return dict(scores)


def top_mlp(scores: Array, k: int) -> dict[MLPId, float]:
    """The k best of [layer, neuron], best first, ties by id."""
    ids = [(-s, (int(a), int(b))) for (a, b), s in np.ndenumerate(scores)]
    return {i: -s for s, i in sorted(ids)[:k]}


def top_attn(scores: Array, k: int) -> dict[AttnId, float]:
    """The k best of [layer, source, head, dim], best first, ties by id (layer, head, dim, source)."""
    ids = [(-s, (int(a), int(h), int(d), int(p))) for (a, p, h, d), s in np.ndenumerate(scores)]
    return {i: -s for s, i in sorted(ids)[:k]}
