"""What opens and closes an engine, in a thread."""

from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

from headway.base.specs.samplers import Argmax
from headway.base.text import format_bytes
from headway.server.models.served_model import STEPS, LoadedEngine, ServedModel

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter

FREE_SECONDS = 2.0  # for the last references to a closed engine to go


def opened(model: ServedModel, memory: int | None) -> LoadedEngine:
    """The engine with its adapters and what drafts for it."""

    def progress(done: int, total: int) -> None:
        model.progress = done, total

    source = model.source
    engine = source.open(memory, progress)
    try:
        _ = engine.has_tokenizer  # reads it here, not with the first request: it may be large, or broken
        model.adapters.open(engine)
        drafter: Drafter | None = None
        if source.open_drafter is not None:
            drafter = source.open_drafter()
            with engine.context() as context:  # raises if it cannot draft for this model
                context.fill([0]).generate(Argmax(), speculate=drafter)
        return LoadedEngine(engine, drafter, engine.events(STEPS))
    except BaseException:
        engine.close()
        raise


def discard(loaded: LoadedEngine) -> None:
    """Close an engine that nobody wants any more."""
    loaded.events.close()
    loaded.engine.close()


def close_engine(closed: list[Any]) -> None:
    """Close an engine and free its memory: the list has the last lasting reference to it."""
    closed[0].close()
    engine = weakref.ref(closed[0])
    closed.clear()
    end = time.monotonic() + FREE_SECONDS
    while engine() is not None and time.monotonic() < end:  # the last requests are still ending
        time.sleep(FREE_SECONDS / 100)
    if engine() is not None:
        gc.collect()  # stops every thread meanwhile, so only if it has to be


def facts(engine: Engine) -> dict[str, Any]:
    """What the log tells of an engine."""
    info, pages = engine.info, engine.stats().pages_total
    stored = {"stored": info.stored} if info.stored else {}
    cache = f"at most {format_bytes(info.kv_bytes)}: {info.kv_reason}; --memory sets another amount"
    return {
        "dtype": info.dtype,
        **stored,
        "device": info.device,
        "threads": info.threads,
        "pages": pages,
        "kv_cache": cache,
    }
