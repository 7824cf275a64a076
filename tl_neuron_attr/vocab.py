"""What a neuron says: the tokens that its vector pushes up and down, directly or once a head has moved it.

A neuron's vector ``a w`` changes the logits by ``W_U' N(a w)`` with the final norm frozen
(:mod:`tl_neuron_attr.readout`). The sign of the coefficient ``a`` is applied: a neuron with a negative
coefficient promotes the tokens at the *lower* end of its row's projection.

Vectors of shallow neurons are often unreadable until a head of a later layer moves them. :func:`through_head`
reads ``W_U' N(N_l(a w) W_V[l, kv(h)] W_O[l, h])``, with ``N_l`` the linear part of the norm before that layer's
attention, its scale frozen at the position where the neuron writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr import tables
from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.neurons import GivenNeurons, Neuron, neurons_of
from tl_neuron_attr.numbering import chosen_layers, place
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.results import RankedNeurons
from tl_neuron_attr.writes import added, coefficient, rows_of

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    from tl_neuron_attr.trace import Trace

TokenChange: TypeAlias = tuple[str, float]


@dataclass(frozen=True, eq=False)
class PromotedTokens:
    """For each neuron, the tokens it pushes up most and down most, with the change of their logit.

    ``up`` and ``down`` hold one tuple for each neuron of pairs (token, logit change), strongest first.
    """

    ids: tuple[Neuron, ...]
    up: tuple[tuple[TokenChange, ...], ...]
    down: tuple[tuple[TokenChange, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    def to_frame(self) -> "pandas.DataFrame":
        """One row for each neuron and rank: neuron, rank, up, up_change, down, down_change."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        rows = [
            (str(neuron), rank, *raised, *lowered)
            for neuron, up, down in zip(self.ids, self.up, self.down, strict=True)
            for rank, (raised, lowered) in enumerate(zip(up, down, strict=True), start=1)
        ]
        columns = pandas.Index(["neuron", "rank", "up", "up_change", "down", "down_change"])
        return pandas.DataFrame(rows, columns=columns)

    def _repr_html_(self) -> str:
        columns: dict[str, list[tables.Cell]] = {"neuron": [str(neuron) for neuron in self.ids]}
        for name, ends in (("pushed up most", self.up), ("pushed down most", self.down)):
            columns[name] = ["  ".join(tables.quoted(token, 20) for token, _ in end[:5]) for end in ends]
        return tables.as_html([], columns, 0)

    def __repr__(self) -> str:
        lines = [f"PromotedTokens of {len(self.ids)} neurons"]
        for neuron, up, down in list(zip(self.ids, self.up, self.down, strict=True))[:10]:
            raised, lowered = (" ".join(repr(token) for token, _ in end[:5]) for end in (up, down))
            lines.append(f"  {neuron}: up {raised} | down {lowered}")
        return "\n".join(lines)


@without_autocast
def promoted_tokens(
    trace: "Trace",
    neurons: GivenNeurons,
    k: int = 10,
    *,
    position: int | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> PromotedTokens:
    """The ``k`` tokens each neuron promotes and the ``k`` it demotes, at this prompt's activations.

    ``position`` is where the neurons write: by default the predicting position, and for a ranking of query
    neurons the position of each (its column ``pos``). A neuron whose coefficient is zero there changes nothing;
    its changes are then all zero.

    Raises :class:`ValueError` for ``k < 1``, a position out of range, or a neuron that the model or prompt does
    not have.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> na.promoted_tokens(trace, [na.MLPNeuron(24, 1005)], k=1).up[0][0][0]
        ' capitals'
    """
    placed = _written(trace, neurons, position)
    return _read_out(trace, placed, [vector for _, _, vector in placed], k, memory_budget)


@without_autocast
def through_head(
    trace: "Trace",
    neurons: GivenNeurons,
    layer: int,
    head: int,
    k: int = 10,
    *,
    position: int | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> PromotedTokens:
    """The tokens each neuron promotes and demotes once head ``head`` of layer ``layer`` has moved its vector.

    The norm before that layer's attention is applied with its scale frozen where the neuron writes
    (``position``, as in :func:`promoted_tokens`), a norm behind it with that of the predicting position; the
    attention weight, a positive factor, is left out.

    Raises :class:`ValueError` for a head that does not exist, a neuron that does not write before it, ``k < 1``,
    or a position out of range.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> query = na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=3)
        >>> len(na.through_head(trace, query, layer=23, head=8))
        3
    """
    chosen_layers(trace, "attn", [layer])
    view, block = trace.view, trace.view.block(layer)
    if not 0 <= head < view.n_heads:
        raise ValueError(f"head {head} is out of range: {view.name} has heads 0 to {view.n_heads - 1}")
    W_V = block.W_V[head // (view.n_heads // view.n_kv_heads)].to(view.compute_dtype)
    W_O, norm = block.W_O[head].to(view.compute_dtype), block.attn_norm
    behind = added(trace, "attn", layer)
    placed = _written(trace, neurons, position)
    moved: list[Tensor] = []
    for neuron, pos, vector in placed:
        if neuron.layer >= layer:
            raise ValueError(f"{neuron} writes after layer {layer} has read the stream: name a head of a later layer")
        stream = trace.resid_pre[layer][pos].to(W_V)
        read = norm.linear(vector.to(stream), norm.scale(stream))
        moved.append(behind.linear(read @ W_V @ W_O))
    return _read_out(trace, placed, moved, k, memory_budget)


def _written(
    trace: "Trace", neurons: GivenNeurons, position: int | None
) -> list[tuple[Neuron, int, Float[Tensor, " d_model"]]]:
    """Each neuron, where it writes, and ``a w``: what it adds there."""
    if position is not None and not 0 <= position <= trace.position:
        raise ValueError(f"position {position} is out of range: the trace holds positions 0 to {trace.position}")
    own = neurons.columns.get("pos") if isinstance(neurons, RankedNeurons) else None
    placed: list[tuple[Neuron, int, Tensor]] = []
    for i, neuron in enumerate(neurons_of(neurons)):
        place(trace, neuron)
        pos = position if position is not None else trace.position if own is None else int(cast("int", own[i]))
        row = rows_of(trace, [neuron], pos)[0]
        placed.append((neuron, pos, row * coefficient(trace, neuron, pos).to(row)))
    return placed


def _read_out(
    trace: "Trace",
    placed: Sequence[tuple[Neuron, int, Tensor]],
    vectors: Sequence[Tensor],
    k: int,
    memory_budget: int,
) -> PromotedTokens:
    readout = Readout.of(trace, memory_budget=memory_budget)
    k = min(check_count("k", k), readout.W_U.shape[1])
    up: list[tuple[TokenChange, ...]] = []
    down: list[tuple[TokenChange, ...]] = []
    at_once = max(1, memory_budget // (4 * readout.dtype.itemsize * readout.W_U.shape[1]))
    for start in range(0, len(vectors), at_once):
        chunk = torch.stack([v.to(readout.W_U.device) for v in vectors[start : start + at_once]])
        change = readout.moved_logits(chunk)
        up += _ends(trace, change, k, largest=True)
        down += _ends(trace, change, k, largest=False)
    return PromotedTokens(tuple(neuron for neuron, _, _ in placed), tuple(up), tuple(down))


def _ends(trace: "Trace", change: Tensor, k: int, *, largest: bool) -> Sequence[tuple[TokenChange, ...]]:
    values, tokens = change.topk(k, dim=-1, largest=largest)
    return [
        tuple((trace.vocabulary.text(token), value) for token, value in zip(row_tokens, row, strict=True))
        for row_tokens, row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
