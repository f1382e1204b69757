"""`headway bench`: measure an engine's speed, its own overhead, or a server under load."""

from __future__ import annotations

import typer

from headway.cli.bench import overhead, serve, speed

app = typer.Typer(help="Measure decoding, prefill, batches, startup, a server, and the engine's own overhead.")
app.command("decode")(speed.decode)
app.command("prefill")(speed.prefill)
app.command("batch")(speed.batch)
app.command("startup")(speed.startup)
app.command("serve")(serve.serve)
app.command("overhead")(overhead.overhead)


@app.callback()
def bench() -> None:
    """Measure decoding, prefill, batches, startup, a server, and the engine's own overhead."""
