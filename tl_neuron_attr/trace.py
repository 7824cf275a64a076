"""One forward pass -> :class:`Trace`, the record that every score is computed from.

A trace holds what the method needs of one prompt at the predicting position: the residual stream before each
block, what attention and MLP really added to it, MLP activations, attention patterns and values, the model's
own log-probabilities, and the target. Before it is handed out, :mod:`tl_neuron_attr.checks` confirms that these
numbers fit together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.arithmetic import without_autocast
from tl_neuron_attr.cached import CachedRun, read_cache
from tl_neuron_attr.checks import check_traces
from tl_neuron_attr.model_view import ModelView
from tl_neuron_attr.results import Provenance
from tl_neuron_attr.targets import ResolvedTarget, Target, resolve_target, single
from tl_neuron_attr.tokens import Prompt, Tokens

Convention = Literal["exact", "paper"]


@dataclass(frozen=True, eq=False)
class Trace:
    """Activations of one prompt and the target they are attributed to; make one with :func:`trace`.

    Per-layer activations are tuples over layers of tensors in the model's own precision, cut at the predicting
    position: ``resid_pre``, ``attn_out`` and ``mlp_out`` are ``[pos, d_model]``, ``pattern`` is ``[head, dest,
    source]``, ``value`` is ``[source, kv_head, d_head]``, ``z`` is ``[pos, head, d_head]`` and ``post``
    (``hook_post``) is ``[pos, d_mlp]``; entries are ``None`` where a layer has no MLP, or no MLP neurons.
    ``resid_final`` is the stream after the last block at the predicting position. ``log_probs`` are the model's
    own log-probabilities (nats) there.
    """

    view: ModelView
    vocabulary: Tokens
    prompt: str | None
    tokens: Int[Tensor, " pos"]
    position: int
    target: ResolvedTarget
    convention: Convention
    resid_pre: tuple[Tensor, ...]
    attn_out: tuple[Tensor, ...]
    mlp_out: tuple[Tensor | None, ...]
    pattern: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    post: tuple[Tensor | None, ...]
    resid_final: Float[Tensor, " d_model"]
    log_probs: Float[Tensor, " d_vocab"]

    @property
    def model(self) -> Any:
        """The TransformerLens model that was traced."""
        return self.view.model

    @property
    def str_tokens(self) -> tuple[str, ...]:
        """The prompt's tokens as strings (``[id]`` without a tokenizer)."""
        return tuple(self.vocabulary.text(token) for token in self.tokens.tolist())

    @property
    def target_log_prob(self) -> float:
        """``T`` of the model's own log-probabilities, in nats: ``log p(target)`` for a token."""
        return float(self.target.value(self.log_probs))

    @property
    def provenance(self) -> Provenance:
        """Where every result computed from this trace comes from."""
        return Provenance(
            model=self.view.name,
            prompt=self.prompt,
            tokens=tuple(self.tokens.tolist()),
            str_tokens=self.str_tokens,
            position=self.position,
            target=self.target.label,
            target_ids=self.target.token_ids,
            convention=self.convention,
            model_log_prob=self.target_log_prob,
        )

    def __repr__(self) -> str:
        shown = repr(self.prompt) if self.prompt is not None else f"{len(self.tokens)} token ids"
        return (
            f"Trace({self.view.name}, {shown}, position={self.position}, target={self.target.label}, "
            f"log_prob={self.target_log_prob:.4f}, convention={self.convention!r})"
        )


@without_autocast
def trace(
    model: Any,
    prompt: Prompt,
    target: Target = None,
    *,
    position: int = -1,
    cache: Any = None,
    convention: Convention = "exact",
    prepend_bos: bool | None = None,
) -> Trace:
    """Run ``model`` once on ``prompt`` (only the hooks needed) and record what attribution needs.

    The pass runs in the precision of the model's weights, also under ``torch.autocast``. Scores of a trace whose
    weights were edited or exchanged since are refused, except for an edit in place through ``.data``, which PyTorch
    does not count: make the trace again after one.

    Args:
        model: a ``TransformerBridge`` (TransformerLens 3 and 4) or ``HookedTransformer`` (2 and 3).
        prompt: a string, a list of token ids, or a tensor of shape ``[pos]`` or ``[1, pos]``.
        target: a token id, a string of one token, ``Contrast``, ``AnyOf``, or ``None`` for the model's own top
            prediction.
        position: the predicting position; negative counts from the end.
        cache: an ``ActivationCache`` (or dict) of the same tokens, made with ``names_filter=required_hooks(model)``
            or without a filter; then no forward pass is run.
        convention: ``"exact"`` keeps the readout's constant, so that layer scores sum to the model's own
            log-probability; ``"paper"`` drops it, as the published code does.
        prepend_bos: for string prompts, whether to begin with the BOS token; ``None`` is the model's default.

    Raises:
        UnsupportedModelError: the method is not defined for this model, or its numbers do not fit together.
        TargetError: the target is not one token of the vocabulary.
        ValueError: an empty or too long prompt, a position out of range, a cache that is partial or of other
            tokens, a model in training mode with dropout.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> na.trace(model, "The capital of France is", target=" Paris").position
        4
    """
    view, vocabulary = prepare(model, convention)
    tokens = vocabulary.prompt_ids(prompt, prepend_bos)
    dest = predicting_position(position, len(tokens))
    resolved = resolve_target(target, vocabulary)
    run = CachedRun.forward(view, tokens, [dest]) if cache is None else read_cache(view, cache, tokens, [dest])
    return traces_of(view, vocabulary, convention, [Asked(prompt, tokens, dest, resolved, run)])[0]


