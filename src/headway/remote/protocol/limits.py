"""Numbers that both sides of a connection agree on; `docs/protocol.md` gives their meaning."""

from __future__ import annotations

ACK_EVERY = 32  # messages after which a side that sends nothing else acknowledges
WINDOW = 32  # steps of a generation that a server may be ahead of its client
KEPT_PASSES = 8  # latest passes of a context whose tokens can be fed to another one
PATH = "/v1/session"  # of the WebSocket
