"""Where the page's numbers come from: a server that restarts, loads, has keys, serves another model; or none at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_models import nasty_folder
from lab_serving import lab_live, listening

import headway as hw
from headway.server.keys import add_key
from headway.testing import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nasty_folder(tmp_path_factory.mktemp("nasty-sources"))[0]


def small_engine(folder: Path) -> hw.Engine:
    return hw.Engine(folder, dtype="float32", pages=64, threads=1)


def test_a_server_may_restart_with_another_model_while_the_page_is_open(
    folder: Path, visit: Callable[..., Any]
) -> None:
    with lab_live(small_engine(folder), model="first") as server:
        port = server.port
        page = visit(server.url, "/lab/#lab", may_refuse=True).page
        page.fill("#prompt", "hello world")
        page.click("#run")
        page.locator(".crumbs", has_text="11 tokens").wait_for()
        page.locator("#tab-tree").click()
        page.locator("#take-best").click()
        page.locator(".tree .node", has_text="%").wait_for()
    page.locator("#tab-next").click()
    page.locator(".numbers .bars button.chip").first.click()  # what is on the page can be pressed; the pass fails
    page.locator("#banner", has_text="cannot be reached").wait_for()
    assert page.locator(".numbers .bars li").count() > 5
    other = hw.Engine(random_model("qwen3", vocab_size=77, seed=4), pages=32, threads=1)
    with lab_live(other, port=port, model="second"):
        page.locator("#source", has_text="second · live").wait_for()
        page.locator("#engine-check", has_text="Equal to the engine's Sampling").wait_for()
        assert page.locator("#banner").is_hidden()
        assert "77 tokens" in page.locator(".lab-head").inner_text()
        assert "as token ids" in page.locator("label[for=prompt]").inner_text()  # it has no tokenizer
        page.fill("#prompt", "5 6 seven")
        page.click("#run")
        page.locator("#lab-message", has_text="must be integers").wait_for()
        page.fill("#prompt", "5 6 70")
        page.click("#run")
        page.locator(".crumbs", has_text="3 tokens").wait_for()
        page.goto(f"http://127.0.0.1:{port}/lab/#home")
        page.locator("#title-output").wait_for()


def test_the_page_waits_for_a_model_that_loads(folder: Path, visit: Callable[..., Any]) -> None:
    go = threading.Event()

    def slowly() -> hw.Engine:
        go.wait(60)
        return small_engine(folder)

    with listening(slowly, model="slow") as port:
        page = visit(f"http://127.0.0.1:{port}").page
        page.locator("main", has_text="still loading").wait_for()
        go.set()
        page.locator("#commit-output").wait_for()
        assert page.locator("#banner").is_hidden()


def test_the_page_says_when_there_will_be_no_model(visit: Callable[..., Any]) -> None:
    def never() -> hw.Engine:
        raise RuntimeError("no")

    with listening(never, model="none") as port:
        page = visit(f"http://127.0.0.1:{port}").page
        page.locator("#banner", has_text="could not be loaded").wait_for()


def test_a_server_with_keys_gives_the_page_and_nothing_else_without_one(
    folder: Path, tmp_path: Path, visit: Callable[..., Any]
) -> None:
    keys = tmp_path / "keys.json"
    secret = add_key(keys, "someone")
    with listening(lambda: small_engine(folder), model="locked", key_file=keys) as port:
        page = visit(f"http://127.0.0.1:{port}", may_refuse=True).page
        page.locator("h1", has_text="This server needs a key").wait_for()
        page.fill("#key", "hw-wrong")
        page.keyboard.press("Enter")
        page.locator(".lead", has_text="is not valid").wait_for()
        page.fill("#key", secret)
        page.keyboard.press("Enter")
        page.locator("#commit-output").wait_for()
        for method, path in (("GET", "/lab/api/model"), ("GET", "/lab/api/vocab"), ("POST", "/lab/api/trace")):
            assert page.request.fetch(f"http://127.0.0.1:{port}{path}", method=method).status == 401
        assert page.request.get(f"http://127.0.0.1:{port}/lab/main.js").status == 200
        assert page.request.post(f"http://127.0.0.1:{port}/lab/").status == 401


def test_without_a_server_the_page_runs_on_a_recording_and_says_so(plain_files: str, visit: Callable[..., Any]) -> None:
    watched = visit(plain_files, "/index.html", may_refuse=True)
    page = watched.page
    page.locator("#banner", has_text="recorded, real distribution").wait_for()
    page.locator("#source", has_text="recorded").wait_for()
    page.check("#output-1")
    page.locator("input[id^=output-count]").fill("150")
    page.click("#commit-output")
    page.click("#reveal-output")
    assert "49,152" in page.locator("#answer-output").inner_text()
    page.check("#greedy-2")
    page.click("#commit-greedy")
    page.click("#reveal-greedy")
    page.locator("#answer-greedy mark").first.wait_for()
    page.fill("#teacher-question", "Which token is the likeliest?")
    page.keyboard.press("Enter")
    page.locator(".composed", has_text="“ girl” 35.8%").wait_for()
    assert page.locator(".generated").count() == 0  # there is no model
    page.goto(f"{plain_files}/index.html#lab")
    page.locator("#distribution .bars li", has_text="35.8%").wait_for()
    page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
    page.locator(".strip", has_text="2 stay").wait_for()
    page.locator("#tab-lens").click()
    page.locator(".lens tbody tr").nth(30).wait_for()
    page.locator("#tab-attention").click()
    page.locator(".heat").first.wait_for()
    page.locator("#mask-kind-window").click()
    page.locator("#mask-result", has_text="no server behind this page").wait_for()
    page.locator("#tab-engine").click()
    page.locator("#panel", has_text="headway lab").wait_for()
    page.fill("#prompt", "something else")
    page.click("#run")
    page.locator("#lab-message", has_text="only one recorded distribution").wait_for()
    assert len(watched.refused) == 1  # one look for a server, and no more
