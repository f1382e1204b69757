"""What an engine without work gives back to the system: memory of cached pages, on a CPU."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.program.engine import Engine

IDLE_CACHE = 256 << 20  # bytes of cached pages that an idle engine on a CPU keeps
IDLE_SHARE = 64 << 20  # bytes of pages given back to the system at a time, while the lock is held


def give_back_when_idle(engine: weakref.ref[Engine]) -> bool:
    """Give memory of cached pages back to the system, a share at a time; whether there is more. The lock is held."""
    one = engine()
    if one is None or one._pool is None or one._backend.decoder.device.type != "cpu" or one._tiers is not None:
        return False  # whoever has tiers wants to keep what was computed
    size = one._pool.nbytes // (one._allocator.total + 1)
    pages = one._allocator.shrink(IDLE_CACHE // size, max(1, IDLE_SHARE // size))
    one._pool.give_back(pages)
    return bool(pages)
