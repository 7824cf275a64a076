"""The comparison of methods: against a plain loop over edited weights, its statistics, and what it may not change."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import plotly.io
import pytest
import torch
import zoo
from guards import FEW, as_users_run_it, refused, unchanged, warm
from reference_forward import parts_of

import tl_neuron_attr as na
from tl_neuron_attr import evaluation
from tl_neuron_attr.comparison import METRICS, ComparedPrompt, MethodComparison
from tl_neuron_attr.knowledge import KnowledgePrompt
from tl_neuron_attr.methods import STATIC_METHODS
from tl_neuron_attr.neurons import parse
from tl_neuron_attr.outcomes import Outcomes
from tl_neuron_attr.serialise import SchemaError

ASKED = (
    ("t5 t17 t42 t8", "t63", "one"),
    ("t9 t9 t71", "t11", "two"),
    ("t3 t14 t15 t92", "t65", "one"),
    ("t7 t81 t2 t64 t33", "t20", "two"),
    ("t30 t31 t32", "t33", "one"),
)
PROMPTS = [KnowledgePrompt(*one, subject="", template="") for one in ASKED]
SOME = ("log_prob_increase", "coefficient_norm")
# Weight processing moves the constant part of the values to the output bias, so there an attention neuron that is
# zeroed is not a row of the original weights.
LOOPED = [
    pytest.param(case, kind, id="-".join([*case, kind]))
    for case in zoo.CASES
    if case[0] in ("gpt2", "llama_gqa", "neox")
    for kind in ("mlp", "attn")
    if kind == "mlp" or case[1] in zoo.UNPROCESSED
]


@pytest.fixture(params=FEW, ids="-".join)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    return warm(zoo.case(*request.param))


def compared(case: zoo.ZooCase, methods: Any = SOME, k: int = 4, prompts: Any = PROMPTS, **options: Any) -> Any:
    return na.compare_methods(case.model, prompts, methods, k, progress=False, **options)


def without_seconds(found: MethodComparison) -> str:
    record = json.loads(found.to_json())
    del record["seconds"]
    return json.dumps(record)


def rows_of(module: Any) -> torch.Tensor:
    """A view of the weight with one row for each input."""
    return module.weight.T if isinstance(module, torch.nn.Linear) else module.weight


class ByHand:
    """The Hugging Face model in float64, run with rows of its weights set to zero."""

    def __init__(self, case: zoo.ZooCase, kind: str) -> None:
        self.hf, self.kind = zoo.clone(case.hf_model, torch.float64), kind
        self.state = {name: tensor.clone() for name, tensor in self.hf.state_dict().items()}

    @torch.no_grad()
    def __call__(self, tokens: list[int], answer: int, labels: Any) -> tuple[float, float, float]:
        """1 / rank, probability and log-probability."""
        for label in labels:
            layer, rest = label[1:].split("N" if self.kind == "mlp" else "H")
            parts = parts_of(self.hf, zoo.blocks(self.hf)[int(layer)])
            if self.kind == "mlp":
                rows_of(parts.down)[int(rest)] = 0
            else:
                head, dim = (int(part) for part in rest.split("@")[0].split("D"))
                rows = rows_of(parts.out)
                rows[head * (len(rows) // self.hf.config.num_attention_heads) + dim] = 0
        log_probs = self.hf(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1).tolist()
        self.hf.load_state_dict(self.state)
        rank = 1
        for other in log_probs:
            if other > log_probs[answer]:
                rank += 1
        return 1 / rank, math.exp(log_probs[answer]), log_probs[answer]


# Against a plain loop


@pytest.mark.parametrize(("case", "kind"), LOOPED)
def test_the_table_is_that_of_a_plain_loop(case: tuple[str, str], kind: str) -> None:
    """Each prompt alone: rank, set rows of the weights to zero, run the Hugging Face model in float64, count."""
    built = zoo.case(*case)
    methods = STATIC_METHODS if kind == "mlp" else SOME
    found = compared(built, methods, kind=kind)
    frame, run = found.to_frame().set_index("name"), ByHand(built, kind)
    for place, name in enumerate(found.names):
        values: list[tuple[float, float, float]] = []
        for i, one in enumerate(PROMPTS):
            trace = na.trace(built.model, one.prompt, one.answer)
            labels: Any = ()
            if name == "random":
                labels = found.neurons[0][i]
            elif name != "untouched":
                labels = [str(neuron) for neuron in na.value_neurons(trace, kind, 4, method=name)]
                assert list(found.neurons[place - 1][i]) == labels
            values.append(run(trace.tokens.tolist(), int(one.answer[1:]), labels))
        for metric, column in zip(("mrr", "probability", "log_prob"), zip(*values, strict=True), strict=True):
            assert frame.loc[name, metric] == pytest.approx(sum(column) / len(column), abs=2e-5)
        if name == "untouched":
            untouched = values
        else:
            falls = [before[2] - after[2] for before, after in zip(untouched, values, strict=True)]
            assert frame.loc[name, "log_prob_fall"] == pytest.approx(sum(falls) / len(falls), abs=2e-5)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_the_control_is_as_many_of_the_same_layers_and_none_of_the_best(few: zoo.ZooCase, kind: str) -> None:
    found = compared(few, kind=kind)
    for drawn, best in zip(found.neurons[0], found.neurons[1], strict=True):
        units = {label.split("@")[0] for label in best}
        layers = [Counter(label.replace("H", "N").split("N")[0] for label in labels) for labels in (drawn, units)]
        assert layers[0] == layers[1]
        assert len(set(drawn)) == len(drawn) and not units & set(drawn)
        assert kind == "attn" or all(parse(label) for label in drawn)


def test_a_mean_by_name_is_that_of_the_prompts(few: zoo.ZooCase) -> None:
    mean = na.mean_activations(few.model, [one.prompt for one in PROMPTS])
    by_name, given = (compared(few, [m]) for m in ("attribution_patching", na.AttributionPatching(mean)))
    assert without_seconds(by_name) == without_seconds(given)
    assert by_name.methods == ("attribution_patching",)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_methods_past_the_paper_are_rows_like_any_other(few: zoo.ZooCase, kind: str) -> None:
    methods = ["gradient", na.IntegratedGradients(steps=2), na.Causal(candidates=5), "direct_logit"]
    found = compared(few, methods, kind=kind, prompts=PROMPTS[:2])
    assert found.methods == ("gradient", "integrated_gradients", "causal", "direct_logit")
    for place, method in enumerate(methods):
        for i, one in enumerate(PROMPTS[:2]):
            trace = na.trace(few.model, one.prompt, one.answer)
            alone = na.value_neurons(trace, kind, 4, method=method)
            assert found.neurons[1 + place][i] == tuple(map(str, alone))
            effect = na.ablation_effect(trace, alone)
            assert found.outcomes.log_prob[2 + place, i].item() == pytest.approx(
                effect.after.log_prob.item(), abs=1e-5
            )


def test_the_control_does_not_depend_on_the_methods(few: zoo.ZooCase) -> None:
    all_eight, one = compared(few, STATIC_METHODS), compared(few, ["norm"])
    assert one.neurons == (all_eight.neurons[0], all_eight.neurons[1 + STATIC_METHODS.index("norm")])
    torch.testing.assert_close(one.outcomes.log_prob[1], all_eight.outcomes.log_prob[1], rtol=0, atol=1e-5)


def test_a_table_by_type_is_that_of_the_type_alone(few: zoo.ZooCase) -> None:
    found = compared(few)
    assert found.types == ("one", "two")
    frame = found.to_frame(by="type")
    assert frame["type"].tolist() == ["one"] * 4 + ["two"] * 4
    assert frame["n_prompts"].tolist() == [3] * 4 + [2] * 4
    for name in ("one", "two"):
        alone = compared(few, prompts=[prompt for prompt in PROMPTS if prompt.type == name]).to_frame()
        part = frame[frame["type"] == name].reset_index(drop=True)
        kept = [i for i, row in enumerate(found.names) if row != "random"]  # other draws
        columns = [c for c in alone.columns if c not in ("name", "seconds")]
        torch.testing.assert_close(
            torch.tensor(part.loc[kept, columns].astype(float).values),
            torch.tensor(alone.loc[kept, columns].astype(float).values),
            rtol=0,
            atol=1e-5,
            equal_nan=True,
        )


# Sameness


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_control(few: zoo.ZooCase) -> None:
    first, again, other = compared(few, seed=3), compared(few, seed=3), compared(few, seed=4)
    assert without_seconds(first) == without_seconds(again)
    assert first.neurons[0] != other.neurons[0]
    assert first.neurons[1:] == other.neurons[1:]
    assert first.of("coefficient_norm").mrr.value == other.of("coefficient_norm").mrr.value


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"memory_budget": 2**20}], ids=str)
def test_results_do_not_depend_on_batches(few: zoo.ZooCase, options: dict[str, int]) -> None:
    methods = [*SOME, "prob_increase", "coefficient_inverse_rank"]
    one, other = compared(few, methods), compared(few, methods, **options)
    assert one.neurons == other.neurons
    for metric in ("log_prob", "probability"):
        torch.testing.assert_close(one.outcomes.values(metric), other.outcomes.values(metric), rtol=0, atol=1e-5)
    assert torch.equal(one.outcomes.rank, other.outcomes.rank)


def test_prompts_are_traced_one_window_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than one trace is held when the next is asked for."""
    most, made = [], []
    original = evaluation.trace_batch

    def watched(*args: Any, **options: Any) -> Any:
        for trace in original(*args, **options):
            made.append(weakref.ref(trace))
            most.append(sum(ref() is not None for ref in made))
            yield trace
            del trace

    monkeypatch.setattr(evaluation, "trace_batch", watched)
    compared(zoo.case("gpt2", zoo.BACKENDS[0]), prompts=PROMPTS * 3, batch_size=1)
    assert len(made) == 15
    assert max(most) <= 2


