"""Memory that torch allocates, by the allocator's own record of every allocation and release."""

from collections.abc import Callable
from typing import Any

import torch


class Memory:
    """Peak of what torch held beyond what it held before, over the calls made in it."""

    def __init__(self) -> None:
        self.peak = 0

    def of(self, call: Callable[[], Any]) -> Any:
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = call()
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        held = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            self.peak = max(self.peak, held)
        return result
