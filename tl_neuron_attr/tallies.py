"""Means and counts over prompts of several types, from plain numbers: no model and no PyTorch.

The functions of traces and rankings (:mod:`tl_neuron_attr.analysis`, :mod:`tl_neuron_attr.shared`) and those of a
sweep's files (:mod:`tl_neuron_attr.sweep_read`) both end here. With ``S_i`` the scores (nats) of one prompt, averages
are over the prompts of a type, in double precision.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tl_neuron_attr.neurons import Head

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]


@dataclass(frozen=True)
class MeanLayers:
    """Mean score of each attention and MLP layer over ``n_prompts`` prompts of one type."""

    n_prompts: int
    attn: tuple[float, ...]
    mlp: tuple[float, ...]


def mean_layers(scores: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> dict[str, MeanLayers]:
    """For each type its means, from the type and the attention and MLP scores of each prompt."""
    found: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    for type_, attn, mlp in scores:
        found.setdefault(type_, []).append((attn, mlp))
    return {
        type_: MeanLayers(len(parts), *(tuple(map(_mean, zip(*column, strict=True))) for column in zip(*parts)))  # noqa: B905
        for type_, parts in found.items()
    }


def layer_means_frame(means: Mapping[str, MeanLayers]) -> "pandas.DataFrame":
    """One row a type and layer: type, layer, attn, mlp."""
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    rows = [
        {"type": type_, "layer": layer, "attn": attn, "mlp": mlp}
        for type_, mean in means.items()
        for layer, (attn, mlp) in enumerate(zip(mean.attn, mean.mlp, strict=True))
    ]
    return pandas.DataFrame(rows, columns=pandas.Index(["type", "layer", "attn", "mlp"]))


def layer_sums_frame(means: Mapping[str, MeanLayers]) -> "pandas.DataFrame":
    """One row a type: type, n_prompts, attn, mlp."""
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    rows = [
        {"type": type_, "n_prompts": mean.n_prompts, "attn": math.fsum(mean.attn), "mlp": math.fsum(mean.mlp)}
        for type_, mean in means.items()
    ]
    return pandas.DataFrame(rows, columns=pandas.Index(["type", "n_prompts", "attn", "mlp"]))


def layer_histogram_frame(
    rankings: Iterable[tuple[str, Sequence[int], Sequence[float]]], n_layers: int | None
) -> "pandas.DataFrame":
    """One row a type and layer, from the type, the layers and the scores of each prompt's ranked neurons.

    Columns: type, layer, ``neurons`` (mean over prompts), ``share`` (of the type's), ``score`` (mean over prompts).
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    counts: dict[tuple[str, int], int] = {}
    sums: dict[tuple[str, int], float] = {}
    prompts: dict[str, int] = {}
    for type_, layers, scores in rankings:
        prompts[type_] = prompts.get(type_, 0) + 1
        for layer, score in zip(layers, scores, strict=True):
            at = type_, layer
            counts[at] = counts.get(at, 0) + 1
            sums[at] = sums.get(at, 0.0) + score
    last = max((layer for _, layer in counts), default=-1)
    if n_layers is not None and n_layers <= last:
        raise ValueError(f"n_layers={n_layers}, but a ranked neuron is in layer {last}: give at least {last + 1}")
    rows: list[dict[str, object]] = []
    for type_, n_prompts in prompts.items():
        total = sum(count for (name, _), count in counts.items() if name == type_)
        for layer in range(last + 1 if n_layers is None else n_layers):
            count = counts.get((type_, layer), 0)
            score = sums.get((type_, layer), 0.0) / n_prompts
            share = count / total if total else 0.0
            rows.append({"type": type_, "layer": layer, "neurons": count / n_prompts, "share": share, "score": score})
    return pandas.DataFrame(rows, columns=pandas.Index(["type", "layer", "neurons", "share", "score"]))


def check_fraction(fraction: float) -> float:
    """Raise :class:`ValueError` for a share of all heads that is not above 0, up to 1."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: give a share of all heads above 0, up to 1")
    return fraction


def best_heads(sums: Mapping[str, Sequence[Sequence[float]]], fraction: float) -> dict[str, tuple[Head, ...]]:
    """For each type the highest of summed scores ``[layer][head]``: that fraction, rounded down, at least one."""
    found: dict[str, tuple[Head, ...]] = {}
    for type_, summed in sums.items():
        heads = [(Head(layer, head), score) for layer, row in enumerate(summed) for head, score in enumerate(row)]
        count = max(1, math.floor(fraction * len(heads) + 1e-9))
        found[type_] = tuple(head for head, _ in sorted(heads, key=lambda pair: -pair[1])[:count])
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
