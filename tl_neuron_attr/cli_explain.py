"""``tl-neuron-attr explain``: one prediction, down to its neurons, as tables, JSON or a page.

As in every command, nothing heavy is imported until it is needed.
"""

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tl_neuron_attr.cli_options import (
    BackendOption,
    Convention,
    ConventionOption,
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    ModelOption,
    PositionOption,
    PromptArgument,
    TargetOption,
    asked,
)
from tl_neuron_attr.cli_support import PROGRAM, announced, check_writable, deliver, fail, note_space, say_written

if TYPE_CHECKING:
    from tl_neuron_attr.explanation import Explanation
    from tl_neuron_attr.trace import Trace

EXAMPLE = f'{PROGRAM} explain "The capital of France is" --target " Paris" --k 5'


def explain(
    prompt: PromptArgument,
    target: TargetOption = None,
    model: ModelOption = None,
    k: Annotated[int, typer.Option(help="How many layers, heads and neurons of each kind.")] = 10,
    json: JsonOption = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one page to share: tables, figures, an ablation check.")
    ] = None,
    convention: ConventionOption = Convention.exact,
    position: PositionOption = -1,
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Explain one prediction: layers, heads, MLP and attention neurons, and the tokens they promote.

    Scores are rises of the target's log-probability in nats. "up" and "down" are the tokens whose logits a
    neuron raises and lowers most on this prompt, the sign of its coefficient applied.
    """
    prompt, target = asked(prompt, target)
    if k < 1:
        fail(f"--k is {k}: ask for 1 or more")
    if html == "-":
        fail('--html "-" is no file: name one, such as --html page.html')
    check_writable(json)
    check_writable(html)
    if json and html and os.path.realpath(json) == os.path.realpath(html):
        fail(f"--json and --html both name {html}: give each a file of its own")
    loaded = announced(model, backend, device, dtype)
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("Attributing ..."):
        from tl_neuron_attr.explanation import gather
        from tl_neuron_attr.trace import trace

        try:
            traced = trace(loaded, prompt, target, position=position, convention=convention.value)
            found = gather(traced, k=k) if html is None else _written(traced, k, html)
        except ValueError as error:
            fail(str(error))
    from tl_neuron_attr.terminal import render

    note_space(traced, target)
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
    say_written(path)
    return story.found
