"""Which query neuron feeds which value neuron: the table behind a flow diagram.

The contribution of query neuron ``q`` to value neuron ``n`` is its share of ``n``'s score,
``S_n c_q(pos_n) <w_q, k_n> / total_n`` (nats), with ``w_q`` the query neuron's output row, ``c_q(pos)`` its
coefficient at the position that ``n`` reads, and ``k_n``, ``total_n`` as in :mod:`tl_neuron_attr.query`. It is
zero where ``q`` writes after ``n`` has read. Summed over the value neurons it is the query score of ``q``.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.keys import Key, Keys
from tl_neuron_attr.neurons import GivenNeurons, MLPNeuron, Neuron, neurons_of
from tl_neuron_attr.numbering import place
from tl_neuron_attr.query import weighted_keys
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.writes import coefficient, rows_of

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    from tl_neuron_attr.trace import Trace


@without_autocast
def links(
    trace: "Trace",
    value: GivenNeurons,
    query: GivenNeurons,
    *,
    key: Key = "linearised",
    normalise: bool = True,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> "pandas.DataFrame":
    """Contribution (nats) of every query neuron to every value neuron, strongest first.

    Returns a frame with the columns ``query``, ``value`` (labels such as ``L11N1229``) and ``contribution``, one
    row for each pair, zeros included. ``key`` and ``normalise`` are those of
    :func:`tl_neuron_attr.query_neurons`, whose errors and warnings apply.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> value = na.value_neurons(trace, "attn", k=30)
        >>> list(na.links(trace, value, na.query_neurons(trace, value, k=5)).columns)
        ['query', 'value', 'contribution']
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    queries = tuple(dict.fromkeys(neurons_of(query)))
    for neuron in queries:
        place(trace, neuron)
    weighted = weighted_keys(trace, value, key=key, normalise=normalise, memory_budget=memory_budget)
    rows = {pos: rows_of(trace, queries, pos) for pos in {w.group.pos for w in weighted}}
    table: list[tuple[str, str, float]] = []
    for w in weighted:
        written = rows[w.group.pos]
        share = written @ w.weighted.to(written.device).T * _seen(trace, queries, w.group).to(written)[:, None]
        for i, q in enumerate(queries):
            table += [(str(q), str(n), c) for n, c in zip(w.group.neurons, share[i].tolist(), strict=True)]
    frame = pandas.DataFrame(table, columns=pandas.Index(["query", "value", "contribution"]))
    return frame.sort_values("contribution", ascending=False, kind="stable", ignore_index=True)


def _seen(trace: "Trace", queries: tuple[Neuron, ...], group: Keys) -> Tensor:
    """Each query neuron's coefficient at the position the group reads; zero where it writes too late."""
    seen: list[float] = []
    for neuron in queries:
        same_layer = group.reads_attn and not isinstance(neuron, MLPNeuron)
        early = neuron.layer < group.layer + same_layer
        seen.append(float(coefficient(trace, neuron, group.pos)) if early else 0.0)
    return torch.tensor(seen, dtype=trace.view.compute_dtype)
