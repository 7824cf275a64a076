"""The command line: ``tl-neuron-attr explain "The capital of France is"``.

Results go to standard output; progress, warnings and whatever the libraries say while loading go to
standard error. Bad input ends with exit code 2 and one line. Nothing heavy is imported until a model is
needed, so that ``--version`` and ``--help`` answer at once.
"""

import contextlib
import enum
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from tl_neuron_attr import __version__
from tl_neuron_attr.cli_evaluate import EXAMPLE as EVALUATE_EXAMPLE
from tl_neuron_attr.cli_evaluate import evaluate
from tl_neuron_attr.cli_support import PROGRAM, Backend, announced, as_text, check_writable, deliver, fail

EXAMPLE = f'{PROGRAM} explain "The capital of France is" --target " Paris" --k 5'

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

# What every usage error of the command-line library derives from, whichever copy of it is in use.
_UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])


class Convention(str, enum.Enum):
    """Whether the readout keeps its constant; see the README."""

    exact = "exact"
    paper = "paper"


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__} ({', '.join(_installed('transformer-lens', 'torch'))})")
        raise typer.Exit
    return wanted


def _installed(*packages: str) -> Iterator[str]:
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Which neurons of a language model make a prediction likely.

    Example: tl-neuron-attr explain "The capital of France is" --target " Paris"
    """


@app.command(epilog=f"Example: {EXAMPLE}")
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


app.command(epilog=f"Example: {EVALUATE_EXAMPLE}")(evaluate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # A token that the terminal's encoding lacks is shown as an escape, not as a crash.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: object = app(args=given or ["--help"], prog_name=PROGRAM, standalone_mode=False)
    except _UsageError as error:
        message: str = cast(Any, error).format_message()
        typer.echo(f"{PROGRAM}: error: {' '.join(message.split())}", err=True)
        return 2
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0
