"""Knowledge prompts: the package's facts, prompts from files, and which of them a model can answer."""

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from guards import as_users_run_it, unchanged

import tl_neuron_attr as na
from tl_neuron_attr.answers import VERDICTS
from tl_neuron_attr.knowledge import TYPES

DATA = Path(na.__file__).parent / "data"

# The data


@pytest.fixture(params=TYPES)
def of_type(request: pytest.FixtureRequest) -> list[na.KnowledgePrompt]:
    return na.load_knowledge([request.param])


def test_enough_prompts_from_several_templates(of_type: list[na.KnowledgePrompt]) -> None:
    assert len(of_type) >= 150
    per_template = Counter(prompt.template for prompt in of_type)
    assert len([n for n in per_template.values() if n >= 10]) >= 3
    assert len({prompt.type for prompt in of_type}) == 1
    assert len({prompt.answer for prompt in of_type}) >= 10


def test_prompts_are_their_templates_and_never_hold_their_answer(of_type: list[na.KnowledgePrompt]) -> None:
    for prompt in of_type:
        assert prompt.template.count("{}") == 1
        assert prompt.prompt == prompt.template.format(prompt.subject)
        assert re.fullmatch(r" [A-Za-z]+", prompt.answer), prompt
        words = re.findall(r"\w+", prompt.prompt.lower())
        assert not [word for word in words if word.startswith(prompt.answer.strip().lower())], prompt
        assert re.fullmatch(r"\S+( \S+)*", prompt.prompt), prompt


def test_no_prompt_comes_twice() -> None:
    counts = Counter(prompt.prompt for prompt in na.load_knowledge())
    assert [text for text, n in counts.items() if n > 1] == []


def test_answers_of_a_subject_agree_between_templates_that_ask_the_same() -> None:
    """Whatever the template, a country's capital, a city's country, a thing's colour and so on are the same."""
    same = {
        "capital": ["The capital of {} is", "The capital city of {} is called", "The name of the capital of {} is"],
        "language": ["The main language spoken in {} is", "Most people in {} speak"],
        "country": ["The city of {} is in", "{} is a city in the country of"],
        "colour": ["The color of {} is", "The usual color of {} is"],
        "number": ["How many {} are there? There are", "If you count the {}, you will find that there are"],
        "month": ["The month after {} is", "The month that follows {} is"],
    }
    for type_, templates in same.items():
        answers: list[dict[str, str]] = [
            {p.subject: p.answer for p in na.load_knowledge([type_]) if p.template == template}
            for template in templates
        ]
        assert answers[0]
        assert all(other == answers[0] for other in answers)


NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def test_sums_and_calendar_are_right_by_counting() -> None:
    signs = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    sums = [p for p in na.load_knowledge(["number"]) if p.template == "{} equals"]
    assert len(sums) > 40
    for prompt in sums:
        left, sign, right = prompt.subject.lower().split()
        value = signs[sign](NUMBERS.index(left), NUMBERS.index(right))
        assert prompt.answer == f" {NUMBERS[value]}", prompt
    steps = {"after": 1, "follows": 1, "before": -1}
    counted = 0
    for prompt in na.load_knowledge(["month"]):
        step = next((steps[word] for word in prompt.template.split() if word in steps), 0)
        if step:
            expected = MONTHS[(MONTHS.index(prompt.subject) + step) % 12]
            assert prompt.answer == f" {expected}", prompt
            counted += 1
    assert counted == 48


FACTS = {
    "The capital of Australia is": "Canberra",
    "The capital of Turkey is": "Ankara",
    "The capital city of Canada is called": "Ottawa",
    "The name of the capital of New Zealand is": "Wellington",
    "The capital of Morocco is": "Rabat",
    "The capital of the state of Georgia is": "Atlanta",
    "The main language spoken in Brazil is": "Portuguese",
    "Most people in Iran speak": "Persian",
    "Don Quixote was originally written in": "Spanish",
    "The Tale of Genji was originally written in": "Japanese",
    "The native language of Niels Bohr is": "Danish",
    'The phrase "Kiitos" is how people say thanks in': "Finnish",
    "The city of Gothenburg is in": "Sweden",
    "Mosul is a city in the country of": "Iraq",
    "Machu Picchu is located in the country of": "Peru",
    "Petra is located in the country of": "Jordan",
    "The color of an emerald is": "green",
    "Crimson is a shade of the color": "red",
    "Mixing yellow and blue paint gives the color": "green",
    "The color of the cross on the flag of Finland is": "blue",
    "How many legs of a spider are there? There are": "eight",
    "How many holes on a golf course are there? There are": "eighteen",
    "How many lines in a sonnet are there? There are": "fourteen",
    "How many edges of a cube are there? There are": "twelve",
    "How many protons in a carbon atom are there? There are": "six",
    "Every year, Halloween comes in the month of": "October",
    "Each year, Bastille Day falls in": "July",
    "The Apollo 11 moon landing of 1969 happened in the month of": "July",
    "The fall of the Berlin Wall in 1989 happened in the month of": "November",
    "The birthstone garnet belongs to the month of": "January",
    "Abraham Lincoln was born in the month of": "February",
    "In the calendar, the ninth month is called": "September",
}


