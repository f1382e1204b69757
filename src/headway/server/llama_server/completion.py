"""`POST /completion`, llama-server's own route: continues one prompt.

The prompt is all the client's, from its first token on: names of special tokens in it are those tokens, so that what
`/apply-template` gives is the prompt of that chat.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from headway.base.text import short_repr
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.plan import check_size
from headway.server.api.prompts import encode
from headway.server.api.request_schema import CompletionRequest, NonNegative, StructuredOutputs
from headway.server.api.respond import respond
from headway.server.api.response_schema import whole_or_stream
from headway.server.errors import bad_request, fields_named
from headway.server.llama_server.output import NativeJob, NativeText
from headway.server.llama_server.request_schema import NativeFields, native_limit, sampling_fields
from headway.server.models import requested_model
from headway.server.openai.completions import plan_completion
from headway.server.serving import Serving

FIELDS = {"max_tokens": "n_predict", "logprobs": "n_probs", "structured_outputs.json": "json_schema"}
FORMS = "a text, or a list of texts and token ids, which are joined"
PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "minItems": 1},
    ]
}

router = APIRouter(route_class=JsonRoute)


class NativeCompletionRequest(NativeFields):
    """`POST /completion`."""

    prompt: Annotated[Any, Field(json_schema_extra=PROMPT)]
    n_probs: NonNegative | None = None
    json_schema: dict[str, Any] | None = None


@router.post("/completion", summary="Continue a prompt", responses=whole_or_stream(NativeText))
@router.post("/completions", summary="Continue a prompt", responses=whole_or_stream(NativeText))
async def completion(body: NativeCompletionRequest, request: Request) -> Response:
    """What follows a prompt, as clients of llama-server ask for it, whole or as server-sent events."""
    serving: Serving = request.app.state.serving
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        check = RequestChecks(serving, lease.engine)
        asked = await check.threads.run(_completion, body, check)
        job = await plan_completion(asked, serving, tenant, lease)
    native = NativeJob(
        job, "completion", returns_tokens=bool(body.return_tokens), ranked=lease.engine if body.n_probs else None
    )
    return await respond(
        serving, request, CompletionRequest(prompt=[0], stream=body.stream), native, tokens=job.tokens, lease=lease
    )


def _completion(body: NativeCompletionRequest, check: RequestChecks) -> CompletionRequest:
    """The request as one for a completion of token ids. In a thread."""
    ids = _prompt(body.prompt, check)
    fields = sampling_fields(body, check.engine)
    if body.json_schema is not None:
        if body.grammar:
            raise bad_request("grammar and json_schema are both set; pass one of them", "json_schema")
        check_size(body.json_schema, "json_schema", check.settings)
        fields["structured_outputs"] = StructuredOutputs(json=body.json_schema)
    limit = native_limit(body, len(ids), check, "prompt")
    return CompletionRequest(prompt=ids, max_tokens=limit, logprobs=body.n_probs or None, **fields)


def _prompt(given: Any, check: RequestChecks) -> list[int]:
    """The tokens of a prompt. With a BOS token in front, if the model uses one and the prompt begins with a text."""
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise bad_request(f"prompt is empty; pass {FORMS}", "prompt")
    check.text((one for one in listed if isinstance(one, str)), "prompt")
    ids: list[int] = []
    for i, one in enumerate(listed):
        if isinstance(one, str):
            ids += encode(one, check.engine, begin=not i, special=True)
        elif isinstance(one, bool) or not isinstance(one, int):
            raise bad_request(
                f"prompt[{i}] is {short_repr(one)}; the prompt must be {FORMS}", "prompt", "invalid_value"
            )
        else:
            ids.append(one)
    return ids
