"""OpenAI's API, and the other routes that such servers have (/tokenize and the like).

chat, completions   their routes
infill              llama-server's route for code
about               routes about the model: names, tokenization
adapter_routes      routes that load LoRA adapters
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.api.response_schema import ERRORS
from headway.server.openai import about, chat, completions, infill

router = APIRouter(responses=ERRORS)
for part in (completions, chat, infill, about):
    router.include_router(part.router)
