"""The command line: ``tl-neuron-attr explain "The capital of France is"``.

Results go to standard output; progress, warnings and whatever the libraries say while loading go to
standard error. Bad input ends with exit code 2 and one line. Nothing heavy is imported until a model is
needed, so that ``--version`` and ``--help`` answer at once.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, cast

import typer

from tl_neuron_attr import __version__
from tl_neuron_attr.cli_ablate import EXAMPLE as ABLATE_EXAMPLE
from tl_neuron_attr.cli_ablate import ablate
from tl_neuron_attr.cli_evaluate import EXAMPLE as EVALUATE_EXAMPLE
from tl_neuron_attr.cli_evaluate import evaluate
from tl_neuron_attr.cli_explain import EXAMPLE as EXPLAIN_EXAMPLE
from tl_neuron_attr.cli_explain import explain
from tl_neuron_attr.cli_summary import EXAMPLE as SUMMARY_EXAMPLE
from tl_neuron_attr.cli_summary import summary
from tl_neuron_attr.cli_support import PROGRAM
from tl_neuron_attr.cli_sweep import EXAMPLE as SWEEP_EXAMPLE
from tl_neuron_attr.cli_sweep import sweep

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

# What every usage error of the command-line library derives from, whichever copy of it is in use.
_UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])


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


app.command(epilog=f"Example: {EXPLAIN_EXAMPLE}")(explain)
app.command(epilog=f"Example: {ABLATE_EXAMPLE}")(ablate)
app.command(epilog=f"Example: {EVALUATE_EXAMPLE}")(evaluate)
app.command(epilog=f"Example: {SWEEP_EXAMPLE}")(sweep)
app.command(epilog=f"Example: {SUMMARY_EXAMPLE}")(summary)


def _way_out(error: Exception, message: str) -> str:
    """What to type instead, where a prompt without quotes or one without labels is the likely mistake."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    if command == "explain" and message.startswith("Got unexpected extra argument"):
        return f"; put the prompt in quotes, such as {EXPLAIN_EXAMPLE}"
    if command == "ablate" and message.startswith("Missing argument"):
        return f" Give a prompt and labels, such as {ABLATE_EXAMPLE}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0, 2 for bad input, 3 for a sweep with prompts that have no result, 130 when interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        # A token that the terminal's encoding lacks is shown as an escape, not as a crash.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: object = app(args=given or ["--help"], prog_name=PROGRAM, standalone_mode=False)
    except _UsageError as error:
        message: str = cast(Any, error).format_message()
        typer.echo(f"{PROGRAM}: error: {' '.join(message.split())}{_way_out(error, message)}", err=True)
        return 2
    except OSError as error:  # what is not said of a named file: standard output cannot be written
        what = f"cannot write to standard output: {error.strerror}" if error.filename is None else str(error)
        typer.echo(f"{PROGRAM}: error: {what}", err=True)
        return 2
    except typer.Abort:
        return 130
    except SystemExit as ended:  # how showing, installing and running shell completion end
        code = ended.code
    return code if isinstance(code, int) else 0
