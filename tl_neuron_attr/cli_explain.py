"""``tl-neuron-attr explain``: one prediction, down to its neurons, as tables or JSON.

As in every command, nothing heavy is imported until it is needed.
"""

import contextlib
import enum
import sys
from typing import Annotated

import typer
from rich.console import Console

from tl_neuron_attr.cli_support import PROGRAM, Backend, announced, as_text, check_writable, deliver, fail

EXAMPLE = f'{PROGRAM} explain "The capital of France is" --target " Paris" --k 5'


class Convention(str, enum.Enum):
    """Whether the readout keeps its constant; see the README."""

    exact = "exact"
    paper = "paper"


def explain(
    prompt: Annotated[str, typer.Argument(help="The text whose next token is explained.")],
    target: Annotated[
        str | None,
        typer.Option(help='The token to explain, with its leading space: " Paris". Default: the prediction.'),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model that TransformerLens knows, such as gpt2. Default: the embedded SmolLM2."),
    ] = None,
    k: Annotated[int, typer.Option(help="How many layers, heads and neurons of each kind.")] = 10,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help='Write everything as JSON; "-" prints it instead.')
    ] = None,
    convention: Annotated[
        Convention, typer.Option(help="exact: scores sum to the log-probability. paper: as published.")
    ] = Convention.exact,
    position: Annotated[
        int, typer.Option(help="The token to predict from, counted from 0, or from the end by -1, -2, ...")
    ] = -1,
    backend: Annotated[
        Backend | None, typer.Option(help="The TransformerLens class. Default: what its release prefers.")
    ] = None,
) -> None:
    """Explain one prediction: layers, heads, MLP and attention neurons, and the tokens they promote.

    Scores are rises of the target's log-probability in nats. "up" and "down" are the tokens whose logits a
    neuron raises and lowers most on this prompt, the sign of its coefficient applied.
    """
    prompt, target = as_text("prompt", prompt), None if target is None else as_text("target", target)
    if not prompt:
        fail("the prompt is empty: give the text whose next token is to be explained")
    if k < 1:
        fail(f"--k is {k}: ask for 1 or more")
    check_writable(json)
    loaded = announced(model, backend)
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("Attributing ..."):
        from tl_neuron_attr.explanation import explain as run

        try:
            found = run(loaded, prompt, target, k=k, position=position, convention=convention.value)
        except ValueError as error:
            fail(str(error))
    from tl_neuron_attr.terminal import render

    deliver(found, json, lambda: render(found, k))
