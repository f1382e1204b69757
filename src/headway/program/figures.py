"""What an engine says of itself: the loaded model, and its counters. Plain values, for programs anywhere."""

from __future__ import annotations

from dataclasses import dataclass


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
