"""`headway serve`: a model over HTTP for OpenAI clients, and its API keys."""

from __future__ import annotations

from headway.cli.serve.command import serve as serve
