"""`headway bench`: measure an engine's speed, its own overhead, or a server under load."""

from __future__ import annotations

from headway.cli.bench import overhead, serve, speed

HELP = "Measure decoding, prefill, batches, startup, a server, and the engine's own overhead."
COMMANDS = {
    "decode": speed.decode,
    "prefill": speed.prefill,
    "batch": speed.batch,
    "startup": speed.startup,
    "serve": serve.serve,
    "overhead": overhead.overhead,
}
