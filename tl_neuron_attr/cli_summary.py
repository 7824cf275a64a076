"""``tl-neuron-attr summary``: the tables over a sweep's prompts, from its files alone.

Neither PyTorch nor a model is needed or imported.
"""

from pathlib import Path
from typing import Annotated

import typer

from tl_neuron_attr.cli_options import JsonOption
from tl_neuron_attr.cli_support import PROGRAM, check_writable, deliver, fail

EXAMPLE = f"{PROGRAM} summary found --k 100"


def summary(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that sweep wrote, finished or not.")],
    k: Annotated[
        int | None, typer.Option(help="Shared neurons: among how many of each prompt's top. Default: all kept.")
    ] = None,
    share: Annotated[float, typer.Option(help="Shared neurons: in more than this share of a type's prompts.")] = 0.5,
    json: JsonOption = None,
) -> None:
    """Summarise a sweep by type of prompt: layers, heads, where neurons are, and which are shared.

    Scores are in nats, means over the prompts of a type.
    """
    check_writable(json)
    from tl_neuron_attr.sweep_read import load_sweep
    from tl_neuron_attr.sweep_summary import render, summarise

    try:
        found = summarise(load_sweep(Path(folder)), k, share)
    except (ValueError, OSError) as error:
        fail(str(error))
    deliver(found, json, lambda: render(found))
