"""The lesson, walked: by keyboard alone, and by touch on a phone. No guess can be skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.live import Live

STEPS = ("output", "greedy", "temperature", "zero", "cut")
TABS = 400  # presses until something counts as out of reach


class Keys:
    """Someone who has a keyboard and nothing else."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def to(self, selector: str) -> None:
        """Press Tab until the focus is there."""
        for _ in range(TABS):
            if self.page.evaluate("(s) => document.activeElement?.matches(s) ?? false", selector):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is out of reach")

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            self.page.keyboard.press(key)

    def commit_and_reveal(self, step: str) -> None:
        self.to(f"#commit-{step}")
        self.press("Enter")
        self.to(f"#reveal-{step}")
        self.press("Enter")
        assert self.page.evaluate("document.activeElement.id") == f"answer-{step}"


def check_closed(page: Any, step: str) -> None:
    """Neither the answer nor any later step can be had yet, whatever is pressed."""
    assert page.locator(f"#reveal-{step}").is_disabled()
    page.evaluate("(id) => document.getElementById(id).click()", f"reveal-{step}")
    assert page.locator(f"#answer-{step}").count() == 0
    for later in STEPS[STEPS.index(step) + 1 :]:
        assert page.locator(f"#commit-{later}").count() == 0
    assert page.locator("#score").count() == 0


def test_the_whole_lesson_by_keyboard_alone(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url).page
    keys = Keys(page)
    page.wait_for_selector("#commit-output")

    check_closed(page, "output")
    assert "one score per token" not in page.locator("main").inner_text()  # the table of analogies would give it away
    assert page.locator("#commit-output").is_disabled()
    keys.to("#output-0")
    keys.press("ArrowDown")
    assert page.locator("#commit-output").is_disabled()  # half a guess is none
    keys.to("input[id^=output-count]")
    keys.press("ArrowRight", 3)
    check_closed(page, "output")
    keys.commit_and_reveal("output")
    response = page.locator("#answer-output").inner_text()
    assert "49,152" in response
    assert "1.000000000000" in response
    assert page.locator("#answer-output .bars .chip").count() == 8
    assert "49,144 others" in response
    assert page.locator(".analogy").is_visible()
    assert page.locator("#output-1").is_disabled()  # a guess is kept as it was

    check_closed(page, "greedy")
    keys.to("#greedy-0")
    keys.press("Space")
    keys.commit_and_reveal("greedy")
    page.wait_for_selector("#answer-greedy mark")
    response = page.locator("#answer-greedy").inner_text()
    assert "Identical, token for token." in response
    assert "✗ you said" in page.locator("section[aria-labelledby=title-greedy]").inner_text()
    keys.to(".recall button")
    keys.press("Enter")
    assert page.locator(".recall .hidden-text").first.get_attribute("aria-hidden") == "false"

    check_closed(page, "temperature")
    for heat in ("0-1", "1"):
        keys.to(f"#bar-{heat}-0")
        keys.press("PageUp", 5)
    assert page.locator("#commit-temperature").is_disabled()  # the third was not drawn
    keys.to("#bar-2-1")
    keys.press("End")
    keys.commit_and_reveal("temperature")
    response = page.locator("#answer-temperature").inner_text()
    assert "Of the top eight" in response
    assert "Of the whole vocabulary" in response
    assert page.locator("#answer-temperature .guess-mark").count() == 9

    check_closed(page, "zero")
    keys.to("#zero-0")
    keys.press("ArrowUp")  # the last one
    keys.commit_and_reveal("zero")
    assert "NaN" in page.locator("#answer-zero").inner_text()

    check_closed(page, "cut")
    keys.to("input[id^=cut-count]")
    keys.press("ArrowLeft", 5)
    keys.commit_and_reveal("cut")
    response = page.locator("#answer-cut").inner_text()
    assert "0 of 200 from the tail" in response
    assert "hold 90" in response

    points = int(page.locator("#score").inner_text())
    rows = [int(text) for text in page.locator("section[aria-labelledby=score-title] td:last-child").all_inner_texts()]
    assert len(rows) == 5
    assert sum(rows) == points
    assert rows[1] == 0
    assert rows[3] == 100

    keys.to("#colleague")
    assert page.locator("#compare").is_disabled()
    page.keyboard.type("We decode it: greedy takes the best, or we draw with temperature and top-p.")
    keys.to("#compare")
    keys.press("Enter")
    assert page.locator(".checklist input:checked").count() >= 3

    page.reload()
    page.wait_for_selector("#score")  # guesses stay while the tab does
    assert int(page.locator("#score").inner_text()) == points


@pytest.mark.slow
def test_the_lesson_by_touch_on_a_phone(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True).page
    page.wait_for_selector("#commit-output")

    def slide(selector: str, share: float) -> None:
        box = page.locator(selector).first
        box.scroll_into_view_if_needed()
        size = box.bounding_box()
        page.touchscreen.tap(size["x"] + size["width"] * share, size["y"] + size["height"] / 2)

    def choose(label: str) -> None:
        page.locator("label", has=page.locator(label)).tap()

    def commit_and_reveal(step: str) -> None:
        page.locator(f"#commit-{step}").tap()
        page.locator(f"#reveal-{step}").tap()
        page.wait_for_selector(f"#answer-{step}")

    choose("#output-1")
    slide("input[id^=output-count]", 0.75)
    commit_and_reveal("output")
    choose("#greedy-2")
    commit_and_reveal("greedy")
    page.wait_for_selector("#answer-greedy mark")
    for heat, share in (("0-1", 0.95), ("1", 0.5), ("2", 0.3)):
        slide(f"#bar-{heat}-0", share)
    commit_and_reveal("temperature")
    choose("#zero-2")
    commit_and_reveal("zero")
    slide("input[id^=cut-count]", 0.45)
    commit_and_reveal("cut")
    assert int(page.locator("#score").inner_text()) > 250
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select, nav a")]
            .filter((e) => e.offsetParent && !e.disabled && e.type !== "radio" && e.type !== "checkbox")
            .map((e) => [e.id || e.textContent, e.getBoundingClientRect()])
            .filter(([, box]) => box.height < 24 || box.width < 24).map(([name]) => name)"""
    )
    assert small == []


@pytest.mark.parametrize("page_name", ["read", "glossary"])
def test_the_other_pages_are_there(lab_server: Live, visit: Callable[..., Any], page_name: str) -> None:
    page = visit(lab_server.url, f"/lab/#{page_name}").page
    page.locator("h2, dt").nth(3).wait_for()
    text = page.locator("main").inner_text()
    assert "softmax" in text.lower()
    if page_name == "read":
        page.locator(".figure mark").first.wait_for()
        assert page.locator("section .figure").count() == 4
        assert page.locator("svg.chart").count() == 2
        assert page.locator(".compared").count() == 1
        assert [heading[0] for heading in page.locator("section h2").all_inner_texts()[:4]] == ["1", "2", "3", "4"]
        assert "49,152" in text
