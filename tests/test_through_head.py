"""What a neuron says once a head has moved it, against a plain loop, under grouped-query attention and both norms.

Processed weights centre the unembedding over the vocabulary, which shifts all logits of a vector alike; changes are
compared after their mean is taken out, which no probability sees.
"""

import functools
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import zoo
from reference_forward import record
from reference_query_loop import Id, QueryLoop

import tl_neuron_attr as na

CASES = [pytest.param(*case, id="-".join(case)) for case in zoo.CASES]
POSITION = 5
# One of each kind and sign, at the predicting position or before; none writes after layer 0.
NEURONS: tuple[Id, ...] = ((0, 3), (0, 29), (0, 1, 2, 1), (0, 3, 5, 4), (0, 2, 7, 0))


@functools.cache
def loop(name: str, processed: bool) -> QueryLoop:
    recording = record(zoo.hf_model(name), list(zoo.TOKENS))
    return QueryLoop(recording, 11, position=POSITION, processed=processed)


@functools.cache
def trace(name: str, backend: str, dtype: torch.dtype = torch.float64, convention: str = "exact") -> Any:
    model = zoo.case(name, backend, dtype).model
    return na.trace(model, list(zoo.TOKENS), 11, position=POSITION, convention=convention)


def neuron_of(i: Id) -> Any:
    return na.MLPNeuron(*i) if len(i) == 2 else na.AttnNeuron(*i)


def changes(pairs: tuple[tuple[str, float], ...], d_vocab: int) -> np.ndarray:
    """[d_vocab], from every token of the vocabulary with its change."""
    found = np.full(d_vocab, np.nan)
    for token, change in pairs:
        found[int(token.removeprefix("t"))] = change
    assert len(pairs) == d_vocab and not np.isnan(found).any()
    return found


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """In float64, to a part of the largest change: some neurons say little."""
    expected = expected - expected.mean()
    np.testing.assert_allclose(found - found.mean(), expected, rtol=0, atol=1e-8 * np.abs(expected).max() + 1e-14)


@pytest.mark.parametrize("position", [None, 3])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_every_token(name: str, backend: str, position: int | None) -> None:
    """Through heads of both key-value groups; before its source an attention neuron writes nothing."""
    reference, traced = loop(name, backend not in zoo.UNPROCESSED), trace(name, backend)
    d_vocab, n_heads = reference.recording.W_U.shape[1], reference.recording.layers[1].W_O.shape[0]
    given = [neuron_of(i) for i in NEURONS]
    for head in (1, n_heads - 2):
        said = na.through_head(traced, given, layer=1, head=head, k=d_vocab, position=position)
        assert list(said.ids) == given
        for i, up, down in zip(NEURONS, said.up, said.down, strict=True):
            expected = reference.through_head(i, POSITION if position is None else position, 1, head)
            close(changes(up, d_vocab), expected)
            assert [change for _, change in up] == sorted((change for _, change in up), reverse=True)
            assert sorted(up) == sorted(down) and list(down) == sorted(down, key=lambda pair: pair[1])
            if len(i) == 4 and position is not None and position < i[3]:
                assert not any(change for _, change in up)
            else:
                assert expected.std() > 0


@pytest.mark.parametrize(("k", "convention"), [(1, "exact"), (5, "paper")])
def test_the_first_tokens(case: zoo.ZooCase, k: int, convention: str) -> None:
    """In float32, whatever the convention: the readout's constant changes no difference of logits."""
    reference = loop(case.name, not case.value_constant)
    traced = trace(case.name, case.backend, torch.float32, convention)
    last = traced.model.cfg.n_layers - 1
    said = na.through_head(traced, [neuron_of(i) for i in NEURONS], last, 1, k)
    for i, up, down in zip(NEURONS, said.up, said.down, strict=True):
        expected = reference.through_head(i, POSITION, last, 1)
        order = np.argsort(-expected)
        assert [int(token[1:]) for token, _ in up] == order[:k].tolist()
        assert [int(token[1:]) for token, _ in down] == order[::-1][:k].tolist()
        spread = expected[order[0]] - expected[order[-1]]
        assert abs((up[0][1] - down[0][1]) - spread) < 1e-4


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_query_neurons_are_read_where_they_are_read_from(name: str, backend: str, kind: str) -> None:
    """A ranking of query neurons knows the position of each; one that is given counts instead."""
    reference, traced = loop(name, backend not in zoo.UNPROCESSED), trace(name, backend)
    d_vocab, last = reference.recording.W_U.shape[1], len(reference.recording.layers) - 1
    query = na.query_neurons(traced, na.value_neurons(traced, "attn", k=12, layers=[last]), kind, k=6, layers=[0])
    assert set(query.columns["pos"]) - {POSITION}
    for given, positions in ((query, query.columns["pos"]), (query[2:5], query.columns["pos"][2:5])):
        said = na.through_head(traced, given, last, 3, d_vocab)
        for neuron, position, up in zip(given, positions, said.up, strict=True):
            close(changes(up, d_vocab), reference.through_head(id_of(neuron), position, last, 3))
    said = na.through_head(traced, query, last, 3, d_vocab, position=POSITION)
    ids_only = na.through_head(traced, query.ids, last, 3, d_vocab)
    for neuron, up, same in zip(query, said.up, ids_only.up, strict=True):
        close(changes(up, d_vocab), reference.through_head(id_of(neuron), POSITION, last, 3))
        assert up == same


