"""Forks of a long prompt: full attention, a window by mask, and pages that all of them share."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

import headway as hw
from headway.runtime.runners.cuda.attention import shared_pages

if TYPE_CHECKING:
    from gpu import Bench

ATTENTION = ("_decode", "_shared")  # kernels of decode rows


async def decode_forks(engine: hw.Engine, prompt: list[int], count: int, tokens: int, mask: Any = None) -> float:
    """Seconds a step, while forks of a prompt decode."""
    async with engine.context() as ctx:
        await ctx.fill(prompt).flush()
        twins = [ctx.fork().fill([1 + i]) for i in range(count)]
        gens = [t.generate(hw.Argmax(), max_tokens=tokens, stop_only=True, attention_mask=mask) for t in twins]
        await asyncio.gather(*(anext(g) for g in gens))
        began = time.perf_counter()
        await asyncio.gather(*(g.tokens() for g in gens))
        for twin in twins:
            twin.release()
        return (time.perf_counter() - began) / (tokens - 1)


def window(bench: Bench) -> None:
    """A long context: full attention, and a window by mask, whose other pages are trimmed."""
    s, found = bench.size, {}
    with bench.engine(s.big, 9, s.long + s.tokens, 4096) as engine:
        (prompt,) = bench.prompts(1, s.long)
        for name, mask in (("full", None), ("window", hw.Mask.window(s.window))):
            for count in (1, 8):
                engine.run(decode_forks, prompt, count, s.tokens, mask)
                found[name, count] = engine.run(decode_forks, prompt, count, s.tokens, mask)
    for count in (1, 8):
        full, part = 1e3 * found["full", count], 1e3 * found["window", count]
        note = f"full attention {full:.2f} ms: {full / part:.2f} times"
        bench.add(f"{s.big}, {count} × {s.long} context, window {s.window}", part, "ms", note=note)


def forks(bench: Bench) -> None:
    """Many forks of a long prompt, its pages read once for all of them and once for each."""
    s, much, times, attention = bench.size, shared_pages.MUCH, {}, {}
    with bench.engine(s.big, 2, s.long + s.tokens * s.forks, 4096) as engine:
        (prompt,) = bench.prompts(1, s.long)
        for name, least in (("once", much), ("each", 1 << 60)):
            shared_pages.MUCH = least
            engine.run(decode_forks, prompt, s.forks, s.tokens)
            times[name] = engine.run(decode_forks, prompt, s.forks, s.tokens)
            attention[name] = _attention(bench, engine, prompt)
    shared_pages.MUCH = much
    each, once = 1e3 * times["each"], 1e3 * times["once"]
    note = f"each for itself {each:.2f} ms: {each / once:.2f} times"
    bench.add(f"{s.big}, {s.forks} forks of a prompt of {s.long}", once, "ms", note=note)
    if attention["once"] is not None:
        note = f"{1e3 * attention['once']:.2f} ms a step, each for itself {1e3 * attention['each']:.2f} ms"
        bench.add("… its attention", attention["each"] / attention["once"], "times", target=2.5, note=note)


def _attention(bench: Bench, engine: hw.Engine, prompt: list[int]) -> float | None:
    """Seconds that attention takes of a step, by the device's profile; None without one."""
    if bench.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    tokens = 32
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.run(decode_forks, prompt, bench.size.forks, tokens)
    taken: dict[str, list[float]] = {name: [] for name in ATTENTION}
    for event in found.events() or ():
        if event.device_type != torch.autograd.DeviceType.CPU and event.name in taken:
            taken[event.name].append(event.time_range.elapsed_us() / 1e6)
    return engine.config.layers * sum(statistics.median(times) for times in taken.values() if times)
