"""The routes of /v1/responses: create, retrieve, list input items, cancel, delete, count tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from headway.base.text import short_repr
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import ItemsRoute
from headway.server.api.response_schema import ERRORS, QUEUE_ERRORS, ok
from headway.server.api.streaming import json_bytes
from headway.server.chats.fields import modern_request
from headway.server.chats.message_job import respond_message
from headway.server.chats.plan import plan_chat, read_prompt
from headway.server.errors import bad_request, fields_named
from headway.server.models import requested_model
from headway.server.responses.items import FIELDS, ItemOrder, Offered, chat_messages, chat_request, item_page
from headway.server.responses.mcp_tools import not_offered, offered_tools
from headway.server.responses.output import McpResult, ResponseTools, ResponseWriter
from headway.server.responses.request_schema import PromptRequest, ResponseRequest
from headway.server.responses.response_schema import (
    WHOLE_OR_EVENTS,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseObject,
)
from headway.server.responses.store import ResponseStore
from headway.server.responses.tool_loop import ToolLoop, approved_item
from headway.server.responses.turn import TurnJob, continued, read_turn
from headway.server.serving import Serving

router = APIRouter(route_class=ItemsRoute, responses={**ERRORS, **QUEUE_ERRORS})


@router.post("/v1/responses", summary="Generate a response", response_model=None, responses=WHOLE_OR_EVENTS)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """The model's next turn: whole, as a stream of server-sent events, or in the background."""
    serving: Serving = request.app.state.serving
    store: ResponseStore = request.app.state.responses
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    _check_options(body)
    previous = continued(body, store, tenant)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        turn = await serving.readers.run(read_turn, body, serving.settings, previous)
        offered = await offered_tools(body, request.app.state.mcp, serving.settings, tenant)
        if offered is None and turn.approved:
            raise not_offered(turn.approved[0])
        if offered is None:
            loop, plan = None, await plan_chat(chat_request(body, turn.earlier, turn.new), serving, tenant, lease)
        else:
            loop = ToolLoop(
                body,
                turn.earlier,
                turn.new,
                offered,
                approved=turn.approved,
                serving=serving,
                tenant=tenant,
                lease=lease,
            )
            plan = await loop.first_plan()
    replica = serving.settings.replica
    custom = plan.policy.custom
    tools = ResponseTools(custom) if offered is None else offered.response_tools(custom, turn.approved)
    writer = ResponseWriter(
        body, lease.engine, model=lease.name, format=plan.prompt.format, replica=replica, tools=tools
    )
    job = TurnJob(turn, plan, writer, store, is_stored=body.store is not False, tools=loop)
    if body.background:
        return Response(json_bytes(await job.start(serving, tenant, lease)), media_type="application/json")
    job.store_at_end(tenant)
    return await respond_message(serving, request, plan, job.message, writer, stream=bool(body.stream), lease=lease)


def _check_options(body: ResponseRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options require stream: true; set it, or remove them", "stream_options")
    if body.background and body.stream:
        raise bad_request("a background response is not streamed; remove background or stream", "background")
    if body.background and body.store is False:
        raise bad_request("a background response must be stored; remove background or store", "background")


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    response_model=None,
    responses=ok(ResponseObject),
)
async def cancel_response(response_id: str, request: Request) -> Response:
    """A background response, which stops if it is under way."""
    serving: Serving = request.app.state.serving
    stored = request.app.state.responses.get(serving.tenant(request), response_id)
    if not stored.response["background"]:
        raise bad_request(
            "only a background response can be cancelled; disconnect to end any other", "response_id", "unsupported"
        )
    if (task := stored.task) is not None:
        task.cancel()
        await asyncio.wait({task})
    return Response(json_bytes(stored.response), media_type="application/json")


# -- stored responses --------------------------------------------------------------------------------------------------


@router.get(
    "/v1/responses/{response_id}", summary="A stored response", response_model=None, responses=ok(ResponseObject)
)
async def retrieve_response(
    response_id: str, request: Request, stream: Annotated[bool, Query(description="Only false")] = False
) -> Response:
    """A response that was stored, without log-probabilities."""
    if stream:
        raise bad_request("a stored response is not streamed; remove stream", "stream", "unsupported")
    serving: Serving = request.app.state.serving
    stored = request.app.state.responses.get(serving.tenant(request), response_id)
    return Response(json_bytes(stored.response), media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}", summary="Delete a response", response_model=None, responses=ok(DeletedResponse)
)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a stored response and its context; responses that continue it stay."""
    serving: Serving = request.app.state.serving
    request.app.state.responses.delete(serving.tenant(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="The input of a stored response",
    response_model=None,
    responses=ok(InputItems),
)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: ItemOrder = "desc",
    after: str | None = None,
) -> Response:
    """The input items of a stored response, without those of earlier ones."""
    serving: Serving = request.app.state.serving
    stored = request.app.state.responses.get(serving.tenant(request), response_id)
    if after is not None and all(item["id"] != after for item in stored.input_items):
        raise bad_request(f"after is {short_repr(after)}; it must be the id of an input item", "after")
    return Response(json_bytes(item_page(stored.input_items, limit, order, after)), media_type="application/json")


@router.post("/v1/responses/input_tokens", summary="Count input tokens", response_model=None, responses=ok(InputTokens))
async def count_input_tokens(body: PromptRequest, request: Request) -> dict[str, Any]:
    """The tokens of the prompt that a request would have."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    lease = await requested_model(request, body.model)
    previous = continued(body, request.app.state.responses, tenant)

    def count(offered: Offered) -> int:
        turn = read_turn(body, serving.settings, previous)
        calls = chat_messages([approved_item(call, McpResult(0, "")) for call in turn.approved], turn.all_messages)
        chat = modern_request(chat_request(body, turn.earlier, (*turn.new, *calls), offered))
        return len(read_prompt(chat, RequestChecks(serving, lease.engine)).ids)

    with serving.queue_slot(tenant), fields_named(FIELDS):
        offered = await offered_tools(body, request.app.state.mcp, serving.settings, tenant)
        if offered is not None:
            offered.close()
        tools = {} if offered is None else offered.definitions
        return {"object": "response.input_tokens", "input_tokens": await serving.readers.run(count, tools)}