def id_of(neuron: Any) -> Id:
    if isinstance(neuron, na.MLPNeuron):
        return neuron.layer, neuron.neuron
    return neuron.layer, neuron.head, neuron.dim, neuron.source


def test_query_heads_share_values_not_outputs() -> None:
    """Heads 0, 1, 2 of six have the values of key-value head 0, heads 3, 4, 5 those of 1: swap what is shared."""
    hf = zoo.clone(zoo.hf_model("llama_gqa"), torch.float32)
    W_O = zoo.blocks(hf)[1].self_attn.o_proj.weight  # [d_model, head * dim]
    with torch.no_grad():
        for head in range(1, 6):
            W_O[:, 16 * head : 16 * (head + 1)] = W_O[:, :16]
    for backend in zoo.BACKENDS:
        traced = na.trace(zoo.build(hf, backend), list(zoo.TOKENS), 11)
        said = [na.through_head(traced, [na.MLPNeuron(0, 3)], 1, head).up[0] for head in range(6)]
        close_to_first = [abs(up[0][1] - said[0][0][1]) < 1e-5 for up in said]
        assert close_to_first == [True] * 3 + [False] * 3
        assert [up[0][0] for up in said] == [said[0][0][0]] * 3 + [said[3][0][0]] * 3


@pytest.mark.parametrize(
    ("neurons", "settings", "message"),
    [
        ([na.MLPNeuron(1, 0)], {}, "L1N0 writes after layer 1 has read the stream"),
        ([na.MLPNeuron(0, 1), na.AttnNeuron(1, 0, 0, 0)], {}, "L1H0D0@0 writes after layer 1"),
        ([na.MLPNeuron(0, 52)], {}, "L0N52 does not exist"),
        ([na.AttnNeuron(0, 0, 0, 6)], {}, "source runs from 0 to 5"),
        ([na.MLPNeuron(0, 0)], {"head": 6}, "head 6 is out of range: .* has heads 0 to 5"),
        ([na.MLPNeuron(0, 0)], {"head": -1}, "head -1 is out of range"),
        ([na.MLPNeuron(0, 0)], {"layer": 2}, "from 0 to 1"),
        ([na.MLPNeuron(0, 0)], {"layer": -1}, "from 0 to 1"),
        ([na.MLPNeuron(0, 0)], {"k": 0}, "k is 0: ask for 1 or more"),
        ([na.MLPNeuron(0, 0)], {"position": 6}, "position 6 is out of range: the trace holds positions 0 to 5"),
        ([na.MLPNeuron(0, 0)], {"position": -1}, "position -1 is out of range"),
    ],
)
def test_bad_input(neurons: Any, settings: Any, message: str) -> None:
    traced = trace("llama_gqa", zoo.BACKENDS[0])
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it
    try:
        with pytest.raises(ValueError, match=message):
            na.through_head(traced, neurons, **{"layer": 1, "head": 0, **settings})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_more_tokens_than_there_are_and_no_neurons() -> None:
    traced = trace("llama_gqa", zoo.BACKENDS[0])
    d_vocab = traced.model.cfg.d_vocab
    assert len(na.through_head(traced, [na.MLPNeuron(0, 0)], 1, 0, k=10**6).up[0]) == d_vocab
    assert len(na.through_head(traced, [], 1, 0)) == 0


def test_the_frame() -> None:
    """One row for each neuron and rank, with the columns of promoted tokens."""
    said = na.through_head(trace("gpt2", zoo.BACKENDS[0]), [na.MLPNeuron(0, 1), na.MLPNeuron(0, 2)], 1, 0, k=4)
    frame = said.to_frame()
    assert list(frame.columns) == ["neuron", "rank", "up", "up_change", "down", "down_change"]
    assert len(frame) == 8 and list(frame.neuron) == ["L0N1"] * 4 + ["L0N2"] * 4
    assert [(row.up, row.up_change) for row in frame.itertuples()][:4] == list(said.up[0])
