"""Result types: order, slicing, frames, JSON, tables, refusals. No model is needed."""

import dataclasses
import html.parser
import itertools
import json
import math
import pickle
import struct

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_neuron_attr.neurons import AttnNeuron, Head, Layer, MLPNeuron
from tl_neuron_attr.results import (
    HeadScores,
    LayerScores,
    NeuronScores,
    Provenance,
    RankedNeurons,
    SchemaError,
)

TOKENS = ("<|start|>", "The", " <script>alert(1)</script>", " is\n")


def provenance(**changes):
    values = {
        "model": "tiny",
        "prompt": "The <script>alert(1)</script> is\n",
        "tokens": (0, 11, 12, 13),
        "str_tokens": TOKENS,
        "position": 3,
        "target": "' Paris'",
        "target_ids": (7,),
        "convention": "exact",
        "model_log_prob": -0.2593,
    }
    return Provenance(**{**values, **changes})


def ranking(n=4, kind="mlp", dtype=torch.float32, **changes):
    make = {"mlp": lambda i: MLPNeuron(i, 10 * i), "attn": lambda i: AttnNeuron(i, 1, 2, i % 4)}[kind]
    values = {
        "kind": kind,
        "ids": tuple(make(i) for i in range(n)),
        "scores": torch.linspace(1, 0.1, n, dtype=dtype),
        "coefficients": torch.linspace(-3, 3, n, dtype=dtype),
        "method": "log_prob_increase",
        "n_evaluated": 332,
        "n_neurons": 46080,
        "provenance": provenance(),
    }
    return RankedNeurons(**{**values, **changes})