@without_autocast
def trace_continuation(
    model: Any,
    prompt: Prompt,
    continuation: str | Sequence[int],
    *,
    convention: Convention = "exact",
    prepend_bos: bool | None = None,
) -> list[Trace]:
    """Traces of an answer of several tokens from one forward pass, one for each token of it.

    Trace ``i`` predicts token ``i`` of ``continuation`` from the prompt and the tokens before it, which are its
    prompt, so under
    ``"exact"`` the traces' ``target_log_prob`` sum to the log-probability of the whole answer (nats).

    Raises what :func:`trace` raises, and :class:`ValueError` for an empty continuation.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> [t.target.label for t in na.trace_continuation(model, "The capital of France is", " Paris.")]
        ["' Paris'", "'.'"]
    """
    view, vocabulary = prepare(model, convention)
    start = vocabulary.prompt_ids(prompt, prepend_bos)
    answer = vocabulary.continuation_ids(continuation, start)
    tokens = vocabulary.prompt_ids(torch.cat([start, answer[:-1]]), None)
    first = len(start) - 1
    dests = list(range(first, first + len(answer)))
    targets = [resolve_target(token, vocabulary) for token in answer.tolist()]
    run = CachedRun.forward(view, tokens, dests)
    pieces = [vocabulary.text(token) for token in answer.tolist()]
    read = ["".join([prompt, *pieces[:i]]) if isinstance(prompt, str) else prompt for i in range(len(pieces))]
    asked = [
        Asked(text, tokens[: dest + 1], dest, target, run)
        for text, dest, target in zip(read, dests, targets, strict=True)
    ]
    return traces_of(view, vocabulary, convention, asked)


def required_hooks(model: Any) -> list[str]:
    """Names of the activations that ``trace(..., cache=)`` reads, for people who run the model themselves.

    Example:
        >>> import tl_neuron_attr as na
        >>> model = na.load_demo_model()
        >>> _, cache = model.run_with_cache("The capital of France is", names_filter=na.required_hooks(model))
        >>> na.trace(model, "The capital of France is", " Paris", cache=cache).position
        4
    """
    return ModelView(model).hook_names()


def prepare(model: Any, convention: str) -> tuple[ModelView, Tokens]:
    """A view of the model and its vocabulary, or the error that a trace of it would raise before any forward pass."""
    if convention not in get_args(Convention):
        raise ValueError(f'unknown convention {convention!r}: choose "exact" or "paper"')
    view = ModelView(model)
    view.check_ready()
    return view, view.vocabulary()


def predicting_position(position: int, length: int) -> int:
    """The absolute position; :class:`ValueError` outside the prompt."""
    index = Tokens.as_index(position)
    if index is None or not -length <= index < length:
        raise ValueError(
            f"position {position!r} is out of range for a prompt of {length} tokens: give {-length} to {length - 1}"
        )
    return index % length


class Asked(NamedTuple):
    """One trace to cut from a run; ``target`` ``None`` is the run's own top prediction."""

    prompt: Prompt
    tokens: Tensor
    dest: int
    target: ResolvedTarget | None
    run: CachedRun


def traces_of(view: ModelView, vocabulary: Tokens, convention: Convention, asked: Sequence[Asked]) -> list[Trace]:
    """Traces cut from runs of one model, and checked together (:mod:`tl_neuron_attr.checks`)."""
    made = [_cut(view, vocabulary, convention, one) for one in asked]
    check_traces(made)
    return made


def _cut(view: ModelView, vocabulary: Tokens, convention: Convention, asked: Asked) -> Trace:
    log_probs = torch.log_softmax(asked.run.logits[asked.dest].to(view.compute_dtype), -1)
    return Trace(
        view=view,
        vocabulary=vocabulary,
        prompt=asked.prompt if isinstance(asked.prompt, str) else None,
        tokens=asked.tokens,
        position=asked.dest,
        target=single(int(log_probs.argmax()), vocabulary) if asked.target is None else asked.target,
        convention=convention,
        log_probs=log_probs,
        resid_final=asked.run.resid_final[asked.dest],
        **asked.run.until(asked.dest),
    )
