"""The page of `report`: what it holds, what it escapes, what it refuses; in a browser see tests/browser."""

import base64
import copy
import dataclasses
import hashlib
import json
import os
import re
import sys
import types
from types import SimpleNamespace

import page_reader
import pytest
import torch
import zoo

import tl_neuron_attr as na
from tl_neuron_attr import whole_file
from tl_neuron_attr.page import build, story
from tl_neuron_attr.targets import resolve_target

K, CONTROLS = 3, 2
TOKENS = [5, 17, 17, 3, 40, 8, 21]
# Text that would break a careless page: markup, ends of scripts, entities, quotes, line ends, directions.
ODD = [
    "<script>alert(1)</script>",
    "</script>",
    "&amp;",
    "\"'`",
    " <!--",
    "\n\r\t\x00\x07\x1b",
    "\u2028\u2029\u202e\ufeff",
    "שלום",
    "<a href='https://example.com/'>x</a>",
    "$x$ {{ 7 * 7 }} {% raw %} \\u003c",
    " ",
    "",
]


def odd_text(token: int) -> str:
    return ODD[token % len(ODD)]


def traced(target=None, **options):
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    return na.trace(case.model, TOKENS, target, **options)


def odd_trace():
    """A trace whose vocabulary, target and model have odd names."""
    trace = traced(9)
    vocabulary = copy.copy(trace.vocabulary)
    vocabulary.text = odd_text
    vocabulary.quoted = lambda token: repr(odd_text(token))
    trace.view.name = "<i>model</i>"
    return dataclasses.replace(trace, vocabulary=vocabulary, target=resolve_target(9, vocabulary))


