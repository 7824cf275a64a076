"""Many prompts -> their traces, several prompts in each forward pass (:mod:`tl_neuron_attr.rows`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

from tl_neuron_attr.cached import CachedRun
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.prompts import Request, requests
from tl_neuron_attr.rows import Rows, continued, difference, in_order
from tl_neuron_attr.targets import Target
from tl_neuron_attr.tokens import Prompt, Tokens
from tl_neuron_attr.trace import Asked, Convention, Trace, prepare, traces_of


def trace_batch(
    model: Any,
    prompts: Iterable[Prompt] | Int[Tensor, "row pos"],
    targets: Target | Sequence[Target] | Int[Tensor, " row"] = None,
    *,
    batch_size: int = 8,
    position: int = -1,
    attention_mask: Int[Tensor, "row pos"] | Bool[Tensor, "row pos"] | None = None,
    convention: Convention = "exact",
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Iterator[Trace]:
    """Traces of many prompts, in their order, each equal to ``trace(model, prompt, target)`` up to rounding.

    Prompts of like length share a forward pass. A shorter one is continued with some token, and what comes after it,
    which a causal model's activations do not depend on, is cut off: nothing is masked, and the tokenizer's padding
    plays no part. A trace holds its own activations only; traces are made as they are asked for.

    Args:
        model: as for :func:`trace`.
        prompts: a list (or generator) of what :func:`trace` takes, or a tensor of ids ``[row, pos]``.
        targets: one target for all, ``None`` (each prompt's own top prediction), or a list of one for each.
        batch_size: how many prompts of like length to run at once.
        position: the predicting position of every prompt; negative counts from the end of its tokens.
        attention_mask: for a tensor whose rows are padded, on either side: 1 for a token, 0 for padding.
        convention: as for :func:`trace`.
        prepend_bos: as for :func:`trace`.
        progress: whether to show a progress bar on stderr.

    Raises:
        UnsupportedModelError: as :func:`trace`.
        TargetError: as :func:`trace`, naming the target: ``targets[3]: ...``.
        ValueError: as :func:`trace`, naming the prompt: ``prompts[3]: ...``; another number of targets than of
            prompts; a mask that does not fit, or with a hole; rows with padding but no mask; ``batch_size`` below 1.

    All of it is checked before the first forward pass, except what a generator has yet to give. Warns
    :class:`BatchingWarning` where a batch does not give what its prompts give alone; they are then run alone.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> prompts = ["The capital of France is", "The capital of Italy is", "Two and two make"]
        >>> for trace in na.trace_batch(model, prompts, [" Paris", " Rome", None], progress=False):
        ...     print(trace.target.label)
        ' Paris'
        ' Rome'
        ' '
    """
    size = Tokens.as_index(batch_size)
    if size is None or size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: give how many prompts to run at once, 1 or more")
    view, vocabulary = prepare(model, convention)
    wanted, total = requests(
        prompts,
        targets,
        vocabulary,
        attention_mask=attention_mask,
        position=position,
        prepend_bos=prepend_bos,
    )
    made = in_order(wanted, rows_of(view, vocabulary, convention), size, n_bytes=trace_bytes)
    return _with_progress(made, total, progress)


def _with_progress(traces: Iterator[Trace], total: int | None, progress: bool) -> Iterator[Trace]:
    with tqdm(total=total, disable=not progress, desc="traces", unit="prompt") as bar:
        for trace in traces:
            yield trace
            bar.update()


def rows_of(view: ModelView, vocabulary: Tokens, convention: Convention) -> Rows[Trace]:
    """What makes traces of prompts of like length."""

    def cut(rows: Sequence[Request], runs: Sequence[CachedRun]) -> list[Trace]:
        asked = [Asked(r.prompt, r.tokens, r.dest, r.target, run) for r, run in zip(rows, runs, strict=True)]
        return traces_of(view, vocabulary, convention, asked)

    def together(rows: Sequence[Request]) -> list[Trace]:
        places = [(len(row.tokens), row.dest) for row in rows]
        runs = CachedRun.forward_rows(view, continued(view, rows), places)
        return cut(rows, runs)

    def alone(row: Request) -> Trace:
        return cut([row], [CachedRun.forward(view, row.tokens, [row.dest])])[0]

    return Rows(view, together, alone, _difference, mixes=not view.reads_length)


def _difference(batched: Trace, alone: Trace, row: Request) -> str | None:
    """The first activation of a row that is not, up to rounding, that of its prompt alone; ``None`` if all are."""
    found = dict(_tensors(batched))
    for name, own in _tensors(alone):
        told = difference(name, found.get(name), own, alone.view, row)
        if told is not None:
            return told
    return None


def _tensors(trace: Trace) -> Iterator[tuple[str, Tensor]]:
    """Everything recorded, by name; a layer's as ``name[layer]``."""
    for field in fields(trace):
        value = getattr(trace, field.name)
        if isinstance(value, Tensor):
            yield field.name, value
        elif isinstance(value, tuple):
            yield from ((f"{field.name}[{i}]", part) for i, part in enumerate(value) if isinstance(part, Tensor))


def trace_bytes(trace: Trace) -> int:
    """What holding a trace costs."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(trace))