@pytest.fixture
def unchecked():
    """Without the type checks that only tests have, so that a user's own refusals are what is seen."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).tolist()


# --- RankedNeurons as a sequence


def test_sequence_of_identities():
    ranked = ranking()
    assert len(ranked) == 4
    assert list(ranked) == [MLPNeuron(0, 0), MLPNeuron(1, 10), MLPNeuron(2, 20), MLPNeuron(3, 30)]
    assert ranked[1] == MLPNeuron(1, 10)
    assert ranked[-1] == MLPNeuron(3, 30)
    with pytest.raises(IndexError):
        ranked[4]


@pytest.mark.parametrize("part", [slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(9, 12)])
def test_slices_are_rankings_with_everything_aligned(part):
    ranked = ranking(columns={"note": ("a", "b", "c", "d")})
    got = ranked[part]
    assert type(got) is RankedNeurons
    assert got.ids == ranked.ids[part]
    assert got.scores.tolist() == ranked.scores.tolist()[part]
    assert got.coefficients.tolist() == ranked.coefficients.tolist()[part]
    assert got.columns == {"note": ("a", "b", "c", "d")[part]}
    assert (got.n_evaluated, got.n_neurons, got.method) == (332, 46080, "log_prob_increase")
    assert got.provenance is ranked.provenance


def test_top():
    ranked = ranking()
    assert ranked.top(2).ids == ranked.ids[:2]
    assert ranked.top(99).ids == ranked.ids
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"n is {n}: ask for 1 or more"):
            ranked.top(n)


def test_frozen_without_graph_and_picklable():
    scores = torch.rand(4, requires_grad=True)
    ranked = ranking(scores=scores * 2, coefficients=scores + 1, columns={"note": (1, None, "x", 2.5)})
    assert ranked.scores.grad_fn is None and not ranked.scores.requires_grad
    assert ranked.coefficients.grad_fn is None and not ranked.coefficients.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        ranked.method = "other"
    again = pickle.loads(pickle.dumps(ranked))
    assert again.ids == ranked.ids and again.columns == ranked.columns
    assert torch.equal(again.scores, ranked.scores)


def test_a_view_does_not_keep_the_large_tensor_alive():
    large = torch.rand(1000, 4)
    assert ranking(scores=large[5]).scores.untyped_storage().nbytes() == 16
    scores = NeuronScores("mlp", large[:2], large[:2], (0, 1), 8, provenance())
    assert scores.scores.untyped_storage().nbytes() == 32


# --- frames


def test_frame_of_mlp_neurons():
    frame = ranking(columns={"note": ("a", "b", "c", "d")}).to_frame()
    assert list(frame.columns) == ["layer", "neuron", "score", "coefficient", "note"]
    assert frame["neuron"].tolist() == [0, 10, 20, 30]
    assert frame["score"].tolist() == ranking().scores.tolist()


def test_frame_of_attention_neurons():
    frame = ranking(n=5, kind="attn", columns={"rise": (1.0, 2.0, 3.0, 4.0, 5.0)}).to_frame()
    columns = ["layer", "head", "dim", "source", "score", "coefficient", "source_token", "rise"]
    assert list(frame.columns) == columns
    assert frame["source"].tolist() == [0, 1, 2, 3, 0]
    assert frame["source_token"].tolist() == [*TOKENS, TOKENS[0]]


def test_empty_ranking_keeps_its_columns():
    empty = ranking(kind="attn")[4:]
    assert len(empty) == 0
    assert list(empty.to_frame().columns)[:4] == ["layer", "head", "dim", "source"]
    assert RankedNeurons.from_json(empty.to_json()).ids == ()
    assert "0 attn neurons" in repr(empty)
    assert "<table" in empty._repr_html_()


# --- JSON

finite32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
finite64 = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(data=st.data(), kind=st.sampled_from(["mlp", "attn"]), wide=st.booleans())
def test_json_round_trip_is_exact_to_the_bit(data, kind, wide):
    dtype = torch.float64 if wide else torch.float32
    values = data.draw(st.lists(finite64 if wide else finite32, min_size=1, max_size=5))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    extra = tuple(data.draw(st.one_of(st.none(), st.integers(), finite64, text)) for _ in values)
    scores = torch.tensor(values, dtype=dtype)
    ranked = ranking(
        n=len(values), kind=kind, scores=scores, coefficients=-scores, columns={data.draw(text) + "!": extra}
    )
    back = RankedNeurons.from_json(ranked.to_json())
    assert (back.scores.dtype, back.coefficients.dtype) == (dtype, dtype)
    assert bits(back.scores) == bits(ranked.scores)
    assert bits(back.coefficients) == bits(ranked.coefficients)
    assert list(back.columns) == list(ranked.columns)
    for old, new in zip(extra, next(iter(back.columns.values())), strict=True):
        assert type(old) is type(new)
        assert struct.pack("d", old) == struct.pack("d", new) if isinstance(old, float) else old == new
    for field in ("kind", "ids", "method", "n_evaluated", "n_neurons", "provenance"):
        assert getattr(back, field) == getattr(ranked, field)


def test_json_of_bfloat16():
    ranked = ranking(dtype=torch.bfloat16)
    back = RankedNeurons.from_json(ranked.to_json())
    assert back.scores.dtype == torch.bfloat16 and bits(back.scores) == bits(ranked.scores)


def test_json_file_and_layout(tmp_path):
    ranked = ranking(kind="attn", columns={"note": (None, "ü", 1, True)})
    path = tmp_path / "ranked.json"
    text = ranked.to_json(path)
    assert path.read_text(encoding="utf-8") == text + "\n"
    for source in (text, path, str(path)):
        assert RankedNeurons.from_json(source).ids == ranked.ids
    record = json.loads(text)
    assert (record["schema"], record["schema_version"]) == ("tl_neuron_attr.ranked_neurons", 1)
    assert list(record["neurons"][1]) == list(ranked.to_frame().columns)
    assert record["neurons"][1]["source_token"] == "The"


def test_json_without_prompt_text():
    origin = provenance(prompt=None)
    assert origin.text == "".join(TOKENS)
    assert RankedNeurons.from_json(ranking(provenance=origin).to_json()).provenance == origin


def test_json_refuses_infinity():
    infinite = ranking(scores=torch.tensor([math.inf, 1.0, 0.0, -1.0]))
    with pytest.raises(ValueError, match="strict JSON cannot hold"):
        infinite.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "version 2 of tl_neuron_attr.ranked_neurons: this release reads version 1"),
        ({"schema_version": None}, "version None of"),
        ({"schema": "other"}, "the schema is 'other', but 'tl_neuron_attr.ranked_neurons' is needed here"),
        ({"neurons": [{"layer": 1}]}, "incomplete or altered: KeyError"),
        ({"kind": "moe"}, "incomplete or altered: .*unknown kind 'moe'"),
        ({"provenance": {}}, "incomplete or altered: KeyError"),
        ({"dtypes": ["float31", "float32"]}, "incomplete or altered: AttributeError"),
    ],
)
def test_json_that_cannot_be_read_is_named(change, message):
    text = json.dumps({**json.loads(ranking().to_json()), **change})
    with pytest.raises(SchemaError, match=message):
        RankedNeurons.from_json(text)


def test_json_that_is_not_strict():
    with pytest.raises(SchemaError, match="this is not JSON"):
        RankedNeurons.from_json('{"schema": ')
    with pytest.raises(SchemaError, match="NaN in the text: strict JSON holds finite numbers only"):
        RankedNeurons.from_json('{"schema": NaN}')


def test_json_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        RankedNeurons.from_json(tmp_path / "none.json")


# --- tables for people


class _Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_notebook_table_escapes_everything_foreign():
    evil = "<img src=x onerror=alert(1)>"
    ranked = ranking(
        kind="attn",
        columns={f"<b>{evil}": (evil,) * 4},
        method=evil,
        provenance=provenance(model=evil, target=evil, convention=evil),
    )
    page = _Tags()
    page.feed(ranked._repr_html_())
    assert set(page.tags) == {"div", "table", "br", "thead", "tbody", "tr", "th", "td"}
    assert page.tags.count("tr") == 5
    assert "' <script>alert(1)</script>'" in page.text
    assert r"' is\n'" in page.text
    assert page.text.count(evil) == 4


def test_notebook_table_says_what_it_leaves_out():
    assert "... and 15 more" in ranking(n=40)._repr_html_()
    assert "more</div>" not in ranking(n=25)._repr_html_()


def test_repr_reads_well():
    lines = repr(ranking(n=12, kind="attn")).splitlines()
    assert lines[0] == (
        "12 attn neurons for ' Paris' after 'The <script>alert(1)</script> is\\n', by log_prob_increase, "
        "332 of 46,080 neurons evaluated"
    )
    assert lines[1] == "model tiny, position 3, convention exact, target value -0.2593 nats"
    assert lines[2].split() == ["neuron", "score", "coefficient", "source_token"]
    assert lines[4].split(maxsplit=3) == ["L1H1D2@1", "0.918", "-2.455", "'The'"]
    assert len(lines) == 14 and lines[-1] == "... and 2 more"


def test_long_prompts_are_cut_at_the_front():
    text = "x" * 500 + " is"
    assert "after ...'xxx" in repr(ranking(provenance=provenance(prompt=text)))
    assert "xx is', by" in repr(ranking(provenance=provenance(prompt=text)))


# --- dense scores


def dense(kind, scores, layers=None, coefficients=None):
    layers = tuple(range(len(scores))) if layers is None else layers
    coefficients = scores if coefficients is None else coefficients
    return NeuronScores(kind, scores, coefficients, layers, scores.numel(), provenance())


@settings(deadline=None)
@given(data=st.data(), kind=st.sampled_from(["mlp", "attn"]))
def test_dense_top_agrees_with_plain_sorting_ties_included(data, kind):
    layers = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)))
    n_source, n_head, n_dim = (data.draw(st.integers(1, 3)) for _ in range(3))
    shape = (len(layers), n_dim) if kind == "mlp" else (len(layers), n_source, n_head, n_dim)
    size = math.prod(shape)
    values = data.draw(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0]), min_size=size, max_size=size))
    scores = torch.tensor(values).reshape(shape)
    coefficients = torch.arange(size, dtype=torch.float32).reshape(shape)

    expected = []
    for place in itertools.product(*(range(n) for n in shape)):
        if kind == "mlp":
            neuron = MLPNeuron(layers[place[0]], place[1])
        else:
            row, source, head, dim = place
            neuron = AttnNeuron(layers[row], head, dim, source)
        expected.append((-scores[place].item(), neuron, coefficients[place].item()))
    expected.sort(key=lambda entry: entry[:2])

    whole = dense(kind, scores, layers, coefficients)
    k = data.draw(st.integers(1, size + 2))
    ranked = whole.top(k)
    assert list(ranked) == [entry[1] for entry in expected[:k]]
    assert ranked.scores.tolist() == [-entry[0] for entry in expected[:k]]
    assert ranked.coefficients.tolist() == [entry[2] for entry in expected[:k]]
    assert (ranked.n_neurons, ranked.n_evaluated) == (size, size)

    frame = whole.to_frame()
    by_id = sorted(expected, key=lambda entry: entry[1])
    names = ["layer", "neuron"] if kind == "mlp" else ["layer", "head", "dim", "source"]
    assert list(frame.columns) == list(ranked.to_frame().columns)
    assert frame[names].to_numpy().tolist() == [list(dataclasses.astuple(entry[1])) for entry in by_id]
    assert frame["score"].tolist() == [-entry[0] for entry in by_id]
    assert frame["coefficient"].tolist() == [entry[2] for entry in by_id]
    if kind == "attn":
        assert frame["source_token"].tolist() == [TOKENS[entry[1].source] for entry in by_id]


def test_dense_top_of_nothing_is_refused():
    with pytest.raises(ValueError, match="k is 0: ask for 1 or more"):
        dense("mlp", torch.zeros(2, 3)).top(0)


# --- layers and heads


def test_layer_scores():
    scores = LayerScores(torch.tensor([1.0, 3.0]), torch.tensor([3.0, -1.0]), provenance(), embed=0.5)
    frame = scores.to_frame()
    assert list(frame.columns) == ["layer", "attn", "mlp"]
    assert frame.to_numpy().tolist() == [[0, 1, 3], [1, 3, -1]]
    assert scores.embed == 0.5
    assert scores.top(3) == [(Layer(0, "mlp"), 3.0), (Layer(1, "attn"), 3.0), (Layer(0, "attn"), 1.0)]
    assert len(scores.top(10)) == 4
    assert repr(scores).startswith("LayerScores(2 layers, target ' Paris', strongest: L0.mlp 3.0000, L1.attn")


def test_head_scores():
    scores = HeadScores(torch.tensor([[1.0, 3.0], [3.0, 5.0]], requires_grad=True), provenance())
    assert not scores.scores.requires_grad
    assert scores.top(3) == [(Head(1, 1), 5.0), (Head(0, 1), 3.0), (Head(1, 0), 3.0)]
    frame = scores.to_frame()
    assert list(frame.columns) == ["layer", "head", "score"]
    assert frame.to_numpy().tolist() == [[1, 1, 5], [0, 1, 3], [1, 0, 3], [0, 0, 1]]
    with pytest.raises(ValueError, match="n is 0"):
        scores.top(0)


# --- refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ranking(kind="mlp", ids=(MLPNeuron(0, 0),)), "1 ids, scores of shape (4,)"),
        (lambda: ranking(scores=torch.zeros(3)), "4 ids, scores of shape (3,)"),
        (lambda: ranking(coefficients=torch.zeros(5)), "coefficients of shape (5,): there must be one score"),
        (
            lambda: ranking(ids=tuple(AttnNeuron(0, 0, i, 0) for i in range(4))),
            "AttnNeuron(layer=0, head=0, dim=0, source=0) among mlp neurons: every id must be a MLPNeuron",
        ),
        (
            lambda: ranking(kind="attn", ids=tuple(AttnNeuron(0, 0, i, 4) for i in range(4))),
            "L0H0D0@4 reads outside the prompt of 4 tokens",
        ),
        (lambda: ranking(ids=(MLPNeuron(0, 0),) * 4), "L0N0 is given twice"),
        (lambda: ranking(scores=torch.tensor([1.0, math.nan, 0, 0])), "1 of 4 scores are NaN"),
        (lambda: ranking(columns={"note": ("a",)}), "column 'note' has 1 values for 4 neurons"),
        (lambda: ranking(columns={"score": (1, 2, 3, 4)}), "column 'score' is one that every table has"),
        (
            lambda: ranking(columns={"x": (torch.ones(1), 2, 3, 4)}),
            "of type Tensor: a cell is a plain str, int, float, bool or None",
        ),
        (lambda: dense("mlp", torch.zeros(2, 3, 1, 1)), "for mlp neurons both must be [layer, neuron]"),
        (lambda: dense("attn", torch.zeros(2, 3)), "both must be [layer, source, head, dim]"),
        (lambda: dense("attn", torch.zeros(2, 5, 1, 1)), "5 sources in a prompt of 4 tokens"),
        (
            lambda: dense("mlp", torch.zeros(2, 3), coefficients=torch.zeros(2, 4)),
            "coefficients of shape (2, 4)",
        ),
        (lambda: dense("mlp", torch.zeros(2, 3), layers=(0,)), "layers (0,) for 2 rows of scores"),
        (lambda: dense("mlp", torch.zeros(2, 3), layers=(1, 1)), "layers (1, 1) for 2 rows of scores"),
        (lambda: dense("mlp", torch.full((2, 3), math.nan)), "6 of 6 scores are NaN"),
        (lambda: LayerScores(torch.zeros(2), torch.zeros(3), provenance()), "attn has shape (2,), mlp (3,)"),
        (lambda: HeadScores(torch.zeros(2), provenance()), "scores has shape (2,): it must be [layer, head]"),
        (lambda: provenance(tokens=(1, 2)), "2 tokens but 4 str_tokens"),
        (lambda: provenance(position=4), "position 4 is outside the prompt of 4 tokens"),
        (lambda: provenance(position=-1), "position -1 is outside the prompt of 4 tokens"),
    ],
)
def test_refusals(build, message, unchecked):
    with pytest.raises(ValueError) as error:
        build()
    assert message in str(error.value)
