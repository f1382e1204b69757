"""The routes of /v1/messages: generate the next message, and count the tokens of a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.server.anthropic.blocks import FIELDS, chat_request
from headway.server.anthropic.output import MessageWriter
from headway.server.anthropic.request_schema import CountRequest, MessagesRequest
from headway.server.anthropic.response_schema import ERRORS, WHOLE_OR_EVENTS, TokenCount
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.response_schema import ok
from headway.server.chats.fields import modern_request
from headway.server.chats.message_job import MessageJob, respond_message
from headway.server.chats.plan import plan_chat, read_prompt
from headway.server.errors import fields_named
from headway.server.models import requested_model
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/messages", summary="Generate the next message", response_model=None, responses=WHOLE_OR_EVENTS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """The assistant's next message in Anthropic's format, whole or as a stream of server-sent events."""
    serving: Serving = request.app.state.serving
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        chat = await serving.readers.run(chat_request, body, lease.engine)
        plan = await plan_chat(chat, serving, tenant, lease)
    job = MessageJob(plan)
    writer = MessageWriter(
        model=lease.name,
        format=plan.prompt.format,
        prompt_tokens=job.usage.prompt,
        stream=bool(body.stream),
    )
    return await respond_message(serving, request, plan, job, writer, stream=bool(body.stream), lease=lease)


@router.post("/v1/messages/count_tokens", summary="Count tokens", response_model=None, responses=ok(TokenCount))
async def count_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
    """The tokens of the prompt that a request would have."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    lease = await requested_model(request, body.model)

    def count() -> int:
        chat = modern_request(chat_request(body, lease.engine))
        return len(read_prompt(chat, RequestChecks(serving, lease.engine)).ids)

    with serving.queue_slot(tenant), fields_named(FIELDS):
        return {"input_tokens": await serving.readers.run(count)}
