"""`POST /apply-template`: the prompt of a chat as text, as llama-server has it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.request_schema import ChatRequest
from headway.server.api.response_schema import ResponseSchema, ok
from headway.server.api.streaming import json_bytes
from headway.server.chats.fields import modern_request
from headway.server.chats.plan import read_prompt
from headway.server.models import requested_model
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute)


class AppliedTemplate(ResponseSchema):
    """The text; `/completion` takes it as a prompt."""

    prompt: str


@router.post("/apply-template", summary="Render a chat", response_model=None, responses=ok(AppliedTemplate))
async def apply_template(body: ChatRequest, request: Request) -> Response:
    """What the model's template makes of a chat. Fields about generation are checked, and change nothing."""
    serving: Serving = request.app.state.serving
    lease = await requested_model(request, body.model)

    def render() -> bytes:
        prompt = read_prompt(modern_request(body), RequestChecks(serving, lease.engine))
        result: dict[str, Any] = {"prompt": lease.engine.tokenizer.decode(prompt.ids)}
        return json_bytes(result)

    with serving.queue_slot(serving.tenant(request)):
        return Response(await serving.readers.run(render), media_type="application/json")
