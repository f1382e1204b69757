"""Servers with the Lab, and a browser that refuses to be quiet: a console error or a request elsewhere fails a test.

The browser is Debian's chromium (`make test` installs it where it can). Without it these tests fail, unless
HEADWAY_NO_BROWSER=1 says that there is to be none.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from lab_serving import lab_live

import headway as hw
from headway.server.lab.page import STATIC
from support.live import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
REFUSED = "Failed to load resource"  # what chromium says of any answer that is an error
PATIENCE = 120_000  # milliseconds until a test gives up; nothing is asserted about times


@pytest.fixture(scope="session")
def lab_server(smollm2_path: Path) -> Iterator[Live]:
    """The default model with the Lab."""
    with lab_live(hw.Engine("smollm2", pages=512, threads=1)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module. It must end with it: playwright leaves an event loop running in this thread."""
    if os.environ.get("HEADWAY_NO_BROWSER") == "1":
        pytest.skip("HEADWAY_NO_BROWSER=1: there is to be no browser")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("there is no chromium here; install it (apt-get install chromium), or set HEADWAY_NO_BROWSER=1")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield result
        result.close()


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page, self.origin = page, origin
        self.problems: list[str] = []
        self.refused: list[str] = []  # answers that were errors: the test says whether they were meant
        page.set_default_timeout(PATIENCE)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            kind = self.refused if message.text.startswith(REFUSED) else self.problems
            kind.append(f"{message.type}: {message.text} {message.location}")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.problems.append(f"request to {url}")


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Open the Lab: `visit(server.url)`, then `.page`. `may_refuse` says that answers may be errors."""
    opened: list[tuple[Watched, bool]] = []
    contexts = []

    def open_(url: str, path: str = "/lab/", *, may_refuse: bool = False, **options: Any) -> Watched:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        options.setdefault("reduced_motion", "reduce")
        context = browser.new_context(**options)
        contexts.append(context)
        watched = Watched(context.new_page(), url)
        opened.append((watched, may_refuse))
        watched.page.goto(url + path)
        return watched

    yield open_
    for context in contexts:
        context.close()
    for watched, may_refuse in opened:
        assert watched.problems == []
        assert may_refuse or watched.refused == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def plain_files() -> Iterator[str]:
    """The page's files and nothing behind them."""
    handler = functools.partial(_Quiet, directory=str(STATIC))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
