"""The page of a report in a real browser: found, followed, searched, copied, by keys alone, in both themes."""

from __future__ import annotations

import dataclasses
import shutil
import time

import pytest

from tests.explain import reports
from tileops.explain.model import Report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: apt-get install chromium")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a report; at the end there was no error, no message, and no request but for the page."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_(report: Report, **options):
        path = tmp_path / "page.html"
        report.to_html(path)
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.endswith("/page.html")] == []


def seen(page, selector):
    page.locator(selector).wait_for(state="visible")
    box = page.locator(selector).bounding_box()
    assert 0 <= box["y"] < page.viewport_size["height"], (selector, box)


def focused(page, expression="e.closest('[id]').id"):
    return page.evaluate(f"(() => {{ const e = document.activeElement; return {expression}; }})()")


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def until(page, condition):
    """Asked from outside: the page's own policy lets nobody evaluate a string inside it."""
    end = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


# ---- following links -----------------------------------------------------------------------------


def test_from_a_line_to_a_node_to_a_kernel_and_back(visit):
    page = visit(reports.small())
    page.locator("#l0-5 > summary").click()
    page.locator("#l0-5 .became a[href='#n0-0-1']").click()
    seen(page, "#n0-0-1")
    assert "operator.mul" in page.locator("#n0-0-1").inner_text()
    page.locator("#n0-0-1 a[href='#k0-0-0']").click()
    seen(page, "#k0-0-0 > summary")
    assert '"quoted" & <bracketed>' in page.locator("#k0-0-0 pre").inner_text()
    page.locator("#k0-0-0 .facts a[href='#n0-1-1']").click()
    seen(page, "#n0-1-1")
    page.go_back()
    seen(page, "#k0-0-0 > summary")
    page.locator("#k0-0-0 .lines a[href='#l0-5']").click()
    seen(page, "#l0-5 > summary")
    until(page, "document.activeElement.closest('[id]')?.id === 'l0-5'")


def test_from_the_overview_to_a_break(visit):
    page = visit(reports.small())
    page.locator("#overview a[href='#b0-0']").click()
    seen(page, "#b0-0")
    assert "Print outside." in page.locator("#b0-0").inner_text()


def test_a_link_to_a_place_opens_it(visit):
    page = visit(reports.small())
    address = page.url
    page.goto("about:blank")
    page.goto(address + "#k0-0-0")
    seen(page, "#k0-0-0 pre")


# ---- search --------------------------------------------------------------------------------------


