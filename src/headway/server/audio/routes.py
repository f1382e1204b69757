"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a recording as text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.server.api.respond import DONE, client_error
from headway.server.api.response_schema import ERRORS
from headway.server.api.streaming import EventStreamResponse, event, json_bytes, relay
from headway.server.audio.decoder import AudioDecoder
from headway.server.audio.form_fields import SpeechForm, form_schema, read_form
from headway.server.audio.output import MEDIA_TYPES, TIMED, SpeechTranscript, usage, written
from headway.server.audio.response_schema import TRANSCRIPT
from headway.server.audio.transcriber import SpeechRequest, TranscriptPart, check_request, transcribe
from headway.server.errors import ApiError, error_event
from headway.server.pooling.models import PoolingModel, PoolingModels
from headway.server.serving import AdmittedRequest, Serving

router = APIRouter(responses=ERRORS)
TOKENS_PER_SECOND = 50  # of a recording, in the queue: the frames of Whisper's encoder


@router.post(
    "/v1/audio/transcriptions",
    summary="Transcribe a recording",
    response_model=None,
    responses=TRANSCRIPT,
    openapi_extra=form_schema(translates=False),
)
async def transcriptions(request: Request) -> Response:
    """What is said in a recording, in its own language."""
    return await _respond(request, "transcribe")


@router.post(
    "/v1/audio/translations",
    summary="Translate a recording into English",
    response_model=None,
    responses=TRANSCRIPT,
    openapi_extra=form_schema(translates=True),
)
async def translations(request: Request) -> Response:
    """What is said in a recording, in English."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: str) -> Response:
    serving: Serving = request.app.state.serving
    models: PoolingModels = request.app.state.pooling_models
    decoder: AudioDecoder = request.app.state.audio_decoder
    serving.check_started()
    body = await request.body()
    kind, translates = request.headers.get("content-type", ""), task == "translate"
    form = await serving.readers.run(lambda: read_form(kind, body, serving.settings, translates=translates))
    pool = models.get("audio", model=form.model)
    wanted = _wanted(form, task)
    check_request(pool, wanted)
    tenant = serving.tenant(request)
    with serving.queue_slot(tenant):
        samples = await decoder.samples(form.file, pool.task.rate)
    seconds = len(samples) / pool.task.rate
    tokens = max(1, round(seconds * TOKENS_PER_SECOND))
    transcript = SpeechTranscript(seconds)
    async with AsyncExitStack() as stack:
        admitted = await stack.enter_async_context(serving.admit(tenant, tokens=tokens, model=pool.name))
        admitted.prompt(tokens)
        if not form.stream:
            async with aclosing(transcribe(pool, samples, wanted)) as parts:
                async for part in parts:
                    transcript.add(part)
                    _count(admitted, part, pool)
            admitted.finish("stop")
            return _whole(transcript, form, task, pool)

        async def work(put: Any) -> None:
            async with aclosing(transcribe(pool, samples, wanted)) as parts:
                async for part in parts:
                    await put(part)

        batches = await stack.enter_async_context(relay(work))
        first = await anext(batches, [])  # an error before it sets the status
        events = _events(serving, transcript, admitted, first, batches, pool=pool)
        return EventStreamResponse(events, stack.pop_all())
    raise AssertionError("the stack suppresses no exception")


def _wanted(form: SpeechForm, task: str) -> SpeechRequest:
    timed = form.format in TIMED
    return SpeechRequest(
        task=task,
        language=form.language,
        temperature=form.temperature,
        prompt=form.prompt,
        segments=timed and "segment" in form.units,
        words=timed and "word" in form.units,
    )


def _count(admitted: AdmittedRequest, part: TranscriptPart, pool: PoolingModel) -> None:
    """Report the tokens of a part to the metrics, the log and the trace: those of its text, without times."""
    if part.text:
        admitted.tokens(len(pool.pipeline.tokenizer(part.text, add_special_tokens=False).input_ids))


def _whole(transcript: SpeechTranscript, form: SpeechForm, task: str, pool: PoolingModel) -> Response:
    value = written(transcript, form.format, task=task, units=form.units, tokenizer=pool.pipeline.tokenizer)
    data = value.encode() if isinstance(value, str) else json_bytes(value)
    return Response(data, headers={"content-type": MEDIA_TYPES[form.format]})


async def _events(
    serving: Serving,
    transcript: SpeechTranscript,
    admitted: AdmittedRequest,
    first: list[TranscriptPart],
    rest: AsyncIterator[list[TranscriptPart]],
    *,
    pool: PoolingModel,
) -> AsyncIterator[bytes]:
    """A delta for each part, and at the end the whole text. An error is the last event."""
    batch: list[TranscriptPart] | None = first
    try:
        while batch is not None:
            for part in batch:
                _count(admitted, part, pool)
                if delta := transcript.add(part):
                    yield event({"type": "transcript.text.delta", "delta": delta}, json_bytes)
            batch = await anext(rest, None)
    except Exception as error:
        admitted.fail(error)
        known: ApiError = client_error(error, log_text=serving.settings.log_prompts)
        yield error_event(known)
        return
    admitted.finish("stop")
    done = {"type": "transcript.text.done", "text": transcript.text, "usage": usage(transcript.seconds)}
    yield event(done, json_bytes) + DONE