def written(trace, tmp_path, **options):
    path = tmp_path / "page.html"
    assert na.report(trace, path, k=K, controls=CONTROLS, **options) == path
    text = path.read_text(encoding="utf-8")
    return SimpleNamespace(path=path, trace=trace, text=text, document=page_reader.read(text))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return written(traced(9), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return written(odd_trace(), tmp_path_factory.mktemp("odd"))


@pytest.fixture(params=["plain", "odd"])
def page(request):
    return request.getfixturevalue(request.param)


def rows(page, table: str) -> list[list[page_reader.Element]]:
    body = page.document.one("table", id=f"table-{table}").one("tbody")
    return [row.all("th", "td") for row in body.all("tr")]


def column(page, table: str, name: str) -> list[float]:
    """The numbers that a column is sorted by."""
    headers = page.document.one("table", id=f"table-{table}").one("thead").all("th")
    [place] = [i for i, header in enumerate(headers) if header.text.strip() == name]
    return [float(row[place].attributes["data-value"]) for row in rows(page, table)]


def script(page, id_: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(page.document.one("script", id=id_).text, parse_constant=refuse)


# --- what it holds


def test_tables_hold_what_the_library_finds(plain):
    trace = plain.trace
    for kind in ("mlp", "attn"):
        ranked = na.value_neurons(trace, kind, k=K)
        assert [row[0].text.strip() for row in rows(plain, f"{kind}-neurons")] == [str(neuron) for neuron in ranked]
        assert column(plain, f"{kind}-neurons", "score") == pytest.approx(ranked.scores.tolist(), abs=1e-6)
    query = na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=K)
    assert [row[0].text.strip() for row in rows(plain, "query-neurons")] == [str(neuron) for neuron in query]
    layers = na.layer_scores(trace)
    assert column(plain, "layers", "attention") == pytest.approx(layers.attn.tolist(), abs=1e-6)
    assert column(plain, "layers", "MLP") == pytest.approx(layers.mlp.tolist(), abs=1e-6)
    heads = na.head_scores(trace).top(K)
    assert [row[0].text.strip() for row in rows(plain, "heads")] == [str(head) for head, _ in heads]
    read = [na.position_scores(trace, head.layer, head.head) for head, _ in heads]
    assert column(plain, "heads", "at position") == [int(scores.argmax()) for scores in read]
    assert column(plain, "positions", "score") == pytest.approx(na.source_scores(trace).sum(0).tolist(), abs=1e-6)


def test_neurons_are_listed_with_the_tokens_they_promote(plain):
    ranked = na.value_neurons(plain.trace, "mlp", k=K)
    pushed = na.promoted_tokens(plain.trace, ranked, k=5)
    for row, up, down in zip(rows(plain, "mlp-neurons"), pushed.up, pushed.down, strict=True):
        for cell, expected in zip(row[-2:], (up, down), strict=True):
            assert [token.text for token in cell.all("bdi")] == [repr(token) for token, _ in expected]


def test_each_token_shows_what_attention_brings_from_it(plain):
    chips = plain.document.one("ol", class_="chips").all("li")
    scores = na.source_scores(plain.trace).sum(0).tolist()
    assert [chip.one("span", class_="score").text for chip in chips] == [f"{score:+.2f}" for score in scores]
    assert ["aria-current" in chip.attributes for chip in chips] == [False] * (len(TOKENS) - 1) + [True]
    largest = max(scores, key=abs)
    assert chips[scores.index(largest)].attributes["data-shade"] == ("p5" if largest > 0 else "n5")


def test_prediction_has_the_target_with_its_rank(plain):
    log_probs = plain.trace.log_probs
    by_role = {row[-1].text.strip(): row for row in rows(plain, "prediction")}
    rank, probability = (float(cell.attributes["data-value"]) for cell in by_role["target"][1:3])
    assert rank == 1 + int((log_probs > log_probs[9]).sum())
    assert probability == pytest.approx(float(log_probs[9].exp()))
    assert len(rows(plain, "prediction")) == 5 + (rank > 5)


def test_ablation_check_is_that_of_the_library(plain):
    trace = plain.trace
    ranked = [na.value_neurons(trace, "mlp", k=K), na.value_neurons(trace, "attn", k=K)]
    ranked.append(na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=K))
    curves = [
        na.ablation_curve(trace, neurons, sizes=[1, 2, 3], controls=CONTROLS, progress=False) for neurons in ranked
    ]
    effects = [curve.summary(K)[0] for curve in curves]
    assert column(plain, "ablations", "change") == pytest.approx([effect.change for effect in effects])
    assert column(plain, "ablations", "random: mean") == pytest.approx([effect.control_change for effect in effects])


def test_query_neurons_at_the_first_token_are_zeroed_apart(tmp_path):
    trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
    page = SimpleNamespace(
        document=page_reader.read(na.report(trace, tmp_path / "p.html", k=10, controls=2).read_text())
    )
    query = na.query_neurons(trace, na.value_neurons(trace, "attn", k=30), k=10)
    first = [neuron for neuron, pos in zip(query, query.columns["pos"], strict=True) if pos == 0]
    rest = [neuron for neuron in query if neuron not in first]
    assert len(first) == 2
    changes = [
        na.ablation_curve(trace, part, sizes=[len(part)], progress=False).summary(len(part))[0].change
        for part in (first, rest)
    ]
    assert column(page, "ablations", "change")[3:] == pytest.approx([float(change) for change in changes], abs=1e-3)
    names = [row[0].text.strip() for row in rows(page, "ablations")][3:]
    assert names == ["2 query neurons, most at the first token", "8 query neurons, the others"]
    card = page.document.one("ul", class_="findings").all("li")[-1].text
    assert f"the 2 at the first token alone: {float(changes[0]):+.2f}" in card
    summed = re.search(r"embedding (.*), attention (.*), MLP (.*) = log-probability (\S+)", findings_text(page))
    parts = [float(part) for part in summed.groups()]
    assert sum(parts[:3]) == pytest.approx(parts[3], abs=0.02)
    assert "attention sink" in page.document.one("section", id="prompt").text
    flow = next(each for each in page.document.all("figcaption") if "From query neurons" in each.text)
    assert re.search(r"Lines below 1 % of the strongest are left out \(\d+\)", flow.text)