# Intervals


def made_up(values: list[float], falls: list[float], seed: int = 0, n_boot: int = 1000) -> MethodComparison:
    """A comparison of one method whose log-probabilities fall from `values` by `falls`."""
    untouched = torch.tensor(values, dtype=torch.float64)
    log_prob = torch.stack([untouched, untouched, untouched - torch.tensor(falls, dtype=torch.float64)])
    ranks = torch.ones(log_prob.shape, dtype=torch.int64)
    n = len(values)
    return MethodComparison(
        model="tiny",
        kind="mlp",
        k=1,
        seed=seed,
        n_boot=n_boot,
        methods=("norm",),
        prompts=tuple(ComparedPrompt(f"<b>{i}", " x", "<i>") for i in range(n)),
        outcomes=Outcomes(log_prob, log_prob.exp(), ranks, ranks),
        neurons=((("L0N1",),) * n, (("L0N2",),) * n),
        seconds={"norm": 1.5, "total": 2.0},
    )


def test_intervals_contain_their_means_and_are_those_of_the_bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (-3 + torch.randn(400, generator=generator)).tolist()
    falls = torch.rand(400, generator=generator).tolist()
    found = made_up(values, falls)
    for row, metric in itertools.product(found.rows, METRICS):
        one = getattr(row, metric)
        assert one.low <= one.value <= one.high
        assert one.fall is None or one.fall_low <= one.fall <= one.fall_high
    wanted = found.of("norm").log_prob
    # A mean of 400: 1.96 standard errors on either side, to a tenth of the width.
    for value, low, high, sample in (
        (wanted.value, wanted.low, wanted.high, [v - f for v, f in zip(values, falls, strict=True)]),
        (wanted.fall, wanted.fall_low, wanted.fall_high, falls),
    ):
        half = 1.96 * torch.tensor(sample).std().item() / 20
        assert value == pytest.approx(sum(sample) / 400)
        assert low == pytest.approx(value - half, abs=half / 5)
        assert high == pytest.approx(value + half, abs=half / 5)
    again = made_up(values, falls)
    assert [again.rows, again.rows_by_type] == [found.rows, found.rows_by_type]
    other = made_up(values, falls, seed=1).of("norm").log_prob
    assert (other.value, other.fall) == (wanted.value, wanted.fall)
    assert other.low != wanted.low
    assert made_up(values, falls, n_boot=50).of("norm").log_prob.low != wanted.low