def test_search(visit):
    page = visit(reports.small())
    press(page, "/")
    assert focused(page, "e.id") == "search"
    page.keyboard.type("bracketed")  # in the code of a kernel alone
    assert page.locator("#announce").inner_text() == "1 result"
    press(page, "Enter")
    seen(page, "#k0-0-0 > summary")
    assert page.locator("#found").is_hidden()
    press(page, "/")
    page.keyboard.type("mul")
    assert page.locator("#found [role=option]").count() > 2
    for key, place in (("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1)):
        press(page, key)
        assert page.locator("#search").get_attribute("aria-activedescendant") == f"hit{place}"
        assert page.locator("#found [aria-selected=true]").get_attribute("id") == f"hit{place}"
    press(page, "Escape")
    assert page.locator("#found").is_hidden()
    assert page.locator("#search").get_attribute("aria-expanded") == "false"
    page.locator("#search").fill("no such thing")
    assert page.locator("#announce").inner_text() == "0 results"
    assert "Nothing found" in page.locator("#found").inner_text()
    press(page, "Enter", "Escape", "Escape")
    assert focused(page, "e.localName") == "body"


def test_search_is_used_by_mouse(visit):
    page = visit(reports.small())
    page.locator("#search").fill("relu capture")
    page.locator("#found li", has_text="torch.relu").first.click()
    seen(page, "#n1-0-0")


# ---- copying -------------------------------------------------------------------------------------


def test_copies_code(visit):
    page = visit(reports.small(), permissions=["clipboard-read", "clipboard-write"])
    page.evaluate("location.hash = 'k0-0-0'")
    page.locator("#k0-0-0 .copy").click()
    until(page, "document.querySelector('#k0-0-0 .copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == reports.CODE
    assert page.locator("#announce").inner_text() == "Copied"
    until(page, "document.querySelector('#k0-0-0 .copy').textContent === 'Copy'")


# ---- keys ----------------------------------------------------------------------------------------


def test_by_keys_alone(visit):
    page = visit(reports.small())
    press(page, "Tab")
    assert focused(page, "e.textContent") == "Skip to the report"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    press(page, "Enter")
    until(page, "document.activeElement.id === 'main'")
    for _ in range(12):  # over the links of the overview
        press(page, "Tab")
        outline = focused(
            page, "getComputedStyle(e).outlineStyle + getComputedStyle(e).outlineWidth"
        )
        assert outline == "solid2px"
        if focused(page) == "l0-5":
            break
    press(page, "ArrowDown")
    assert focused(page) == "l0-6"
    press(page, "ArrowUp", "Enter")
    assert page.locator("#l0-5").get_attribute("open") is not None
    press(page, "ArrowRight")  # the first link of what became of it
    assert focused(page, "e.getAttribute('href')") == "#n0-0-1"
    press(page, "Enter")
    until(page, "document.activeElement.id === 'n0-0-1'")
    press(page, "Tab")  # a row is one stop
    assert focused(page, "e.getAttribute('href')") == "#n0-0-0"
    press(page, "ArrowRight", "ArrowRight")
    assert focused(page, "e.getAttribute('href')") == "#k0-0-0"
    press(page, "Enter")
    until(page, "document.activeElement.closest('details')?.id === 'k0-0-0'")


def test_a_long_list_is_one_stop(visit):
    page = visit(reports.long(200))
    page.locator("#c0-capture > summary").click()
    stops = "[...document.querySelectorAll('#c0-capture tbody a')].filter((a) => a.tabIndex >= 0).length"
    assert page.evaluate(stops) == 1


# ---- looks ---------------------------------------------------------------------------------------


def ground(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return "dark" if all(int(part) < 60 for part in colour[4:-1].split(",")) else "light"


def test_theme(visit):
    page = visit(reports.small(), color_scheme="dark")
    assert ground(page) == "dark"
    button = page.get_by_role("button", name="Dark")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert (ground(page), button.get_attribute("aria-pressed")) == ("light", "false")
    page.reload()
    assert ground(page) == "light"
    page.emulate_media(color_scheme="light")
    button.click()
    assert ground(page) == "dark"


def test_code_is_coloured(visit):
    page = visit(reports.small())
    page.evaluate("location.hash = 'k0-0-0'")
    until(page, "CSS.highlights.has('comment')")
    words = """(kind) => [...CSS.highlights.get(kind)].map((range) =>
        range.startContainer.data.slice(range.startOffset, range.endOffset))"""
    assert '// twice, "quoted" & <bracketed>' in page.evaluate(words, "comment")
    assert '"between"' in page.evaluate(words, "string")
    assert {"def", "return", "for", "const"} <= set(page.evaluate(words, "keyword"))


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("make", [lambda: reports.filled(Report), reports.hostile])
def test_fits_its_width(visit, width, make):
    page = visit(make(), viewport={"width": width, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_code_in_tables_keeps_a_width_to_read(visit):
    """On a phone the table scrolls; a guard's code in a column of six letters is a page long."""
    report = reports.small()
    guard = dataclasses.replace(
        report.compilations[0].guards.guards[0], code="a long check " * 20, properties={}
    )
    report.compilations[0].guards.guards.append(guard)
    page = visit(report, viewport={"width": 390, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    widths = page.evaluate("[...document.querySelectorAll('td .wrap')].map((e) => e.offsetWidth)")
    assert widths
    assert min(widths) >= 200
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_prints(visit):
    page = visit(reports.small(), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".bar").is_hidden() and page.locator(".contents").is_hidden()
    assert ground(page) == "light"
    assert page.locator("#overview h1").is_visible()


# ---- who cannot see it ---------------------------------------------------------------------------

UNNAMED = """() => {
    const spoken = (e) => ['a', 'button', 'summary'].includes(e.localName) ? e.textContent : '';
    const name = (e) => e.getAttribute('aria-label') || spoken(e) || (e.localName === 'table' && e.caption?.textContent)
        || document.getElementById(e.getAttribute('aria-labelledby'))?.textContent;
    const all = 'a, button, input, summary, nav, section, table, [role]:not([role=status]), [tabindex="0"]';
    return [...document.querySelectorAll(all)].filter((e) => !name(e)?.trim()).map((e) => e.outerHTML.slice(0, 200));
}"""


@pytest.mark.parametrize("make", [reports.small, lambda: reports.filled(Report)])
def test_everything_has_a_name(visit, make):
    page = visit(make())
    assert page.evaluate(UNNAMED) == []
    assert page.locator("main").count() == page.locator("nav").count() == 1
    assert page.locator("header").count() == page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("[...document.querySelectorAll('th')].filter((e) => !e.scope).length") == 0


# ---- size, hostility -----------------------------------------------------------------------------


def test_a_thousand_nodes_stay_quick(visit):
    """The limits are several times what a busy machine of two cores takes."""
    page = visit(reports.long(1000))
    ready = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert page.evaluate(ready) < 5000
    started = time.perf_counter()
    page.locator("#search").fill("mul_777")
    assert page.locator("#found [role=option]").first.is_visible()
    assert time.perf_counter() - started < 3
    started = time.perf_counter()
    press(page, "Enter")
    until(page, "document.activeElement.id === 'n0-0-777'")
    seen(page, "#n0-0-777")
    assert time.perf_counter() - started < 3


def test_hostile_text_does_nothing(visit):
    page = visit(reports.hostile())
    page.locator("#search").fill("hacked")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img").count() == 0
    assert page.title().startswith(reports.HOSTILE)
