"""What an engine says of itself: the loaded model, and its counters. Plain values, for programs anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.runtime.scheduler.cache_tiers import CacheTiers


@dataclass(frozen=True)
class EngineInfo:
    """The loaded model: name, format, device, sizes."""

    name: str
    path: str | None
    dtype: str
    device: str
    threads: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_dtype: str = "float32"  # what keys and values are stored in
    kv_bytes: int = 0  # that the KV cache may take, and why
    kv_reason: str = ""
    runner: str = "torch"  # what computes: torch, or the native step and its instruction set
    format: str = ""  # how the weights are kept
    stored: str = ""  # the float type of the file's matrices; empty if they are quantized, of several types or no file
    tensor_parallel: int = 1  # ranks that each compute a share of it


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine: pages, steps, tokens; `drafted` tokens were verified, `accepted` of them kept."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_trimmed: int
    steps: int
    passes: int
    tokens: int
    batch_size_mean: float
    queued: int
    cache_hits: int
    preemptions: int
    drafted: int
    accepted: int
    adapters: int  # loaded now
    adapter_bytes: int  # on the device
    cache_host_pages: int = 0  # that left the pool's prefix cache and are kept in host memory, and their bytes
    cache_host_bytes: int = 0
    cache_host_saves: int = 0  # pages copied there so far, and pages copied back
    cache_host_hits: int = 0
    cache_folder_pages: int = 0  # in files below host memory, and their bytes
    cache_folder_bytes: int = 0
    cache_folder_hits: int = 0  # pages read back so far
    cache_tier_errors: int = 0  # pages that could not be kept or brought back so far; they were computed again


def engine_stats(engine: Engine) -> EngineStats:
    """An engine's counters now."""
    adapters, adapter_bytes = engine._adapters.figures()
    with engine._lock:
        engine._loop.drain()
        done = engine._loop.counters
        return EngineStats(
            pages_total=engine._allocator.total,
            pages_free=engine._allocator.free,
            pages_cached=engine._allocator.cached,
            pages_held=engine._allocator.held,
            pages_trimmed=done.pages_trimmed,
            steps=done.steps,
            passes=done.passes,
            tokens=done.tokens,
            batch_size_mean=done.batch_passes / done.steps if done.steps else 0.0,
            queued=engine._loop.waiting(),
            cache_hits=engine._loop.kv_cache.hits,
            preemptions=engine._loop.kv_cache.preemptions,
            drafted=done.drafted,
            accepted=done.accepted,
            adapters=adapters,
            adapter_bytes=adapter_bytes,
            **({} if engine._tiers is None else _tier_figures(engine._tiers)),
        )


def _tier_figures(tiers: CacheTiers) -> dict[str, int]:
    host, folder = tiers.host, tiers.folder
    figures = {
        "cache_host_pages": host.pages,
        "cache_host_bytes": host.pages * host.store.memory.page_bytes,
        "cache_host_saves": host.saved,
        "cache_host_hits": tiers.host_hits,
        "cache_tier_errors": host.store.errors + tiers.misses,
    }
    if folder is not None:
        figures |= {
            "cache_folder_pages": folder.pages,
            "cache_folder_bytes": folder.bytes,
            "cache_folder_hits": tiers.folder_hits,
        }
        figures["cache_tier_errors"] += folder.errors + folder.damaged
    return figures


def page_keys(engine: Engine) -> list[bytes]:
    """The keys of the pages that an engine's prefix cache can find now."""
    with engine._lock:
        return engine._allocator.keys()
