"""The server's face: what OpenAI's clients call, and the routes beside it that such servers have.

wire         the fields of a body and their types
checks       values against the model and the limits
plan         a request, settled: sampler, stops, constraint, log-probabilities
prompts      prompts of completions; messages  those of chats
speech       one message of an assistant
tokens       tokens and log-probabilities in OpenAI's shapes
running      work beside the response, streams
answers      admission, whole answers and streams; completions, chat, about  the routes
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.openai import about, chat, completions
from headway.server.openai.response_schema import ERRORS

router = APIRouter(responses=ERRORS)
for part in (completions, chat, about):
    router.include_router(part.router)
