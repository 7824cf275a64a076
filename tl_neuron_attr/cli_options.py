"""Options and arguments that several commands have, each worded once."""

import enum
from typing import Annotated, TypeAlias

import typer

from tl_neuron_attr.cli_support import as_text, fail


class Backend(str, enum.Enum):
    """Which of TransformerLens's model classes."""

    bridge = "bridge"
    hooked = "hooked"


class DType(str, enum.Enum):
    """Precision of a model's weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Convention(str, enum.Enum):
    """Whether the readout keeps its constant; see the README."""

    exact = "exact"
    paper = "paper"


PromptArgument: TypeAlias = Annotated[str, typer.Argument(help="The text whose next token it is about.")]
TargetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(help='The token it is about, with its leading space: " Paris". Default: the prediction.'),
]
PositionOption: TypeAlias = Annotated[
    int, typer.Option(help="The token to predict from, counted from 0, or from the end by -1, -2, ...")
]
ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A model that TransformerLens knows, such as gpt2, or its folder. Default: the embedded SmolLM2."
    ),
]
BackendOption: TypeAlias = Annotated[
    Backend | None, typer.Option(help="The TransformerLens class. Default: what its release prefers.")
]
DeviceOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, mps, ... Default: TransformerLens's choice; the embedded model on the CPU."
    ),
]
DTypeOption: TypeAlias = Annotated[DType, typer.Option(help="The precision of the model.")]
ConventionOption: TypeAlias = Annotated[
    Convention, typer.Option(help="exact: scores sum to the log-probability. paper: as published.")
]
JsonOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help='Write everything as JSON; "-" prints it instead.')
]


def asked(prompt: str, target: str | None) -> tuple[str, str | None]:
    """Prompt and target as text; an empty prompt is refused."""
    prompt = as_text("prompt", prompt)
    if not prompt:
        fail("the prompt is empty: give the text whose next token it is about")
    return prompt, None if target is None else as_text("target", target)
