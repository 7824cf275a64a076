"""The exact top-k is the dense top-k: ids, order and ties, whatever is asked.

Order is compared strictly on float64 models, where two paths to a score differ by 1e-15 and different neurons by far
more. In float32 they differ by 1e-7, so neurons closer than that may change places; that is checked to be all.
"""

import functools
from typing import Any

import pytest
import torch
import transformers
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_forward import parts_of

import tl_neuron_attr as na

ROUNDING = 2e-6  # of float32 scores
D_VOCAB = 96  # every zoo model has at least these tokens

tokens = st.integers(0, D_VOCAB - 1)
targets = st.one_of(
    st.none(),
    tokens,
    st.tuples(tokens, tokens).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: na.Contrast(*pair)),
    st.lists(tokens, min_size=1, max_size=5, unique=True).map(na.AnyOf),
)


def question(dtype: torch.dtype) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "case": st.sampled_from(zoo.CASES).map(lambda pair: zoo.case(*pair, dtype)),
            "prompt": st.lists(tokens, min_size=1, max_size=9),
            "target": targets,
            "convention": st.sampled_from(["exact", "paper"]),
            "kind": st.sampled_from(["mlp", "attn"]),
            "k": st.one_of(st.integers(1, 12), st.integers(13, 2000)),
            "layers": st.sampled_from([None, [0], [1], [0, 1]]),
            "where": st.floats(0, 1),
        }
    )


def ask(q: dict[str, Any]) -> tuple[Any, list[tuple[float, Any]]]:
    """The ranking, and all neurons of the dense computation, best first, ties by id."""
    position = round(q["where"] * (len(q["prompt"]) - 1))
    trace = na.trace(q["case"].model, q["prompt"], q["target"], position=position, convention=q["convention"])
    ranked = na.value_neurons(trace, q["kind"], k=q["k"], layers=q["layers"])
    return ranked, dense_ranking(na.value_scores(trace, q["kind"], layers=q["layers"]))


def dense_ranking(dense: Any) -> list[tuple[float, Any]]:
    rows = []
    indices = torch.cartesian_prod(*(torch.arange(n) for n in dense.scores.shape)).tolist()
    for index, score in zip(indices, dense.scores.flatten().tolist(), strict=True):
        layer = dense.layers[index[0]]
        if dense.kind == "mlp":
            neuron = na.MLPNeuron(layer, index[1])
        else:
            source, head, dim = index[1:]
            neuron = na.AttnNeuron(layer, head, dim, source)
        rows.append((-score, key(neuron), neuron))
    return [(-negative, neuron) for negative, _, neuron in sorted(rows, key=lambda row: row[:2])]


def key(neuron: Any) -> tuple[int, ...]:
    if isinstance(neuron, na.MLPNeuron):
        return neuron.layer, neuron.neuron
    return neuron.layer, neuron.head, neuron.dim, neuron.source


@settings(max_examples=100, deadline=None)
@given(question(torch.float64))
def test_equals_the_dense_ranking(q: dict[str, Any]) -> None:
    ranked, dense = ask(q)
    k = min(q["k"], len(dense))
    assert list(ranked.ids) == [neuron for _, neuron in dense[:k]]
    assert ranked.scores.tolist() == pytest.approx([score for score, _ in dense[:k]], abs=1e-12)
    assert k <= ranked.n_evaluated <= len(dense)
    assert ranked.n_neurons == len(dense)


@settings(max_examples=60, deadline=None)
@given(question(torch.float32))
def test_equals_the_dense_ranking_in_float32(q: dict[str, Any]) -> None:
    ranked, dense = ask(q)
    k = min(q["k"], len(dense))
    assert ranked.scores.tolist() == pytest.approx([score for score, _ in dense[:k]], abs=ROUNDING)
    assert ranked.scores.tolist() == sorted(ranked.scores.tolist(), reverse=True)
    own = {neuron: score for score, neuron in dense}
    assert len(set(ranked.ids)) == k
    for neuron, score in zip(ranked.ids, ranked.scores.tolist(), strict=True):
        assert own[neuron] == pytest.approx(score, abs=ROUNDING)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_scores_are_the_dense_ones_to_the_last_bit(case: zoo.ZooCase, kind: str) -> None:
    """One path scores a neuron, whether it is asked for among few or among all."""
    trace = na.trace(case.model, list(case.tokens), 11)
    dense = na.value_scores(trace, kind).scores.flatten().sort(descending=True).values
    assert torch.equal(na.value_neurons(trace, kind, k=30).scores, dense[:30])


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_more_than_there_are(case: zoo.ZooCase, kind: str) -> None:
    trace = na.trace(case.model, list(case.tokens))
    dense = na.value_scores(trace, kind)
    ranked = na.value_neurons(trace, kind, k=10**9)
    assert len(ranked) == len(set(ranked.ids)) == dense.scores.numel() == ranked.n_neurons
    assert ranked.scores.tolist() == pytest.approx(
        dense.scores.flatten().sort(descending=True).values.tolist(), abs=ROUNDING
    )


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_ranks_without_scoring_every_neuron(case: zoo.ZooCase, kind: str) -> None:
    ranked = na.value_neurons(na.trace(case.model, list(case.tokens)), kind, k=1)
    assert ranked.n_evaluated < ranked.n_neurons


@functools.cache
def wide(backend: str) -> Any:
    """A model with so many tokens that one MiB holds the logits of few neurons."""
    config = zoo.llama_like(transformers.LlamaConfig, vocab_size=6007, num_hidden_layers=2)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return zoo.build(zoo.randomise(hf.float(), seed=5), backend, torch.float64)