def test_spot_facts() -> None:
    known = {prompt.prompt: prompt.answer.strip() for prompt in na.load_knowledge()}
    assert {text: known.get(text) for text in FACTS} == FACTS


def test_types_in_the_order_asked_for() -> None:
    assert list(dict.fromkeys(p.type for p in na.load_knowledge())) == list(TYPES)
    found = na.load_knowledge(["month", "capital", "month"])
    assert list(dict.fromkeys(p.type for p in found)) == ["month", "capital"]
    assert len(found) == len(na.load_knowledge(["capital"])) + len(na.load_knowledge(["month"]))


@pytest.mark.parametrize("types", [["capitals"], [], ["month", "Paris"]], ids=str)
def test_unknown_types(types: list[str]) -> None:
    rule = f"types={types}: choose one or more of language, capital, country, colour, number, month"
    with pytest.raises(ValueError, match=re.escape(rule)):
        na.load_knowledge(types)


def test_data_are_read_as_a_users_file_too() -> None:
    found, bad = na.read_prompts(DATA / "colour.jsonl")
    assert (found, bad) == (na.load_knowledge(["colour"]), [])


# Prompts from files


def read(tmp_path: Path, name: str, content: str | bytes, **options: Any) -> tuple[list[Any], dict[int, str]]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found, bad = na.read_prompts(path, **options)
    assert len({line.line for line in bad}) == len(bad)
    return found, {line.line: line.reason for line in bad}


GOOD = {"prompt": "The capital of France is", "answer": " Paris"}
PARIS = na.KnowledgePrompt("The capital of France is", " Paris")


def test_bad_lines_of_jsonl_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    lines = [
        good,
        b"{'prompt': 1}",
        b'["a", "b"]',
        b"null",
        b'{"prompt": "x"}',
        b'{"prompt": "x", "answer": 5}',
        b'{"prompt": "x", "answer": "  "}',
        b'{"prompt": "", "answer": "y"}',
        b'{"prompt": "The capital is ", "answer": "y"}',
        b'{"prompt": "caf\xe9", "answer": "y"}',
        b'{"prompt": "x", "answer": "\\ud800"}',
        b'{"prompt": "x", "answer": "y", "type": ["z"]}',
        b"",
        b"   ",
        good[:-1] + b', "type": "capital", "subject": "France", "template": "t", "more": 3}',
        good.replace(b'" Paris"', b'"Paris"'),
        b'{"prompt": "x", "answer": null}',
    ]
    found, bad = read(tmp_path, "mine.jsonl", b"\xef\xbb\xbf" + b"\r\n".join(lines))
    typed = na.KnowledgePrompt(PARIS.prompt, PARIS.answer, "capital", "France", "t")
    assert found == [PARIS, typed, PARIS]
    assert bad == {
        2: "not JSON: Expecting property name enclosed in double quotes at place 2 of the line",
        3: 'the line is a list: give an object, {"prompt": ..., "answer": ...}',
        4: 'the line is null: give an object, {"prompt": ..., "answer": ...}',
        5: "there is no answer",
        6: "the answer is a number, 5: give a string",
        7: "the answer is empty",
        8: "the prompt is empty",
        9: "the prompt ends in a space: the space before the answer belongs to the answer's token",
        10: "not UTF-8: byte 0xe9 at place 16 of the line",
        11: "the answer holds half of a surrogate pair, which is no letter",
        12: "the type is a list, ['z']: give a string",
        17: "there is no answer",
    }


