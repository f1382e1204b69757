"""The charts: one scale from 0 to 100%, shares that add up to 100, the entropy of what is shown, a phone's width."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.server.lab.schema import Base64Array
from support.live import Live

PROMPT = "Once upon a time, there was a little"
DESK = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

# The bars of a chart: how long each is drawn, in percent of its track, and what its label says.
BARS = """(place) => [...document.querySelectorAll(`${place} .bars .fill`)].filter((e) => e.getClientRects().length)
    .map((e) => [100 * e.getBoundingClientRect().width / e.parentElement.getBoundingClientRect().width,
        e.closest(".lane, li").querySelector(".num").textContent])"""

# How many bars or rows of a matrix lie in the window, under nothing else.
IN_VIEW = """(selector) => [...document.querySelectorAll(selector)].filter((e) => {
    const box = e.getBoundingClientRect();
    const [x, y] = [box.left + 2, box.top + box.height / 2];
    return box.width && y > 0 && y < innerHeight && e.contains(document.elementFromPoint(x, y));
}).length"""


def parsed(label: str) -> float:
    """The number of a label in percent; what is too small to write counts as nothing."""
    return 0.0 if "<" in label else float(re.search(r"([\d.]+)%", label)[1])


def logits_of(server: Live) -> np.ndarray:
    trace = server.post("/lab/api/trace", prompt=PROMPT).json
    return Base64Array(**trace["logits"]).array().astype(np.float64)


def softmax(logits: np.ndarray, temperature: float = 1) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def entropy(probs: np.ndarray) -> float:
    probs = probs[probs > 0]
    return float(-(probs * np.log(probs)).sum())


def reveal(page: Any, step: str) -> None:
    page.click(f"#commit-{step}")
    page.click(f"#reveal-{step}")


def to_step_three(page: Any) -> None:
    page.check("#output-1")
    page.locator("input[id^=output-count]").fill("150")
    reveal(page, "output")
    page.check("#greedy-2")
    reveal(page, "greedy")


def check_scale(page: Any, place: str) -> list[float]:
    """Every bar is as long as its label says, on a scale from 0 to 100%; gives the labels."""
    rows = page.evaluate(BARS, place)
    assert rows
    for drawn, label in rows:
        assert drawn == pytest.approx(parsed(label), abs=0.5), (place, label)
    ticks = page.locator(f"{place} .ticks").last.inner_text().split()
    assert (ticks[0], ticks[-1]) == ("0", "100%")
    return [parsed(label) for _, label in rows]


def test_step_three_is_one_chart_of_three_temperatures(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, viewport=DESK).page
    to_step_three(page)
    page.fill("#bar-2-0", "80")
    page.fill("#bar-2-1", "70")  # together at most 100
    assert page.locator("#bar-2-1").input_value() == "20"
    assert "0% left for the other five" in page.locator("section[aria-labelledby=title-temperature]").inner_text()
    for heat in ("0-1", "1"):
        page.fill(f"#bar-{heat}-0", "50")
    reveal(page, "temperature")
    chart = "#answer-temperature"
    assert page.locator(f"{chart} .compared").count() == 1
    logits = np.sort(logits_of(lab_server))[::-1]
    for choice, tokens in (("top", 8), ("all", 9)):
        page.locator(f"{chart} input[value={choice}]").check()
        labels = np.array(check_scale(page, chart)).reshape(tokens, 3)
        assert np.allclose(labels.sum(axis=0), 100, atol=1e-9)
        legend = page.locator(f"{chart} .legend-list").inner_text()
        entropies = [float(text) for text in re.findall(r"entropy ([\d.]+) nats", legend)]
        for k, heat in enumerate((0.1, 1, 2)):
            probs = softmax(logits, heat)
            shown = probs[:8] / probs[:8].sum() if choice == "top" else probs
            assert np.allclose(labels[:8, k], 100 * shown[:8], atol=0.1)
            assert entropies[k] == pytest.approx(entropy(shown), abs=0.01)
    said = page.locator(f"{chart} .versus dd").all_inner_texts()[:2]
    for line in "\n".join(said).splitlines():  # "T 1: 50.2 / 31.3 / 4.3%, others 14.2%"
        assert sum(float(n) for n in re.findall(r"[\d.]+", line.split(":")[1])) == pytest.approx(100), line


def test_next_token_bars_add_up_and_have_their_own_entropy(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab", viewport=DESK).page
    probs = softmax(logits_of(lab_server))
    page.locator("#entropy", has_text=f"entropy {entropy(probs):.3f} nats").wait_for()
    labels = check_scale(page, "#distribution")
    assert sum(labels) == pytest.approx(100)
    assert len(labels) == 13  # twelve tokens and all others
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 7}
    trace = lab_server.post("/lab/api/trace", prompt=PROMPT, sampling=sampling).json
    kept = Base64Array(**trace["sampling"]["probs"]).array()
    final, count = entropy(kept), int((kept > 0).sum())
    page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
    page.locator(".strip", has_text=f"{count} stay").wait_for()
    text = page.locator("#entropy").inner_text()
    assert text == f"entropy {final:.3f} nats · the model's own {entropy(probs):.3f}"
    labels = check_scale(page, "#distribution")
    assert sum(labels[:count]) == pytest.approx(100)
    page.click("#draw-many")
    drawn = page.locator("#draws .num").all_inner_texts()
    assert sum(int(text.split("×")[0]) for text in drawn) == 200
    page.click("#tab-engine")
    page.click("#measure")
    page.locator("button", has_text="Measure again").wait_for()
    assert sum(check_scale(page, "#panel")) == pytest.approx(100)


def check_in_view(page: Any, sliders: list[str], parts: str) -> None:
    """At least three parts of a chart are in view wherever a slider is on the screen."""
    for slider in sliders:
        for block in ("start", "center", "end", "nearest"):
            page.evaluate(
                "([id, block]) => document.getElementById(id).scrollIntoView({block, behavior: 'instant'})",
                [slider, block],
            )
            assert page.evaluate(IN_VIEW, f"#{slider}"), (slider, block)
            assert page.evaluate(IN_VIEW, parts) >= 3, (slider, block)


@pytest.mark.parametrize(("size", "chart"), [(DESK, "#distribution"), (PHONE, ".peek")], ids=["desk", "phone"])
def test_a_chart_is_in_view_while_a_slider_moves(
    lab_server: Live, visit: Callable[..., Any], size: dict[str, int], chart: str
) -> None:
    page = visit(lab_server.url, "/lab/#lab", viewport=size).page
    page.locator("#engine-check", has_text="Equal").wait_for()
    page.locator("#stages-summary").click()  # the page gets longer
    sliders = page.locator(".params input[type=range]").evaluate_all("(all) => all.map((one) => one.id)")
    assert len(sliders) == 10
    check_in_view(page, sliders, f"{chart} .track")
    before = page.locator(f"{chart} .bars").first.inner_text()
    page.locator("#param-temperature").focus()
    page.keyboard.press("Home")
    page.locator(f"{chart} .bars", has_text="100.0%").first.wait_for()
    assert page.locator(f"{chart} .bars").first.inner_text() != before
    page.click("#tab-attention")
    page.locator(".heat").first.wait_for()
    check_in_view(page, ["pick-layer", "pick-head"], ".heat tbody tr td:nth-child(2), .beside .track")


def test_attention_is_a_matrix_on_a_log_scale_with_the_sink_apart(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab", viewport=DESK).page
    page.click("#tab-attention")
    page.locator("h3", has_text="Layer 15, head 0").wait_for()
    options = {"layers": [15], "rows": 9}
    trace = lab_server.post("/lab/api/trace", prompt=PROMPT, attention=options, logits=False).json
    scores = Base64Array(**trace["attention"]["array"]).array()[0]  # [rows, heads, slots]
    rows = page.locator(".heat").first.locator("tbody tr")
    assert rows.count() == 9
    for i, line in enumerate(rows.all()):
        cells = line.locator("td").evaluate_all("(all) => all.map((cell) => cell.title)")
        assert cells[i + 1 :] == [""] * (8 - i)  # it does not see the tokens after it
        assert np.allclose([float(text.rstrip("%")) / 100 for text in cells[: i + 1]], scores[i, 0, : i + 1], atol=1e-3)
    text = page.locator("#sink").inner_text().replace("\n", "")
    assert text.startswith("The sink: the first slot, Once")
    assert f"{100 * scores[-1, 0, 0]:.1f}% of the last token's weight in this head" in text
    assert f"{100 * scores[-1, :, 0].mean():.1f}% on average" in text
    edges = rows.last.locator("td").evaluate_all("(all) => all.slice(0, 3).map((e) => e.getBoundingClientRect().left)")
    widths = rows.last.locator("td").evaluate_all("(all) => all.slice(0, 3).map((e) => e.clientWidth)")
    assert edges[1] - edges[0] - widths[0] > edges[2] - edges[1] - widths[1] + 5  # a gap after the sink
    assert sum(check_scale(page, ".sink-bars")) == pytest.approx(100)
    beside = check_scale(page, ".beside")
    assert sum(beside) == pytest.approx(100)
    left = scores[-1, 0, 1:]
    assert np.allclose(beside, 100 * left / left.sum(), atol=0.1)
    tints = page.evaluate(
        """async () => { const { logTint } = await import("./charts.js");
            return [0.0005, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1].map((x) => logTint(x).background); }"""
    )
    assert tints[0] == tints[1]
    assert len(set(tints)) == 7  # what is 0.3% and 3% can be told apart


def test_no_lens_of_whitespace_widens_a_phone(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab", viewport=PHONE).page
    page.click("#tab-lens")
    page.locator(".lens tbody tr").nth(30).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = "[...document.querySelectorAll('main .scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert page.evaluate(wide) == 0
    assert page.locator(".lens tbody tr").first.locator(".chip:visible").count() == 5


def test_the_head_names_the_format_of_the_weights(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    head = page.locator(".lab-head", has_text="parameters").inner_text()
    assert f"weights {lab_server.engine.info.format}" in head
    assert "int4 in groups of 32" in head
    assert "computed in float32 on cpu" in head
