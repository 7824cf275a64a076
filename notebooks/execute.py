"""Runs the notebooks of this folder, each from its first cell in a clean kernel, without the network.

    python notebooks/execute.py             in place: outputs are stored in the files
    python notebooks/execute.py --check     copies only: fails on an error, a warning, or an output that is missing
    python notebooks/execute.py 02 05       only those whose names begin so

Figures are stored twice, as Plotly's data and as a picture, so that they show where notebooks are only rendered.
"""

import argparse
import ast
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 1_500_000  # bytes of one notebook

SETTINGS = {
    "PLOTLY_RENDERER": "plotly_mimetype+png",
    "TQDM_DISABLE": "1",
    **({"BROWSER_PATH": os.environ["CHROMIUM"]} if os.environ.get("CHROMIUM") else {}),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
}


def run(path: Path) -> NotebookNode:
    """The notebook with fresh outputs, and without what differs from run to run or machine to machine."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(HERE)}})
    client.execute(env={**os.environ, **SETTINGS})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # progress bars, which are nothing without their kernel
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    return notebook


def faults(notebook: NotebookNode) -> list[str]:
    """What a reader would miss or stumble over: a value that is not shown, noise, no picture, too large a file."""
    found: list[str] = []
    pictures = 0
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        shown = [output for output in cell.outputs if output.output_type != "stream" or output.text.strip()]
        pictures += sum("image/png" in output.get("data", {}) for output in shown)
        body = ast.parse(cell.source).body
        if body and isinstance(body[-1], ast.Expr) and not shown:
            found.append(f"code cell {number} ends in a value and shows nothing")
        for output in shown:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"code cell {number}: {output.get('text') or output.get('evalue')}")
            if "application/vnd.plotly.v1+json" in output.get("data", {}) and "image/png" not in output.data:
                found.append(f"code cell {number} has a figure without a picture")
    size = len(nbformat.writes(notebook).encode())
    if not pictures:
        found.append("no picture is stored")
    if size > LARGEST:
        found.append(f"{size:,} bytes, more than {LARGEST:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of the notebooks' names; all by default")
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    given = parser.parse_args()
    paths = [p for p in sorted(HERE.glob("*.ipynb")) if not given.names or p.name.startswith(tuple(given.names))]
    failed = not paths
    for path in paths:
        begun = time.perf_counter()
        notebook = run(path)
        wrong = faults(notebook)
        if given.check:
            wrong += [f"as committed: {fault}" for fault in faults(nbformat.read(path, as_version=4))]
        else:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s", *wrong, sep="\n  ", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
