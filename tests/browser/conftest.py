"""Pages of the embedded model and a Chromium to look at them with. `make test-browser` runs these tests.

The browser is the machine's own: `chromium` on the path, or what the environment variable CHROMIUM names.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

import tl_neuron_attr as na

# Markup, entities, quotes, repeated tokens, line ends, directions and control characters.
ODD = "<script>alert(1)</script> the the the &amp; \"q\" 'a'\n\u2028שלום \u202e\x07 </script> <b>bold</b> is"
PROMPTS = {"paris": ("The capital of France is", " Paris"), "odd": (ODD, None)}


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The report of each prompt."""
    model, folder = na.load_demo_model(), tmp_path_factory.mktemp("pages")
    return {
        name: na.report(na.trace(model, prompt, target), folder / f"{name}.html", k=8, controls=2)
        for name, (prompt, target) in PROMPTS.items()
    }


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if executable is None:
        pytest.exit("no browser: install chromium (apt-get install chromium), or name one by CHROMIUM=/path", 2)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield launched
        launched.close()


class Opened:
    """A page in a browser that has no network, and everything that happened on it."""

    def __init__(self, browser: Browser, path: Path, **options) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.troubles: list[str] = []
        self.context.route("**/*", self._serve)
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("dialog", lambda dialog: (self._note("error", f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("popup", lambda popup: self._note("error", f"popup {popup.url}"))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def _serve(self, route: Route) -> None:
        self.requests.append(route.request.url)
        if route.request.url == self.url:
            route.continue_()
        else:
            route.abort()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(f"{kind}: {text}")

    def run(self, script: str, *arguments):
        """What JavaScript finds on the page."""
        return self.page.evaluate(script, *arguments)


@pytest.fixture
def open_page(browser, pages) -> Iterator[Callable[..., Opened]]:
    """Opens a page by name; afterwards nothing must have gone wrong on it, and nothing been asked for but itself."""
    opened: list[Opened] = []

    def opener(name: str, **options) -> Opened:
        opened.append(Opened(browser, pages[name], **options))
        return opened[-1]

    yield opener
    for each in opened:
        each.context.close()
    assert [each.troubles for each in opened] == [[]] * len(opened)
    assert [each.requests for each in opened] == [[each.url] for each in opened]


@pytest.fixture(scope="session")
def figures(pages) -> Callable[[str], list[str]]:
    """The ids of a page's figures, from its source."""

    def ids(name: str) -> list[str]:
        text = pages[name].read_text(encoding="utf-8")
        _, _, rest = text.partition('<script type="application/json" id="figures">')
        return [figure["id"] for figure in json.loads(rest.partition("</script>")[0])]

    return ids
