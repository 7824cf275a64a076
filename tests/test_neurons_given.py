"""Wherever neurons are given: rankings, identities and labels mean the same, anything else is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo

import tl_neuron_attr as na

ATTN, MLP = na.AttnNeuron(1, 1, 3, 2), na.MLPNeuron(1, 5)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "query_neurons": lambda trace, given: na.query_neurons(trace, given, k=5).scores.tolist(),
    "links, value": lambda trace, given: na.links(trace, given, [na.MLPNeuron(0, 2)]).values.tolist(),
    "links, query": lambda trace, given: na.links(trace, [na.AttnNeuron(1, 0, 2, 1)], given).values.tolist(),
    "promoted_tokens": lambda trace, given: na.promoted_tokens(trace, given, k=3).up,
    "ablation_effect": lambda trace, given: na.ablation_effect(trace, given).to_frame().values.tolist(),
}


@pytest.fixture(scope="module")
def trace() -> Any:
    return na.trace(zoo.case("llama_gqa", zoo.BACKENDS[0], torch.float64).model, [5, 17, 42], 7)


@pytest.mark.parametrize("name", CALLS)
def test_labels_stand_for_their_neurons(name: str, trace: Any) -> None:
    call = CALLS[name]
    expected = repr(call(trace, [ATTN]))
    for given in (["L1H1D3@2"], "L1H1D3@2", ATTN, (each for each in [ATTN])):
        assert repr(call(trace, given)) == expected
    assert repr(call(trace, ["L1N5", ATTN])) == repr(call(trace, [MLP, ATTN]))


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_neuron_is_refused_by_name(name: str, trace: Any) -> None:
    for given in ("L1N5 ", ["x"], ""):
        with pytest.raises(ValueError, match=r"cannot read '.*' as a neuron, head or layer"):
            CALLS[name](trace, given)
    if name != "ablation_effect":
        with pytest.raises(
            ValueError, match=r"Head\(layer=1, head=1\) of type Head is no neuron: give ranked neurons"
        ):
            CALLS[name](trace, ["L1H1"])
    with pytest.raises(ValueError, match=r"9 of type int"):
        CALLS[name](trace, iter([9]))