def test_falls_are_paired_by_prompt() -> None:
    """Every prompt falls by the same, however much prompts differ: the fall is known exactly."""
    one = made_up([-10.0, -1.0, -4.0, -0.5], [0.25] * 4).of("norm").log_prob
    assert (one.fall, one.fall_low, one.fall_high) == (0.25, 0.25, 0.25)
    assert one.high - one.low > 1


def test_differences_are_paired_by_prompt_and_count_both_sides() -> None:
    values, falls = [-10.0, -1.0, -4.0, -0.5, -2.0], [0.25, 0.25, -0.5, 0.25, 0.0]
    found = made_up(values, falls)
    for against, sign in (("untouched", -1), ("random", -1)):
        table = na.method_differences(found, against).set_index(["name", "metric"])
        row = table.loc[("norm", "log_prob")]
        assert row["difference"] == pytest.approx(sign * 0.05)
        assert row["low"] <= row["difference"] <= row["high"]
        assert (row["n_lower"], row["n_higher"], row["n_prompts"]) == (3, 1, 5)
        assert table.loc[("norm", "mrr"), ["difference", "n_lower", "n_higher"]].tolist() == [0, 0, 0]
    back = na.method_differences(found, "norm").set_index(["name", "metric"]).loc[("untouched", "log_prob")]
    assert (back["difference"], back["n_lower"], back["n_higher"]) == (pytest.approx(0.05), 1, 3)
    equal = na.method_differences(made_up(values, [0.25] * 5), "untouched").set_index(["name", "metric"])
    assert equal.loc[("norm", "log_prob"), ["difference", "low", "high"]].tolist() == [-0.25] * 3
    assert na.method_differences(found, by="type", against="norm")["type"].unique().tolist() == ["<i>"]