@pytest.mark.parametrize("target", [None, na.Contrast(3, 40), na.AnyOf([3, 40])], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_does_not_depend_on_the_memory_budget(backend: str, kind: str, target: Any) -> None:
    trace = na.trace(wide(backend), list(zoo.TOKENS), target)
    usual, dense = na.value_neurons(trace, kind, k=40), na.value_scores(trace, kind)
    for budget in (2**20, 3 * 2**20):
        small = na.value_neurons(trace, kind, k=40, memory_budget=budget)
        assert small.ids == usual.ids
        assert small.scores.tolist() == pytest.approx(usual.scores.tolist(), abs=1e-12)
        assert small.coefficients.equal(usual.coefficients)
        small_dense = na.value_scores(trace, kind, memory_budget=budget)
        assert (small_dense.scores - dense.scores).abs().max() < 1e-12
    layers, heads = na.layer_scores(trace), na.head_scores(trace)
    small_layers = na.layer_scores(trace, memory_budget=2**20)
    assert (small_layers.attn - layers.attn).abs().max() < 1e-12
    assert (small_layers.mlp - layers.mlp).abs().max() < 1e-12
    assert (na.head_scores(trace, memory_budget=2**20).scores - heads.scores).abs().max() < 1e-12


# Ties


def with_twins(name: str) -> Any:
    """A zoo model in which, in layer 1, MLP neurons 3, 17 and 40 and dims 1 and 6 of head 2 are the same.

    Large output rows, either sign, so that twins stand at the top of the ranking or at its end.
    """
    hf = zoo.clone(zoo.hf_model(name), torch.float64)
    parts = parts_of(hf, zoo.blocks(hf)[1])
    config = hf.config
    heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_head = 2 // (heads // getattr(config, "num_key_value_heads", heads))
    first_value = {"gpt2": 2 * config.hidden_size + 2 * d_head, "gpt_neox": (3 * 2 + 2) * d_head}.get(
        config.model_type, kv_head * d_head
    )

    def columns_out(module: Any) -> torch.Tensor:  # [out, in]
        return module.weight if isinstance(module, torch.nn.Linear) else module.weight.T

    def same(module: Any, twins: list[int], side: str) -> None:
        if module is None:
            return
        weight = columns_out(module)
        for twin in twins[1:]:
            if side == "out":
                weight[twin] = weight[twins[0]]
                if module.bias is not None:
                    module.bias[twin] = module.bias[twins[0]]
            else:
                weight[:, twin] = weight[:, twins[0]]

    with torch.no_grad():
        columns_out(parts.down)[:, 3] *= 8
        columns_out(parts.out)[:, 2 * d_head + 1] *= 8
        for module in (parts.up, parts.gate):
            same(module, [3, 17, 40], "out")
        same(parts.down, [3, 17, 40], "in")
        same(parts.value, [first_value + 1, first_value + 6], "out")
        same(parts.out, [2 * d_head + 1, 2 * d_head + 6], "in")
    return hf


def cache_of_twins(model: Any) -> dict[str, torch.Tensor]:
    """A cache in which twins are equal to the last bit: a matrix product rounds equal columns differently."""
    _, cache = model.run_with_cache(torch.tensor([zoo.TOKENS]), names_filter=na.required_hooks(model))
    cache = {name: value.detach().clone() for name, value in cache.items()}
    post = cache["blocks.1.mlp.hook_post"]
    post[..., [17, 40]] = post[..., [3]]
    value = cache["blocks.1.attn.hook_v"]  # [batch, pos, kv, dim]
    kv = 2 // (model.cfg.n_heads // value.shape[2])
    value[..., kv, 6] = value[..., kv, 1]
    return cache


@pytest.mark.parametrize(("name", "backend"), zoo.CASES)
def test_ties_are_ordered_by_id(name: str, backend: str) -> None:
    """Twins have equal scores and stand side by side in the order of their ids; a cut keeps the first ones."""
    model = zoo.build(with_twins(name), backend, torch.float64)
    cache = cache_of_twins(model)
    for target in (11, na.Contrast(11, 30), na.AnyOf([11, 30])):
        trace = na.trace(model, list(zoo.TOKENS), target, cache=cache)
        rankings = {kind: dense_ranking(na.value_scores(trace, kind)) for kind in ("mlp", "attn")}
        for kind, k in ((kind, k) for kind in rankings for k in (1, 2, 5, 60, 10**6)):
            ranked = na.value_neurons(trace, kind, k=k)
            assert list(ranked.ids) == [neuron for _, neuron in rankings[kind][:k]]
            place = {neuron: rank for rank, neuron in enumerate(ranked.ids)}
            score = dict(zip(ranked.ids, ranked.scores.tolist(), strict=True))
            for twins in twins_of(kind):
                ranks = [place.get(neuron) for neuron in twins]
                assert ranks == sorted(ranks, key=lambda r: (r is None, r)), "a later twin before an earlier"
                found = [rank for rank in ranks if rank is not None]
                assert found == list(range(found[0], found[0] + len(found))) if found else True
                assert len({score[neuron] for neuron in twins if neuron in score}) <= 1
                if 0 < len(found) < len(twins):
                    assert found[-1] == len(ranked) - 1, "a twin is missing though the ranking goes on"


def twins_of(kind: str) -> list[list[Any]]:
    if kind == "mlp":
        return [[na.MLPNeuron(1, n) for n in (3, 17, 40)]]
    return [[na.AttnNeuron(1, 2, dim, source) for dim in (1, 6)] for source in range(len(zoo.TOKENS))]
