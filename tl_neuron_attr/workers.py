"""One process, or one of several that Hugging Face Accelerate started (``accelerate launch``).

Processes only share which parts are to be done and what became of them; results go through files. A process alone
needs no launcher, and Accelerate is not imported for it.
"""

import datetime
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Value = TypeVar("_Value")
# How launchers say how many processes there are: torchrun's, and those of MPI that Accelerate reads.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# A process that is done waits for one that has longer parts.
_PATIENCE = datetime.timedelta(days=30)


class Workers:
    """The processes of this run, seen from one of them; make it before the model is loaded."""

    def __init__(self) -> None:
        self._state: Any = None
        started = max(int(os.environ.get(name) or 1) for name in _SIZES)
        if started > 1:
            self._state = importlib.import_module("accelerate").PartialState(cpu=_on_processors(), timeout=_PATIENCE)
            if self.count != started:
                raise ValueError(
                    f"a launcher started {started} processes, but Accelerate sees {self.count}, so all of them would "
                    f"do everything: see `accelerate env`, or start one process without a launcher"
                )

    @property
    def count(self) -> int:
        """How many processes there are."""
        return 1 if self._state is None else self._state.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes what there is one of."""
        return self._state is None or self._state.is_main_process

    @property
    def device(self) -> str | None:
        """Where this process's model belongs, if a launcher says so."""
        return None if self._state is None or self._state.device.type == "cpu" else str(self._state.device)

    def share(self, items: Sequence[_Value]) -> list[_Value]:
        """This process's share of what all processes hold alike; each item goes to exactly one."""
        return list(items) if self._state is None else list(items[self._state.process_index :: self.count])

    def from_main(self, make: Callable[[], _Value]) -> _Value:
        """What the main process makes, or the error it raises, on every process; the others wait for it."""
        if self._state is None:
            return make()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except (ValueError, OSError) as error:
                box[1] = error
        importlib.import_module("accelerate.utils").broadcast_object_list(box, from_process=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, items: list[_Value]) -> list[_Value]:
        """The items of all processes, on every process."""
        if self._state is None:
            return items
        return list(importlib.import_module("accelerate.utils").gather_object(items))


def _on_processors() -> bool:
    """Whether processes are to talk to each other without accelerators; Accelerate does not find out by itself."""
    torch: Any = importlib.import_module("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "mlu", "musa", "hpu"))
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return asked or not any(kind is not None and kind.is_available() for kind in kinds)