def test_differences_against_what_is_not_a_row_are_refused() -> None:
    found = made_up([-1.0], [0.5])
    assert na.method_differences(found, "random")["low"].isna().all()
    with pytest.raises(ValueError, match=r"no row 'causal': the rows are untouched, random, norm$"):
        na.method_differences(found, "causal")
    with as_users_run_it(), pytest.raises(ValueError, match="by='kind': give \"type\" for one table a type"):
        na.method_differences(found, "norm", by="kind")  # type: ignore[arg-type]


def test_one_prompt_has_no_interval() -> None:
    found = made_up([-1.0], [0.5])
    assert found.of("norm").log_prob.fall == 0.5
    assert found.of("norm").log_prob.fall_low is None
    assert found.of("untouched").log_prob.fall is None
    assert "0.5000\n" in repr(found).replace(" ", "\n")
    assert math.isnan(found.to_frame()["log_prob_low"].astype(float)[0])


# The result


def test_json_gives_the_same_back(few: zoo.ZooCase, tmp_path: Any) -> None:
    found = compared(few)
    text = found.to_json(tmp_path / "found.json")
    for source in (text, tmp_path / "found.json"):
        back = MethodComparison.from_json(source)
        assert back.to_json() == text
        assert back.rows == found.rows
    record = json.loads(text)
    assert "seconds" not in record["table"][0]
    assert record["table"][0]["mrr"] == found.rows[0].mrr.value
    record["prompts"].pop()
    with pytest.raises(SchemaError, match="incomplete or altered: ValueError: 2 methods and 4 prompts need"):
        MethodComparison.from_json(json.dumps(record))
    with pytest.raises(SchemaError, match=r"version 2 of tl_neuron_attr\.method_comparison"):
        MethodComparison.from_json(json.dumps({**record, "schema_version": 2}))