def test_bad_lines_of_csv_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    text = '\ufefftype, prompt ,answer\ncapital,The capital of France is,Paris\n\n,"Well, it is","""q"" y"\n'
    text += (
        'capital,only two\na,b,c,d\n,,y\n,"two\nlines",y\n,"never closed,y\n,after,\u2028 z\n,"x"y,z\n,3" disk,y\n'
    )
    content = text.encode() + b",caf\xe9,y\n,last,y"
    found, bad = read(tmp_path, "mine.CSV", content)
    assert found == [
        na.KnowledgePrompt("The capital of France is", " Paris", "capital"),
        na.KnowledgePrompt("Well, it is", ' "q" y'),
        na.KnowledgePrompt("two\nlines", " y"),
        na.KnowledgePrompt("after", "\u2028 z"),
        na.KnowledgePrompt('3" disk', " y"),
        na.KnowledgePrompt("last", " y"),
    ]
    assert bad == {
        5: "2 fields where the header names 3: put text that holds a comma in quotes",
        6: "4 fields where the header names 3: put text that holds a comma in quotes",
        7: "the prompt is empty",
        10: "a quote is opened and never closed",
        12: "not CSV: ',' expected after '\"'",
        14: "not UTF-8: byte 0xe9 at place 5 of the line",
    }


def test_a_space_before_the_answer_is_put_unless_asked_not_to(tmp_path: Path) -> None:
    content = "prompt,answer\nx,y\nx, y\n"
    assert [p.answer for p in read(tmp_path, "a.csv", content)[0]] == [" y", " y"]
    assert [p.answer for p in read(tmp_path, "a.csv", content, leading_space=False)[0]] == ["y", " y"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.txt",
            "x",
            "a.txt ends in '.txt': prompts come as .jsonl, one JSON object a line, or as .csv with a header",
        ),
        (
            "a.csv",
            "prompt;answer\nx;y\n",
            "the header of a.csv names the columns ['prompt;answer']: it must name prompt and answer, and no column "
            "twice, with commas between",
        ),
        (
            "a.csv",
            "",
            "the header of a.csv names the columns []: it must name prompt and answer, and no column twice, with "
            "commas between",
        ),
        (
            "a.csv",
            "prompt,answer,answer\n",
            "the header of a.csv names the columns ['prompt', 'answer', 'answer']: it must name prompt and answer, "
            "and no column twice, with commas between",
        ),
        (
            "a.csv",
            b"\xff\xfep\x00",
            "the header of a.csv, line 1, cannot be read: not UTF-8: byte 0xff at place 1 of the line",
        ),
    ],
)
def test_files_that_cannot_be_read_at_all(tmp_path: Path, name: str, content: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        read(tmp_path, name, content)


def test_an_empty_jsonl_file_and_a_missing_one(tmp_path: Path) -> None:
    assert read(tmp_path, "a.jsonl", "") == ([], {})
    with pytest.raises(FileNotFoundError):
        na.read_prompts(tmp_path / "none.jsonl")


# Which prompts a model can answer


FEW = [pytest.param(case, id="-".join(case)) for case in zoo.CASES if case[0] in ("gpt2", "llama_gqa")]


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest) -> zoo.ZooCase:
    return zoo.case(*request.param)


def next_log_probs(model: Any, text: str) -> torch.Tensor:
    with torch.no_grad():
        return model(model.to_tokens(text))[0, -1].double().log_softmax(-1)


def some_prompts(model: Any) -> list[na.KnowledgePrompt]:
    """Random words; answers of rank 1 to 14 of two types and of none, and some that are not one token."""
    draw = random.Random(0)
    d_vocab = next_log_probs(model, "t5").shape[0]
    prompts: list[na.KnowledgePrompt] = []
    for i in range(60):
        text = " ".join(f"t{draw.randrange(2, d_vocab)}" for _ in range(draw.randint(1, 5)))
        token = int(next_log_probs(model, text).sort(descending=True).indices[draw.randrange(14)])
        answer = f"t{token}" if i % 10 else "t3 t4"
        prompts.append(na.KnowledgePrompt(text, answer, ("a", "b", "")[i % 3]))
    return prompts


def verdict_by_loop(model: Any, prompt: na.KnowledgePrompt, prompts: list[na.KnowledgePrompt]) -> str:
    if " " in prompt.answer:
        return "not one token"
    log_probs = next_log_probs(model, prompt.prompt).tolist()
    own = log_probs[int(prompt.answer[1:])]
    if len([value for value in log_probs if value > own]) >= 10:
        return "not in the top 10"
    for other in prompts:
        words_differ = other.answer != prompt.answer and " " not in other.answer
        if prompt.type and other.type == prompt.type and words_differ and log_probs[int(other.answer[1:])] >= own:
            return "below another word"
    return "answerable"


