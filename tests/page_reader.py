"""A page as its elements, read with the standard library's parser."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    """A tag, its attributes and what is in it."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, *tags: str, **attributes: str) -> list["Element"]:
        """Every element inside with one of these tags and these attributes (`data_x` for `data-x`)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if isinstance(child, Element):
                fits = all(child.attributes.get(name) == value for name, value in wanted.items())
                found += [child] * (fits and (not tags or child.tag in tags)) + child.all(*tags, **attributes)
        return found

    def one(self, *tags: str, **attributes: str) -> "Element":
        """The only such element."""
        found = self.all(*tags, **attributes)
        assert len(found) == 1, (tags, attributes, len(found))
        return found[0]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document")]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        assert len(element.attributes) == len(attrs), (tag, attrs)
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag):
        closed = self.open.pop()
        assert closed.tag == tag, f"<{closed.tag}> is closed by </{tag}>"

    def handle_data(self, data):
        self.open[-1].children.append(data)


def read(html: str) -> Element:
    """The document; an AssertionError where tags do not match."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert [element.tag for element in reader.open] == ["document"]
    return reader.open[0]