def test_frames_have_the_documented_columns() -> None:
    found = made_up([-1.0, -2.0], [0.5, 0.5])
    parts = ["", "_low", "_high", "_fall", "_fall_low", "_fall_high"]
    measured = [f"{metric}{part}" for metric in ("mrr", "probability", "log_prob") for part in parts]
    assert found.to_frame().columns.tolist() == ["name", "n_prompts", *measured, "seconds"]
    assert found.to_frame(by="type").columns.tolist() == ["name", "type", "n_prompts", *measured]
    assert found.to_frame()["seconds"].tolist()[2] == 1.5
    with (
        as_users_run_it(),
        pytest.raises(ValueError, match="by='answer': give \"type\" for one table a type of knowledge"),
    ):
        found.to_frame(by="answer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no row 'gradient': the rows are untouched, random, norm"):
        found.of("gradient")


def test_tables_name_what_was_done_and_escape_it() -> None:
    found = made_up([-1.0, -2.0], [0.5, 0.5])
    text = repr(found)
    assert text.startswith("Zeroing the top 1 MLP neurons of tiny by each method, 2 prompts (<i>)\n")
    assert "0.5000 [0.5000, 0.5000]" in text
    page = found._repr_html_()
    assert "&lt;i&gt;" in page and "<i>" not in page


def test_results_are_frozen_and_hold_no_graph(few: zoo.ZooCase) -> None:
    found = compared(few)
    with pytest.raises(AttributeError):
        found.k = 3  # type: ignore[misc]
    assert not any(found.outcomes.values(metric).requires_grad for metric in METRICS.values())
    with pytest.raises(ValueError, match=r"1 methods and 5 prompts need outcomes of shape \[3, 5\]"):
        MethodComparison(**{**vars(found), "methods": ("norm",)})


def test_seconds_cover_every_part() -> None:
    found = compared(zoo.case("gpt2", zoo.BACKENDS[0]), STATIC_METHODS)
    assert list(found.seconds) == [*STATIC_METHODS, "trace", "control", "ablation", "total"]
    parts = [seconds for name, seconds in found.seconds.items() if name != "total"]
    assert all(seconds > 0 for seconds in parts)
    assert 0.5 * found.seconds["total"] < sum(parts) <= found.seconds["total"]
    assert found.of("norm").seconds == found.seconds["norm"]
    assert found.of("random").seconds is None


# What it may not change, and what it refuses


def test_the_users_state_is_as_before(few: zoo.ZooCase) -> None:
    with unchanged(few.model):
        compared(few, STATIC_METHODS)


def test_progress_has_a_switch(capfd: pytest.CaptureFixture[str]) -> None:
    built = zoo.case("gpt2", zoo.BACKENDS[0])
    compared(built)
    assert capfd.readouterr() == ("", "")
    na.compare_methods(built.model, PROMPTS[:2], SOME, 4)
    out, err = capfd.readouterr()
    assert out == ""
    assert "comparing methods" in err and "2/2" in err


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompts": (
        {"prompts": []},
        "no prompts are given: a comparison needs at least one that the model answers",
    ),
    "a string": (
        {"prompts": ["The capital of France is"]},
        "prompts[0] is 'The capital of France is': give KnowledgePrompt objects, from load_knowledge, read_prompts "
        "or KnowledgePrompt(prompt, answer, type, subject, template)",
    ),
    "no methods": ({"methods": []}, "no methods are given: name at least one to compare"),
    "one string": ({"methods": "norm"}, "methods is the one string 'norm': give a list of methods, ['norm']"),
    "twice": (
        {"methods": ["norm", "coefficient", "norm"]},
        "method 'norm' is given twice: each is one row, so compare its options in two calls",
    ),
    "kind": ({"kind": "head"}, 'unknown kind \'head\': the kinds are "mlp" and "attn"'),
    "k": ({"k": 0}, "k is 0: ask for 1 or more"),
    "n_boot": ({"n_boot": 0}, "n_boot is 0: ask for 1 or more"),
    "batch size": ({"batch_size": 0}, "batch_size is 0: give how many prompts to run at once, 1 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_run(name: str) -> None:
    built = warm(zoo.case("gpt2", zoo.BACKENDS[0]))
    options, message = BAD[name]
    with refused(built.model, ValueError, message):
        compared(built, **options)


def test_an_unknown_method_and_an_answer_of_several_tokens_are_refused_before_any_run() -> None:
    built = warm(zoo.case("gpt2", zoo.BACKENDS[0]))
    with unchanged(built.model), pytest.raises(ValueError, match="unknown method 'nrom': choose one of log_prob"):
        compared(built, ["nrom"])
    prompts = [PROMPTS[0], KnowledgePrompt("t3 t4", "t5 t6", "", "", "")]
    with unchanged(built.model), pytest.raises(na.TargetError, match=r"targets\[1\]: "):
        compared(built, prompts=prompts)


def test_more_neurons_than_a_layer_has_left_for_a_control_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"but only .* are not in the set; ask for fewer neurons or no controls"):
        compared(zoo.case("gpt2", zoo.BACKENDS[0]), ["log_prob_increase"], k=10_000)


