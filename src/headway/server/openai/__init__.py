"""The server's face: what OpenAI's clients call."""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.openai import completions

router = APIRouter()
for part in (completions,):
    router.include_router(part.router)
