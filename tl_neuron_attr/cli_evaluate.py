"""``tl-neuron-attr evaluate``: which attribution methods find the neurons that matter, on any model.

The prompts that the model answers (the paper's rule, :func:`check_answers`) are compared by
:func:`compare_methods`. As in every command, nothing heavy is imported until it is needed.
"""

import contextlib
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_neuron_attr.cli_options import BackendOption, DeviceOption, DType, DTypeOption, JsonOption, ModelOption
from tl_neuron_attr.cli_support import PROGRAM, announced, as_text, check_writable, deliver, fail, warn

if TYPE_CHECKING:
    from tl_neuron_attr.answers import AnswerCheck
    from tl_neuron_attr.knowledge import KnowledgePrompt

EXAMPLE = f"{PROGRAM} evaluate --types capital,month --limit 20 --json out.json"


def evaluate(
    model: ModelOption = None,
    types: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Types of knowledge, with commas between. Default: all.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your own prompts, JSONL or CSV with prompt and answer (and type)."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help='Methods, with commas between, or "all". Default: the eight static.'),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many answered prompts a type, drawn by the seed.")
    ] = None,
    k: Annotated[int, typer.Option(help="How many neurons to zero for each prompt.")] = 10,
    seed: Annotated[int, typer.Option(help="Of draws and intervals; the same seed gives the same table.")] = 0,
    json: JsonOption = None,
    batch_size: Annotated[int, typer.Option(help="How many prompts to run at once.")] = 16,
    progress: Annotated[bool, typer.Option(help="Whether to show progress, on standard error.")] = True,
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Compare attribution methods: zero each one's top MLP neurons, and see how far the answer falls.

    Prompts are kept where the right token is among the model's top 10 and above every other answer of its type.
    Untouched and random rows stand beside the methods; intervals are 95 % bootstrap, falls paired by prompt.
    """
    for name, value in (("k", k), ("limit", limit), ("batch-size", batch_size)):
        if value is not None and value < 1:
            fail(f"--{name} is {value}: ask for 1 or more")
    check_writable(json)
    wanted = None if types is None else _names("types", types)
    named = None if methods is None else _names("methods", methods)
    given, chosen = _prompts(prompts, wanted), _methods(named)
    loaded = announced(model, backend, device, dtype)
    with contextlib.redirect_stdout(sys.stderr):
        from tl_neuron_attr.evaluation import compare_methods
        from tl_neuron_attr.knowledge import check_answers

        try:
            check = check_answers(loaded, given, batch_size=batch_size, progress=progress)
            if prompts is not None:
                _name_unusable(prompts, check)
            if not check.answerable:
                fail(f"the model answers none of the prompts, so nothing can be compared: {check!r}")
            found = compare_methods(
                loaded,
                limited(check.answerable, limit, seed),
                chosen,
                k,
                batch_size=batch_size,
                seed=seed,
                progress=progress,
            )
        except ValueError as error:
            fail(str(error))
    from tl_neuron_attr.comparison_table import render

    deliver(found, json, lambda: render(found, check))


def _names(option: str, given: str) -> list[str]:
    names = [name.strip() for name in as_text(option, given).split(",") if name.strip()]
    if not names:
        fail(f"--{option} is {given!r}: give names with commas between, or leave it out for all")
    return names


def _prompts(path: str | None, types: Sequence[str] | None) -> "list[KnowledgePrompt]":
    """The embedded prompts, or a file's: its bad lines are named on standard error, and the rest goes on."""
    from tl_neuron_attr.knowledge import load_knowledge, read_prompts

    try:
        if path is None:
            return load_knowledge(types)
        read, bad = read_prompts(path)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))
    for line in bad:
        warn(f"{path}, line {line.line}: {line.reason}")
    there = list(dict.fromkeys(prompt.type for prompt in read))
    for name in types or ():
        if name not in there:
            fail(f"no prompt of {path} has the type {name!r}: its types are {', '.join(map(repr, there)) or 'none'}")
    kept = [prompt for prompt in read if types is None or prompt.type in types]
    if not kept:
        fail(f"{path} holds no prompt that can be used")
    return kept


def _methods(names: list[str] | None) -> Sequence[Any]:
    """Names that exist, before a model is loaded."""
    from tl_neuron_attr.evaluation import named_methods
    from tl_neuron_attr.methods import METHODS, STATIC_METHODS

    wanted = STATIC_METHODS if names is None else list(METHODS) if names == ["all"] else names
    try:
        return list(named_methods(wanted).values())
    except ValueError as error:
        fail(str(error))


def _name_unusable(path: str, check: "AnswerCheck") -> None:
    for answer in check.answers:
        if answer.verdict == "not one token":
            asked = answer.prompt
            warn(f"{path}: the answer {asked.answer!r} of {asked.prompt!r} is not one token of {check.model}")


def limited(answered: "Sequence[KnowledgePrompt]", limit: int | None, seed: int) -> "list[KnowledgePrompt]":
    """At most ``limit`` prompts a type, in the order given."""
    draw = random.Random(seed)
    kept: set[int] = set()
    for one in dict.fromkeys(prompt.type for prompt in answered):
        places = [i for i, prompt in enumerate(answered) if prompt.type == one]
        kept |= set(places if limit is None or limit >= len(places) else draw.sample(places, limit))
    return [prompt for i, prompt in enumerate(answered) if i in kept]
