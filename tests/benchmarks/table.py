"""Medians, ratios and memory of one run of `make bench`, as JSON and Markdown.

    python tests/benchmarks/table.py RUN.json FOLDER    # writes FOLDER/table.json and FOLDER/table.md

`RUN.json` is what pytest-benchmark wrote. A time marked `~` is extrapolated from some layers and source positions.
"""

import json
import sys
from pathlib import Path
from typing import Any

LENGTHS = (5, 32, 128, 512)
ROWS = {
    "forward pass": "test_forward_pass[{n}]",
    "trace": "test_trace[{n}]",
    "exact top 300, MLP": "test_top_300_value_neurons[{n}-mlp]",
    "exact top 300, attention": "test_top_300_value_neurons[{n}-attn]",
    "exact top 300 of both at once": "test_top_300_of_both_kinds_at_once[{n}]",
    "all MLP neurons, exact": "test_dense_scores[{n}-mlp-27]",
    "all attention neurons, exact": "test_dense_scores[{n}-attn-23]",
    "all MLP neurons to 1e-3": "test_certified[{n}-0.001-mlp]",
    "all attention neurons to 1e-3": "test_certified[{n}-0.001-attn]",
    "all MLP neurons to 5e-6": "test_certified[{n}-5e-06-mlp]",
    "all attention neurons to 5e-6": "test_certified[{n}-5e-06-attn]",
    "query neurons of 30": "test_query_neurons[{n}-30]",
    "query neurons of 300": "test_query_neurons[{n}-300]",
    "layers and heads": "test_layers_and_heads[{n}]",
    "report": "test_report[{n}]",
    "published: all MLP neurons": "test_published_mlp[{n}]",
    "published: all attention neurons": "test_published_attn[{n}]",
}
# Rows that are measured at five tokens only.
SINGLE = {
    "published: query neurons of 30": "test_published_query[30]",
    "published: query neurons of 300": "test_published_query[300]",
    "TransformerLens: stack_neuron_results, MLP": "test_stack_neuron_results",
    "integrated gradients of one MLP layer": "test_integrated_gradients[package]",
    "captum: integrated gradients of one MLP layer": "test_integrated_gradients[captum]",
    "a prompt of one type alone: trace, top 300 of both": "test_one_prompt_at_a_time[one type]",
    "a prompt of one type among 16": "test_prompts_together[one type]",
    "a prompt of mixed types alone": "test_one_prompt_at_a_time[mixed]",
    "a prompt of mixed types among 16": "test_prompts_together[mixed]",
}
# What stands for a row where it was not measured at a length, since it does not depend on the length.
INSTEAD = {"all MLP neurons, exact": 5}
PUBLISHED = ("published: all MLP neurons", "published: all attention neurons")
TOP = ("exact top 300, MLP", "exact top 300, attention")
RATIOS = {
    "exact top 300 of both, faster than published": (PUBLISHED, TOP),
    "exact top 300 of both at once, faster than published": (PUBLISHED, ("exact top 300 of both at once",)),
    "all neurons exact, faster than published": (
        PUBLISHED,
        ("all MLP neurons, exact", "all attention neurons, exact"),
    ),
    "all neurons to 1e-3, faster than published": (
        PUBLISHED,
        ("all MLP neurons to 1e-3", "all attention neurons to 1e-3"),
    ),
    "all neurons to 5e-6, faster than published": (
        PUBLISHED,
        ("all MLP neurons to 5e-6", "all attention neurons to 5e-6"),
    ),
    "query neurons of 30, faster than published": (("published: query neurons of 30",), ("query neurons of 30",)),
    "query neurons of 300, faster than published": (("published: query neurons of 300",), ("query neurons of 300",)),
    "exact top 300 of both, beside a forward pass": (TOP, ("forward pass",)),
    "exact top 300 of both at once, beside a forward pass": (("exact top 300 of both at once",), ("forward pass",)),
    "integrated gradients, faster than captum": (
        ("captum: integrated gradients of one MLP layer",),
        ("integrated gradients of one MLP layer",),
    ),
    "among 16 of one type, faster than alone": (
        ("a prompt of one type alone: trace, top 300 of both",),
        ("a prompt of one type among 16",),
    ),
    "among 16 of mixed types, faster than alone": (
        ("a prompt of mixed types alone",),
        ("a prompt of mixed types among 16",),
    ),
}

Rows = dict[str, dict[int, dict[str, Any]]]


