"""`headway lab`: a local server with the Lab's page, opened in a browser."""

from __future__ import annotations

import threading
import webbrowser
from typing import Annotated

from headway.cli.flags.declare import Option, with_flags
from headway.cli.flags.shared import INTEGER, EngineOptions
from headway.cli.serve.engines import open_served
from headway.cli.terminal.render import note


@with_flags
def lab(
    *,
    options: EngineOptions,
    port: Annotated[int, Option("--port", **INTEGER, help="The port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> int:
    """Watch live logits become a token: a page with a lesson, sliders and a view of the inside, on a real model.

    The page is served to this machine only; `headway serve` has it too, at /lab. Ctrl-C ends it.
    """
    from headway.server import lab as pages
    from headway.server.run import serve
    from headway.server.settings import ServerSettings

    def show(url: str) -> None:
        print(f"{url}/lab/", flush=True)
        if browser:
            threading.Thread(target=_open_browser, args=(f"{url}/lab/",), daemon=True).start()

    # Requests are not logged, so that the address stays on the screen.
    settings = ServerSettings(port=port, model=options.model, log_requests=False)
    return serve(settings, lambda: open_served(options), [pages.router], show)


def _open_browser(url: str) -> None:
    if not webbrowser.open(url):
        note("no browser could be opened; open the address above yourself, or use --no-browser")
