"""Medians and ratios of one run of `make bench`, as JSON and Markdown.

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
    "all MLP neurons to 1e-3": "test_certified[{n}-mlp-0.001]",
    "all attention neurons to 1e-3": "test_certified[{n}-attn-0.001]",
    "query neurons of 30": "test_query_neurons[{n}-30]",
    "layers and heads": "test_layers_and_heads[{n}]",
    "published: all MLP neurons": "test_published_mlp[{n}]",
    "published: all attention neurons": "test_published_attn[{n}]",
    "published: query neurons of 30": "test_published_query[{n}]",
}
RATIOS = {
    "exact top 300 of both, faster than published": (
        ("published: all MLP neurons", "published: all attention neurons"),
        ("exact top 300, MLP", "exact top 300, attention"),
    ),
    "all neurons to 1e-3, faster than published": (
        ("published: all MLP neurons", "published: all attention neurons"),
        ("all MLP neurons to 1e-3", "all attention neurons to 1e-3"),
    ),
    "query neurons, faster than published": (("published: query neurons of 30",), ("query neurons of 30",)),
    "exact top 300 of both, beside a forward pass": (
        ("exact top 300, MLP", "exact top 300, attention"),
        ("forward pass",),
    ),
}


def throughput(run: dict[str, Any]) -> dict[int, float]:
    """Prompts a second of a sweep, by batch size."""
    jobs = [one for one in run["benchmarks"] if one["extra_info"].get("job") == "sweep"]
    return {one["extra_info"]["batch_size"]: one["extra_info"]["n_prompts"] / one["stats"]["median"] for one in jobs}


def medians(run: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Median seconds, spread (interquartile) and whether extrapolated, by row and length."""
    by_name = {one["name"]: one for one in run["benchmarks"]}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row, name in ROWS.items():
        for n in LENGTHS:
            one = by_name.get(name.format(n=n))
            if one is not None:
                factor = one["extra_info"].get("factor", 1)
                seconds = {"median": one["stats"]["median"] * factor, "iqr": one["stats"]["iqr"] * factor}
                found.setdefault(row, {})[n] = {**seconds, "extrapolated": factor != 1, **one["extra_info"]}
    return found


def ratios(rows: dict[str, dict[int, dict[str, Any]]]) -> dict[str, dict[int, float]]:
    """Sums of medians, one over the other."""
    found: dict[str, dict[int, float]] = {}
    for title, (above, below) in RATIOS.items():
        for n in LENGTHS:
            if all(n in rows.get(row, {}) for row in (*above, *below)):
                top, bottom = (sum(rows[row][n]["median"] for row in part) for part in (above, below))
                found.setdefault(title, {})[n] = top / bottom
    return found


def markdown(rows: dict[str, dict[int, dict[str, Any]]], shown: dict[str, dict[int, float]]) -> str:
    """Two tables: seconds, and ratios."""
    head = "| | " + " | ".join(f"{n} tokens" for n in LENGTHS) + " |\n| --- |" + " ---: |" * len(LENGTHS) + "\n"
    lines = [f"| {row} | {' | '.join(_seconds(at.get(n)) for n in LENGTHS)} |" for row, at in rows.items()]
    parts = [f"| {row} | {' | '.join(_ratio(at.get(n)) for n in LENGTHS)} |" for row, at in shown.items()]
    return (
        "Seconds, median (interquartile range)\n\n"
        + head
        + "\n".join(lines)
        + "\n\nRatios\n\n"
        + head
        + "\n".join(parts)
        + "\n"
    )


def _seconds(at: dict[str, Any] | None) -> str:
    return "" if at is None else f"{'~' * at['extrapolated']}{at['median']:.3g} ({at['iqr']:.1g})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    measured = medians(json.loads(source.read_text()))
    compared = ratios(measured)
    swept = throughput(json.loads(source.read_text()))
    record = {"seconds": measured, "ratios": compared, "sweep, prompts a second": swept}
    (folder / "table.json").write_text(json.dumps(record, indent=1) + "\n")
    shown_text = markdown(measured, compared)
    shown_text += "".join(
        f"\nA sweep, {size} at a time: {speed:.2f} prompts a second\n" for size, speed in swept.items()
    )
    (folder / "table.md").write_text(shown_text)
    sys.stdout.write(shown_text)
