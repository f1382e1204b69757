"""OpenAI's API, and the other routes that such servers have (/tokenize and the like).

chat, completions   their routes
about               routes about the model: names, tokenization
adapter_routes      routes that load LoRA adapters
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.api.response_schema import ERRORS
from headway.server.openai import about, chat, completions

router = APIRouter(responses=ERRORS)
for part in (completions, chat, about):
    router.include_router(part.router)