# The plot


def test_the_plot_shows_the_table_and_touches_nothing() -> None:
    found = made_up([-1.0, -2.0, -4.0], [0.5, 0.5, 2.0])
    template = plotly.io.templates.default
    figure = na.plots.methods(found)
    assert plotly.io.templates.default == template
    title = figure.layout.title.text.replace("<br>", " ")
    assert title.startswith("Right token after zeroing the top 1 MLP neurons of tiny")
    assert "means over 3 prompts, the first '&lt;b&gt;0', 95 % bootstrap intervals" in title
    titles = [figure.layout[axis].title.text for axis in ("xaxis", "xaxis2", "xaxis3")]
    assert titles == ["MRR", "Prob.", "Log-prob.<br>(nats)"]
    named = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    assert named == {0: "norm", 1: "random", 2: "untouched"}
    shown: dict[tuple[str, str], tuple[float, float, float]] = {}
    for part in figure.data:
        spread = zip(part.x, part.error_x.arrayminus, part.error_x.array, strict=True)
        for line, (x, minus, plus) in zip(part.y, spread, strict=True):
            shown[part.xaxis, named[line]] = (x - minus, x, x + plus)
    assert len(shown) == 9
    for (axis, name), values in shown.items():
        one = getattr(found.of(name), {"x": "mrr", "x2": "probability", "x3": "log_prob"}[axis])
        assert values == pytest.approx((one.low, one.value, one.high))
    assert len({part.marker.symbol for part in figure.data}) == 2
    assert any("fall: 1 [" in text for part in figure.data for text in part.hovertext)
    assert json.loads(figure.to_json())["layout"]["paper_bgcolor"] == "rgba(0, 0, 0, 0)"


def test_equal_names_do_not_share_a_line_of_the_plot() -> None:
    """On an axis of names they would collapse into one."""
    found = made_up([-1.0, -2.0, -4.0], [0.5, 0.5, 2.0])
    rows = tuple(dataclasses.replace(row, name="norm") for row in found.rows)
    given = {name: getattr(found, name) for name in ("prompts", "k", "kind", "model")}
    with as_users_run_it():
        figure = na.plots.methods(SimpleNamespace(**given, rows=rows))  # type: ignore[arg-type]
    lines = [line for part in figure.data if part.xaxis == "x" for line in part.y]
    assert sorted(lines) == [0, 1, 2]
    assert figure.layout.yaxis.ticktext == ("norm", "norm", "norm")


def test_a_plot_is_drawn_and_written_without_a_notebook_or_a_network() -> None:
    """Neither nbformat nor ipywidgets is imported, and a page written for offline use carries plotly.js itself."""
    code = (
        "import sys; sys.modules['nbformat'] = sys.modules['ipywidgets'] = None\n"
        "import tl_neuron_attr as na\nprint(na.plots.methods.__name__)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "methods\n"
    page = na.plots.methods(made_up([-1.0, -2.0, -4.0], [0.5, 0.5, 2.0])).to_html(include_plotlyjs=True)
    assert len(page) > 10**6 and '<script src="http' not in page


def test_plots_are_reached_by_name_and_loaded_late() -> None:
    assert "plots" in dir(na)
    assert "plots" not in na.__all__
    assert na.plots.methods.__module__ == "tl_neuron_attr.plots.method_intervals"
