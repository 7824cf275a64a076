"""Labels name what they say: one planted neuron comes first, under its own name, also with a subset of layers."""

from typing import Any

import pytest
import torch
import zoo
from reference_forward import parts_of

import tl_neuron_attr as na

PROMPT = list(zoo.TOKENS)
LAYER, NEURON, HEAD, DIM, TARGET = 1, 37, 3, 5, 11
SUBSETS = [None, (1,), [1, 0]]


def planted(name: str, backend: str, kind: str) -> tuple[Any, Any]:
    """A model in which one neuron of layer 1 writes the unembedding of the target, and the neuron's name."""
    hf = zoo.clone(zoo.hf_model(name), torch.float32)
    usual = na.trace(zoo.case(name, backend).model, PROMPT, TARGET)
    weights = na.value_scores(usual, kind, layers=[LAYER]).coefficients[0]
    parts = parts_of(hf, zoo.blocks(hf)[LAYER])
    if kind == "mlp":
        neuron: Any = na.MLPNeuron(LAYER, NEURON)
        module, row, weight = parts.down, NEURON, weights[NEURON]
    else:
        here = weights[:, HEAD, DIM]  # [source]
        source = int(here.abs().argmax())
        neuron = na.AttnNeuron(LAYER, HEAD, DIM, source)
        module, row, weight = parts.out, HEAD * weights.shape[2] + DIM, here[source]
    with torch.no_grad():
        rows = module.weight.T if isinstance(module, torch.nn.Linear) else module.weight
        direction = hf.get_output_embeddings().weight[TARGET]
        rows[row] = 30 * direction / direction.norm() / weight
    return zoo.build(hf, backend), neuron


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_a_planted_neuron_comes_first(case: zoo.ZooCase, kind: str) -> None:
    model, neuron = planted(case.name, case.backend, kind)
    trace = na.trace(model, PROMPT, TARGET)
    for layers in SUBSETS:
        ranked = na.value_neurons(trace, kind, k=3, layers=layers)
        assert ranked[0] == neuron
        assert ranked.scores[0] > ranked.scores[1]
        dense = na.value_scores(trace, kind, layers=layers)
        assert dense.top(1)[0] == neuron
        place = dense.layers.index(LAYER)
        mine = dense.scores[place]
        best = mine[neuron.neuron] if kind == "mlp" else mine[neuron.source, neuron.head, neuron.dim]
        assert best == dense.scores.max()
        assert best.item() == pytest.approx(ranked.scores[0].item(), abs=1e-5)
    assert na.promoted_tokens(trace, [neuron], k=1).up[0][0][0] == f"t{TARGET}"
    assert str(ranked[0]) == (f"L1N{NEURON}" if kind == "mlp" else f"L1H{HEAD}D{DIM}@{neuron.source}")
    if kind == "attn":
        assert na.position_scores(trace, LAYER, HEAD).argmax() == neuron.source
    row = ranked.to_frame().iloc[0]
    assert row["layer"] == LAYER

    # Asked about the other end, the same neuron comes last.
    against = na.trace(model, PROMPT, na.Contrast(20, TARGET))
    count = dense.scores.numel()
    assert na.value_neurons(against, kind, k=count, layers=[1, 0])[count - 1] == neuron
