"""Sessions: programs that run elsewhere, over a WebSocket or a Unix socket. `docs/protocol.md` has the messages."""
