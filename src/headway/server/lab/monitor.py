"""Routes that the page polls: the model, its vocabulary, the state of the pages, the latest steps.

The page map has the state of each page and nothing of its contents.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter, deque
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from headway.program.engine import Engine
from headway.program.events import EventStream
from headway.program.kv_cache.page_map import PageState
from headway.server.api.tokens import text_of
from headway.server.errors import bad_request
from headway.server.serving import Serving

STEPS = 256  # latest ones that are kept
STATES = tuple(state.name.lower() for state in PageState)

router = APIRouter()


class PageMapResponse(BaseModel):
    """The state of every page as runs [state, length] over pages 1 … total, and the number of pages in each state."""

    total: int
    page_size: int
    states: list[str]
    runs: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    counts: dict[str, int]
    contexts: int
    queued: int


class RecentSteps:
    """The latest steps of one engine, from the first request on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stream: EventStream = engine.events(STEPS)
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)

    def steps(self, after: int) -> list[dict[str, Any]]:
        """The steps with a number above `after`."""
        while (event := self._stream.poll()) is not None:
            self._steps.append(asdict(event))
        return [step for step in self._steps if step["step"] > after]


@router.get("/lab/api/model", summary="The model")
async def model(request: Request) -> dict[str, Any]:
    """What the page needs to know about the model: its sizes, where it runs, and what it can do.

    Without an engine the response has only `state`: loading, failed or dead. That is not an error: the page waits.
    """
    serving: Serving = request.app.state.serving
    served = serving.default_model
    if served.engine is None or serving.state == "dead":
        if not serving.models.is_single:
            serving.models.load(served)  # whoever opens the page wants to see it
        return {"state": serving.state if serving.models.is_single else "loading"}
    engine, served.used_at = served.engine, time.monotonic()
    config, facts = engine.config, engine.info
    return {
        "state": serving.state,
        "name": served.name,
        "loaded_at": served.loaded_at,
        "vocab_size": engine.vocab_size,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "hidden_size": config.hidden_size,
        "max_positions": config.max_positions,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "dtype": facts.dtype,
        "format": facts.format,
        "device": facts.device,
        "threads": facts.threads,
        "runner": facts.runner,
        "page_size": engine.page_size,
        "pages": engine.pages,
        "has_tokenizer": engine.has_tokenizer,
        "has_chat": engine.chat_template is not None,
        "eos_ids": list(engine.eos_ids),
    }


@router.get("/lab/api/vocab", summary="The text of every token")
async def vocab(request: Request) -> Response:
    """A JSON list with the text of each of the V tokens; bytes that are not whole characters are escaped."""
    serving: Serving = request.app.state.serving
    engine = serving.engine
    with serving.queue_slot(serving.tenant(request)):
        body = await serving.writers.run(_vocab, engine)
    return Response(body, media_type="application/json")


_vocabs: weakref.WeakKeyDictionary[Engine, bytes] = weakref.WeakKeyDictionary()


def _vocab(engine: Engine) -> bytes:
    """Cached for each engine: it takes half a second for a large vocabulary."""
    if engine not in _vocabs:
        _vocabs[engine] = _spelled(engine)
    return _vocabs[engine]


def _spelled(engine: Engine) -> bytes:
    texts = [text_of(id, engine, "") for id in range(engine.vocab_size)]
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


@router.get("/lab/api/pages", summary="The state of every page")
async def pages(request: Request) -> PageMapResponse:
    """Which pages are free, cached, working, committed, or shared by several contexts."""
    serving: Serving = request.app.state.serving
    return await serving.writers.run(page_map, serving.engine)


def page_map(engine: Engine) -> PageMapResponse:
    """The state of every page, as runs."""
    pages = engine.page_map()
    counts = Counter(pages.states)
    return PageMapResponse(
        total=len(pages.states),
        page_size=engine.page_size,
        states=list(STATES),
        runs=[[int(state), len(list(group))] for state, group in groupby(pages.states)],
        counts={state.name.lower(): counts[state] for state in PageState},
        contexts=pages.contexts,
        queued=pages.queued,
    )


@router.get("/lab/api/steps", summary="The engine's latest steps")
async def steps(request: Request, after: int = -1) -> dict[str, Any]:
    """The latest steps since the first request; `after` skips those up to a number."""
    if after < -1:
        raise bad_request(f"after is {after}; it must be the number of a step, or -1 for all", "after")
    serving: Serving = request.app.state.serving
    engine = serving.engine
    recent: RecentSteps | None = getattr(request.app.state, "lab_steps", None)
    if recent is None or recent.engine is not engine:
        recent = request.app.state.lab_steps = RecentSteps(engine)
    return {"steps": recent.steps(after), "kept": STEPS}
