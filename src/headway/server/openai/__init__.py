"""OpenAI's API, and the other routes that such servers have (/tokenize and the like).

parsing          request bodies as JSON
request_schema   the fields of a request and their types
checks           values against the model and the server's limits
token_bounds     allowed_token_ids and bad_words as a constraint
plan             a checked request: sampler, stops, constraint, log-probabilities
prompts          prompts of completions; `messages` has those of chats
message_stream   one message of an assistant, as it is generated
tokens           tokens and log-probabilities in OpenAI's format
streaming        work that runs concurrently with its response; server-sent events
respond          admission, whole responses and streams
response_schema  the fields of responses, for the OpenAPI document
chat, completions, about   the routes
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.openai import about, chat, completions
from headway.server.openai.response_schema import ERRORS

router = APIRouter(responses=ERRORS)
for part in (completions, chat, about):
    router.include_router(part.router)
