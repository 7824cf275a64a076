"""A story as one HTML file that needs nothing else: no request leaves the page.

Everything that comes from a model, a tokenizer or a user goes through Jinja's escaping, or into a script element as
JSON without ``<``, ``>`` and ``&``. A content security policy names the page's own two scripts by their hashes;
nothing else may run, and nothing may be loaded or sent.
"""

import base64
import functools
import hashlib
import itertools
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from tl_neuron_attr import __version__
from tl_neuron_attr.explanation import N_QUERIED
from tl_neuron_attr.page.figures import figures
from tl_neuron_attr.page.story import Story
from tl_neuron_attr.page.tables import tables
from tl_neuron_attr.page.wording import SHOWN, findings, settings, target_value
from tl_neuron_attr.plots.labels import target as label_of
from tl_neuron_attr.tables import fixed, quoted

_LEVELS = 5
_TITLE_LENGTH = 100


def page(story: Story) -> str:
    """The whole page."""
    drawn = figures(story)
    plotly_js, script, style = _plotly_js(), _resource("page.js"), _resource("page.css")
    origin = story.found.provenance
    return (
        _environment()
        .get_template("page.html")
        .render(
            quoted=quoted,
            segments=segments,
            policy=_policy(plotly_js, script),
            plotly_js=Markup(plotly_js),
            script=Markup(script),
            style=Markup(style),
            figures=drawn,
            figures_json=Markup(_for_script([_drawing(figure) for figure in drawn.values()])),
            numbers_json=Markup(_for_script(json.loads(story.found.to_json()))),
            tables=tables(story),
            prompt=_shortened(origin.read),
            target=[story.trace.vocabulary.text(token) for token in story.trace.target.positive[:SHOWN]],
            n_more=max(len(story.trace.target.positive) - SHOWN, 0),
            contrast=[story.trace.vocabulary.text(token) for token in story.trace.target.negative],
            target_label=label_of(origin),
            tokens=list(_tokens(story)),
            position=origin.position,
            findings=findings(story),
            target_value=target_value(story),
            convention=origin.convention,
            mlp=story.found.mlp,
            attn=story.found.attn,
            n_queried=N_QUERIED,
            split=bool(story.parts),
            controls=story.ablations[0].curve.protocol.controls,
            settings=settings(story),
            versions=dict(_versions()),
            model=origin.model,
            n_layers=story.trace.view.n_layers,
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("tl_neuron_attr", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def segments(text: str) -> list[tuple[bool, str]]:
    """Text cut into what prints as it is (``True``) and escapes of what does not.

    >>> segments("a\\n")
    [(True, 'a'), (False, '\\\\n')]
    """
    cut = ((plain, "".join(letters)) for plain, letters in itertools.groupby(text, str.isprintable))
    return [(plain, piece if plain else piece.encode("unicode_escape").decode("ascii")) for plain, piece in cut]


def _resource(name: str) -> str:
    return files("tl_neuron_attr.page").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    source: str = get_plotlyjs()
    # What browsers read: line ends as one character, and no text that would end the script element.
    return source.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    """Only these scripts, images made by the page itself, and inline styles, which Plotly sets on what it draws."""
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _for_script(value: object) -> str:
    """Strict JSON that can stand in a script element: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _drawing(figure: Any) -> dict[str, Any]:
    return {name: part for name, part in asdict(figure).items() if name in ("id", "data", "layout")}


def _shortened(text: str) -> str:
    return text if len(text) <= _TITLE_LENGTH else "…" + text[-_TITLE_LENGTH:]


def _tokens(story: Story) -> Iterator[dict[str, Any]]:
    """The prompt's tokens with what attention brings from each, and that as a level from -5 to 5 for its shade."""
    origin, scores = story.found.provenance, story.sources.sum(0).tolist()
    largest = max(map(abs, scores)) or 1.0
    for i, text in enumerate(origin.str_tokens):
        if i < len(scores):
            shade = round(_LEVELS * scores[i] / largest)
            yield {
                "text": text,
                "score": fixed(scores[i], 2, "+"),
                "shade": f"{'p' if shade > 0 else 'n'}{abs(shade)}",
            }
        else:
            yield {"text": text, "score": None, "shade": "later"}


def _versions() -> Iterator[tuple[str, str]]:
    yield "tl_neuron_attr", __version__
    for package in ("transformer-lens", "transformers", "torch", "plotly"):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
    yield "Python", platform.python_version()
    yield "written", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
