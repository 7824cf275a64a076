"""Where benchmarks run: on CUDA where there is one, else on the processor; a call ends when its work has ended."""

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

import tl_neuron_attr as na

PROMPT = "The capital of France is"
LENGTHS = (5, 32, 128, 512)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))  # tests have one
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def demo_model() -> Any:
    return na.load_demo_model(device=DEVICE)


def prompt_of(length: int) -> list[int]:
    """The prompt itself for five tokens, else its tokens repeated in front of it."""
    tokens = demo_model().to_tokens(PROMPT)[0].tolist()
    return (tokens * (length // len(tokens) + 1))[-length:]


@cache
def trace_of(length: int) -> Any:
    with torch.no_grad():
        return na.trace(demo_model(), prompt_of(length), " Paris")


def finished(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call and everything that it queued on the device."""

    @wraps(call)
    def waited(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return result

    return waited


def timed(
    benchmark: Any, call: Callable[..., Any], *args: Any, rounds: int = 5, warmup: int = 1, **facts: Any
) -> Any:
    """Time five calls; ``facts`` go into the table."""
    benchmark.extra_info.update(device=DEVICE, threads=torch.get_num_threads(), **facts)
    return benchmark.pedantic(finished(call), args=args, rounds=rounds, warmup_rounds=warmup)
