"""Which method finds the neurons that matter? The comparison of Yu and Ananiadou (EMNLP 2024, section 4.1).

For each prompt and each method: rank the neurons for the right token, zero the ``k`` best as if their output rows
were zero (at every position, everything downstream recomputed), and look at the right token again. Beside them stand
the untouched model and a control: as many random neurons, from the same layers as the top ``k`` of the
log-probability increase and none of these, drawn once a prompt.

Prompts are traced as they are needed. Everything that one prompt is run with (untouched, control, methods) is rows of
one batch of that prompt, so nothing is padded; the row without ablation must give what was traced. Tables and
intervals: :mod:`tl_neuron_attr.comparison`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.batching import trace_batch
from tl_neuron_attr.comparison import ComparedPrompt, MethodComparison
from tl_neuron_attr.controls import draw_controls
from tl_neuron_attr.gradients import AttributionPatching
from tl_neuron_attr.knowledge import KnowledgePrompt
from tl_neuron_attr.methods import STATIC_METHODS, VALUE_METHOD, AnyMethod, resolve_method
from tl_neuron_attr.modes import Zero
from tl_neuron_attr.neurons import Kind, check_kind
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.ranking import RankedNeurons, check_count
from tl_neuron_attr.ranks import CoefficientInverseRank, InverseRank, InverseRanks
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.recording import mean_activations
from tl_neuron_attr.selection import Selection, identities, select
from tl_neuron_attr.trace import Trace, prepare
from tl_neuron_attr.value import value_neurons
from tl_neuron_attr.variants import run_variants

_Result = TypeVar("_Result")


@without_autocast
def compare_methods(
    model: Any,
    prompts: Sequence[KnowledgePrompt],
    methods: Sequence[AnyMethod] = STATIC_METHODS,
    k: int = 10,
    *,
    kind: Kind = "mlp",
    batch_size: int = 16,
    seed: int = 0,
    n_boot: int = 1000,
    progress: bool = True,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
) -> MethodComparison:
    """MRR, probability and log-probability of the right token after zeroing each method's ``k`` best neurons.

    Args:
        model: as for ``trace``.
        prompts: prompts with their answer and type, such as ``answerable(model, load_knowledge())``.
        methods: names or method objects, as ``value_neurons(method=)`` takes them; the mean that
            "attribution_patching" needs is, if it is given by name, that of ``prompts``.
        k: how many neurons to zero for each prompt.
        kind: ``"mlp"``, or ``"attn"`` where the methods are defined for it; an attention neuron is zeroed for every
            source position, as if its row of the output matrix were.
        batch_size: how many prompts of like length to trace at once; it changes time and memory only.
        seed: of the random control and of the bootstrap.
        n_boot: resamples of a bootstrap interval.
        progress: whether to show a progress bar on stderr.
        memory_budget: bytes for one method's scores, and for the runs of one prompt.

    Raises:
        ValueError: no prompts or methods, a method given twice, unknown or not defined for ``kind``; ``k``,
            ``n_boot`` or ``batch_size`` below 1; what ``trace_batch`` raises of a prompt (named); layers with too few
            other neurons for the control.
        TargetError: an answer that is not one token: ``targets[3]: ...``.
        UnsupportedModelError: as ``trace``.

    The time of projections on the vocabulary that "inverse_rank" and "coefficient_inverse_rank" share is split
    between them. Prompts, answers and methods are checked before the first forward pass.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> prompts = na.load_knowledge(["capital"])[:2]
        >>> found = na.compare_methods(model, prompts, ["log_prob_increase", "norm"], progress=False)
        >>> found.to_frame()["name"].tolist()
        ['untouched', 'random', 'log_prob_increase', 'norm']
    """
    kind, k, n_boot = check_kind(kind), check_count("k", k), check_count("n_boot", n_boot)
    given, named = _checked_prompts(prompts), named_methods(methods)
    view, _ = prepare(model, "exact")
    started, clock = perf_counter(), _Clock((*named, "trace", "control", "ablation"))
    generator = torch.Generator().manual_seed(seed)
    traces = trace_batch(
        model, [one.prompt for one in given], [one.answer for one in given], batch_size=batch_size, progress=False
    )
    named = _with_shared_work(model, given, named, kind, clock, memory_budget)
    found: list[Outcomes] = []
    labels: list[list[tuple[str, ...]]] = []
    with tqdm(total=len(given), disable=not progress, desc="comparing methods", unit="prompt") as bar:
        while (trace := clock.timed("trace", _next, traces)) is not None:
            ranked = {
                name: clock.timed(name, value_neurons, trace, kind, k, method=method, memory_budget=memory_budget)
                for name, method in named.items()
            }
            control = clock.timed("control", _control, trace, ranked.get(VALUE_METHOD), kind, k, generator)
            chosen = [control, *(_selection(trace, ranked[name]) for name in named)]
            found.append(clock.timed("ablation", _outcomes, trace, chosen, memory_budget))
            labels.append([_labels(trace, control), *(tuple(map(str, ranked[name])) for name in named)])
            bar.update()
    return MethodComparison(
        model=view.name,
        kind=kind,
        k=k,
        seed=seed,
        n_boot=n_boot,
        methods=tuple(named),
        prompts=tuple(ComparedPrompt(one.prompt, one.answer, one.type) for one in given),
        outcomes=Outcomes.stack(found),
        neurons=tuple(zip(*labels, strict=True)),
        seconds={**clock.seconds, "total": perf_counter() - started},
    )


def _checked_prompts(prompts: Sequence[KnowledgePrompt]) -> list[KnowledgePrompt]:
    given = list(prompts)
    if not given:
        raise ValueError("no prompts are given: a comparison needs at least one that the model answers")
    for i, one in enumerate(given):
        if not isinstance(one, KnowledgePrompt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"prompts[{i}] is {one!r}: give KnowledgePrompt objects, from load_knowledge, read_prompts or "
                f"KnowledgePrompt(prompt, answer, type, subject, template)"
            )
    return given


def named_methods(methods: Sequence[AnyMethod]) -> dict[str, AnyMethod]:
    """Methods by name, each once; :class:`ValueError` for none, unknown ones, and one given twice."""
    if isinstance(methods, str):
        raise ValueError(f"methods is the one string {methods!r}: give a list of methods, [{methods!r}]")
    named: dict[str, AnyMethod] = {}
    for method in methods:
        # The one method that a name alone does not describe: its mean is that of the compared prompts.
        name = AttributionPatching.name if method == AttributionPatching.name else resolve_method(method)[0]
        if name in named:
            raise ValueError(f"method {name!r} is given twice: each is one row, so compare its options in two calls")
        named[name] = method
    if not named:
        raise ValueError("no methods are given: name at least one to compare")
    return named


def _with_shared_work(
    model: Any,
    prompts: Sequence[KnowledgePrompt],
    named: Mapping[str, AnyMethod],
    kind: Kind,
    clock: "_Clock",
    budget: int,
) -> dict[str, AnyMethod]:
    """The methods, those given by name with what they need of all prompts together computed once.

    The vocabulary's projections serve both methods that rank it, and their time is split between them.
    """
    made: dict[str, AnyMethod] = {}
    ranking = [name for name in (InverseRank.name, CoefficientInverseRank.name) if named.get(name) == name]
    if ranking:
        answers = list(dict.fromkeys(one.answer for one in prompts))
        start = perf_counter()
        ranks = InverseRanks(model, answers, kind, memory_budget=budget)
        for name in ranking:
            made[name] = InverseRank(ranks) if name == InverseRank.name else CoefficientInverseRank(ranks)
            clock.seconds[name] += (perf_counter() - start) / len(ranking)
    if named.get(AttributionPatching.name) == AttributionPatching.name:
        texts = [one.prompt for one in prompts]
        mean = clock.timed(AttributionPatching.name, mean_activations, model, texts)
        made[AttributionPatching.name] = AttributionPatching(mean)
    return {name: made.get(name, method) for name, method in named.items()}


def _next(traces: Iterator[Trace]) -> Trace | None:
    return next(traces, None)


def _control(trace: Trace, best: RankedNeurons | None, kind: Kind, k: int, generator: torch.Generator) -> Selection:
    """Random neurons of the layers of the log-probability increase's best, whichever methods are compared."""
    best = value_neurons(trace, kind, k) if best is None else best
    return draw_controls(trace.view, _selection(trace, best), 1, generator)[0]


def _selection(trace: Trace, ranked: RankedNeurons) -> Selection:
    return select(trace.view, identities(ranked))


def _labels(trace: Trace, drawn: Selection) -> tuple[str, ...]:
    """Names of MLP neurons, and of entries of heads, all sources together: ``L9H8D17``."""
    d_head = trace.view.d_head
    mlp = [f"L{layer}N{unit}" for layer, units in drawn.mlp.items() for unit in sorted(units)]
    attn = [
        f"L{layer}H{unit // d_head}D{unit % d_head}" for layer, units in drawn.attn.items() for unit in sorted(units)
    ]
    return (*mlp, *attn)


def _outcomes(trace: Trace, selections: Sequence[Selection], memory_budget: int) -> Outcomes:
    """Outcomes ``[row]`` of one prompt: untouched, then with each selection zeroed."""
    ablated = run_variants(trace, selections, Zero(), None, memory_budget, lambda n: None)
    return Outcomes.cat([Outcomes.before([trace]), ablated])


class _Clock:
    """Seconds spent on each of ``names``; GPU work counts where its result is read, which rankings do."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)

    def timed(self, name: str, call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """``call(*args, **kwargs)``, its time added to ``name``."""
        start = perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[name] += perf_counter() - start
