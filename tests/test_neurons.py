"""Identities: labels, parsing, order, equality. No model is needed."""

import copy
import itertools
import pickle

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_neuron_attr.neurons import AttnNeuron, Head, Layer, MLPNeuron, check_kind, parse

LABELS = [
    (MLPNeuron(8, 123), "L8N123", "MLPNeuron(layer=8, neuron=123)"),
    (AttnNeuron(9, 8, 17, 3), "L9H8D17@3", "AttnNeuron(layer=9, head=8, dim=17, source=3)"),
    (Head(9, 8), "L9H8", "Head(layer=9, head=8)"),
    (Layer(9, "attn"), "L9.attn", "Layer(layer=9, kind='attn')"),
    (Layer(0, "mlp"), "L0.mlp", "Layer(layer=0, kind='mlp')"),
]

index = st.integers(min_value=0, max_value=10**9)
identities = st.one_of(
    st.builds(MLPNeuron, index, index),
    st.builds(AttnNeuron, index, index, index, index),
    st.builds(Head, index, index),
    st.builds(Layer, index, st.sampled_from(["mlp", "attn"])),
)


@pytest.mark.parametrize(("identity", "label", "shown"), LABELS)
def test_label_and_repr(identity, label, shown):
    assert str(identity) == label
    assert repr(identity) == shown
    assert parse(label) == identity


@given(identities)
def test_parse_reads_back_every_label(identity):
    back = parse(str(identity))
    assert type(back) is type(identity)
    assert back == identity
    assert hash(back) == hash(identity)


@given(identities, identities)
def test_labels_are_unique(a, b):
    assert (str(a) == str(b)) == (a == b)


def test_classes_are_not_confused():
    one, other = MLPNeuron(1, 2), Head(1, 2)
    assert one != other
    assert hash(one) != hash(other)
    assert len({one, other, MLPNeuron(1, 2)}) == 2
    with pytest.raises(TypeError):
        sorted([one, other])


def test_order_is_by_coordinates_first_to_last():
    expected = [AttnNeuron(*c) for c in itertools.product(range(2), repeat=4)]
    scrambled = expected[::-1]
    assert sorted(scrambled) == expected
    assert MLPNeuron(2, 0) > MLPNeuron(1, 10)
    assert Layer(3, "attn") < Layer(3, "mlp") < Layer(4, "attn")


@pytest.mark.parametrize("identity", [row[0] for row in LABELS])
def test_frozen_slotted_and_copied(identity):
    with pytest.raises((AttributeError, TypeError)):
        identity.layer = 5
    assert not hasattr(identity, "__dict__")
    assert pickle.loads(pickle.dumps(identity)) == identity
    assert copy.deepcopy(identity) == identity


@pytest.fixture
def unchecked():
    """Without the type checks that only tests have: users' numbers are often NumPy's."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def test_integers_of_other_libraries_become_plain_ones(unchecked):
    neuron = MLPNeuron(np.int64(3), np.int32(4))
    assert neuron == MLPNeuron(3, 4)
    assert type(neuron.layer) is int and type(neuron.neuron) is int


def test_other_things_are_not_indices(unchecked):
    with pytest.raises(ValueError, match=r"Head\.head is 1\.5: it must be an integer of 0 or more"):
        Head(1, 1.5)


@pytest.mark.parametrize(
    "label",
    [
        "",
        "L8",
        "8N123",
        "L8N",
        "l8n123",
        " L8N123",
        "L8N123\n",
        "L8H1D2",
        "L8.moe",
        "L-1N3",
        "L8N1.5",
        "L٣N1",
    ],
)
def test_parse_refuses(label):
    with pytest.raises(ValueError, match="a label is one of the forms L8N123") as error:
        parse(label)
    assert repr(label) in str(error.value)
    for form in ("L9H8D17@3", "L9H8 (head)", "L9.mlp or L9.attn"):
        assert form in str(error.value)


def test_negative_index_is_refused():
    with pytest.raises(ValueError, match=r"AttnNeuron\.source is -1: it must be an integer of 0 or more"):
        AttnNeuron(1, 2, 3, -1)


@pytest.mark.parametrize("kind", ["MLP", "attention", ""])
def test_unknown_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f'unknown kind {kind!r}: the kinds are "mlp" and "attn"'):
        check_kind(kind)


def test_known_kinds():
    assert [check_kind("mlp"), check_kind("attn")] == ["mlp", "attn"]
