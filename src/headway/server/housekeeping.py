"""What a server tidies up when nobody waits for it: garbage, and memory that large requests have left free.

Both stop or slow down every thread for some milliseconds, so a server that is never idle does the first of them once in
a while only, between large requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headway.base.system.collector import FullCollections, give_back_memory

if TYPE_CHECKING:
    from headway.server.serving import Serving

REST_SECONDS = 1.0  # without requests, until everything is tidied up
BUSY_SECONDS = 60.0  # until garbage is collected while there are requests
LARGE_BYTES = 1 << 20  # of bodies in flight: a collection would visit all their values


class Housekeeping:
    """Called now and then with the time, as `time.monotonic()` has it."""

    def __init__(self, serving: Serving, collections: FullCollections) -> None:
        self._serving, self._collections = serving, collections
        self._busy_at = self._collected_at = 0.0
        self._is_tidy = True

    def loaded(self) -> None:
        """The models that are kept are loaded. An only one stays until the end, and need not be looked at again."""
        if self._serving.models.is_single:
            self._collections.skip_loaded()

    async def tend(self, now: float) -> None:
        serving = self._serving
        ended = serving.last_body_at
        if serving.is_busy:
            self._busy_at, self._is_tidy = now, False
            if now - self._collected_at >= BUSY_SECONDS and serving.body_bytes < LARGE_BYTES:
                self._collected_at = now
                self._collections.collect()
        elif not (self._is_tidy and ended <= self._collected_at) and now - max(self._busy_at, ended) >= REST_SECONDS:
            self._collected_at, self._is_tidy = now, True
            await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        self._collections.collect()
        give_back_memory()
