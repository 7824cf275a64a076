"""What the commands share: refusing bad input in one line, loading a model, checking files before any work."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer
from rich.console import Console

from tl_neuron_attr.serialise import writable

if TYPE_CHECKING:
    from tl_neuron_attr.cli_options import Backend, DType
    from tl_neuron_attr.trace import Trace

PROGRAM = "tl-neuron-attr"


def load(name: str | None, backend: Literal["bridge", "hooked"] | None, **options: Any) -> Any:
    """The embedded model, or a named one; every way in which loading fails is one line for the user."""
    from tl_neuron_attr.models import load_demo_model, load_model

    try:
        with _no_word_of_retries():
            if name is not None:
                return load_model(name, backend, **options)
            return load_demo_model(backend, **options)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        fail(str(error))


@contextlib.contextmanager
def _no_word_of_retries() -> Generator[None, None, None]:
    """The hub's client warns before every retry; when it gives up, its error says the same in one line."""
    log = logging.getLogger("huggingface_hub.utils._http")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def announced(model: str | None, backend: "Backend | None", device: str | None, dtype: "DType") -> Any:
    """:func:`load`, saying on standard error that it goes on; whatever libraries print goes there too.

    Without a ``device`` the embedded model is on the CPU, and TransformerLens chooses for the others.
    """
    status = Console(stderr=True).status(f"Loading {model or 'the embedded model'} ...")
    with contextlib.redirect_stdout(sys.stderr), status:
        options: dict[str, Any] = {} if device is None else {"device": device}
        if dtype.value != "float32":
            import torch

            options["dtype"] = getattr(torch, dtype.value)
        return load(model, None if backend is None else backend.value, **options)


def deliver(found: Any, json: str | None, shown: Callable[[], Any]) -> None:
    """A result as JSON on standard output (``"-"``), or as a table (or text) and in a file if one is named."""
    try:
        if json == "-":
            typer.echo(found.to_json())
            return
        told = shown()
        if isinstance(told, str):
            typer.echo(told)
        else:
            Console(highlight=False, soft_wrap=False).print(told)
    except ValueError as error:
        fail(str(error))
    if json is not None:
        try:
            found.to_json(json)
        except OSError as error:
            fail(f"cannot write {json}: {error.strerror or error}")
        except ValueError as error:
            fail(f"cannot write {json}: {error}")
        say_written(json)


def say_written(path: str) -> None:
    """Name a file that was written, and its size, on standard error."""
    if not os.path.isfile(path):  # a pipe, say
        return
    size = os.path.getsize(path)
    told = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    typer.echo(f"wrote {path} ({told})", err=True)


def as_text(name: str, given: str) -> str:
    """An argument as text, also where the locale left its bytes undecoded."""
    try:
        return given.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        fail(f"the {name} {given!a} is not text in UTF-8")


def note_space(traced: "Trace", target: str | None) -> None:
    """Say so where the target begins a word without the space that the model has before it here."""
    from tl_neuron_attr.targets import TargetError, resolve_target

    if target is None or target[:1].isspace():
        return
    try:
        spaced = resolve_target(f" {target}", traced.vocabulary)
    except TargetError:
        return
    if spaced is not None and float(spaced.value(traced.log_probs)) > traced.target_log_prob:
        warn(f'note: with a space before it the target is more probable here: --target " {target}"')


def check_writable(json: str | None) -> None:
    """Refuse a folder, or a file in a folder that is not there, before any work is done for it."""
    if json is None or json == "-":
        return
    try:
        writable(json)
    except OSError as error:
        fail(str(error))


def warn(message: str) -> None:
    """One line on standard error; the work goes on."""
    typer.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """One line on standard error and exit code 2."""
    warn(f"error: {message}")
    raise typer.Exit(2)
