"""The prefix cache for programs: counts, pins, clearing. Passes use it by themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headway.base.checks import check_number, check_text
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.program.checks.ids import token_ids

if TYPE_CHECKING:
    from headway.program.engine import Engine


class PrefixCache:
    """Pages that no context holds, kept by the tokens that they depend on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<PrefixCache: {self.pages} pages cached, {self.hits} reused so far>"

    @property
    def pages(self) -> int:
        """The number of cached pages."""
        return self._engine.stats().pages_cached

    @property
    def hits(self) -> int:
        """How many pages were reused instead of computed, so far."""
        return self._engine.stats().cache_hits

    def pin(self, name_or_ids: str | Iterable[int], *, ttl: float | None = None, salt: str = "") -> int:
        """Keep the pages of a saved context, or of a prompt's token ids, until `unpin` or for ttl seconds.

        Returns how many pages are pinned: those that are cached now.
        """
        if ttl is not None and (ttl := check_number(ttl, "ttl")) <= 0:
            raise InvalidInput(f"ttl is {short_repr(ttl)}; it must be a number of seconds above 0")
        check_text(salt, "salt")
        until = math.inf if ttl is None else time.monotonic() + ttl
        engine = self._engine
        with engine._lock:
            if isinstance(name_or_ids, str):
                table = engine._snapshots.table(name_or_ids)
                if table is None:
                    raise InvalidInput(
                        f"no context is saved in memory as {short_repr(name_or_ids)}; save it, or give token ids"
                    )
                name, pages = name_or_ids, table.held()
            else:
                ids = token_ids(name_or_ids, engine.vocab_size)
                name, pages = (salt, *ids), engine._loop.kv_cache.cached_prefix(salt, ids, engine.page_size)
            engine._loop.kv_cache.pin(name, pages, until)
        return len(pages)

    def unpin(self, name_or_ids: str | Iterable[int], *, salt: str = "") -> bool:
        """Unpin pages; False when they were not pinned."""
        check_text(salt, "salt")
        name = name_or_ids if isinstance(name_or_ids, str) else (salt, *token_ids(name_or_ids, self._engine.vocab_size))
        with self._engine._lock:
            return self._engine._loop.kv_cache.unpin(name)

    def clear(self) -> int:
        """Forget every cached page; returns how many became free. Pages in use stay, but are not matched again."""
        with self._engine._lock:
            return self._engine._loop.kv_cache.clear()
