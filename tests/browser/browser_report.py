"""A report in Chromium: drawn, sorted, read with a keyboard, on a phone and in the dark, and never on the network.

The fixture `open_page` fails every test in which the page logs an error or asks for anything but itself.
"""

import json
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError

NAMES = ["paris", "odd"]
PHONE = {"width": 360, "height": 740}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_drawn(open_page, figures, name):
    opened = open_page(name)
    drawn = opened.run(
        """() => [...document.querySelectorAll(".plot")].map((plot) => {
          const box = plot.querySelector("svg.main-svg").getBoundingClientRect();
          const marks = [...plot.querySelectorAll("path, rect, image")].filter((mark) => {
            const { width, height } = mark.getBoundingClientRect();
            return width > 2 && height > 2;
          });
          return { id: plot.id, width: box.width, height: box.height, marks: marks.length };
        })"""
    )
    assert [each["id"] for each in drawn] and sorted(each["id"] for each in drawn) == sorted(
        f"figure-{id_}" for id_ in figures(name)
    )
    for each in drawn:
        assert each["width"] > 200 and each["height"] > 100 and each["marks"] >= 4, each


def test_scrolling_and_hovering_ask_for_nothing(open_page):
    opened = open_page("paris")
    for plot in opened.page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.hover()
    opened.page.emulate_media(color_scheme="dark")
    opened.page.emulate_media(media="print")
    opened.page.wait_for_timeout(200)


# --- tables

