"""One prompt's whole story as plain data: prediction, layers, heads, value neurons of both kinds, query neurons.

:func:`gather` collects from a trace what the command line prints, what its JSON holds and what a report shows;
:func:`explain` traces first. :meth:`Explanation.to_json` writes it without NaN, under a schema version. Ranks count
from 1: the rank of a token is one more than the number of tokens with a higher probability.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tl_neuron_attr import serialise
from tl_neuron_attr.overview import overviews
from tl_neuron_attr.query import query_neurons
from tl_neuron_attr.ranking import Provenance, RankedNeurons, check_count, floats, integers
from tl_neuron_attr.results import HeadScores, LayerScores
from tl_neuron_attr.trace import Trace, trace
from tl_neuron_attr.vocab import PromotedTokens, promoted_tokens

SCHEMA = "tl_neuron_attr.explanation"
SCHEMA_VERSION = 1
# Query neurons are those of this many attention value neurons, as in the paper.
N_QUERIED = 30


@dataclass(frozen=True, slots=True)
class TokenPrediction:
    """One token as the model predicts it; ``log_probability`` in nats."""

    token: str
    token_id: int
    rank: int
    probability: float
    log_probability: float


@dataclass(frozen=True, slots=True)
class Rankings:
    """Layers, heads, the top value neurons of both kinds, and the MLP neurons that activate the attention ones."""

    layers: LayerScores
    heads: HeadScores
    mlp: RankedNeurons
    attn: RankedNeurons
    query: RankedNeurons

    @staticmethod
    def of(traced: Trace, k: int) -> "Rankings":
        """The top ``k`` neurons of each."""
        check_count("k", k)
        [all_of] = overviews([traced], max(k, N_QUERIED))
        query = query_neurons(traced, all_of.attn.top(N_QUERIED), "mlp", k=k)
        return Rankings(all_of.layers, all_of.heads, all_of.mlp.top(k), all_of.attn.top(k), query)

    def top(self, k: int) -> "Rankings":
        """The first ``k`` neurons of each (all where there are fewer)."""
        return replace(self, mlp=self.mlp.top(k), attn=self.attn.top(k), query=self.query.top(k))


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What :func:`gather` found.

    ``predicted`` is what the model prefers, best first; ``target`` is the token that the scores are about.
    ``query`` are the MLP neurons that activate the top 30 attention value neurons.
    """

    provenance: Provenance
    d_vocab: int
    target: TokenPrediction
    predicted: tuple[TokenPrediction, ...]
    layers: LayerScores
    heads: HeadScores
    mlp: RankedNeurons
    attn: RankedNeurons
    mlp_tokens: PromotedTokens
    attn_tokens: PromotedTokens
    query: RankedNeurons
    query_tokens: PromotedTokens

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON; written to ``path`` as well where one is given. All layers and all heads are in it."""
        embed = {} if self.layers.embed is None else {"embed": self.layers.embed}
        attn, mlp = floats(self.layers.attn), floats(self.layers.mlp)
        heads = self.heads.top(max(self.heads.scores.numel(), 1))
        record = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(self.provenance),
            "prediction": {
                "d_vocab": self.d_vocab,
                "target": asdict(self.target),
                "top": [asdict(token) for token in self.predicted],
            },
            **embed,
            "layers": [{"layer": layer, "attn": attn[layer], "mlp": mlp[layer]} for layer in range(len(attn))],
            "heads": [{"layer": head.layer, "head": head.head, "score": score} for head, score in heads],
            "mlp_neurons": _neurons(self.mlp, self.mlp_tokens),
            "attn_neurons": _neurons(self.attn, self.attn_tokens),
            "query_neurons": {"of_top_attn": N_QUERIED, **_neurons(self.query, self.query_tokens)},
        }
        return serialise.dump(record, path)


def explain(
    model: Any,
    prompt: str,
    target: str | None = None,
    *,
    k: int = 10,
    position: int = -1,
    convention: Literal["exact", "paper"] = "exact",
    n_tokens: int = 5,
) -> Explanation:
    """Trace one prompt and collect layers, heads, the top ``k`` neurons of both kinds and what they promote.

    ``n_tokens`` is how many tokens are listed as predicted, and as promoted and demoted by each neuron.
    Raises what :func:`tl_neuron_attr.trace` raises, and ValueError for ``k < 1``.
    """
    check_count("k", k)
    return gather(trace(model, prompt, target, position=position, convention=convention), k=k, n_tokens=n_tokens)


def gather(traced: Trace, *, k: int = 10, n_tokens: int = 5, ranked: Rankings | None = None) -> Explanation:
    """Layers, heads, the top ``k`` neurons of both kinds and what they promote, of a trace.

    ``n_tokens`` as in :func:`explain`. ``ranked`` are rankings of this trace that are there already, of ``k`` neurons
    or more. Raises ValueError for ``k < 1``.
    """
    check_count("k", k)
    top = Rankings.of(traced, k) if ranked is None else ranked.top(k)
    best = integers(traced.log_probs.topk(min(n_tokens, len(traced.log_probs))).indices)
    return Explanation(
        provenance=traced.provenance,
        d_vocab=len(traced.log_probs),
        target=predicted_as(traced, traced.target.positive[0]),
        predicted=tuple(predicted_as(traced, token) for token in best),
        layers=top.layers,
        heads=top.heads,
        mlp=top.mlp,
        attn=top.attn,
        mlp_tokens=promoted_tokens(traced, top.mlp, k=n_tokens),
        attn_tokens=promoted_tokens(traced, top.attn, k=n_tokens),
        query=top.query,
        query_tokens=promoted_tokens(traced, top.query, k=n_tokens),
    )


def predicted_as(traced: Trace, token: int) -> TokenPrediction:
    """What the model says of one token."""
    log_probability = float(traced.log_probs[token])
    return TokenPrediction(
        token=traced.vocabulary.text(token),
        token_id=token,
        rank=1 + int(torch.count_nonzero(traced.log_probs > traced.log_probs[token])),
        probability=math.exp(log_probability),
        log_probability=log_probability,
    )


def _neurons(ranked: RankedNeurons, promoted: PromotedTokens) -> dict[str, object]:
    table = ranked.table()
    rows: list[dict[str, object]] = []
    for i, (up, down) in enumerate(zip(promoted.up, promoted.down, strict=True)):
        row: dict[str, object] = {name: values[i] for name, values in table.items()}
        for name, end in (("up", up), ("down", down)):
            row[name] = [{"token": token, "logit_change": change} for token, change in end]
        rows.append(row)
    return {
        "method": ranked.method,
        "n_evaluated": ranked.n_evaluated,
        "n_neurons": ranked.n_neurons,
        "neurons": rows,
    }
