"""Text in figures: escaped, shortened, and broken into lines that fit a phone.

Plotly reads a small HTML in every text, and whatever stands between two dollar signs as LaTeX where a page has
MathJax. :func:`escaped` makes both plain text, in titles, ticks, legends and hover boxes alike. Texts are given to
hover boxes whole (``hovertext``), never as a template, in which ``%{x}`` would be replaced.
"""

import html
import re
from collections.abc import Sequence

from rich.cells import cell_len

from tl_neuron_attr import tables
from tl_neuron_attr.results import Provenance

# Units of a ranking's scores by its method; a method that is not here has scores in nats.
_UNITS = {
    "prob_increase": "probability",
    "norm": "units of the residual stream",
    "coefficient": "units of activation",
    "coefficient_norm": "units of the residual stream",
    "inverse_rank": "1 / rank",
    "coefficient_inverse_rank": "activation / rank",
    "direct_logit": "logits",
    "query_unnormalised": "nats x activation",
}


def unit_of(method: str) -> str:
    """The unit of a ranking's scores.

    >>> unit_of("log_prob_increase")
    'nats'
    """
    return _UNITS.get(method, "nats")


def escaped(text: str) -> str:
    """Text that Plotly shows as it is.

    >>> escaped("<b> & $x$")
    '&lt;b&gt; &amp; &#36;x&#36;'
    """
    return html.escape(text, quote=False).replace("$", "&#36;")


def token(text: str, width: int = 14) -> str:
    """A token as a quoted string, so that spaces and line breaks are seen; a long one's start. Not escaped.

    >>> token(" Paris"), token(" incomprehensibilities")
    ("' Paris'", "' incomprehen'...")
    """
    return repr(text) if len(text) <= width else repr(text[: width - 2]) + "..."


def shortened(text: str, width: int = 24) -> str:
    """A name's start, where it is long. Not escaped."""
    return text if len(text) <= width else text[: width - 3] + "..."


def source(origin: Provenance, position: int) -> str:
    """A position and its token, as tick text: repeated tokens differ by their position. Not escaped."""
    return f"{position} {token(origin.str_tokens[position])}"


def target(origin: Provenance, width: int = 40) -> str:
    """The target's label; of a long one the start, and of how many tokens it is one. Not escaped."""
    label, n = origin.target, len(origin.target_ids)
    if len(label) <= width:
        return label
    end = f"... ({n} tokens)" if n > 1 and width > 30 else "..."
    return label[: width - len(end)] + end


def where(origin: Provenance) -> str:
    """The prompt up to the predicting position, and the model, for the lines under a title. Not escaped."""
    read = "".join(origin.str_tokens[: origin.position + 1])
    whole = origin.position == len(origin.tokens) - 1
    return f"after {tables.quoted(origin.text if whole else read)}, {origin.model}"


def prompts(texts: Sequence[str]) -> str:
    """The only prompt, or how many prompts there are and the first of them. Not escaped."""
    first = tables.quoted(texts[0]) if texts else ""
    return f"after {first}" if len(texts) == 1 else f"means over {len(texts):,} prompts, the first {first}"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` cells of a terminal (wide characters are two), broken at spaces where there
    are any, but not at one that begins a quoted token.

    >>> wrapped("one two three", 8)
    ['one two', 'three']
    """
    lines: list[str] = []
    line = ""
    for word in re.split(r"(?<=[^'\"] )", text):
        if line and cell_len(line + word.rstrip()) > width >= cell_len(word.rstrip()):
            lines.append(line.rstrip())
            line = ""
        for char in word:
            if cell_len(line + char) > width and char != " ":
                lines.append(line)
                line = ""
            line += char
    return [*lines, line.rstrip()]


def hover(*lines: str) -> str:
    """The lines of a hover box, escaped; the first is in bold."""
    first, *rest = map(escaped, lines)
    return "<br>".join([f"<b>{first}</b>", *rest])


def number(value: float, unit: str = "") -> str:
    """A signed number with four significant digits.

    >>> number(-0.25812, "nats")
    '-0.2581 nats'
    """
    return f"{value:+.4g} {unit}".rstrip()


def names(items: Sequence[tuple[object, float]]) -> str:
    """Labels with their numbers: ``L23H4 +3.12, L29H1 +0.9``."""
    return ", ".join(f"{item} {value:+.3g}" for item, value in items)