def throughput(run: dict[str, Any]) -> dict[str, float]:
    """Prompts a second of a sweep, by the prompts' types and batch size."""
    jobs = [one for one in run["benchmarks"] if one["extra_info"].get("job") == "sweep"]
    return {
        f"{one['extra_info']['types']}, {one['extra_info']['batch_size']} at a time": one["extra_info"]["n_prompts"]
        / one["stats"]["median"]
        for one in jobs
    }


def medians(run: dict[str, Any]) -> Rows:
    """Median seconds, spread (interquartile) and whether extrapolated, by row and length."""
    by_name = {one["name"]: one for one in run["benchmarks"]}
    wanted = [(row, n, name.format(n=n)) for row, name in ROWS.items() for n in LENGTHS]
    wanted += [(row, 5, name) for row, name in SINGLE.items()]
    found: Rows = {}
    for row, n, name in wanted:
        one = by_name.get(name)
        if one is not None:
            facts = one["extra_info"]
            factor = facts.get("factor", 1) / facts.get("per_call", 1)
            seconds = {"median": one["stats"]["median"] * factor, "iqr": one["stats"]["iqr"] * factor}
            found.setdefault(row, {})[n] = {
                **seconds,
                "rounds": one["stats"]["rounds"],
                "extrapolated": facts.get("factor", 1) != 1,
                **facts,
            }
    return found


def ratios(rows: Rows) -> dict[str, dict[int, float]]:
    """Sums of medians, one over the other."""
    found: dict[str, dict[int, float]] = {}
    for title, (above, below) in RATIOS.items():
        for n in LENGTHS:
            parts = [[rows.get(row, {}).get(n) or _instead(rows, row) for row in side] for side in (above, below)]
            measured = any(n in rows.get(row, {}) for row in below)
            if measured and all(all(side) for side in parts):
                top, bottom = (sum(one["median"] for one in side if one) for side in parts)
                found.setdefault(title, {})[n] = top / bottom
    return found


def memory(run: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Peak bytes of the wide model's calls, by name."""
    kept = ("allocated", "resident", "budget")
    return {
        one["name"][len("test_memory[") : -1]: {name: one["extra_info"][name] for name in kept}
        for one in run["benchmarks"]
        if one["name"].startswith("test_memory[")
    }


def markdown(rows: Rows, shown: dict[str, dict[int, float]], peaks: dict[str, dict[str, int]]) -> str:
    """Three tables: seconds, ratios, memory."""
    head = "| | " + " | ".join(f"{n} tokens" for n in LENGTHS) + " |\n| --- |" + " ---: |" * len(LENGTHS)
    lines = [f"| {row} | {' | '.join(_seconds(at.get(n)) for n in LENGTHS)} |" for row, at in rows.items()]
    parts = [f"| {row} | {' | '.join(_ratio(at.get(n)) for n in LENGTHS)} |" for row, at in shown.items()]
    sizes = [
        f"| {name} | {at['allocated'] / 2**20:.0f} | {at['resident'] / 2**20:.0f} |" for name, at in peaks.items()
    ]
    some = next(iter(rows.get("forward pass", {}).values()), {})
    where = f"on {some.get('device', '?')} with {some.get('threads', '?')} threads"
    tables = [
        f"Seconds {where}, median of five calls (interquartile range); `~` is extrapolated",
        "\n".join([head, *lines]),
        "Ratios",
        "\n".join([head, *parts]),
        "Peak MiB beyond model and trace: 256,000 tokens, two layers of 16,384 MLP neurons, budget 1,024 MiB",
        "\n".join(["| | allocated | resident |\n| --- | ---: | ---: |", *sizes]),
    ]
    return "\n\n".join(tables) + "\n"


def _instead(rows: Rows, row: str) -> dict[str, Any] | None:
    return rows.get(row, {}).get(INSTEAD[row]) if row in INSTEAD else None


def _seconds(at: dict[str, Any] | None) -> str:
    return "" if at is None else f"{'~' * at['extrapolated']}{at['median']:.3g} ({at['iqr']:.1g})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    run = json.loads(source.read_text())
    measured, peaks = medians(run), memory(run)
    compared = ratios(measured)
    swept = throughput(run)
    record = {"seconds": measured, "ratios": compared, "memory": peaks, "sweep, prompts a second": swept}
    (folder / "table.json").write_text(json.dumps(record, indent=1) + "\n")
    text = markdown(measured, compared, peaks)
    text += "".join(f"\nA sweep of {told}: {speed:.2f} prompts a second\n" for told, speed in swept.items())
    (folder / "table.md").write_text(text)
    sys.stdout.write(text)
