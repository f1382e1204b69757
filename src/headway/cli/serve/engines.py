"""What a server computes with: its engine, and what drafts for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.system.log import log_event
from headway.cli.flags.shared import EngineOptions, named_drafter
from headway.cli.terminal.render import PLAIN_SECONDS, fetched

if TYPE_CHECKING:
    from headway.models.weights.load import LoadProgress
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter


def open_served(options: EngineOptions, **sizes: Any) -> Engine:
    """A server's engine, with everything loaded that the first request would otherwise wait for."""
    return open_engine_at(fetched(options.model), **options.given(), **sizes)


def open_engine_at(path: Path, *, progress: LoadProgress | None = None, **given: Any) -> Engine:
    """The engine of a model on disk; `progress` is told as well as the log."""
    import headway as hw

    log = LoadingLog()

    def tell(done: int, total: int) -> None:
        log(done, total)
        if progress is not None:
            progress(done, total)

    engine = hw.Engine(path, **given, progress=tell)
    _ = engine.chat_template, engine.generation_defaults
    return engine


def served_drafter(name: str, options: EngineOptions) -> Drafter:
    """What drafts for every request; a draft model stays loaded as long as the server runs."""
    import headway as hw

    if (own := named_drafter(name)) is not None:
        return own
    return hw.DraftModel(open_served(options.of_drafter(name)))


class LoadingLog:
    """Logs how much of a model is loaded, every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + PLAIN_SECONDS
            log_event("loading layers", done=done, total=total)
