"""Every attribution method by name: ``value_neurons(trace, kind, k, method=...)``.

``METHODS`` is the one table of names, formulas, costs and sources (:func:`methods_table` shows it). ``a`` is a
neuron's coefficient, ``v`` what a coefficient of one adds, ``T`` the target's log-probability, ``p`` its probability,
``g`` the derivative of ``T`` by an activation. A method is its name, or an object with options where it has any.

:data:`STATIC_METHODS` are the eight of Yu and Ananiadou (EMNLP 2024, section 4.1), in their order a to h.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tl_neuron_attr import static
from tl_neuron_attr.causal import Causal
from tl_neuron_attr.gradients import AttributionPatching, GradientTimesActivation
from tl_neuron_attr.integrated import IntegratedGradients
from tl_neuron_attr.question import Find
from tl_neuron_attr.ranks import CoefficientInverseRank, InverseRank
from tl_neuron_attr.together import VALUE_METHOD

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

STATIC_METHODS: tuple[str, ...] = (
    VALUE_METHOD,
    "log_prob_alone",
    "prob_increase",
    "norm",
    "coefficient",
    "inverse_rank",
    "coefficient_norm",
    "coefficient_inverse_rank",
)
"""The eight methods that the paper compares, in its order a to h; the default of ``compare_methods``."""


@dataclass(frozen=True)
class Method:
    """One row of the table; ``find`` ranks with the method's defaults, ``None`` where it needs an option."""

    name: str
    formula: str
    cost: str
    source: str
    find: Find | None


_PAPER = "Yu and Ananiadou, EMNLP 2024, 4.1"
_BEST_FIRST = "one vector a layer, and one vocabulary product for each neuron that its bound does not rule out"
_WEIGHTS = "one product with the weights"
_RANKS = "a sample of the vocabulary for every row, all of it for few; once for all prompts (InverseRanks)"

_ONE_BACKWARD = "one forward and backward pass"

_TABLE = (
    Method(VALUE_METHOD, "T(base + a v) - T(base)", _BEST_FIRST, f"{_PAPER} a", static.log_prob_increase),
    Method("log_prob_alone", "T(a v)", _BEST_FIRST, f"{_PAPER} b", static.log_prob_alone),
    Method("prob_increase", "p(base + a v) - p(base)", _BEST_FIRST, f"{_PAPER} c", static.prob_increase),
    Method("norm", "|v|", _WEIGHTS, f"{_PAPER} d", static.norm),
    Method("coefficient", "|a|", "none", f"{_PAPER} e", static.coefficient),
    Method("inverse_rank", "1 / rank of the target in W_U' N(v)", _RANKS, f"{_PAPER} f", InverseRank().find),
    Method("coefficient_norm", "|a| |v|", _WEIGHTS, f"{_PAPER} g", static.coefficient_norm),
    Method(
        "coefficient_inverse_rank",
        "|a| / rank of the target in W_U' N(v)",
        _RANKS,
        f"{_PAPER} h",
        CoefficientInverseRank().find,
    ),
    Method("direct_logit", "a u_t, u = W_U' N(v)", _WEIGHTS, "direct logit attribution", static.direct_logit),
    Method("gradient", "a g", _ONE_BACKWARD, "Simonyan et al., 2014", GradientTimesActivation().find),
    Method(
        "integrated_gradients",
        "a times g averaged on the way from zero, each layer alone",
        "32 forward and backward passes a layer, batched",
        "Sundararajan et al., ICML 2017",
        IntegratedGradients().find,
    ),
    Method("attribution_patching", "(a - mean) g", _ONE_BACKWARD, "Nanda, 2023", None),
    Method(
        "causal",
        "T(model) - T(model with the neuron zeroed)",
        "one forward pass a candidate (the 300 best by log_prob_increase), batched",
        "exact intervention",
        Causal().find,
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in _TABLE}
"""Every method by name: formula, cost and source, as :func:`methods_table` shows them."""

WithOptions: TypeAlias = (
    InverseRank
    | CoefficientInverseRank
    | GradientTimesActivation
    | IntegratedGradients
    | AttributionPatching
    | Causal
)
AnyMethod: TypeAlias = str | WithOptions


def methods_table() -> "pandas.DataFrame":
    """The table of methods: name, formula, cost, source.

    Example:
        >>> import tl_neuron_attr as na
        >>> na.methods_table().name[0]
        'log_prob_increase'
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    names = ("name", "formula", "cost", "source")
    return pandas.DataFrame([{name: getattr(method, name) for name in names} for method in _TABLE])


def resolve_method(method: object) -> tuple[str, Find]:
    """Name and ranking of a method; :class:`ValueError`, listing the names, for anything else."""
    if isinstance(method, WithOptions):
        return method.name, method.find
    found = METHODS.get(method) if isinstance(method, str) else None
    if found is None:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if found.find is None:
        raise ValueError(
            f"method {method!r} needs a mean: give AttributionPatching(mean_activations(model, prompts))"
        )
    return found.name, found.find
