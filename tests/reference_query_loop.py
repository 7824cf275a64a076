"""Query scores, links, moved tokens and comparisons as plain float64 loops, on top of `reference_loop.Loop`.

A query score shares a value neuron's score `S_n` among the parts `r` of the stream that the neuron reads:

    S_n <r, k_n> / sum_r' <r', k_n>        (normalise=False: S_n <r, k_n>)

A query neuron's part is its row times its coefficient at the position that `n` reads.

Weight processing (`processed=True`) leaves the function of the model and changes what its parts are called:

- Values lose their constant, which goes to the attention's output bias (`Loop.value_constant`).
- LayerNorm models write, and read, centred vectors. `<r, k>` is then that of a centred key whatever the convention:
  what "paper" leaves uncentred has nothing left to centre.

Gains folded into the weights give the same keys, and moving a centred stream is moving a stream.
"""

from collections import defaultdict

import numpy as np
from reference_forward import Array, Norm, Recording
from reference_loop import Loop, Target

Id = tuple[int, ...]  # (layer, neuron) or (layer, head, dim, source)


class QueryLoop(Loop):
    """Query scores of value neurons given as {id: score}."""

    def __init__(
        self,
        recording: Recording,
        target: Target | None = None,
        *,
        position: int = -1,
        convention: str = "exact",
        processed: bool = False,
    ) -> None:
        super().__init__(recording, target, position=position, convention=convention, value_constant=not processed)
        self.centres = convention == "exact" or processed

    # what is read, and how

    def _key(self, k: Array, norm: Norm | None) -> Array:
        if norm is None:
            return k
        return norm.centre(k * norm.gain) if self.centres else k * norm.gain

    def key(self, neuron: Id, key: str) -> Array:
        return self.attn_key(neuron) if len(neuron) == 4 else self.mlp_key(neuron, key)

    def reach(self, neuron: Id) -> tuple[int, int, int]:
        """Position that a value neuron reads, and how many attention and MLP layers have written there before."""
        layer = neuron[0]
        if len(neuron) == 4:
            return neuron[3], layer, layer
        return self.position, layer if self.recording.layers[layer].parallel else layer + 1, layer

    def stream(self, neuron: Id) -> Array:
        """What a value neuron reads, part by part."""
        position, n_attn, n_mlp = self.reach(neuron)
        stream = self.recording.embed[position].copy()
        for layer in range(n_attn):
            stream += self.recording.layers[layer].attn_out[position]
        for layer in range(n_mlp):
            stream += self.recording.layers[layer].mlp_out[position]
        return stream

    def cosine(self, neuron: Id, key: str = "linearised") -> float:
        """Of key and stream: near zero, a share is a ratio with a tiny denominator."""
        k, x, record = self.key(neuron, key), self.stream(neuron), self.recording.layers[neuron[0]]
        norm = record.norm_attn if len(neuron) == 4 else record.norm_mlp
        if self.centres and norm is not None:
            x = norm.centre(x)
        return float(k @ x / np.linalg.norm(k) / np.linalg.norm(x))

    def weighted_key(self, neuron: Id, score: float, key: str, normalise: bool) -> Array:
        k = self.key(neuron, key)
        return score * k / (k @ self.stream(neuron)) if normalise else score * k

    def value_score(self, neuron: Id) -> float:
        """Of one neuron, as `mlp_scores` and `attn_scores` give it among all."""
        if len(neuron) == 2:
            return self._score(self._before_mlp(neuron[0]), self.mlp_vector(*neuron))
        return self._score(self._before_attn(neuron[0]), self.attn_vector(*neuron))

    # query scores

    def layers(self, values: dict[Id, float], key: str, normalise: bool) -> tuple[float, Array, Array]:
        """Embedding, attention [layer] and MLP [layer]."""
        records = self.recording.layers
        embed, attn, mlp = 0.0, np.zeros(len(records)), np.zeros(len(records))
        for neuron, score in values.items():
            k = self.weighted_key(neuron, score, key, normalise)
            position, n_attn, n_mlp = self.reach(neuron)
            embed += self.recording.embed[position] @ k
            for layer in range(n_attn):
                attn[layer] += records[layer].attn_out[position] @ k
            for layer in range(n_mlp):
                mlp[layer] += records[layer].mlp_out[position] @ k
        return float(embed), attn, mlp

    def neurons(self, values: dict[Id, float], kind: str, key: str, normalise: bool) -> dict[Id, dict[int, float]]:
        """{query neuron: {position: what it contributes there}}, every neuron of the kind."""
        found: dict[Id, dict[int, float]] = {i: defaultdict(float) for i in self.ids(kind)}
        for neuron, score in values.items():
            k = self.weighted_key(neuron, score, key, normalise)
            position, n_attn, n_mlp = self.reach(neuron)
            for layer in range(n_mlp if kind == "mlp" else n_attn):
                for i, coefficient, along in self._along(kind, layer, position, k):
                    found[i][position] += coefficient * along
        return found

    def ids(self, kind: str) -> list[Id]:
        """Every neuron of the kind with a source up to the predicting position, in the order of ids."""
        records = self.recording.layers
        if kind == "mlp":
            return [(layer, n) for layer, r in enumerate(records) for n in range(len(r.W_out))]
        return sorted(i for layer in range(len(records)) for i in self.attn_ids(layer) if i[3] <= self.position)

    def _along(self, kind: str, layer: int, position: int, k: Array) -> list[tuple[Id, float, float]]:
        """Every neuron of a layer, its coefficient at a position, and its row along `k`."""
        record = self.recording.layers[layer]
        if kind == "mlp":
            rows = record.mlp_rows(position) @ k
            return [((layer, n), record.mlp_act[position, n], along) for n, along in enumerate(rows)]
        rows = record.attn_rows(position) @ k
        return [
            (i, self.attn_coefficient(*i, dest=position), rows[i[1], i[2]])
            for i in self.attn_ids(layer)
            if i[3] <= self.position
        ]

    def biases(self, values: dict[Id, float], kind: str, key: str, normalise: bool) -> Array:
        """[layer]: what the sublayers' output biases contribute; with the neurons they make the layers' parts."""
        records = self.recording.layers
        found = np.zeros(len(records))
        for neuron, score in values.items():
            k = self.weighted_key(neuron, score, key, normalise)
            position, n_attn, n_mlp = self.reach(neuron)
            for layer in range(n_mlp if kind == "mlp" else n_attn):
                out = records[layer].mlp_out if kind == "mlp" else records[layer].attn_out
                neurons = sum(c * along for _, c, along in self._along(kind, layer, position, k))
                found[layer] += out[position] @ k - neurons
        return found

    def coefficient(self, neuron: Id, position: int) -> float:
        """A query neuron's, at the position where it is read."""
        if len(neuron) == 4:
            return self.attn_coefficient(*neuron, dest=position)
        return float(self.recording.layers[neuron[0]].mlp_act[position, neuron[1]])

    def link(self, query: Id, neuron: Id, score: float, key: str, normalise: bool) -> float:
        """What one query neuron contributes to one value neuron."""
        position, n_attn, n_mlp = self.reach(neuron)
        if query[0] >= (n_mlp if len(query) == 2 else n_attn):
            return 0.0
        k = self.weighted_key(neuron, score, key, normalise)
        return float(self.written(query, position) @ k)

    # what a vector says once a head has moved it

    def written(self, neuron: Id, position: int) -> Array:
        """What a neuron adds to the stream at a position."""
        if len(neuron) == 2:
            return self.mlp_vector(*neuron, position)
        return self.attn_vector(*neuron, dest=position)

    def through_head(self, neuron: Id, position: int, layer: int, head: int) -> Array:
        """[d_vocab]: how the logits, before a cap, change when the head moves what the neuron wrote at a position.

        Read at `position` and added at the predicting position, whose post-norm scale counts.
        """
        record = self.recording.layers[layer]
        v, norm = self.written(neuron, position), record.norm_attn
        if norm is not None:
            v = norm.centre(v) * norm.gain / norm.scale(record.resid_pre[position])
        moved, rows = np.zeros_like(v), record.attn_rows(self.position)[head]
        kv = head // (record.W_O.shape[0] // record.W_V.shape[0])
        for dim, row in enumerate(rows):
            moved += (v @ record.W_V[kv][:, dim]) * row
        return self.recording.logit_scale * self.linear(moved)