def findings_text(page) -> str:
    return " ".join(small.text for small in page.document.one("ul", class_="findings").all("small"))


def test_a_full_disk_leaves_what_was_there(monkeypatch, tmp_path):
    def full(path, data):
        path.write_bytes(data[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(whole_file, "write_bytes", full)
    (tmp_path / "page.html").write_text("before")
    with pytest.raises(OSError, match="no space left"):
        na.report(traced(9), tmp_path / "page.html", k=1, controls=0)
    with pytest.raises(OSError, match="no space left"):
        na.value_neurons(traced(9), "mlp", k=1).to_json(tmp_path / "neurons.json")
    assert (tmp_path / "page.html").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    whole_file.write_text_whole(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    whole_file.write_text_whole(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_it_says_how_it_was_made(plain):
    shown = {pair.one("dt").text: pair.one("dd").text for pair in plain.document.one("dl", class_="short").all("div")}
    assert shown["model"] == plain.trace.view.name
    assert shown["convention"] == "exact"
    assert f"{CONTROLS} random draws, seed 0" in shown["ablation"]
    assert shown["tl_neuron_attr"] == na.__version__
    assert shown["torch"] == torch.__version__.partition("+")[0] or shown["torch"] == torch.__version__
    assert "written" in shown and "Python" in shown
    assert "Eq. 13" in plain.document.one("section", id="definitions").text


def test_numbers_can_be_saved(plain):
    numbers = script(plain, "numbers")
    assert numbers["schema"] == "tl_neuron_attr.explanation"
    assert len(numbers["mlp_neurons"]["neurons"]) == K


def test_figures_are_those_of_plots(plain):
    drawn = {figure["id"]: figure for figure in script(plain, "figures")}
    assert len(drawn) == 7 + 3
    expected = json.loads(na.plots.layers(na.layer_scores(plain.trace)).to_json(engine="json"))
    assert drawn["layers"]["data"] == expected["data"]
    figures = plain.document.all("figure")
    assert {figure.one("div", class_="plot").attributes["id"] for figure in figures} == {
        f"figure-{id_}" for id_ in drawn
    }


@pytest.mark.any_release
@pytest.mark.parametrize(
    ("target", "title", "meaning"),
    [
        (na.Contrast(9, 4), "'t9' rather than 't4'", "T = log p(a) - log p(b) with a - b = 't9' - 't4'"),
        (na.AnyOf([9, 4]), "'t9' or 't4'", "T = log of the summed probability of 't9' | 't4'"),
    ],
)
def test_other_targets(tmp_path, target, title, meaning):
    trace = traced(target, position=3, convention="paper")
    na.report(trace, tmp_path / "page.html", k=1, controls=0)
    document = page_reader.read((tmp_path / "page.html").read_text(encoding="utf-8"))
    heading = " ".join(document.one("h1").text.split())
    assert heading.endswith(title.replace("'", ""))
    assert meaning in document.one("section", id="definitions").text
    assert "random:" not in document.one("table", id="table-ablations").text
    chips = document.one("ol", class_="chips").all("li")
    assert [chip.attributes["data-shade"] == "later" for chip in chips] == [i > 3 for i in range(len(TOKENS))]


@pytest.mark.any_release
@pytest.mark.parametrize("position", [0, 1, 2])
def test_heading_is_what_the_model_had_read(tmp_path, position):
    case = zoo.case("gpt2", zoo.BACKENDS[0])
    steps = na.trace_continuation(case.model, "t5", [9, 4], prepend_bos=False)
    trace = [*steps, na.trace(case.model, "t5 t17 t3", 9)][position]
    na.report(trace, tmp_path / "page.html", k=1, controls=0)
    document = page_reader.read((tmp_path / "page.html").read_text(encoding="utf-8"))
    read = ["t5", "t5t9", "t5 t17 t3"][position]
    answer = ["t9", "t4", "t9"][position]
    assert " ".join(document.one("h1").text.split()) == f"{read} → {answer}"


@pytest.mark.any_release
def test_a_target_of_many_tokens_is_named_by_some(tmp_path):
    na.report(traced(na.AnyOf(range(96))), tmp_path / "page.html", k=1, controls=0)
    document = page_reader.read((tmp_path / "page.html").read_text(encoding="utf-8"))
    main = [*document.all("h1", "title", "figcaption", "caption"), document.one("ul", class_="findings")]
    texts = [" ".join(each.text.split()) for each in main]
    assert texts[1].endswith("t0 or t1 or t2 or t3 or t4 or one of 91 more")
    assert max(map(len, texts)) < 400 and not any("t60" in text for text in texts)
    assert "'t3' | 't4' and 91 more" in texts[-1]
    assert all("t60" not in part.attributes["aria-label"] for part in document.all("div", class_="plot"))
    assert len(rows(types.SimpleNamespace(document=document), "prediction")) == 96


@pytest.mark.any_release
def test_a_contrast_is_not_called_a_log_probability(tmp_path):
    na.report(traced(na.Contrast(9, 4)), tmp_path / "page.html", k=1, controls=0)
    document = page_reader.read((tmp_path / "page.html").read_text(encoding="utf-8"))
    headers = [header.one("button") for header in document.one("table", id="table-ablations").all("th", scope="col")]
    assert "log-probability difference" in [header.text for header in headers]
    hints = {header.text: header.attributes.get("title") for header in headers}
    assert hints["probability"].startswith("of 't9', before ") and hints["rank"].startswith("of 't9', before ")
    plots = document.one("section", id="ablation").all("div", class_="plot")
    for plot in plots:
        assert plot.attributes["aria-label"].startswith("Change of the target's log-probability difference in nats")


def test_repeated_tokens_are_told_apart_by_their_position(plain):
    best, _ = na.head_scores(plain.trace).top(1)[0]
    scores = na.position_scores(plain.trace, best.layer, best.head)
    high, low = int(scores.argmax()), int(scores.argmin())
    alternative = plain.document.one("div", id="figure-head-positions").attributes["aria-label"]
    tokens = plain.trace.str_tokens
    assert f"the highest token {high} {tokens[high]!r} (" in alternative
    assert f"the lowest token {low} {tokens[low]!r} (" in alternative
    assert f"reads most from {tokens[high]!r} at position {high}" in plain.document.one("ul", class_="findings").text


@pytest.mark.any_release
def test_every_layer_has_its_place_in_the_counts(monkeypatch, tmp_path):
    whole = story.Rankings.of(trace := traced(9), 300)
    first = next(i for i, neuron in enumerate(whole.mlp) if neuron.layer == 0)
    low = dataclasses.replace(whole, mlp=whole.mlp[first : first + 1], query=whole.query.top(1))
    assert max(neuron.layer for neuron in [*low.mlp, *low.query]) < trace.view.n_layers - 1
    monkeypatch.setattr(story.Rankings, "of", lambda trace, k: low)
    page = written(trace, tmp_path)
    [counts] = [figure for figure in script(page, "figures") if figure["id"] == "neurons-per-layer"]
    assert [len(part["y"]) for part in counts["data"]] == [trace.view.n_layers] * 2


@pytest.mark.any_release
def test_the_same_trace_gives_the_same_page(tmp_path):
    trace = traced(9)
    pages = [na.report(trace, tmp_path / name, k=1, controls=1).read_text(encoding="utf-8") for name in ("a", "b")]
    one, other = (re.sub(r"<dd>[0-9-]+ [0-9:]+ UTC</dd>", "", page) for page in pages)
    assert one == other and one != pages[0]


@pytest.mark.any_release
def test_a_page_leaves_the_model_and_the_settings_as_they_were(tmp_path):
    trace = traced(9)
    model, hits = trace.model, []
    model.add_hook("blocks.1.hook_resid_pre", lambda tensor, hook: hits.append(1))
    try:
        trace = na.trace(model, TOKENS, 9)
        hooks = [len(point.fwd_hooks) for point in model.hook_dict.values()]
        with torch.enable_grad():
            na.report(trace, tmp_path / "page.html", k=1, controls=1)
            assert torch.is_grad_enabled()
            with pytest.raises(ValueError, match="ask for fewer neurons or no controls"):
                na.report(trace, tmp_path / "page.html", k=1000, controls=1)
        assert [len(point.fwd_hooks) for point in model.hook_dict.values()] == hooks and sum(hooks) > 0
        assert hits and not model.training
        assert not [name for name, weight in model.named_parameters() if weight.grad is not None]
    finally:
        model.reset_hooks()


# --- for every reader


def test_structure(page):
    document = page.document
    assert page.text.startswith("<!DOCTYPE html>\n")
    assert document.one("html").attributes["lang"] == "en"
    assert len(document.all("h1")) == len(document.all("main")) == len(document.all("title")) == 1
    assert len(document.one("body").all("header")) == len(document.all("footer")) == 1
    assert document.one("nav").attributes["aria-label"]
    assert "width=device-width" in (document.one("meta", name="viewport").attributes["content"] or "")
    assert document.one("meta", name="color-scheme").attributes["content"] == "light dark"


def test_references_inside_the_page_resolve(page):
    ids = [element.attributes["id"] for element in page.document.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in page.document.all():
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((element.attributes.get(name) or "").split()) <= set(ids)
        if element.tag == "a":
            assert (element.attributes["href"] or "").removeprefix("#") in ids
    for section in page.document.all("section"):
        assert section.attributes["aria-labelledby"]


def test_tables_are_labelled_and_sort_by_buttons(page):
    tables = page.document.all("table")
    assert len(tables) == 9
    for table in tables:
        assert table.one("caption").text.strip()
        headers = table.one("thead").all("th")
        for header in headers:
            assert header.attributes["scope"] == "col"
            assert header.one("button").text.strip()
            assert header.one("button").attributes["type"] == "button"
        assert sum("aria-sort" in header.attributes for header in headers) <= 1
        for row in table.one("tbody").all("tr"):
            cells = row.all("th", "td")
            assert len(cells) == len(headers)
            assert [cell.attributes.get("scope") for cell in cells] == ["row"] + [None] * (len(headers) - 1)
    for box in page.document.all("div", class_="scroll"):
        assert box.attributes["tabindex"] == "0" and box.attributes["role"] == "region"


def test_tables_are_in_the_order_that_they_claim(page):
    for table in page.document.all("table"):
        for header in table.one("thead").all("th"):
            order = header.attributes.get("aria-sort")
            if order is not None:
                id_ = (table.attributes["id"] or "").removeprefix("table-")
                numbers = column(page, id_, header.text.strip())
                assert numbers == sorted(numbers, reverse=order == "descending")


def test_figures_have_text_alternatives(page):
    for figure in page.document.all("figure"):
        plot = figure.one("div", class_="plot")
        assert figure.one("figcaption").text.strip()
        assert plot.attributes["role"] == "img" and len(plot.attributes["aria-label"] or "") > 40
        assert figure.one("noscript").text.strip() == plot.attributes["aria-label"]


# --- nothing odd gets through, nothing leaves


def test_odd_tokens_are_text(odd):
    texts = [chip.one("bdi").text for chip in odd.document.one("ol", class_="chips").all("li")]
    assert texts == ["".join(piece for _, piece in build.segments(odd_text(token))) for token in TOKENS]
    sources = [row[1].text.strip() for row in rows(odd, "positions")]
    assert sources == [repr(odd_text(token)) for token in TOKENS]
    assert odd.document.one("p", class_="kicker").text.endswith("<i>model</i>")
    assert repr(odd_text(9)) in odd.document.one("title").text


def test_odd_tokens_make_no_elements(plain, odd):
    def tags(page):
        return [
            element.tag for element in page.document.all() if element.tag not in ("bdi", "span", "tr", "td", "th")
        ]

    assert not {"a", "i", "script"} & {element.tag for element in odd.document.one("main").all()}
    assert len(odd.document.all("script")) == len(plain.document.all("script")) == 4
    assert odd.text.count("</script") == 4
    assert set(tags(odd)) == set(tags(plain))
    handlers = [name for element in odd.document.all() for name in element.attributes if name.startswith("on")]
    assert handlers == []


def test_no_raw_control_characters(odd):
    own = odd.text.replace(build._plotly_js(), "")
    assert [letter for letter in set(own) if not letter.isprintable()] == ["\n"]


def test_json_in_scripts_has_no_markup(page):
    for id_ in ("figures", "numbers"):
        raw = page.document.one("script", id=id_).text
        assert raw.isascii() and not set("<>&") & set(raw)
        script(page, id_)
    assert script(page, "numbers")["provenance"]["str_tokens"] == list(page.trace.str_tokens)


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("ab", [(True, "ab")]),
        ("a\n b", [(True, "a"), (False, "\\n"), (True, " b")]),
        ("\u202e\ud800", [(False, "\\u202e\\ud800")]),
        ("", []),
    ],
)
def test_what_does_not_print_is_an_escape(text, segments):
    assert build.segments(text) == segments


def test_policy_names_the_scripts_and_nothing_else(page):
    [meta] = [m for m in page.document.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in (meta.attributes["content"] or "").split("; "))
    run = [element for element in page.document.all("script") if "type" not in element.attributes]
    hashes = [base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode() for element in run]
    assert rules["script-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert len(hashes) == 2
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert not [name for name in rules if name not in ("default-src", "script-src", "style-src", "img-src")][2:]


def test_nothing_is_loaded(page):
    for element in page.document.all():
        assert "src" not in element.attributes and "srcset" not in element.attributes
        if element.tag == "link":
            assert element.attributes["href"] == "data:,"
        if element.tag != "a" and element.tag != "link":
            assert "href" not in element.attributes
    style = page.document.one("style").text
    assert not re.search(r"url\(|@import|https?:", style)


def test_size(page):
    assert page.path.stat().st_size < 8_000_000
    assert page.text.count(build._plotly_js()) == 1


def test_scripts_that_end_early_are_mended(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: 'a = "</script>";\r\nb = 1;\r')
    assert build._plotly_js.__wrapped__() == 'a = "<\\/script>";\nb = 1;\n'


# --- what it refuses


@pytest.fixture
def no_work(monkeypatch):
    """Gathering is an error: what is refused here is refused before any work."""

    def refuse(*args, **options):
        raise AssertionError("work was done")

    monkeypatch.setattr(sys.modules["tl_neuron_attr.report"], "tell", refuse)
    return traced(9)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("", IsADirectoryError, r"cannot write .*: it is a folder; give a file name"),
        ("none/page.html", FileNotFoundError, r"cannot write .*page.html: there is no folder .*none"),
    ],
)
def test_unwritable_paths_are_refused_before_any_work(no_work, tmp_path, path, error, message):
    with pytest.raises(error, match=message):
        na.report(no_work, tmp_path / path)


def test_missing_permission_is_refused_before_any_work(no_work, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"cannot write .*page.html: permission denied"):
        na.report(no_work, tmp_path / "page.html")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k": 0}, "k is 0"), ({"n_tokens": 0}, "n_tokens is 0"), ({"controls": -1}, "controls is -1")],
)
def test_bad_numbers_are_refused_before_any_work(no_work, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        na.report(no_work, tmp_path / "page.html", **options)
    assert not list(tmp_path.iterdir())
