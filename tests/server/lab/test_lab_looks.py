"""What the page looks like and how it can be used: sizes, colours, headings, labels, contrast, focus; and axe-core.

Pictures at three sizes, light and dark, are written to the folder that HEADWAY_SCREENSHOTS names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.server.lab.page import STATIC
from support.live import Live

SIZES = {"phone": (390, 844), "laptop": (1280, 900), "wide": (1920, 1080)}
AXE = Path(__file__).parents[3] / ".venv" / "axe.min.js"  # fetched by `make test` where npm is

# What is wrong with the page by rules that need no library: names, headings, contrast, overflow.
RULES = """() => {
    const wrong = [];
    const shown = (e) => e.getClientRects().length && getComputedStyle(e).visibility !== "hidden";
    const name = (e) => (e.getAttribute("aria-label") || e.getAttribute("title") || e.labels?.[0]?.textContent
        || e.textContent || "").trim();
    for (const e of document.querySelectorAll("button, a[href], input, select, textarea, [role=tab], [role=gridcell]"))
        if (shown(e) && !name(e)) wrong.push(["no name", e.outerHTML.slice(0, 120)]);
    for (const e of document.querySelectorAll("svg[role=img], [role=region], [role=grid], nav"))
        if (shown(e) && !e.getAttribute("aria-label")) wrong.push(["no label", e.outerHTML.slice(0, 120)]);
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(["twice", id]);
    let level = 0;
    for (const e of document.querySelectorAll("main h1, main h2, main h3")) {
        if (!shown(e)) continue;
        const now = Number(e.tagName[1]);
        if (now > level + 1) wrong.push(["heading skips a level", e.textContent]);
        level = now;
    }
    if (document.querySelectorAll("main h1").length !== 1) wrong.push(["headings", "not one h1"]);
    if (document.documentElement.scrollWidth > innerWidth) wrong.push(["wider than the screen", String(innerWidth)]);
    for (const e of document.querySelectorAll("main *"))
        if (["auto", "scroll"].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1
            && e.tagName !== "TEXTAREA") wrong.push(["scrolls sideways", e.outerHTML.slice(0, 120)]);
    const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = (c) => {
        const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (e) => {
        for (let at = e; at; at = at.parentElement) {
            const style = getComputedStyle(at);
            if (style.backgroundImage !== "none") return null;
            const color = rgb(style.backgroundColor);
            if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
            if (color[3] > 0) return null;
        }
        return [255, 255, 255];
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const e = texts.currentNode.parentElement;
        if (!texts.currentNode.textContent.trim() || !shown(e)) continue;
        if (e.closest(".unseen, .cover, :disabled, svg")) continue;
        const style = getComputedStyle(e);
        const [front, back] = [rgb(style.color).slice(0, 3), ground(e)];
        if (!back) continue;
        const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (large ? 3 : 4.5)) wrong.push([`contrast ${ratio.toFixed(2)}`, e.outerHTML.slice(0, 120)]);
    }
    return wrong;
}"""


class Tour:
    """Every view of the page, one after the other, looked at."""

    def __init__(self, page: Any, url: str, name: str, axe: str | None = None) -> None:
        self.page, self.url, self.name = page, url, name
        self.wrong: list[Any] = []
        folder = os.environ.get("HEADWAY_SCREENSHOTS")
        self.folder = None if folder is None else Path(folder)
        self.axe = axe

    def look(self, view: str) -> None:
        page = self.page
        page.mouse.move(0, 0)
        self.wrong += [(self.name, view, *one) for one in page.evaluate(RULES)]
        if self.axe is not None:
            page.evaluate(self.axe + ";0")
            result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
            self.wrong += [(self.name, view, v["id"], v["nodes"][0]["html"][:150]) for v in result["violations"]]
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=self.folder / f"{self.name}-{view}.png", full_page=True)

    def lesson(self) -> None:
        page = self.page
        page.locator("#commit-output").wait_for()
        self.look("home")
        page.check("#output-1")
        page.locator("input[id^=output-count]").fill("150")
        self._reveal("output")
        page.check("#greedy-0")
        self._reveal("greedy")
        for heat in ("0-1", "1", "2"):
            for i, value in enumerate((60, 25, 10)):
                page.fill(f"#bar-{heat}-{i}", str(value))
        self._reveal("temperature")
        page.check("#zero-1")
        self._reveal("zero")
        page.locator("input[id^=cut-count]").fill("90")
        self._reveal("cut")
        page.locator("#answer-greedy mark").first.wait_for()
        page.locator(".recall button").first.click()
        self.look("lesson")

    def _reveal(self, step: str) -> None:
        self.page.click(f"#commit-{step}")
        self.page.click(f"#reveal-{step}")

    def other_pages(self) -> None:
        for view, sign in (("read", ".figure mark"), ("glossary", "dt")):
            self.page.goto(f"{self.url}/lab/#{view}")
            self.page.locator(sign).first.wait_for()
            self.look(view)

    def lab(self) -> None:
        page = self.page
        page.goto(f"{self.url}/lab/#lab")
        page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
        page.locator("#engine-check", has_text="Equal").wait_for()
        page.locator("#stages-summary").click()
        page.click("#draw-many")
        page.locator("#draws").wait_for()
        self.look("next")
        page.click("#tab-tree")
        page.click("#take-best")
        page.locator(".tree .node", has_text="%").wait_for()
        page.locator(".pages tbody tr").wait_for()
        self.look("tree")
        page.click("#tab-lens")
        page.locator(".lens tbody tr").first.wait_for()
        self.look("lens")
        page.click("#tab-attention")
        page.locator(".heat").first.wait_for()
        page.click("#mask-kind-sink")
        page.locator("#mask-result[data-distance]").wait_for()
        self.look("attention")
        page.click("#tab-engine")
        page.locator("svg.map").wait_for()
        page.click("#measure")
        page.locator("button", has_text="Measure again").wait_for()
        self.look("engine")
        page.click("#tab-call")
        page.locator("pre").first.wait_for()
        self.look("call")


def toured(server: Live, visit: Callable[..., Any], size: str, scheme: str, axe: str | None = None) -> None:
    width, height = SIZES[size]
    page = visit(server.url, viewport={"width": width, "height": height}, color_scheme=scheme).page
    tour = Tour(page, server.url, f"{size}-{scheme}", axe)
    tour.lesson()
    tour.other_pages()
    tour.lab()
    assert tour.wrong == []


def test_every_view_can_be_read_and_named(lab_server: Live, visit: Callable[..., Any]) -> None:
    toured(lab_server, visit, "phone", "dark")


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.skip("axe-core is not here; `make browser` fetches it where npm is")
    return AXE.read_text()


def test_axe_finds_nothing_where_people_begin(lab_server: Live, visit: Callable[..., Any], axe: str) -> None:
    page = visit(lab_server.url, color_scheme="light").page
    tour = Tour(page, lab_server.url, "first", axe)
    page.locator("#commit-output").wait_for()
    tour.look("home")
    page.goto(f"{lab_server.url}/lab/#lab")
    page.locator("#engine-check", has_text="Equal").wait_for()
    tour.look("next")
    assert tour.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_axe_finds_nothing_anywhere(
    lab_server: Live, visit: Callable[..., Any], axe: str, size: str, scheme: str
) -> None:
    toured(lab_server, visit, size, scheme, axe)


def test_colours_can_be_chosen_and_stay(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, color_scheme="light").page
    page.locator("#commit-output").wait_for()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) == light
    page.click("#theme")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    page.locator("#commit-output").wait_for()
    assert page.evaluate(ground) == dark


def test_nothing_moves_for_those_who_want_it_so(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab", reduced_motion="reduce").page
    page.locator("#distribution .fill").first.wait_for()
    assert page.evaluate("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"


def test_scripts_are_small_files_without_a_build_step() -> None:
    for path in STATIC.glob("*.js"):
        lines = path.read_text().splitlines()
        assert len(lines) < 400, path.name
        assert lines[0].startswith("//"), path.name
