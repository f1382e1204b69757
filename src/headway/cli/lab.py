"""`headway lab`: a local server with the Lab's page, opened in a browser."""

from __future__ import annotations

import threading
import webbrowser
from typing import Annotated

import typer

from headway.cli.flags import with_flags
from headway.cli.options import INTEGER, EngineOptions
from headway.cli.render import note
from headway.cli.serve import open_served


@with_flags
def lab(
    *,
    options: EngineOptions,
    port: Annotated[int, typer.Option("--port", **INTEGER, help="The port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
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
    code = serve(settings, lambda: open_served(options), [pages.router], show)
    raise typer.Exit(code)


def _open_browser(url: str) -> None:
    if not webbrowser.open(url):
        note("no browser could be opened; open the address above yourself, or use --no-browser")
