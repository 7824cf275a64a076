"""Every architecture that TransformerLens runs: right to rounding, or refused by name."""

import families
import pytest
import torch
import zoo

import tl_neuron_attr as na


@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.FAMILY_CASES))
def test_float32(name: str, backend: str) -> None:
    found = families.errors(name, backend)
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.FAMILY_CASES))
def test_float64(name: str, backend: str) -> None:
    found = families.errors(name, backend, "paper", torch.float64)
    # TransformerLens's gelu_fast and Bloom's own have sqrt(2 / pi) to ten and to eight digits.
    assert max(found.values()) < (1e-6 if name == "bloom" else 1e-8), found


@pytest.mark.parametrize(("name", "backend"), zoo.thinned(zoo.FAMILY_CASES))
def test_from_a_cache(name: str, backend: str) -> None:
    """The user's own run: the readout is then rebuilt from the weights, multipliers and caps included."""
    case = zoo.case(name, backend)
    tokens = torch.tensor([case.tokens])
    _, cache = case.model.run_with_cache(tokens, names_filter=na.required_hooks(case.model))
    for position in (-1, 3):
        ran = na.trace(case.model, tokens, 42, position=position)
        read = na.trace(case.model, tokens, 42, position=position, cache=cache)
        assert (ran.log_probs - read.log_probs).abs().max() < 1e-5
        for kind, _ in families.kinds(name):
            a, b = na.value_scores(ran, kind).scores, na.value_scores(read, kind).scores
            assert (a - b).abs().max() < 1e-5


# OLMo's own forward pass fails behind a bridge in low precision: its bridge multiplies float32 by bfloat16.
# The last backend of a name wins: weights as they are, since a bridge in compatibility mode keeps float32 copies.
LOW = {n: b for n, b in reversed(zoo.FAMILY_CASES) if not (n.startswith("olmo") and b.startswith("bridge"))}


@pytest.mark.filterwarnings("ignore::tl_neuron_attr.TinyDenominatorWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Not refused for rounding, scored in float32, finite for every token, and exactly the dense top."""
    case = zoo.case(name, LOW[name], dtype)
    for target in (None, 3):
        trace = na.trace(case.model, list(case.tokens), target)
        for kind, _ in families.kinds(name):
            dense, ranked = na.value_scores(trace, kind).scores, na.value_neurons(trace, kind, k=20)
            assert dense.dtype == ranked.scores.dtype == torch.float32
            assert dense.isfinite().all()
            assert torch.equal(ranked.scores, dense.flatten().sort(descending=True).values[:20])
            assert na.query_neurons(trace, ranked, "attn", k=5).scores.isfinite().all()


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize(
    ("name", "backend"), [c for c in zoo.FAMILY_CASES if c[0] in ("gemma2", "olmo2", "granite", "cohere")]
)
def test_compare(name: str, backend: str, kind: str) -> None:
    """Bounds on both sides behind caps, multipliers and norms: the exact top of the differences."""
    case = zoo.case(name, backend, torch.float64)
    for target in (42, na.AnyOf([3, 50, 9]), na.Contrast(5, 60)):
        a, b = (na.trace(case.model, tokens, target) for tokens in (list(case.tokens), [9, 17, 42, 8, 61, 2, 33]))
        dense = (na.value_scores(a, kind).scores - na.value_scores(b, kind).scores).flatten().sort(descending=True)
        found = na.compare(a, b, kind, k=15)
        torch.testing.assert_close(found.scores, dense.values[:15], atol=1e-12, rtol=0)
