"""How far the package is off, for one architecture behind one backend, each kind of number against its own truth.

The truth is a float64 loop over the definitions on the Hugging Face model itself (`reference_loop`), or the model: a
score is what its own log-probability does when a vector is added to the stream by a hook, the norm's scale frozen.
Errors are in nats, of float32 models; those of query scores are shares of the largest.
"""

import functools
from typing import Any

import numpy as np
import torch
import zoo
from model_run import Run
from reference_forward import record
from reference_query_loop import QueryLoop

import tl_neuron_attr as na

TARGET, POSITION = 42, -1


@functools.cache
def recording(name: str) -> Any:
    return record(zoo.hf_model(name), list(zoo.TOKENS))


@functools.cache
def reference(name: str, convention: str, processed: bool) -> tuple[QueryLoop, dict[str, np.ndarray]]:
    """The loop and its dense scores, once for all backends that have the same neurons."""
    found = QueryLoop(recording(name), TARGET, position=POSITION, convention=convention, processed=processed)
    attn, mlp = found.layer_scores()
    dense = {
        "layers": np.concatenate([attn, mlp]),
        "heads": found.head_scores(),
        "attention neurons": found.attn_scores(),
    }
    dense["positions"] = found.position_scores(1, 2)
    if name != "attn_only":
        dense["MLP neurons"] = found.mlp_scores()
    return found, dense


def errors(
    name: str, backend: str, convention: str = "exact", dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """The largest error of each kind of number."""
    case = zoo.case(name, backend, dtype)
    loop, dense = reference(name, convention, backend in zoo.PROCESSED)
    trace = na.trace(case.model, list(case.tokens), TARGET, position=POSITION, convention=convention)
    layers = na.layer_scores(trace)
    found = {
        "log-probabilities": _gap(trace.log_probs, loop.recording.log_probs[POSITION]),
        "layers": _gap(torch.cat([layers.attn, layers.mlp]), dense["layers"]),
        "heads": _gap(na.head_scores(trace).scores, dense["heads"]),
        "positions": _gap(na.position_scores(trace, 1, 2), dense["positions"]),
    }
    for kind, label in kinds(name):
        scores = na.value_scores(trace, kind)
        found[label] = _gap(scores.scores, dense[label])
        best = np.sort(dense[label].ravel())[::-1][:40].copy()
        found[f"top {label}"] = _gap(na.value_neurons(trace, kind, k=40).scores, best)
        found |= _queries(trace, loop, kind, label, name)
    found["moved tokens"] = _moved(trace, loop)
    if convention == "exact":
        found["intervention"] = _intervention(case, trace, loop, name)
    return found


def kinds(name: str) -> list[tuple[Any, str]]:
    both: list[tuple[Any, str]] = [("mlp", "MLP neurons"), ("attn", "attention neurons")]
    return both[1:] if name == "attn_only" else both


def _queries(trace: Any, loop: QueryLoop, kind: Any, label: str, name: str) -> dict[str, float]:
    """Who activates the three best value neurons whose keys meet their streams."""
    ranked = na.value_neurons(trace, kind, k=60)
    met = [n for n in ranked.ids if abs(loop.cosine(_id(n))) > 0.05 and n.layer > 0][:3]
    values = {_id(n): loop.value_score(_id(n)) for n in met}
    embed, attn, mlp = loop.layers(values, "linearised", True)
    layers = na.query_layers(trace, met)
    expected = np.concatenate([[embed], attn, mlp])
    made = torch.cat([torch.tensor([layers.embed], dtype=torch.float64), layers.attn, layers.mlp])
    found = {f"query layers of {label}": _share(made, expected)}
    for query_kind, query_label in kinds(name):
        one = {i: sum(at.values()) for i, at in loop.neurons(values, query_kind, "linearised", True).items()}
        query = na.query_neurons(trace, met, query_kind, k=10**6)
        made = torch.tensor([query.scores[rank] for rank in range(0, len(query), 7)])
        expected = np.array([one[_id(query.ids[rank])] for rank in range(0, len(query), 7)])
        found[f"query {query_label} of {label}"] = _share(made, expected)
        found[f"links to {label}"] = max(_links(trace, met, query, one), found.get(f"links to {label}", 0.0))
    return found


def _moved(trace: Any, loop: QueryLoop) -> float:
    """Tokens that attention neurons of the first layer promote once a head of the last has moved them."""
    layer, gaps = trace.view.n_layers - 1, []
    neurons = na.value_neurons(trace, "attn", k=3, layers=[0]).ids
    moved = na.through_head(trace, neurons, layer, 1, k=5)
    for neuron, up, down in zip(neurons, moved.up, moved.down, strict=True):
        expected = loop.through_head(_id(neuron), loop.position, layer, 1)
        off = [value - expected[int(token.strip("'").lstrip("t"))] for token, value in (*up, *down)]
        gaps.append(max(off) - min(off))  # a centred unembedding leaves the differences between tokens
    return max(gaps)


def _links(trace: Any, met: Any, query: Any, expected: dict[tuple[int, ...], float]) -> float:
    """Contributions of some query neurons, summed over the value neurons."""
    some = [query.ids[rank] for rank in (0, 1, len(query) // 2, -1)]
    sums = na.links(trace, met, some).groupby("query")["contribution"].sum()
    largest = max(1.0, max(abs(score) for score in expected.values()))
    return max(abs(sums[str(n)] - expected[_id(n)]) for n in some) / largest


def _intervention(case: zoo.ZooCase, trace: Any, loop: QueryLoop, name: str) -> float:
    """Vectors of the loop, added to the model's own stream by a hook, against the package's scores."""
    run, gaps = Run(case, POSITION), []
    for kind, _ in kinds(name):
        ranked = na.value_neurons(trace, kind, k=10**6)
        for rank in (0, 1, 5, -1):
            n = ranked.ids[rank]
            base = run.before_mlp(n.layer) if kind == "mlp" else run.before_attn(n.layer)
            vector = loop.mlp_vector(*_id(n)) if kind == "mlp" else loop.attn_vector(*_id(n))
            effect = run.with_stream(base + torch.tensor(vector).to(base)) - run.with_stream(base)
            gaps.append(abs(float(effect[TARGET]) - float(ranked.scores[rank])))
    return max(gaps)


def _id(neuron: Any) -> tuple[int, ...]:
    if isinstance(neuron, na.MLPNeuron):
        return neuron.layer, neuron.neuron
    return neuron.layer, neuron.head, neuron.dim, neuron.source


def _gap(found: torch.Tensor, expected: np.ndarray) -> float:
    assert tuple(found.shape) == expected.shape
    return float(np.abs(found.double().numpy() - expected).max())


def _share(found: torch.Tensor, expected: np.ndarray) -> float:
    return _gap(found, expected) / max(1.0, float(np.abs(expected).max()))