def test_answerable_is_the_rule_in_a_plain_loop(few: zoo.ZooCase) -> None:
    prompts = some_prompts(few.model)
    expected = [verdict_by_loop(few.model, prompt, prompts) for prompt in prompts]
    assert set(expected) == set(VERDICTS)
    with unchanged(few.model):
        found = na.check_answers(few.model, prompts, batch_size=4, progress=False)
    assert [answer.verdict for answer in found.answers] == expected
    assert [answer.prompt for answer in found.answers] == prompts
    kept = [prompt for prompt, verdict in zip(prompts, expected, strict=True) if verdict == "answerable"]
    assert found.answerable == kept
    assert na.answerable(few.model, iter(prompts), batch_size=1, progress=False) == kept
    for answer in found.answers:
        if answer.verdict == "not one token":
            assert (answer.rank, answer.probability, answer.other) == (None, None, None)
            continue
        log_probs = next_log_probs(few.model, answer.prompt.prompt)
        own = log_probs[int(answer.prompt.answer[1:])]
        assert answer.rank == 1 + int((log_probs > own).sum())
        assert answer.probability == pytest.approx(float(own.exp()), rel=1e-3)
        assert (answer.other is None) == (answer.prompt.type == "")
        if answer.other is not None:
            assert (answer.verdict == "answerable") <= bool(log_probs[int(answer.other[1:])] < own)
    counts = found.counts().set_index("type")
    assert counts["prompts"].tolist() == [20, 20, 20]
    assert counts[list(VERDICTS)].sum(axis=1).tolist() == [20, 20, 20]
    assert counts["answerable"].sum() == len(kept)
    frame = found.to_frame()
    columns = ["prompt", "answer", "type", "subject", "template", "verdict", "rank", "probability", "other"]
    assert frame.columns.tolist() == columns
    assert frame["verdict"].tolist() == expected
    assert repr(found).endswith(", ".join(f"{expected.count(v)} {v}" for v in VERDICTS) + ")")


@pytest.mark.parametrize("row", [0, -1])
def test_batches_that_are_wrong_are_noticed_and_prompts_run_alone(few: zoo.ZooCase, row: int) -> None:
    """A user's hook that reaches one row of a batch only."""
    prompts = [na.KnowledgePrompt(f"t{i} t{i + 1}", "t9", "a") for i in range(10, 15)]

    def one_row_of_several(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        tensor = tensor.clone()
        if len(tensor) > 1:
            tensor[row] = tensor[row].flip(-1)
        return tensor

    alone = na.check_answers(few.model, prompts, batch_size=1, progress=False)
    noticed = pytest.warns(na.BatchingWarning, match=r"5 prompts of \d tokens run as one batch do not give")
    with few.model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", one_row_of_several)]), noticed:
        found = na.check_answers(few.model, prompts, progress=False)
    assert found.answers == alone.answers


def test_what_answerable_refuses(few: zoo.ZooCase) -> None:
    good = na.KnowledgePrompt("t5", "t6")
    for prompts, options, text in (
        ([], {}, "no prompts are given: load_knowledge() has some"),
        ([good, na.KnowledgePrompt("", "t6")], {}, "prompts[1]: the prompt is empty: give at least one token to"),
        ([good], {"batch_size": 0}, "batch_size is 0: ask for 1 or more"),
    ):
        with as_users_run_it(), pytest.raises(ValueError, match=re.escape(text)):
            na.answerable(few.model, prompts, progress=False, **options)


@functools.cache
def demo() -> Any:
    return na.load_demo_model()


@pytest.mark.any_release
def test_the_demo_model_answers_200_prompts_of_one_type_alone() -> None:
    """All words of the type and a plain loop over some of the prompts say the same."""
    prompts = na.load_knowledge(["country"])
    found = na.check_answers(demo(), prompts, progress=False)
    assert len(found.answerable) >= 200
    words = {demo().to_single_token(prompt.answer) for prompt in prompts}
    for answer in found.answers[::16]:
        log_probs = next_log_probs(demo(), answer.prompt.prompt)
        right = demo().to_single_token(answer.prompt.answer)
        in_top = right in log_probs.topk(10).indices.tolist()
        above = all(log_probs[right] > log_probs[word] for word in words - {right})
        assert (answer.verdict == "answerable") == (in_top and above), answer
