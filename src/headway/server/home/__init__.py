"""The server's own page at `/`: its model, a chat with the probabilities of tokens, and links to everything else."""

from __future__ import annotations

from headway.server.home.page import router

__all__ = ["router"]
