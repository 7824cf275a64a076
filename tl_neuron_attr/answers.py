"""Which prompts a model can answer, by the paper's rule: only those are worth attributing.

A prompt is answerable if at its last position the right token

1. is among the ten most probable ones (its rank, 1 + how many tokens are more probable, is at most 10), and
2. is more probable than every other word of its type.

The words of a type are the answers of that type among the prompts given (so give all of a type, and cut the result
afterwards), as far as each is one token. A prompt without a type (``""``) has the first condition only. A prompt
whose own answer is not one token of this model's tokenizer cannot be judged, and counts as such.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.hooking import logits_with
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.prompt_files import KnowledgePrompt
from tl_neuron_attr.prompts import Request, requests
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.rows import Rows, continued, difference, in_order
from tl_neuron_attr.tokens import Tokens, UnknownTokenError
from tl_neuron_attr.trace import prepare

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

TOP = 10
Verdict = Literal["answerable", "not one token", "not in the top 10", "below another word"]
VERDICTS: tuple[Verdict, ...] = ("answerable", "not one token", "not in the top 10", "below another word")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model makes of one prompt.

    ``rank`` and ``probability`` are the right token's, ``other`` the most probable other word of the type; all are
    ``None`` where the answer is not one token, ``other`` also where the type has no other word.
    """

    prompt: KnowledgePrompt
    verdict: Verdict
    rank: int | None = None
    probability: float | None = None
    other: str | None = None


@dataclass(frozen=True, repr=False)
class AnswerCheck:
    """What a model makes of each prompt, in their order; make it with :func:`check_answers`."""

    model: str
    answers: tuple[Answer, ...]

    @property
    def answerable(self) -> list[KnowledgePrompt]:
        """The prompts that the model can answer."""
        return [answer.prompt for answer in self.answers if answer.verdict == "answerable"]

    def to_frame(self) -> "pandas.DataFrame":
        """One row a prompt: its fields, then ``verdict``, ``rank``, ``probability``, ``other``."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        parts = ("verdict", "rank", "probability", "other")
        rows = [{**asdict(a.prompt), **{part: getattr(a, part) for part in parts}} for a in self.answers]
        return pandas.DataFrame(rows)

    def counts(self) -> "pandas.DataFrame":
        """One row a type, how many ``prompts``, and how many of each verdict."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        types = dict.fromkeys(answer.prompt.type for answer in self.answers)
        return pandas.DataFrame([{"type": name, **self._counts(name)} for name in types])

    def _counts(self, type_: str) -> dict[str, int]:
        verdicts = [answer.verdict for answer in self.answers if answer.prompt.type == type_]
        return {"prompts": len(verdicts), **{name: verdicts.count(name) for name in VERDICTS}}

    def __repr__(self) -> str:
        verdicts = [answer.verdict for answer in self.answers]
        told = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
        return f"AnswerCheck({len(verdicts)} prompts, {self.model}: {told})"


def answerable(
    model: Any,
    prompts: Iterable[KnowledgePrompt],
    *,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> list[KnowledgePrompt]:
    """The prompts that the model can answer by the paper's rule (see the module), in their order.

    Prompts whose answer is not one token are dropped with those answered wrongly; :func:`check_answers`, which takes
    and raises the same, says how many and why.

    Example:
        >>> import tl_neuron_attr as na
        >>> prompts = [p for p in na.load_knowledge(["capital"]) if p.subject in ("France", "Iraq", "Pakistan")]
        >>> [p.subject for p in na.answerable(na.load_demo_model(), prompts, progress=False)]
        ['France', 'Iraq', 'France', 'Iraq', 'France', 'Iraq']
    """
    return check_answers(model, prompts, batch_size=batch_size, prepend_bos=prepend_bos, progress=progress).answerable


@without_autocast
def check_answers(
    model: Any,
    prompts: Iterable[KnowledgePrompt],
    *,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> AnswerCheck:
    """What the model makes of each prompt: answerable by the paper's rule (see the module), or why not.

    Args:
        model: as for :func:`trace`, with a tokenizer.
        prompts: :func:`load_knowledge` or :func:`read_prompts` have some.
        batch_size: how many prompts of like length to run at once, as :func:`trace_batch` does.
        prepend_bos: as for :func:`trace`.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: no prompts, a prompt that :func:`trace` refuses (``prompts[3]: ...``), a model without a
            tokenizer, ``batch_size`` below 1.
        UnsupportedModelError: as :func:`trace`.

    Warns :class:`BatchingWarning` where a batch does not give what its prompts give alone; they are then run alone.

    Example:
        >>> import tl_neuron_attr as na
        >>> prompts = [p for p in na.load_knowledge(["capital"]) if p.subject in ("France", "Iraq", "Pakistan")]
        >>> found = na.check_answers(na.load_demo_model(), prompts, progress=False)
        >>> found.counts()["not one token"].tolist()
        [3]
    """
    given = list(prompts)
    size = check_count("batch_size", batch_size)
    if not given:
        raise ValueError("no prompts are given: load_knowledge() has some")
    view, vocabulary = prepare(model, "exact")
    wanted, _ = requests([prompt.prompt for prompt in given], None, vocabulary, prepend_bos=prepend_bos)
    ids = [_single(vocabulary, prompt.answer) for prompt in given]
    words: dict[str, dict[int, str]] = {}
    for prompt, token in zip(given, ids, strict=True):
        if token is not None and prompt.type:
            words.setdefault(prompt.type, {})[token] = prompt.answer
    answers: list[Answer] = [Answer(prompt, "not one token") for prompt in given]
    judged = [request for request in wanted if ids[request.index] is not None]
    made = in_order(iter(judged), _rows(view), size, stacklevel=4)
    with tqdm(total=len(judged), disable=not progress, desc="answers", unit="prompt") as bar:
        for request, log_probs in zip(judged, made, strict=True):
            prompt, token = given[request.index], ids[request.index]
            if token is not None:
                answers[request.index] = _judge(prompt, token, words.get(prompt.type, {}), log_probs)
            bar.update()
    return AnswerCheck(view.name, tuple(answers))


def _single(vocabulary: Tokens, answer: str) -> int | None:
    try:
        return vocabulary.single_id(answer)
    except UnknownTokenError:
        return None


def _judge(
    prompt: KnowledgePrompt, token: int, words: dict[int, str], log_probs: Float[Tensor, " d_vocab"]
) -> Answer:
    own = log_probs[token]
    rank = 1 + int((log_probs > own).sum())
    others = [word for word in words if word != token]
    best = max(others, key=lambda word: float(log_probs[word]), default=None)
    verdict: Verdict = "answerable"
    if rank > TOP:
        verdict = "not in the top 10"
    elif best is not None and not bool(own > log_probs[best]):
        verdict = "below another word"
    return Answer(prompt, verdict, rank, float(own.exp()), None if best is None else words[best])


def _rows(view: ModelView) -> Rows[Float[Tensor, " d_vocab"]]:
    """Log-probabilities at the last position."""

    def together(rows: Sequence[Request]) -> list[Tensor]:
        logits = logits_with(view, continued(view, rows), ())
        last = torch.stack([logits[i, len(row.tokens) - 1] for i, row in enumerate(rows)])
        return list(last.to(view.compute_dtype).log_softmax(-1).cpu())

    def apart(batched: Tensor, alone: Tensor, row: Request) -> str | None:
        return difference("log_probs", batched, alone, view, row)

    return Rows(view, together, lambda row: together([row])[0], apart, mixes=not view.reads_length)
