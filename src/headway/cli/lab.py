"""`headway lab`: a local server with the Lab's page, opened in a browser."""

from __future__ import annotations

import threading
import webbrowser
from typing import Annotated

import typer

from headway.cli.options import INTEGER, Device, Dtype, EngineOptions, MemoryFraction, Model, Quantize, Threads
from headway.cli.render import note
from headway.cli.serve import open_served
from headway.models.hub.registry import DEFAULT_MODEL


def lab(
    *,
    model: Model = DEFAULT_MODEL,
    port: Annotated[int, typer.Option("--port", **INTEGER, help="The port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
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

    options = EngineOptions(model, dtype, device, threads, quantize, memory_fraction)
    settings = ServerSettings(port=port, model=model, log_requests=False)  # so that the address stays on the screen
    code = serve(settings, lambda: open_served(options), [pages.router], show)
    raise typer.Exit(code)


def _open_browser(url: str) -> None:
    if not webbrowser.open(url):
        note("no browser could be opened; open the address above yourself, or use --no-browser")
