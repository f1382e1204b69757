"""`POST /completion`, llama-server's own route: continues prompts.

A prompt is all the client's, from its first token on: names of special tokens in it are those tokens, so that what
`/apply-template` gives is the prompt of that chat.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.plan import check_size
from headway.server.api.request_schema import CompletionRequest, StructuredOutputs
from headway.server.api.respond import respond
from headway.server.api.response_schema import whole_or_stream
from headway.server.errors import bad_request, fields_named
from headway.server.llama_server.output import NativeJob, NativeText
from headway.server.llama_server.prompts import SCHEMA, read_native_prompts
from headway.server.llama_server.request_schema import (
    NativeFields,
    check_aliases,
    native_extras,
    native_limit,
    sampling_fields,
)
from headway.server.models import requested_model
from headway.server.openai.completions import plan_completion
from headway.server.serving import Serving

FIELDS = {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl", "structured_outputs.json": "json_schema"}

router = APIRouter(route_class=JsonRoute)


class NativeCompletionRequest(NativeFields):
    """`POST /completion`."""

    prompt: Annotated[Any, Field(json_schema_extra=SCHEMA)]
    json_schema: dict[str, Any] | None = None


@router.post("/completion", summary="Continue a prompt", responses=whole_or_stream(NativeText))
@router.post("/completions", summary="Continue a prompt", responses=whole_or_stream(NativeText))
async def completion(body: NativeCompletionRequest, request: Request) -> Response:
    """What follows a prompt, as clients of llama-server ask for it, whole or as server-sent events."""
    serving: Serving = request.app.state.serving
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    check_aliases(body)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        check = RequestChecks(serving, lease.engine)
        asked, limits = await check.threads.run(_completion, body, check)
        job = await plan_completion(asked, serving, tenant, lease, native_extras(body, lease, limits))
    native = NativeJob(job, "completion", body, lease.engine)
    return await respond(serving, request, asked, native, tokens=job.tokens, lease=lease, shape=native.shape)


def _completion(body: NativeCompletionRequest, check: RequestChecks) -> tuple[CompletionRequest, tuple[int, ...]]:
    """The request as one for completions of token ids, and the most tokens of each. In a thread."""
    prompts = read_native_prompts(body.prompt, check)
    fields = sampling_fields(body, check)
    if body.json_schema is not None:
        if body.grammar:
            raise bad_request("grammar and json_schema are both set; pass one of them", "json_schema")
        check_size(body.json_schema, "json_schema", check.settings)
        fields["structured_outputs"] = StructuredOutputs(json=body.json_schema)
    limits = tuple(native_limit(body, len(ids), check, "prompt") for ids in prompts)
    return CompletionRequest(prompt=prompts, max_tokens=max(limits), **fields), limits
