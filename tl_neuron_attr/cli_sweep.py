"""``tl-neuron-attr sweep``: thousands of prompts into files, whatever happens on the way (:func:`sweep`).

Started again with the same command it goes on where it was. Settings that differ from those the folder was begun
with are refused before a model is loaded, as far as they can be known then. As in every command, nothing heavy is
imported until it is needed.
"""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_neuron_attr.cli_options import (
    BackendOption,
    Convention,
    ConventionOption,
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    ModelOption,
)
from tl_neuron_attr.cli_support import PROGRAM, announced, check_writable, deliver, fail, warn

if TYPE_CHECKING:
    from tl_neuron_attr.sweep import SweepOutcome

EXAMPLE = f"{PROGRAM} sweep prompts.jsonl --out found --k 300 --query"
# Some prompts have no result, the rest has.
INCOMPLETE = 3


def sweep(
    prompts: Annotated[
        str, typer.Argument(metavar="FILE", help="Prompts, JSONL or CSV with prompt (and answer, type).")
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder for the results: new, or of this same sweep.")],
    k: Annotated[int, typer.Option(help="How many neurons of each kind.")] = 300,
    query: Annotated[bool, typer.Option(help="Whether to rank query neurons too.")] = False,
    batch_size: Annotated[int, typer.Option(help="How many prompts to run at once; 1 shares nothing.")] = 16,
    mix_lengths: Annotated[
        bool, typer.Option(help="Whether prompts of like length run together too; moves scores by rounding.")
    ] = False,
    model: ModelOption = None,
    convention: ConventionOption = Convention.exact,
    leading_space: Annotated[bool, typer.Option(help="Whether answers without a space before them get one.")] = True,
    part_size: Annotated[int, typer.Option(help="How many prompts a file, so how many a kill can cost.")] = 64,
    memory_budget: Annotated[int, typer.Option(metavar="MIB", help="For activations and products.")] = 2048,
    json: JsonOption = None,
    progress: Annotated[
        bool, typer.Option(help="Whether to show progress, on standard error if that is a terminal.")
    ] = True,
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Attribute a file of prompts: predictions, layers, heads, and neurons, as Parquet files in a folder.

    Killed and started again with the same command it goes on. Prompts without a result are named with their lines
    in DIR/errors.jsonl, and the exit code is 3. "accelerate launch -m tl_neuron_attr sweep ..." splits the prompts
    between processes. Read the folder with "summary", load_sweep, or any Parquet reader.
    """
    options = (("k", k), ("batch-size", batch_size), ("part-size", part_size), ("memory-budget", memory_budget))
    for name, value in options:
        if value < 1:
            fail(f"--{name} is {value}: ask for 1 or more")
    check_writable(json)
    settings: dict[str, Any] = {
        "k": k,
        "query": query,
        "convention": convention.value,
        "leading_space": leading_space,
    }
    _check(prompts, out, part_size, settings)
    with contextlib.redirect_stdout(sys.stderr):
        from tl_neuron_attr.workers import Workers

        try:
            workers = Workers()
        except ValueError as error:
            fail(str(error))
    loaded = announced(model, backend, device or workers.device, dtype)
    with contextlib.redirect_stdout(sys.stderr):
        from tl_neuron_attr.sweep import sweep as run

        try:
            found = run(
                loaded,
                Path(prompts),
                out,
                batch_size=batch_size,
                mix_lengths=mix_lengths,
                part_size=part_size,
                memory_budget=memory_budget * 2**20,
                progress=progress,
                **settings,
            )
        except ValueError as error:
            fail(str(error))
        except OSError as error:
            fail(f"cannot write {error.filename or out}: {error.strerror or error}")
    if not workers.is_main:
        return
    if found.errors and found.errors_file is None:
        for one in found.errors:
            warn(f"{prompts}, line {one.line}: {one.error}")
    deliver(found, json, lambda: _told(found))
    if found.errors:
        raise typer.Exit(INCOMPLETE)


def _check(prompts: str, out: str, part_size: int, settings: dict[str, Any]) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    from tl_neuron_attr.sweep_plan import plan_of, settings_of, versions
    from tl_neuron_attr.sweep_store import check_same, read_manifest

    folder = Path(out)
    try:
        plan = plan_of(Path(prompts), None, part_size, settings["leading_space"])
    except OSError as error:
        fail(f"cannot read {prompts}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))
    try:
        if (folder / "manifest.json").exists():
            begun = read_manifest(folder)
            check_same(folder, begun["settings"], settings_of(plan, **settings))
            check_same(folder, begun["versions"], versions(), "version of ")
        elif folder.exists() and not folder.is_dir():
            fail(f"cannot write {out}: it is a file; give a folder")
    except ValueError as error:
        fail(str(error))


def _told(found: "SweepOutcome") -> str:
    n_errors = len(found.errors)
    lines = [f"{found.folder}: {found.n_prompts - n_errors:,} of {found.n_prompts:,} prompts have a result"]
    if n_errors:
        where = "named above" if found.errors_file is None else f"named in {found.errors_file}"
        lines.append(f"{n_errors:,} without one, {where}")
    speed = f", {found.prompts_per_second:.2f} prompts a second" if found.n_new else ""
    lines.append(f"this run: {found.n_new:,} prompts in {found.seconds:.1f} seconds{speed}")
    return "\n".join(lines)
