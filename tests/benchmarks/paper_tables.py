"""The paper's tables on a model: where scores are by type of knowledge, and what ablating them does.

    python tests/benchmarks/paper_tables.py [--model NAME] [--limit 8] [--seed 0] > tables.md

Prompts are those that the model answers, at most ``--limit`` a type, drawn as ``tl-neuron-attr evaluate`` draws them.
"""

import argparse

import pandas
import torch

import tl_neuron_attr as na
from tl_neuron_attr.cli_evaluate import limited
from tl_neuron_attr.models import load_model

K = 300  # neurons of each kind a prompt, in what is counted over prompts


def markdown(title, frame, digits=2):
    """A frame as a Markdown table."""
    print(f"\n**{title}**\n")
    print("| " + " | ".join(map(str, frame.columns)) + " |")
    print("|" + " --- |" + " ---: |" * (len(frame.columns) - 1))
    for row in frame.itertuples(index=False):
        print("| " + " | ".join(f"{x:,.{digits}f}" if isinstance(x, float) else str(x) for x in row) + " |")


def ablations(title, table):
    """MRR, probability and log-probability before and after, over all prompts, beside random neurons."""
    frame = table.overall()
    chosen = frame[frame["metric"].isin(["reciprocal_rank", "probability", "log_prob"])]
    columns = ["ablated", "n_neurons", "metric", "before", "after", "percent", "control_percent"]
    markdown(title, chosen[columns], 3)


def thirds(pairs, n_layers):
    """The share of ranked neurons in the first, second and last third of the layers, by type."""
    frame = na.layer_histogram(pairs, n_layers=n_layers)
    third = (frame["layer"] * 3 // n_layers).map({0: "first", 1: "second", 2: "last"})
    return frame.assign(third=third).pivot_table(
        index="type", columns="third", values="share", aggfunc="sum", sort=False
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model) if options.model else na.load_demo_model()
    asked = limited(na.answerable(model, na.load_knowledge()), options.limit, options.seed)
    traces = na.trace_batch(model, [p.prompt for p in asked], [p.answer for p in asked])
    pairs = list(zip([p.type for p in asked], traces, strict=True))
    n_layers = pairs[0][1].view.n_layers
    print(f"{len(pairs)} prompts of {pairs[0][1].provenance.model}, {options.limit} a type at most")

    markdown("Sum of layer scores (nats)", na.layer_sums(pairs))
    for kind in ("attn", "mlp"):
        markdown(
            f"Sums of neuron scores, {kind} (nats; all and positive to within 1)",
            na.neuron_sums(pairs, kind, tolerance=1.0),
        )

    ranked = {kind: [(type_, na.value_neurons(trace, kind, K)) for type_, trace in pairs] for kind in ("attn", "mlp")}
    query = [
        (type_, na.query_neurons(trace, best.top(30), "mlp", K))
        for (type_, trace), (_, best) in zip(pairs, ranked["attn"], strict=True)
    ]
    for name, rankings in (*ranked.items(), ("query (MLP, of the top 30 attention neurons)", query)):
        markdown(f"Where the top {K} are, by thirds of the layers: {name}", thirds(rankings, n_layers).reset_index())
    heads = na.top_heads(pairs)
    shared = {kind: na.shared_neurons(rankings, K) for kind, rankings in ranked.items()}
    counts = {kind: {type_: len(ids) for type_, ids in found.sets().items()} for kind, found in shared.items()}
    markdown(
        f"Neurons in the top {K} of more than half of a type's prompts",
        pandas.DataFrame(counts).rename_axis("type").reset_index(),
    )
    for name, sets in (("heads", heads), *((kind, found.sets()) for kind, found in shared.items())):
        markdown(f"Overlap between types: {name}", na.overlap(sets).rename_axis("type").reset_index())

    table = na.ablate_type_heads(pairs, heads)
    markdown("Top 1 % of heads zeroed, change in per cent", table.own_against_other(), 1)
    ablations(
        "200 attention and 100 MLP value neurons of each prompt zeroed", na.ablate_value_neurons(pairs, controls=3)
    )
    for k in (100, 300, 1000):
        found = na.ablate_query_neurons(pairs, k, controls=3)
        ablations(f"{k:,} query neurons of the first third of the layers zeroed", found)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
