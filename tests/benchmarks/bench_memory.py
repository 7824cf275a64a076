"""Peak memory beyond model and trace for a wide model: 256,000 tokens, two layers of 16,384 MLP neurons, 1 GiB.

One neuron's logits are 1 MB here and a layer's 16 GiB. `allocated` is what torch held at most, by its allocator's own
record; `resident` is how much the process's resident set grew at most (Linux), libraries' buffers included.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from allocated import Memory
from machine import DEVICE, finished

import tl_neuron_attr as na

BUDGET = 2**30
D_VOCAB, D_MLP = 256_000, 16_384


@pytest.fixture(scope="module")
def trace():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=D_VOCAB,
        hidden_size=512,
        intermediate_size=D_MLP,
        num_hidden_layers=2,
        num_attention_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        hf.lm_head.weight.mul_(8)  # peaked enough that neurons differ
    model = zoo.plain(hf, zoo.UNPROCESSED[0], torch.float32).to(DEVICE)
    return na.trace(model, list(range(100, 108)), 4242)


def layers_and_heads(trace, budget):
    return na.layer_scores(trace, memory_budget=budget), na.head_scores(trace, memory_budget=budget)


def query(trace, budget):
    value = na.value_neurons(trace, "attn", 30, memory_budget=budget)
    return na.query_neurons(trace, value, "mlp", 300, memory_budget=budget)


CALLS = {
    "top 300 mlp": lambda trace, budget: na.value_neurons(trace, "mlp", 300, memory_budget=budget),
    "top 300 attn": lambda trace, budget: na.value_neurons(trace, "attn", 300, memory_budget=budget),
    "query neurons": query,
    "layers and heads": layers_and_heads,
    "certified mlp": lambda trace, budget: na.value_scores(trace, "mlp", tolerance=1e-3, memory_budget=budget),
    "certified attn": lambda trace, budget: na.value_scores(trace, "attn", tolerance=1e-3, memory_budget=budget),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory(benchmark, trace, name):
    memory, before = Memory(), _resident("VmRSS")
    _forget_the_peak()
    call = finished(CALLS[name])
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    benchmark.pedantic(call, args=(trace, BUDGET), rounds=1)
    grown = _resident("VmHWM") - before
    memory.of(lambda: call(trace, BUDGET))
    peak = torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else memory.peak
    benchmark.extra_info.update(device=DEVICE, allocated=peak, resident=grown, budget=BUDGET)
    assert 0 < peak <= BUDGET


def _resident(field: str) -> int:
    status = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _forget_the_peak() -> None:
    """Linux starts the resident set's peak anew."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
