"""Many ablations of one prompt as rows of one batch, within a memory budget.

Row ``i`` has its own units ablated (a mask with a row axis at every hook point), so a batch costs one forward pass
and each row is what its variant alone would give. All rows hold the same tokens: there is no padding. The first
batch carries one more row without any ablation, which must give what the trace recorded.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from tl_neuron_attr.ablation import hooks_for
from tl_neuron_attr.hooking import logits_with, never_fired
from tl_neuron_attr.modes import Mode
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.protocol import Protocol
from tl_neuron_attr.selection import Selection
from tl_neuron_attr.tolerance import TOLERANCE

if TYPE_CHECKING:
    from tl_neuron_attr.trace import Trace


def run_variants(
    trace: "Trace",
    selections: Sequence[Selection],
    mode: Mode,
    positions: tuple[int, ...] | None,
    memory_budget: int,
    done: Callable[[int], object],
) -> Outcomes:
    """Outcomes ``[variant]`` of the traced prediction with each selection ablated; ``done(n)`` reports rows.

    Raises :class:`UnsupportedModelError` by name for a hook that never fired, :class:`ValueError` for a model that
    no longer predicts what was traced, or in training mode with dropout.
    """
    trace.view.check_ready()
    unchanged = Selection()
    found: list[Outcomes] = []
    rows = [unchanged, *selections]
    step = rows_at_once(trace, memory_budget)
    for start in range(0, len(rows), step):
        batch = rows[start : start + step]
        log_probs = _log_probs(trace, batch, mode, positions)
        if start == 0:
            check_unchanged(trace, log_probs[0])
            log_probs = log_probs[1:]
        if len(log_probs):
            found.append(Outcomes.of(log_probs, trace.target))
        done(len(log_probs))
    return Outcomes.cat(found)


def run_all(
    traces: Sequence["Trace"],
    variants: Sequence[Sequence[Selection]],
    mode: Mode,
    protocol: Protocol,
    memory_budget: int,
    progress: bool,
) -> Outcomes:
    """Outcomes ``[variant, trace]`` of as many variants of each trace, with a progress bar on stderr or none."""
    found: list[Outcomes] = []
    with tqdm(total=sum(map(len, variants)), disable=not progress, desc="ablations", unit="run") as bar:
        for trace, rows in zip(traces, variants, strict=True):
            at = protocol.positions_in(trace)
            found.append(run_variants(trace, rows, mode, at, memory_budget, bar.update))
    return Outcomes.stack(found)


def rows_at_once(trace: "Trace", memory_budget: int) -> int:
    """How many rows fit: logits (twice), attention scores and MLP activations of one layer (four times each)."""
    if memory_budget < 2**20:
        raise ValueError(f"memory_budget={memory_budget} bytes: give at least one MiB (2**20)")
    view, n_pos = trace.view, len(trace.tokens)
    widest = max((post.shape[-1] for post in trace.post if post is not None), default=0)
    per_pos = 2 * view.W_U.shape[1] + 4 * (view.n_heads * n_pos + widest + view.n_heads * view.d_head + view.d_model)
    return max(1, memory_budget // (n_pos * per_pos * view.compute_dtype.itemsize))


def _log_probs(
    trace: "Trace", batch: Sequence[Selection], mode: Mode, positions: tuple[int, ...] | None
) -> Float[Tensor, "row d_vocab"]:
    view = trace.view
    pairs = hooks_for(view, batch, mode, positions)
    tokens = trace.tokens.expand(len(batch), -1)
    logits = logits_with(view, tokens, pairs)[:, trace.position]
    for name, hook in pairs:
        if hook.fired == 0:
            raise never_fired(view, name)
    return torch.log_softmax(logits.to(view.compute_dtype), -1)


def check_unchanged(trace: "Trace", log_probs: Float[Tensor, " d_vocab"]) -> None:
    """The row without ablation gives the traced log-probabilities, or the comparison means nothing."""
    traced = trace.log_probs.to(log_probs)
    gap = float((log_probs - traced).abs().max())
    if not gap <= TOLERANCE[trace.view.dtype] * float(traced.abs().max()):
        raise ValueError(
            f"{trace.view.name} no longer predicts what was traced: without any ablation, log-probabilities differ "
            f"by {gap:.3g} nats; trace again after changing weights, hooks or precision of the model"
        )
