"""The routes of /v1/messages: generate the next message, and count the tokens of a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.server.anthropic.blocks import FIELDS, chat_request
from headway.server.anthropic.output import MessageWriter
from headway.server.anthropic.request_schema import CountRequest, MessagesRequest
from headway.server.anthropic.response_schema import ERRORS, WHOLE_OR_EVENTS, TokenCount
from headway.server.errors import fields_named
from headway.server.message_job import MessageJob, respond_message
from headway.server.openai.chat_fields import modern_request
from headway.server.openai.chat_plan import plan_chat, read_prompt
from headway.server.openai.checks import RequestChecks
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.respond import requested_adapter
from headway.server.openai.response_schema import ok
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/messages", summary="Generate the next message", response_model=None, responses=WHOLE_OR_EVENTS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """The assistant's next message in Anthropic's format, whole or as a stream of server-sent events."""
    serving: Serving = request.app.state.serving
    tenant, adapter = serving.tenant(request), requested_adapter(serving, body.model)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        chat = await serving.readers.run(chat_request, body, serving.engine)
        plan = await plan_chat(chat, serving, tenant, adapter)
    name, job = None if adapter is None else adapter.name, MessageJob(plan)
    writer = MessageWriter(
        model=name or serving.model_name,
        format=plan.prompt.format,
        prompt_tokens=job.usage.prompt,
        stream=bool(body.stream),
    )
    return await respond_message(serving, request, plan, job, writer, stream=bool(body.stream), model=name)


@router.post("/v1/messages/count_tokens", summary="Count tokens", response_model=None, responses=ok(TokenCount))
async def count_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
    """The tokens of the prompt that a request would have."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    requested_adapter(serving, body.model)

    def count() -> int:
        chat = modern_request(chat_request(body, serving.engine))
        return len(read_prompt(chat, RequestChecks(serving)).ids)

    with serving.queue_slot(tenant), fields_named(FIELDS):
        return {"input_tokens": await serving.readers.run(count)}
