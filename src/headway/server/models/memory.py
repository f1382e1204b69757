"""The memory that models share: what each takes, and which give way to another. Pure functions; nothing is opened.

Each model takes its weights and a KV cache: an eighth of the budget, or one sequence of full length if that is more.
Models that nobody uses give way first, the least recently used one first of all; then those with requests, which drain.
Kept models and those with sessions never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import OutOfMemory
from headway.base.text import format_bytes
from headway.server.models.sources import ModelSizes

if TYPE_CHECKING:
    from headway.server.models.served_model import ServedModel

CPU_SHARE = 0.7  # of a machine's memory, by default
CACHES = 8  # a KV cache is one part in so many of the budget
VALUE_BYTES = 4  # of a key or value at most
PAGE_SIZE = 16


@dataclass(frozen=True)
class Room:
    """Whether a model fits now, and which others have to go for it."""

    fits: bool
    leaving: tuple[ServedModel, ...] = ()


def allowance(sizes: ModelSizes | None, budget: int | None, pages: int | None) -> int | None:
    """The bytes that a model may take; None where there is no limit, or nothing is known of the model yet."""
    if sizes is None or budget is None:
        return None
    token = sizes.kv_values_per_token * VALUE_BYTES
    cache = max(budget // CACHES, sizes.context_length * token) if pages is None else pages * PAGE_SIZE * token
    if sizes.weight_bytes >= budget:
        raise OutOfMemory(
            f"its weights take {format_bytes(sizes.weight_bytes)} and all models together may take "
            f"{format_bytes(budget)}; start the server with more --memory"
        )
    return min(sizes.weight_bytes + cache, budget)


def memory_budget(device: str, memory: str | None = None, memory_fraction: float | None = None) -> int:
    """The bytes that all models may take on a device: as given, or a share of what there is."""
    from headway.runtime.device import pick_device
    from headway.runtime.memory import FRACTION, memory_share, read_memory

    where = pick_device(device)
    there, share = read_memory(where), memory_share(memory, memory_fraction, where)
    if share is not None:
        return int(there.total * share)
    return min(int(there.total * (FRACTION if where.type == "cuda" else CPU_SHARE)), int(there.free * FRACTION))


def room_for(needed: int, models: Sequence[ServedModel], budget: int) -> Room:
    """How a model of `needed` bytes fits; raises `OutOfMemory` if it cannot as long as others are in use."""
    taken = sum(model.bytes for model in models)
    if taken + needed <= budget:
        return Room(True)
    soon = taken - sum(model.bytes for model in models if model.state == "draining")
    leaving: list[ServedModel] = []
    for model in sorted((one for one in models if one.may_leave), key=lambda one: (one.requests > 0, one.used_at)):
        if soon + needed <= budget:
            break
        leaving.append(model)
        soon -= model.bytes
    if soon + needed > budget:
        others = ", ".join(repr(one.name) for one in models if one.bytes and one.state != "draining")
        raise OutOfMemory(
            f"it needs {format_bytes(needed)} of the {format_bytes(budget)} that all models may take, and {others} "
            "are kept, loading or used by sessions"
        )
    return Room(False, tuple(leaving))
