"""`POST /infill`, llama-server's route for code: fills in what is between two texts.

The prompt is what models for code are trained on: other files, the text before, the text after, and where the middle
begins, each after a token of its own. It is a completion in every other way; the response has llama-server's fields.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.prompts import infill_ids
from headway.server.api.request_schema import (
    CompletionRequest,
    FailAtFirst,
    RequestSchema,
)
from headway.server.api.respond import respond
from headway.server.api.response_schema import whole_or_stream
from headway.server.errors import fields_named
from headway.server.llama_server.output import NativeJob, NativeText
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

FILE_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"), ("<repo_name>", "<file_sep>"))
PROJECT, OPEN_FILE = "myproject\n", "filename\n"  # names of what has none, as llama-server writes them
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, for models without tokens for files
FIELDS = {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl", "prompt": "input_prefix"}

router = APIRouter(route_class=JsonRoute)


class OtherFile(RequestSchema):
    """Another file that the model may look at."""

    text: str
    filename: str = "tmp"


class InfillRequest(NativeFields):
    """`POST /infill`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[OtherFile], FailAtFirst()] | None = None
    prompt: str = ""  # what the middle begins with


@router.post("/infill", summary="Fill in the middle of a text", responses=whole_or_stream(NativeText))
async def infill(body: InfillRequest, request: Request) -> Response:
    """What is between `input_prefix` and `input_suffix`, by a model with tokens for that; others refuse."""
    serving: Serving = request.app.state.serving
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    check_aliases(body)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        check = RequestChecks(serving, lease.engine)
        asked = await check.threads.run(_completion, body, check)
        job = await plan_completion(asked, serving, tenant, lease, native_extras(body, lease))
    native = NativeJob(job, "infill", body, lease.engine)
    return await respond(serving, request, asked, native, tokens=job.tokens, lease=lease, shape=native.shape)


def _completion(body: InfillRequest, check: RequestChecks) -> CompletionRequest:
    """The request as one for a completion of token ids. In a thread."""
    ids = _prompt(body, check)
    limit = native_limit(body, len(ids), check, "input_prefix")
    return CompletionRequest(prompt=ids, max_tokens=limit, **sampling_fields(body, check))


def _prompt(body: InfillRequest, check: RequestChecks) -> list[int]:
    """The tokens of the prompt. Names of tokens in texts are plain text."""
    engine, extra = check.engine, body.input_extra or []
    others = [text for file in extra for text in (file.filename, file.text)]
    check.text([body.input_prefix, body.input_suffix, body.prompt, *others], "input_prefix")
    before, after, middle = infill_ids(engine, "/infill")
    encode, tokenizer = engine.tokenizer.encode, engine.tokenizer
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    own = [before, *encode(body.input_prefix), after, *encode(body.input_suffix), middle, *encode(body.prompt)]
    return [*bos, *_other_files(extra, engine), *own]


def _other_files(extra: list[OtherFile], engine: Engine) -> list[int]:
    if not extra:
        return []
    encode = engine.tokenizer.encode
    for names in FILE_TOKENS:
        project, separator = (engine.tokenizer.token_to_id(name) for name in names)
        if project is not None and separator is not None:
            files = [[separator, *encode(f"{file.filename}\n"), *encode(file.text)] for file in extra]
            listed = [id for file in files for id in file]
            return [project, *encode(PROJECT), *listed, separator, *encode(OPEN_FILE)]
    return [id for file in extra for id in (*encode(SNIPPET), *encode(file.text))]