READ = """(button) => {
  const header = button.closest("th"), table = button.closest("table"), numeric = button.dataset.numeric === "true";
  const cells = [...table.tBodies[0].rows].map((row) => row.cells[header.cellIndex]);
  const values = cells.map((cell) =>
    !numeric ? cell.textContent.trim() : cell.dataset.value === undefined ? null : Number(cell.dataset.value));
  const sorted = [...table.tHead.rows[0].cells].map((cell) => cell.getAttribute("aria-sort"));
  return { numeric, values, own: header.getAttribute("aria-sort"), sorted: sorted.filter((order) => order !== null) };
}"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("press", ["mouse", "Enter", "Space"])
def test_every_column_sorts_both_ways(open_page, name, press):
    opened = open_page(name)
    for details in opened.page.locator("details").all():
        details.locator("summary").click()
    buttons = opened.page.locator("thead button").all()
    assert len(buttons) > 35
    numeric = []
    for button in buttons:
        before = button.evaluate(READ)
        numeric.append(before["numeric"])
        first = "descending" if before["numeric"] else "ascending"
        other = "ascending" if before["numeric"] else "descending"
        for order in (other, first) if before["own"] == first else (first, other):
            if press == "mouse":
                button.click()
            else:
                button.focus()
                opened.page.keyboard.press(press)
            found = button.evaluate(READ)
            assert sorted(map(str, found["values"])) == sorted(map(str, before["values"]))
            assert (found["own"], found["sorted"]) == (order, [order])
            sign = 1 if order == "ascending" else -1
            steps = opened.run(
                """([values, numeric]) => values.slice(1).map((value, i) => numeric
                  ? (value === null || values[i] === null ? 0 : value - values[i])
                  : value.localeCompare(values[i], "en", { numeric: true }))""",
                [found["values"], found["numeric"]],
            )
            assert all(sign * step >= 0 for step in steps), (button.inner_text(), order, found["values"])
            missing = [value is None for value in found["values"]]
            assert missing == sorted(missing)
            assert order in opened.page.locator("#status").inner_text()
    assert any(numeric) and not all(numeric)


def test_rows_stay_whole(open_page):
    opened = open_page("paris")
    rows = """() => [...document.querySelectorAll("#table-mlp-neurons tbody tr")].map((row) => row.innerText)"""
    before = opened.run(rows)
    opened.page.locator("#table-mlp-neurons thead button", has_text="coefficient").click()
    after = opened.run(rows)
    assert after != before and sorted(after) == sorted(before)


# --- text is text


def test_a_prompt_of_markup_is_text(open_page):
    opened = open_page("odd")
    assert "<script>alert(1)</script> the the the &amp; \"q\" 'a'" in opened.page.locator("h1").inner_text()
    assert opened.run("document.scripts.length") == 4
    assert opened.run("document.querySelectorAll('main b, main i, main a, main script').length") == 0
    ticks = opened.page.locator("#figure-head-positions .ytick text").all_text_contents()
    assert any("'script'" in tick for tick in ticks) and any("'amp'" in tick for tick in ticks)
    repeated = [tick for tick in ticks if tick.endswith("' the'")]
    assert len(repeated) == len(set(repeated)) == 3


def test_without_scripts_everything_but_the_figures_is_there(open_page):
    opened = open_page("paris", java_script_enabled=False)
    assert opened.page.locator("table").count() == 9
    assert "Strongest" in opened.page.locator("#heads noscript").first.inner_text()


def saved(page, button, name):
    """What a click saves. The page says when it has handed the file to the browser; should the browser's own event of
    that get lost, as has been seen on a busy machine, the file is asked for once more."""
    try:
        with page.expect_download() as download:
            button.click()
    except TimeoutError:
        assert page.locator("#status").text_content() == f"Saved {name}"
        with page.expect_download() as download:
            button.click()
    assert download.value.suggested_filename == name
    return Path(download.value.path()).read_text(encoding="utf-8")


def test_figures_and_numbers_can_be_saved(open_page, figures):
    page = open_page("paris").page
    numbers = saved(page, page.get_by_role("button", name="Save the numbers as JSON"), "attribution.json")
    assert json.loads(numbers)["schema"] == "tl_neuron_attr.explanation"
    for id_ in figures("paris"):
        drawing = saved(page, page.locator(f"[data-save='{id_}']"), f"{id_}.svg")
        assert drawing.startswith("<svg") and "SmolLM2" in drawing


# --- for every reader


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [320, 360, 768, 1600])
def test_no_sideways_scrolling(open_page, name, width):
    opened = open_page(name, viewport={"width": width, "height": 740})
    opened.run("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert opened.run("document.documentElement.scrollWidth") <= width
    beyond = opened.run(
        """(width) => [...document.querySelectorAll("body *")]
          .filter((each) => !each.parentElement.closest(".scroll, svg") && !each.matches(".skip"))
          .filter((each) => each.getBoundingClientRect().right > width + 1)
          .map((each) => each.outerHTML.slice(0, 100))""",
        width,
    )
    assert beyond == []


def test_wide_tables_scroll_in_their_own_box(open_page):
    opened = open_page("paris", viewport=PHONE)
    box = opened.page.locator(".scroll", has=opened.page.locator("#table-mlp-neurons"))
    assert box.evaluate("(each) => each.scrollWidth > each.clientWidth")
    box.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.wait_for_function("(each) => each.scrollLeft > 0", arg=box.element_handle())


def test_at_desk_width_tables_fit_and_end_between_rows(open_page):
    opened = open_page("paris")
    opened.page.set_viewport_size({"width": 1280, "height": 900})
    opened.page.wait_for_timeout(200)
    boxes = opened.run(
        """() => [...document.querySelectorAll(".scroll")].filter((box) => box.clientWidth).map((box) => {
          const end = box.getBoundingClientRect().top + box.clientTop + box.clientHeight;
          const cut = [...box.querySelectorAll("tbody tr")].filter((row) => {
            const { top, bottom } = row.getBoundingClientRect();
            return top < end - 1 && bottom > end + 1;
          });
          const { id } = box.querySelector("table");
          return { id, wide: box.scrollWidth - box.clientWidth, cut: cut.length };
        })"""
    )
    assert len(boxes) >= 8 and [box for box in boxes if box["wide"] > 0 or box["cut"]] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_screen_reader_finds(open_page, name):
    opened = open_page(name)
    opened.run("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    session = opened.context.new_cdp_session(opened.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    seen = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node.get("ignored")
    ]

    def named(*roles):
        return [name for role, name in seen if role in roles]

    assert len(named("main")) == len(named("banner")) == len(named("contentinfo")) == 1
    assert named("navigation") == ["Contents"]
    for role, count in (("table", 9), ("image", 1 + len(opened.page.locator(".plot").all())), ("figure", 10)):
        names = named(role) + (named("img") if role == "image" else [])
        assert len(names) == count and all(names), (role, names)
    assert len(set(named("table"))) == 9
    assert all(named("button")) and all(named("region")) and all(named("link"))
    assert len(named("columnheader")) > 35 and len(named("rowheader")) > 60
    levels = opened.run(
        "() => [...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.tagName[1]))"
    )
    assert levels == [1] + [2] * (len(levels) - 1)
    assert opened.run("document.documentElement.lang") == "en"


def test_keyboard_reaches_everything_and_shows_where_it_is(open_page):
    opened = open_page("paris")
    expected = opened.run("() => document.querySelectorAll('a[href], button, summary, .scroll').length")
    expected -= opened.run("() => document.querySelectorAll('details :is(button, .scroll)').length")
    seen = []
    for _ in range(expected):
        opened.page.keyboard.press("Tab")
        seen.append(
            opened.run(
                """() => {
                  const each = document.activeElement, style = getComputedStyle(each);
                  return { what: each.className || each.textContent, outline: style.outlineStyle,
                           width: parseFloat(style.outlineWidth), left: each.getBoundingClientRect().left };
                }"""
            )
        )
    assert seen[0]["what"] == "skip" and seen[0]["left"] >= 0
    assert all(each["outline"] != "none" and each["width"] >= 2 for each in seen)
    assert opened.run("document.activeElement.id") == "save-numbers"
    opened.page.keyboard.press("Shift+Tab")
    opened.page.evaluate("window.scrollTo(0, 0)")
    opened.page.locator(".skip").focus()
    opened.page.keyboard.press("Enter")
    assert opened.run("document.activeElement.id") == "main"


# --- colours

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const ground = (element) => {
    if (element === null) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("script, style, noscript, .hidden")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg") !== null;
    const box = element.closest(".annotation")?.querySelector("rect.bg");
    const plain = ground(drawn ? element.closest(".plot") : element);
    const filled = (each) => {
      const { fill, fillOpacity } = getComputedStyle(each), [r, g, b, a] = rgba(fill);
      return [r, g, b, a * Number(fillOpacity)];
    };
    const back = box ? over(filled(box), plain) : plain;
    const colour = drawn ? filled(element) : rgba(style.color);
    for (let each = element; each; each = each.parentElement) colour[3] *= Number(getComputedStyle(each).opacity);
    const [a, b] = [light(over(colour, back)), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), large = parseFloat(style.fontSize) >= 24;
    count += 1;
    const text = walker.currentNode.textContent.trim();
    if (ratio < (large ? 3 : 4.5)) poor.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
  }
  return { count, poor };
}"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(open_page, name, scheme):
    opened = open_page(name, color_scheme=scheme)
    opened.run("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = opened.run(CONTRAST)
    assert found["count"] > 500
    assert found["poor"] == []


def test_scheme_is_followed_while_the_page_is_open(open_page):
    opened = open_page("paris", color_scheme="light")
    colours = "() => [document.body, document.querySelector('.xtick text')].map((e) => getComputedStyle(e))"
    read = f"() => ({colours})().map((style, i) => (i ? style.fill : style.backgroundColor))"
    light = opened.run(read)
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_timeout(500)
    dark = opened.run(read)
    assert light[0] != dark[0] and light[1] != dark[1]
