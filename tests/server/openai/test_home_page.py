"""The server's own page at `/`: a page for browsers, links for others, and nothing that its policy would forbid."""

from __future__ import annotations

import re
from pathlib import Path

from headway.server.home.page import STATIC, files
from headway.server.keys import add_key
from support.live import Live, live
from support.small import small_engine

BROWSER = {"accept": "text/html,application/xhtml+xml"}


def test_browsers_get_a_page_and_others_links(served: Live) -> None:
    page = served.ask("GET", "/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert served.get("/").json["links"]["docs"] == "/docs"
    assert served.ask("HEAD", "/").status == 200  # how Ollama's clients see whether there is a server
    used = re.findall(r'(?:src|href)="(home/[^"]+)"', page.body.decode())
    assert {f"home/{name}" for name in files()} - {"home/index.html"} == set(used)
    for name in used:
        answer = served.get(f"/{name}")
        assert (answer.status, answer.headers["content-security-policy"]) == (200, policy)
    assert served.get("/home/../app.py").status == 404
    assert served.get("/home/nothing.js").status == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "ada")
    with live(small_engine(tmp_path / "model"), key_file=tmp_path / "keys.json") as server:
        assert server.ask("GET", "/", headers=BROWSER).status == 200
        assert server.get("/home/home.js").status == 200
        assert server.get("/home/a/b").status == 401
        assert server.get("/v1/models").status == 401


def test_nothing_on_the_page_is_inline_or_parses_html() -> None:
    for path in STATIC.iterdir():
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://| style=| on\w+=\"", text
        )
        assert not re.search(r"<script>|<script [^>]*>[^<]", text)
