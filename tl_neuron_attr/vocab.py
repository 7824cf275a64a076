"""What a neuron says: the tokens that its vector pushes up and down.

At the base where the neuron writes, its vector ``a w`` changes the logits by ``a u`` with ``u = W_U' N(w)``
(:mod:`tl_neuron_attr.readout`). The sign of the coefficient ``a`` is applied: a neuron with a negative
coefficient promotes the tokens at the *lower* end of its row's projection.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_neuron_attr.neurons import Neuron
from tl_neuron_attr.numbering import place
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET, Readout
from tl_neuron_attr.writes import coefficients, directions

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

    def __repr__(self) -> str:
        lines = [f"PromotedTokens of {len(self.ids)} neurons"]
        for neuron, up, down in list(zip(self.ids, self.up, self.down, strict=True))[:10]:
            raised, lowered = (" ".join(repr(token) for token, _ in end[:5]) for end in (up, down))
            lines.append(f"  {neuron}: up {raised} | down {lowered}")
        return "\n".join(lines)


def promoted_tokens(
    trace: "Trace", neurons: Iterable[Neuron], k: int = 10, *, memory_budget: int = DEFAULT_MEMORY_BUDGET
) -> PromotedTokens:
    """The ``k`` tokens each neuron promotes and the ``k`` it demotes, at this prompt's activations.

    A neuron whose coefficient is zero here changes nothing; its changes are then all zero.

    Raises :class:`ValueError` for ``k < 1`` or a neuron that the model or prompt does not have.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> na.promoted_tokens(trace, na.value_neurons(trace, "mlp", k=1), k=1).up[0][0][0]
        ' Paris'
    """
    ids = tuple(neurons)
    readout = Readout.of(trace, memory_budget=memory_budget)
    k = min(check_count("k", k), readout.W_U.shape[1])
    up: list[tuple[TokenChange, ...]] = []
    down: list[tuple[TokenChange, ...]] = []
    at_once = max(1, memory_budget // (4 * readout.dtype.itemsize * readout.W_U.shape[1]))
    for start in range(0, len(ids), at_once):
        written = torch.stack([written_vector(trace, neuron) for neuron in ids[start : start + at_once]])
        change = readout.moved_logits(written)
        up += _ends(trace, change, k, largest=True)
        down += _ends(trace, change, k, largest=False)
    return PromotedTokens(ids, tuple(up), tuple(down))


def written_vector(trace: "Trace", neuron: Neuron) -> Float[Tensor, " d_model"]:
    """``a w``: what one neuron adds to the residual stream at the predicting position.

    Raises :class:`ValueError` for a neuron that the model or prompt does not have.
    """
    row, source, kind = place(trace, neuron)
    weight = coefficients(trace, kind, neuron.layer)
    rows = directions(trace, kind, neuron.layer)
    return (rows[row].to(weight) * weight[row, source]).to(trace.view.W_U.device)


def _ends(trace: "Trace", change: Tensor, k: int, *, largest: bool) -> Sequence[tuple[TokenChange, ...]]:
    values, tokens = change.topk(k, dim=-1, largest=largest)
    return [
        tuple((trace.vocabulary.text(token), value) for token, value in zip(row_tokens, row, strict=True))
        for row_tokens, row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
