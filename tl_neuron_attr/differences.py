"""Method against method: the same prompts under both, so differences are paired.

With ``y_i`` the outcome of prompt ``i`` after zeroing one row's neurons and ``z_i`` after another's, a difference is
the mean of ``y_i - z_i`` with a 95 per cent percentile bootstrap over prompts of that paired mean. A negative one
says that the first row's neurons matter more. How many prompts lie on either side stands beside it, since a mean over
few prompts can hang on one of them.
"""

from typing import TYPE_CHECKING, Literal

from tl_neuron_attr.comparison import METRICS, MethodComparison
from tl_neuron_attr.outcomes import interval

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]


def method_differences(
    comparison: MethodComparison, against: str = "log_prob_increase", by: Literal["type"] | None = None
) -> "pandas.DataFrame":
    """How every row of a comparison differs from one of them, paired by prompt.

    Args:
        comparison: what ``compare_methods`` gave.
        against: the name of the row the others are compared with, a method's or ``"untouched"`` or ``"random"``.
        by: ``"type"`` for one table a type of knowledge.

    Returns:
        One row a name and metric (``mrr``, ``probability``, ``log_prob``, nats): ``name, metric, n_prompts,
        difference, low, high, n_lower, n_higher``, led by ``type`` under ``by="type"``; ``low`` and ``high`` are
        missing for a single prompt, and ``n_lower`` counts the prompts whose outcome is below that of ``against``.

    Raises:
        ValueError: no row of that name, or another ``by``.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> prompts = na.load_knowledge(["capital"])[:2]
        >>> found = na.compare_methods(model, prompts, ["prob_increase", "norm"], progress=False)
        >>> table = na.method_differences(found, against="norm").set_index(["name", "metric"])
        >>> int(table.loc[("prob_increase", "log_prob"), "n_lower"])
        2
    """
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    if by not in (None, "type"):
        raise ValueError(f'by={by!r}: give "type" for one table a type of knowledge, or None for all prompts')
    comparison.of(against)
    rows: list[dict[str, object]] = []
    for type_ in (None,) if by is None else comparison.types:
        chosen = [i for i, prompt in enumerate(comparison.prompts) if type_ is None or prompt.type == type_]
        for metric, source in METRICS.items():
            values = comparison.outcomes.values(source)[:, chosen]
            base = values[comparison.names.index(against)]
            for name, own in zip(comparison.names, values, strict=True):
                if name != against:
                    gap = own - base
                    low, high = interval(gap, comparison.seed, comparison.n_boot)
                    rows.append(
                        {
                            **({} if by is None else {"type": type_}),
                            "name": name,
                            "metric": metric,
                            "n_prompts": len(chosen),
                            "difference": float(gap.mean()),
                            "low": low,
                            "high": high,
                            "n_lower": int((gap < 0).sum()),
                            "n_higher": int((gap > 0).sum()),
                        }
                    )
    return pandas.DataFrame(rows)
