"""Prompts of the paper's six types of knowledge, as data of the package.

============  ==========================================================  ============
type          a prompt                                                    answer
============  ==========================================================  ============
``language``  The main language spoken in Brazil is                       Portuguese
``capital``   The capital of France is                                    Paris
``country``   The city of Lyon is in                                      France
``colour``    The color of grass is                                       green
``number``    How many legs of a spider are there? There are              eight
``month``     The month after March is                                    April
============  ==========================================================  ============

Each prompt is a template with its subject put in, and never holds its answer. The facts are common knowledge, chosen
to be neither disputed nor likely to change. Prompts of your own: :func:`read_prompts`. Which of them a model can
answer: :func:`answerable` (:mod:`tl_neuron_attr.answers` has the rule).
"""

import json
from collections.abc import Sequence
from importlib import resources

from tl_neuron_attr.answers import AnswerCheck, answerable, check_answers
from tl_neuron_attr.prompt_files import BadLine, KnowledgePrompt, read_prompts

__all__ = [
    "TYPES",
    "AnswerCheck",
    "BadLine",
    "KnowledgePrompt",
    "answerable",
    "check_answers",
    "load_knowledge",
    "read_prompts",
]

TYPES = ("language", "capital", "country", "colour", "number", "month")


def load_knowledge(types: Sequence[str] | None = None) -> list[KnowledgePrompt]:
    """The package's prompts of the given types (all six by default), type after type in the order given.

    Raises :class:`ValueError` for an unknown type.

    Example:
        >>> load_knowledge(["capital"])[0]  # doctest: +NORMALIZE_WHITESPACE
        KnowledgePrompt(prompt='The capital of France is', answer=' Paris', type='capital', subject='France',
        template='The capital of {} is')
    """
    chosen = [types] if isinstance(types, str) else list(TYPES if types is None else types)
    unknown = [name for name in chosen if name not in TYPES]
    if unknown or not chosen:
        raise ValueError(f"types={chosen}: choose one or more of {', '.join(TYPES)}")
    folder = resources.files("tl_neuron_attr") / "data"
    found: list[KnowledgePrompt] = []
    for name in dict.fromkeys(chosen):
        text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
        found += [KnowledgePrompt(**json.loads(line)) for line in text.splitlines()]
    return found
