"""``tl-neuron-attr ablate``: what a prediction becomes without the neurons named, against random ones.

As in every command, nothing heavy is imported until it is needed; labels and the mode are read before a model is.
"""

import contextlib
import enum
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tl_neuron_attr.cli_options import (
    BackendOption,
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
from tl_neuron_attr.cli_support import PROGRAM, announced, as_text, check_writable, deliver, fail, note_space

if TYPE_CHECKING:
    from tl_neuron_attr.neurons import AttnNeuron, Head, Layer, MLPNeuron
    from tl_neuron_attr.trace import Trace

EXAMPLE = f'{PROGRAM} ablate "The capital of France is" L27N846 L23H4 L29H1D46@4 --target " Paris"'

# More draws than this tell no more.
MOST_CONTROLS = 10_000
# With more draws than these a bar shows how far it is.
_MANY_CONTROLS = 100

_MODES = "zero, scale=FACTOR (such as scale=2), set=VALUE (such as set=0.5) or resample=PROMPT"


class AblationScope(str, enum.Enum):
    """Which sources of an attention neuron are ablated."""

    neuron = "neuron"
    source = "source"


def ablate(
    prompt: PromptArgument,
    neurons: Annotated[
        list[str],
        typer.Argument(help="Labels: L8N123 (MLP), L9H8D17@3 (attention), L9H8 (head), L9.mlp, L9.attn (layer)."),
    ],
    target: TargetOption = None,
    model: ModelOption = None,
    mode: Annotated[
        str, typer.Option(help="zero, scale=FACTOR, set=VALUE, or resample=PROMPT: its values in another prompt.")
    ] = "zero",
    controls: Annotated[
        int, typer.Option(help="How many draws of as many random neurons of the same layers; 0 is none.")
    ] = 20,
    scope: Annotated[
        AblationScope, typer.Option(help="source: of L9H8D17@3 only what comes from position 3. neuron: all of it.")
    ] = AblationScope.neuron,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    json: JsonOption = None,
    position: PositionOption = -1,
    backend: BackendOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = DType.float32,
) -> None:
    """Ablate neurons: the target's probability and rank before and after, against random neurons.

    Neurons, heads and layers are named by their labels, as explain prints them, and ablated together at every
    position; everything downstream is recomputed.
    """
    prompt, target = asked(prompt, target)
    if controls < 0:
        fail(f"--controls is {controls}: give the number of random draws, 0 or more")
    if controls > MOST_CONTROLS:
        fail(
            f"--controls is {controls}: each draw runs the model once more, so the most is {MOST_CONTROLS:,}; "
            "the default, 20, is enough for most comparisons"
        )
    check_writable(json)
    chosen, make_mode = _identities(neurons), _mode(as_text("mode", mode))
    loaded = announced(model, backend, device, dtype)
    bar = controls > _MANY_CONTROLS
    waiting = contextlib.nullcontext() if bar else Console(stderr=True).status("Ablating ...")
    with contextlib.redirect_stdout(sys.stderr), waiting:
        from tl_neuron_attr.effects import ablation_effect
        from tl_neuron_attr.trace import trace

        try:
            traced = trace(loaded, prompt, target, position=position)
            if scope is AblationScope.neuron:  # the other scope refuses it where it looks for the source
                _check_sources(chosen, len(traced.str_tokens))
            found = ablation_effect(
                traced,
                chosen,
                make_mode(traced),
                scope=scope.value,
                controls=controls,
                seed=seed,
                progress=bar and sys.stderr.isatty(),
            )
        except ValueError as error:
            fail(str(error))
    from tl_neuron_attr.effect_table import render

    note_space(traced, target)
    deliver(found, json, lambda: render(found))


def _identities(labels: Sequence[str]) -> "list[MLPNeuron | AttnNeuron | Head | Layer]":
    from tl_neuron_attr.neurons import parse

    try:
        return [parse(as_text("label", label)) for label in labels]
    except ValueError as error:
        fail(str(error))


def _check_sources(chosen: "Sequence[MLPNeuron | AttnNeuron | Head | Layer]", n_tokens: int) -> None:
    """Refuse a source that the prompt does not have, also where the scope takes all of them."""
    from tl_neuron_attr.neurons import AttnNeuron

    for one in chosen:
        if isinstance(one, AttnNeuron) and one.source >= n_tokens:
            fail(f"{one}: the prompt has {n_tokens} tokens, so source runs from 0 to {n_tokens - 1}")


def _mode(given: str) -> "Callable[[Trace], Any]":
    """The mode as a function of the trace, which only ``resample`` needs."""
    name, equals, value = given.partition("=")
    if name == "zero" and not equals:
        return lambda traced: "zero"
    if name == "resample" and value:
        return lambda traced: _resampled(traced, value)
    if name in ("scale", "set") and equals:
        number = _number(value)
        if number is None:
            fail(f"--mode is {given!r}: after {name}= comes a number, such as {name}=2")

        def numbered(traced: "Trace") -> Any:
            from tl_neuron_attr.modes import Scale, SetTo

            return Scale(number) if name == "scale" else SetTo(number)

        return numbered
    fail(f"--mode is {given!r}: choose {_MODES}")


def _resampled(traced: "Trace", prompt: str) -> Any:
    from tl_neuron_attr.recording import resample

    mode = resample(traced.model, prompt)
    there, wanted = len(traced.vocabulary.prompt_ids(prompt, None)), len(traced.tokens)
    if there < wanted:
        fail(
            f"--mode resample={prompt!r}: it has {there} token{'s' * (there != 1)}, the prompt {wanted}, and each "
            f"position takes the values of the same one: give a prompt of {wanted} tokens or more"
        )
    return mode


def _number(given: str) -> float | None:
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(given)) else None
    return None
