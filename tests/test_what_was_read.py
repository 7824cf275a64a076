"""Every face of a result names the text that the model had read, whatever follows in the prompt or the answer."""

import dataclasses
import io

import page_reader
import pytest
import zoo
from rich.console import Console

import tl_neuron_attr as na
from tl_neuron_attr import effect_table, terminal
from tl_neuron_attr.explanation import gather
from tl_neuron_attr.ranking import Provenance

pytestmark = pytest.mark.any_release
FIRST = (zoo.NAMES[0], zoo.BACKENDS[0])


def origin(prompt: str | None, *tokens: str, position: int) -> Provenance:
    ids = tuple(range(len(tokens)))
    return Provenance("tiny", prompt, ids, tokens, position, "' x'", (3,), "exact", -1.0)


@pytest.mark.parametrize(
    ("provenance", "read"),
    [
        (origin("The capital of", "The", " capital", " of", position=2), "The capital of"),
        (origin("The capital of", "<bos>", "The", " capital", " of", position=3), "The capital of"),
        (origin("The capital of", "<bos>", "The", " capital", " of", position=1), "The"),
        (origin("Der Der Der", "Der", " Der", " Der", position=0), "Der"),
        (origin("\U0001f600 is", "\ufffd", "\ufffd", " is", position=1), "\U0001f600"),
        (origin("\U0001f600 is", "\ufffd", "\ufffd", " is", position=0), "\ufffd"),
        (origin("LOUD", "<bos>", "lo", "ud", position=1), "<bos>lo"),
        (origin(None, "<bos>", " a", " b", position=1), "<bos> a"),
        (origin(None, "<bos>", " a", " b", position=2), "<bos> a b"),
    ],
)
def test_what_was_read_is_the_text_up_to_the_position(provenance: Provenance, read: str) -> None:
    assert provenance.read == read


def faces(trace: na.Trace, tmp_path) -> dict[str, str]:
    """What is shown of a trace and its results, by who shows it."""
    mlp = na.value_neurons(trace, "mlp", k=3)
    effect = na.ablation_effect(trace, mlp)
    curve = na.ablation_curve(trace, mlp, sizes=[1, 3], progress=False)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal.render(gather(trace, k=2), 2))
    explained = console.export_text()
    console.print(effect_table.render(effect))
    page = na.report(trace, tmp_path / "page.html", k=1, controls=0).read_text(encoding="utf-8")
    document = page_reader.read(page)
    title = na.plots.ranks(mlp).layout.title.text
    return {
        "ranking": repr(mlp),
        "effect": repr(effect),
        "curve": repr(curve),
        "explain": explained,
        "ablate": console.export_text(),
        "figure": title.replace("<br>", " ").partition("method")[0],
        "title": document.one("title").text,
    }


def test_every_face_shows_what_was_read_and_nothing_after_it(tmp_path) -> None:
    model = zoo.case(*FIRST).model
    trace = na.trace(model, [5, 17, 17, 42, 8, 63], 9, position=-3)
    trace = dataclasses.replace(trace, prompt="".join(trace.str_tokens))  # as if it had been given as text
    for who, text in faces(trace, tmp_path).items():
        first = text.partition("\nmetric")[0].partition("\nneuron")[0]
        assert "'t5t17t17t42'" in first and "t8t63" not in text, (who, text)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_tokens_of_an_answer_that_came_before_were_read_too(tmp_path, step: int) -> None:
    model = zoo.case(*FIRST).model
    trace = na.trace_continuation(model, "t5", [9, 4, 7], prepend_bos=False)[step]
    read = repr("t5" + "t9t4"[: 2 * step])
    assert (trace.prompt, trace.str_tokens) == (read.strip("'"), ("t5", "t9", "t4")[: step + 1])
    for who, text in faces(trace, tmp_path).items():
        assert f"{read}" in text, (who, text)


def test_a_prompt_that_fills_the_context_has_a_page(tmp_path) -> None:
    model = zoo.case(*FIRST).model
    trace = na.trace(model, " ".join(["t5"] * 32), 9, prepend_bos=False)
    assert len(trace.tokens) == 32 == model.cfg.n_ctx
    assert na.report(trace, tmp_path / "page.html", k=1, controls=0).is_file()
