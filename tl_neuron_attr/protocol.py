"""How an ablation experiment is done: which neurons of which trace, where, how, against how many random draws."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tl_neuron_attr.modes import Mode
from tl_neuron_attr.ranking import RankedNeurons
from tl_neuron_attr.selection import Named, Neurons, Scope, Selection, check_scope, identities, select
from tl_neuron_attr.trace import Trace

Traces: TypeAlias = Trace | Sequence[Trace]


@dataclass(frozen=True)
class Protocol:
    """Mode, positions as given (``None``: every one), scope, number of control draws and their seed."""

    mode: str
    positions: tuple[int, ...] | None
    scope: Scope
    controls: int
    seed: int

    @staticmethod
    def of(mode: Mode, positions: Sequence[int] | None, scope: str, controls: int, seed: int) -> "Protocol":
        """Check what can be checked without a trace; raises :class:`ValueError`."""
        if controls < 0:
            raise ValueError(f"controls is {controls}: give the number of random draws, 0 or more")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed is {seed}: give an integer of 64 bits, such as 0")
        if positions is not None and not len(positions):
            raise ValueError("positions=[] ablates nowhere: give at least one, or None for every position")
        at = None if positions is None else tuple(int(position) for position in positions)
        return Protocol(str(mode), at, check_scope(scope), controls, seed)

    def positions_in(self, trace: Trace) -> tuple[int, ...] | None:
        """Absolute positions in one prompt; :class:`ValueError` outside it or after the predicting position."""
        if self.positions is None:
            return None
        length = len(trace.tokens)
        for position in self.positions:
            if not -length <= position < length or position % length > trace.position:
                raise ValueError(
                    f"position {position} is outside the {length} tokens of {trace!r}, or after its predicting "
                    f"position {trace.position}, which it cannot change: give 0 to {trace.position}, or negative "
                    f"ones that count from the end of the prompt"
                )
        return tuple(position % length for position in self.positions)

    def select(self, trace: Trace, named: Iterable[Named]) -> Selection:
        """The units of one trace; a source's destination is the predicting position unless positions are given."""
        return select(trace.view, named, self.scope, self.positions_in(trace) or (trace.position,))

    def __str__(self) -> str:
        where = "at every position" if self.positions is None else f"at positions {list(self.positions)}"
        return f"mode {self.mode}, {where}, scope {self.scope}"


def traces_of_one_model(traces: Traces) -> list[Trace]:
    """The traces as a list; :class:`ValueError` for none, or of several models."""
    given = [traces] if isinstance(traces, Trace) else list(traces)
    if not given:
        raise ValueError("no traces are given: an effect needs at least one")
    for trace in given:
        if trace.model is not given[0].model:
            raise ValueError(
                f"the traces are of several models ({given[0].view.name} and {trace.view.name}): give the traces of "
                f"one model object at a time"
            )
    return given


def sets_for(traces: Traces, neurons: Neurons) -> list[list[Named]]:
    """The neurons of each trace: for several traces, a list of rankings or lists is one for each of them.

    Raises :class:`ValueError` for such a list of another length, or a ranking of another prompt or position.
    """
    if isinstance(traces, Trace):
        return [list(identities(neurons))]
    parts: list[Any] = list(neurons) if isinstance(neurons, list | tuple) else []
    if not parts or not all(isinstance(part, RankedNeurons | list | tuple) for part in parts):
        return [list(identities(neurons))] * len(traces)
    if len(parts) != len(traces):
        raise ValueError(
            f"{len(parts)} rankings or lists of neurons for {len(traces)} traces: give one for each trace, in "
            f"order; to ablate one set in all traces, join them, [*first, *second]"
        )
    for i, (trace, ranked) in enumerate(zip(traces, parts, strict=True)):
        if isinstance(ranked, RankedNeurons):
            origin = ranked.provenance
            if (origin.tokens, origin.position) != (tuple(trace.tokens.tolist()), trace.position):
                raise ValueError(
                    f"ranking {i} is of another prompt or position than trace {i} ({trace!r}): put them in one "
                    f"order; to pair them all the same, give its .ids"
                )
    return [list(identities(part)) for part in parts]
