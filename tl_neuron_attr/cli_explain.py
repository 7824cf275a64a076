"""``tl-neuron-attr explain``: one prediction, down to its neurons, as tables, JSON or a page.

As in every command, nothing heavy is imported until it is needed.
"""

import contextlib
import enum
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tl_neuron_attr.cli_support import PROGRAM, Backend, announced, as_text, check_writable, deliver, fail

if TYPE_CHECKING:
    from tl_neuron_attr.explanation import Explanation
    from tl_neuron_attr.trace import Trace

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
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one page to share: tables, figures, an ablation check.")
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
    if html == "-":
        fail('--html "-" is no file: name one, such as --html page.html')
    check_writable(json)
    check_writable(html)
    if json and html and os.path.realpath(json) == os.path.realpath(html):
        fail(f"--json and --html both name {html}: give each a file of its own")
    loaded = announced(model, backend)
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("Attributing ..."):
        from tl_neuron_attr.explanation import gather
        from tl_neuron_attr.trace import trace

        try:
            traced = trace(loaded, prompt, target, position=position, convention=convention.value)
            found = gather(traced, k=k) if html is None else _written(traced, k, html)
        except ValueError as error:
            fail(str(error).replace("use controls=0 or a smaller set", "use a smaller --k"))
    from tl_neuron_attr.terminal import render

    deliver(found, json, lambda: render(found, k))


def _written(traced: "Trace", k: int, path: str) -> "Explanation":
    """What was found, once its page is written."""
    from tl_neuron_attr.page.story import tell
    from tl_neuron_attr.report import write

    story = tell(traced, k=k)
    try:
        write(story, path)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}")
    return story.found
