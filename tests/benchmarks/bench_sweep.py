"""Throughput of `na.sweep` on the embedded model, one prompt at a time and sixteen: `make bench` runs this.

Prompts are the package's own: of one type, as data sets mostly have them one after the other, or of every type. A
sweep is timed whole: traces, layers, heads, the top 300 of both kinds of neurons, and files.
"""

import pytest
from machine import demo_model

import tl_neuron_attr as na

N_PROMPTS = 64


def prompts(types):
    known = na.load_knowledge(["country"] if types == "one type" else None)
    return known[:: len(known) // N_PROMPTS][:N_PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("types", ["one type", "mixed types"])
def test_sweep(benchmark, tmp_path, types, batch_size):
    model = demo_model()

    def swept():
        return na.sweep(model, prompts(types), tmp_path / "out", batch_size=batch_size, progress=False)

    done = benchmark.pedantic(swept, rounds=1)
    assert done.n_new == N_PROMPTS
    benchmark.extra_info.update(job="sweep", types=types, batch_size=batch_size, n_prompts=N_PROMPTS)
