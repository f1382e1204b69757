"""`POST /infill`, llama-server's route for code: fills in what is between two texts.

The prompt is what models for code are trained on: other files, the text before, the text after, and where the middle
begins, each after a token of its own. It is a completion in every other way; the response has llama-server's fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

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
    SamplingFields,
    Text,
    Texts,
    described,
)
from headway.server.api.respond import respond
from headway.server.api.response_schema import ResponseSchema, Usage, whole_or_stream
from headway.server.errors import bad_request, fields_named
from headway.server.models import requested_model
from headway.server.openai.completions import CompletionJob, SequenceDelta, plan_completion
from headway.server.serving import Serving

FILE_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"), ("<repo_name>", "<file_sep>"))
PROJECT, OPEN_FILE = "myproject\n", "filename\n"  # names of what has none, as llama-server writes them
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, for models without tokens for files
FIELDS = {"max_tokens": "n_predict", "prompt": "input_prefix"}
SHARED = tuple(SamplingFields.model_fields)
STOP_TYPES = {"eos": "eos", "stop": "word", "constraint": "eos", "length": "limit"}

router = APIRouter(route_class=JsonRoute)


class OtherFile(RequestSchema):
    """Another file that the model may look at."""

    text: str
    filename: str = "tmp"


class InfillRequest(SamplingFields):
    """`POST /infill`."""

    model: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[OtherFile], FailAtFirst()] | None = None
    prompt: str = ""  # what the middle begins with
    n_predict: Annotated[int, described(minimum=-1)] | None = None
    stop: Text | Texts | None = None
    grammar: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None  # the prefix cache is always used; ignored
    id_slot: int | None = None  # requests do not choose where they are computed; ignored


class Infill(ResponseSchema):
    """What llama-server responds, and the fields that all responses here have."""

    id: str
    object: Literal["infill"]
    created: int
    model: str
    index: int
    content: str
    tokens: list[int]
    stop: bool
    stop_type: Literal["none", "eos", "word", "limit"]
    stopping_word: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    usage: Usage


@router.post("/infill", summary="Fill in the middle of a text", responses=whole_or_stream(Infill))
async def infill(body: InfillRequest, request: Request) -> Response:
    """What is between `input_prefix` and `input_suffix`, by a model with tokens for that; others refuse."""
    serving: Serving = request.app.state.serving
    tenant, lease = serving.tenant(request), await requested_model(request, body.model)
    with serving.queue_slot(tenant), fields_named(FIELDS):
        check = RequestChecks(serving, lease.engine)
        ids = await check.threads.run(_prompt, body, check)
        job = await plan_completion(_completion(body, ids, check), serving, tenant, lease)
    completion = CompletionRequest(prompt=ids, stream=body.stream)
    return await respond(serving, request, completion, InfillJob(body, job), tokens=job.tokens, lease=lease)


def _completion(body: InfillRequest, ids: list[int], check: RequestChecks) -> CompletionRequest:
    """The request as one for a completion. Without n_predict it may take what the context length leaves."""
    if body.n_predict == 0 or (body.n_predict or 0) < -1:
        raise bad_request(f"n_predict is {body.n_predict}; it must be -1 (no limit) or at least 1", "n_predict")
    given = body.n_predict if body.n_predict is not None and body.n_predict > 0 else None
    limit = check.max_new_tokens(len(ids), given, body.min_tokens or 0, "input_prefix")
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*SHARED, "stop", "grammar", "stream")}
    fields = {name: value for name, value in fields.items() if value is not None}
    return CompletionRequest(prompt=ids, max_tokens=limit, return_token_ids=True, **fields)


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
        project, separator = (engine.tokenizer.backend.token_to_id(name) for name in names)
        if project is not None and separator is not None:
            files = [[separator, *encode(f"{file.filename}\n"), *encode(file.text)] for file in extra]
            listed = [id for file in files for id in file]
            return [project, *encode(PROJECT), *listed, separator, *encode(OPEN_FILE)]
    return [id for file in extra for id in (*encode(SNIPPET), *encode(file.text))]


class InfillJob:
    """A completion whose response has llama-server's fields."""

    id_prefix, object, chunk_object, last_event = "infill", "infill", "infill", b""

    def __init__(self, body: InfillRequest, job: CompletionJob) -> None:
        self._body, self._job, self.usage, self.run = body, job, job.usage, job.run
        self._end: SequenceDelta | None = None

    def add(self, delta: SequenceDelta, admitted: Any) -> None:
        self._job.add(delta, admitted)
        if delta.finish is not None:
            self._end = delta

    def response(self) -> dict[str, Any]:
        (choice,) = self._job.response()["choices"]
        return self._fields(choice["text"], choice["token_ids"], self._end)

    def chunks(self, delta: SequenceDelta) -> Iterable[dict[str, Any]]:
        if delta.text or delta.tokens or delta.finish:
            ids = [token.id for token in delta.tokens]
            yield self._fields(delta.text, ids, delta if delta.finish is not None else None)

    def _fields(self, text: str, ids: list[int], end: SequenceDelta | None) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": ids if self._body.return_tokens else [],
            "stop": end is not None,
            "stop_type": "none" if end is None else STOP_TYPES[end.reason or "eos"],
            "stopping_word": "" if end is None else end.stop_string,
            "tokens_predicted": self._job.generated,
            "tokens_evaluated": self.usage.prompt,
            "tokens_cached": self.usage.cached,
            "truncated": False,
        }

    response_size = 0

    def chunk_size(self, deltas: Iterable[SequenceDelta]) -> int:
        return 0
