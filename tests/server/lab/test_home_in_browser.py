"""The server's own page in a browser: a chat, the probabilities of its tokens, from the keyboard and on a phone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_lab_looks import RULES

from headway.server.models import ModelSources
from support.live import Live
from support.many_models import Loader, many, model_folders

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)], ids=["phone", "laptop"])
def test_a_chat_from_the_keyboard_shows_how_likely_each_token_was(
    lab_server: Live, visit: Callable[..., Any], size: tuple[int, int]
) -> None:
    page = visit(lab_server.url, "/", viewport={"width": size[0], "height": size[1]}).page
    page.wait_for_selector("#state:has-text('ready')")
    assert page.text_content("#model") == "smollm2"
    assert {"Lab", "Docs", "Metrics"} <= set(page.locator("#links a").all_text_contents())
    page.fill("#temperature", "0")
    page.fill("#tokens", "8")
    page.focus("#text")
    page.keyboard.type("Name the capital of France.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.wait_for_selector("#send:enabled")
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 5}
    (choice,) = lab_server.chat("Name the capital of France.", **fields)["choices"]
    assert "".join(page.locator(".token").all_text_contents()) == choice["message"]["content"]

    page.focus(".token")
    page.keyboard.press("ArrowRight")
    second = choice["logprobs"]["content"][1]
    assert page.text_content("#likely .chosen td") == f"{100 * math.exp(second['logprob']):.1f} %"
    assert page.locator("#likely tr").count() == len(second["top_logprobs"])
    page.hover(".token >> nth=0")
    first = choice["logprobs"]["content"][0]
    assert page.text_content("#likely .chosen td") == f"{100 * math.exp(first['logprob']):.1f} %"
    assert page.evaluate(RULES) == []

    page.fill("#text", "And of Japan?")  # the chat goes on with what was said
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    assert [one["role"] for one in asked.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    page.wait_for_selector("#send:enabled")
    page.click("#clear")
    assert page.locator("#messages li").count() == 0


def test_an_answer_is_inserted_as_text_and_escape_stops_one(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/").page
    token = {"token": HOSTILE, "logprob": -0.1, "top_logprobs": [{"token": "<i>", "logprob": -3.0}]}
    chunk = {"choices": [{"delta": {"content": HOSTILE}, "logprobs": {"content": [token]}}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    page.fill("#text", HOSTILE)
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.hover(".token")
    assert page.locator("#messages img, #messages b, #likely i").count() == 0
    assert page.text_content(".token") == HOSTILE
    assert "<i>" in page.text_content("#likely")

    page.unroute("**/v1/chat/completions")
    page.click("#clear")
    page.fill("#tokens", "2000")
    page.fill("#text", "Write a very long story.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.keyboard.press("Escape")
    page.wait_for_selector(".error")
    assert page.text_content(".error") == "stopped"
    lab_server.until(lambda: lab_server.engine.stats().pages_held == 0)


def test_a_server_with_keys_is_asked_for_one(visit: Callable[..., Any], lab_server: Live) -> None:
    watched = visit(lab_server.url, "/", may_refuse=True)
    page = watched.page
    refusal = json.dumps({"error": {"message": "this server requires an API key"}})
    keys: list[str | None] = []

    def answer(route: Any) -> None:
        keys.append(route.request.headers.get("authorization"))
        known = keys[-1] == "Bearer hw-1"
        route.continue_() if known else route.fulfill(status=401, body=refusal, content_type="application/json")

    page.route("**/v1/models", answer)
    page.reload()
    page.wait_for_selector("#key-form:not([hidden])")
    keys.clear()
    assert page.locator("#links a").all_text_contents() == ["Lab", "Health"]  # the others would answer 401
    page.fill("#key", "hw-1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state:has-text('ready')")
    assert keys == ["Bearer hw-1"]
    with page.context.expect_page() as opened:
        page.click("#links a:has-text('Models')")
    opened.value.wait_for_url(re.compile("^blob:"))
    assert keys == ["Bearer hw-1"] * 2
    assert '"smollm2"' in opened.value.text_content("body")


def test_one_of_several_models_is_chosen_and_loads(visit: Callable[..., Any], tmp_path: Path) -> None:
    loader = Loader()
    folders = model_folders(tmp_path, "ada", "bob")
    sources = tuple(loader.source(path, is_kept=name == "ada") for name, path in folders.items())
    with many(ModelSources(sources), loader) as served:
        page = visit(served.url, "/").page
        page.wait_for_selector("#state:has-text('ready')")
        assert page.text_content("#model") == "ada"
        page.select_option("#models", "bob")
        page.wait_for_selector("#state:has-text('loads with the first message')")
        page.fill("#tokens", "4")
        page.fill("#text", "hi")
        page.keyboard.press("Enter")
        page.wait_for_selector("#state:has-text('ready')")
        page.wait_for_selector("#send:enabled")
        assert page.text_content("#model") == "bob"
        assert page.locator(".error").count() == 0
        assert loader.opened == ["ada", "bob"]
        assert page.evaluate(RULES) == []
