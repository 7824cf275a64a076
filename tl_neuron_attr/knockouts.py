"""The paper's ablation tables: which sets of neurons prompts of a type need, against random ones.

============================  =====================================================================================
function                      ablated in every prompt
============================  =====================================================================================
:func:`ablate_type_heads`     the heads of each type, so every type's prompts without their own and without others'
:func:`ablate_value_neurons`  the prompt's own 200 attention and 100 MLP value neurons
:func:`ablate_query_neurons`  the prompt's own 1,000 query neurons in shallow MLP layers
============================  =====================================================================================

Neurons are zeroed at every position, as if their parameters were; controls are as many random neurons of the same
layers (:mod:`tl_neuron_attr.controls`). Traces are read once and one at a time; all sets of a prompt share a batch.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TypeAlias

import torch
from tqdm import tqdm

from tl_neuron_attr.ablation_table import Ablated, AblationTable
from tl_neuron_attr.analysis import TypedTraces, typed
from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.controls import draw_controls
from tl_neuron_attr.modes import Mode, resolve_mode
from tl_neuron_attr.neurons import Head, Kind
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.protocol import Protocol
from tl_neuron_attr.query import query_neurons
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.selection import Neurons, identities
from tl_neuron_attr.trace import Trace
from tl_neuron_attr.value import value_neurons
from tl_neuron_attr.variants import run_variants

Choose: TypeAlias = Callable[[Trace], Mapping[str, Neurons]]


def ablate_type_heads(
    traces: TypedTraces,
    heads: Mapping[str, Sequence[Head]],
    *,
    controls: int = 0,
    mode: str | Mode = "zero",
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> AblationTable:
    """Every type's heads ablated in every prompt: does a type need its own heads more than those of others?

    Args:
        traces: pairs of a type and a trace, read once and one at a time.
        heads: for each type its heads, as :func:`top_heads` gives them.
        controls: how many draws of random entries of as many heads' size from the same layers, none of the set.
        mode: as for :func:`ablation_hooks`.
        seed: of draws and bootstrap intervals.
        memory_budget: bytes for the rows of one batch.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: what :func:`ablation_effect` raises; no heads.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> pairs = [("capital", trace)]
        >>> table = na.ablate_type_heads(pairs, {**na.top_heads(pairs), "other": (na.Head(0, 0),)})
        >>> changes = table.own_against_other().set_index("metric").loc["log_prob"]
        >>> bool(changes["own"] < changes["other"])
        True
    """
    if not heads:
        raise ValueError("no heads are given: top_heads(...) finds those of each type")
    return _ablate(traces, lambda trace: heads, controls, mode, seed, memory_budget, progress)


def ablate_value_neurons(
    traces: TypedTraces,
    n_attn: int = 200,
    n_mlp: int = 100,
    *,
    controls: int = 1,
    mode: str | Mode = "zero",
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> AblationTable:
    """The best attention and MLP value neurons of each prompt ablated together, against random ones.

    Attention neurons are ranked with their source position and ablated at every one, so ``n_attn`` of them may be
    fewer entries of heads (the column ``n_neurons`` counts entries); the controls are as many.

    ``n_attn`` and ``n_mlp`` may be 0, not both. Other arguments and errors: :func:`ablate_type_heads`.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> frame = na.ablate_value_neurons([("capital", trace)]).to_frame().set_index("metric")
        >>> bool(frame["percent"]["probability"] < -90 < frame["control_percent"]["probability"])
        True
    """

    def choose(trace: Trace) -> Mapping[str, Neurons]:
        kinds: tuple[tuple[Kind, int], ...] = (("attn", n_attn), ("mlp", n_mlp))
        return {
            "value neurons": [
                value_neurons(trace, kind, check_count(f"n_{kind}", n), memory_budget=memory_budget)
                for kind, n in kinds
                if n
            ]
        }

    return _ablate(traces, choose, controls, mode, seed, memory_budget, progress)


def ablate_query_neurons(
    traces: TypedTraces,
    k: int = 1000,
    n_value: int = 200,
    shallow: float = 1 / 3,
    *,
    controls: int = 1,
    mode: str | Mode = "zero",
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> AblationTable:
    """The shallow MLP neurons that most activate each prompt's attention value neurons ablated, against random ones.

    Args:
        traces: pairs of a type and a trace, read once and one at a time.
        k: how many query neurons to ablate.
        n_value: how many attention value neurons they are ranked by.
        shallow: the share of layers, from the first on, that count as shallow (rounded down, at least one).
        controls: how many draws of as many random neurons of the same layers.
        mode: what an ablated activation becomes, as for :func:`ablate_type_heads`.
        seed: of the draws.
        memory_budget: bytes for large intermediate results.
        progress: whether to show a bar.

    Raises:
        ValueError: as :func:`ablate_type_heads`, also where ``k`` leaves too few other neurons in a layer for
            controls; ``shallow`` outside 0 to 1.

    Example:
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> frame = na.ablate_query_neurons([("capital", trace)], k=300).to_frame().set_index("metric")
        >>> bool(frame["percent"]["probability"] < frame["control_percent"]["probability"])
        True
    """
    if not 0 < shallow <= 1:
        raise ValueError(f"shallow={shallow}: give a share of all layers above 0, up to 1")

    def choose(trace: Trace) -> Mapping[str, Neurons]:
        layers = range(max(1, int(shallow * trace.view.n_layers + 1e-9)))
        value = value_neurons(trace, "attn", n_value, memory_budget=memory_budget)
        return {"query neurons": query_neurons(trace, value, "mlp", k, layers=layers, memory_budget=memory_budget)}

    return _ablate(traces, choose, controls, mode, seed, memory_budget, progress)


@without_autocast
def _ablate(
    traces: TypedTraces,
    choose: Choose,
    controls: int,
    mode: str | Mode,
    seed: int,
    memory_budget: int,
    progress: bool,
) -> AblationTable:
    resolved = resolve_mode(mode)
    protocol = Protocol.of(resolved, None, "neuron", controls, seed)
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[str, str], list[tuple[Outcomes, Outcomes, int]]] = {}
    model = ""
    total = len(traces) if isinstance(traces, Sized) else None
    with tqdm(total=total, disable=not progress, desc="ablations", unit="prompt") as bar:
        for type_, trace in typed(traces):
            model = trace.view.name
            chosen = {name: protocol.select(trace, identities(neurons)) for name, neurons in choose(trace).items()}
            rows = [
                row
                for selection in chosen.values()
                for row in (selection, *draw_controls(trace.view, selection, controls, generator))
            ]
            outcomes = run_variants(trace, rows, resolved, None, memory_budget, lambda n: None)
            before = Outcomes.before([trace])
            for place, (name, selection) in enumerate(chosen.items()):
                start = place * (1 + controls)
                own = outcomes[start : start + 1 + controls]
                found.setdefault((type_, name), []).append((before, own, len(selection)))
            bar.update()
    types = list(dict.fromkeys(type_ for type_, _ in found))
    ordered = sorted(found, key=lambda at: types.index(at[0]))
    return AblationTable({at: _cell(found[at]) for at in ordered}, protocol, model)


def _cell(parts: list[tuple[Outcomes, Outcomes, int]]) -> Ablated:
    after = Outcomes.stack([outcomes for _, outcomes, _ in parts])
    return Ablated(
        before=Outcomes.cat([before for before, _, _ in parts]),
        after=after[0],
        controls=after[1:],
        n_neurons=tuple(n for _, _, n in parts),
    )
