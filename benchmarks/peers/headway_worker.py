"""Headway as a worker: the public API, as any program would use it."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import wire

import headway as hw
from headway.bench.speed import DecodeTiming, SpeedTest, pages_for, path_of, step_bytes

WARM = 4  # steps that are not counted, where each is timed
NEAR = 16  # slots that a step sees whose attention costs next to nothing


class Worker:
    """One engine; for a while a second one that keeps masked pages, where that is asked for."""

    def load(self, path: str, form: str, *, threads: int, slots: int, sequences: int, total: int) -> dict[str, Any]:
        quantize = {"quantize": form} if form in ("int8", "int4") else {}
        kv = {"kv_dtype": "bfloat16"} if form.endswith("+kv-bf16") else {}
        self._options: dict[str, Any] = {"threads": threads, **quantize, **kv}
        self._path = path
        self.engine = hw.Engine(path, pages=pages_for(sequences, -(-total // sequences)), **self._options)
        self.watch = SpeedTest(self.engine)
        return {
            "version": hw.__version__,
            "path": path_of(self.engine),
            "weight_bytes": step_bytes(self.engine),
            "threads": self.engine.info.threads,
            "dtype": self.engine.info.dtype,
        }

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self._answer(self.watch.decode(prompts, tokens))

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": self.watch.prefill(prompt), "path": path_of(self.engine)}

    def fork(self, prompt: list[int], forks: int, tokens: int) -> dict[str, Any]:
        return self._answer(self.watch.fork(prompt, forks, tokens))

    def trim(self, prompt: list[int], window: int, tokens: int) -> dict[str, Any]:
        """A window over a long context, its masked pages left out or kept, and no window: milliseconds a token."""
        pages, mask = pages_for(1, len(prompt) + 2 * tokens + 2 * WARM), hw.Mask.window(window)
        found = {
            "near": _masked(self.engine, prompt[:NEAR], None, tokens),
            "trimmed": _masked(self.engine, prompt, mask, tokens),
            "whole": _masked(self.engine, prompt, None, tokens),
        }
        with hw.Engine(self._path, pages=pages, trim=False, **self._options) as untrimmed:
            found["kept"] = _masked(untrimmed, prompt, mask, tokens)
        figures = {f"{way}_{what}": value for way, both in found.items() for what, value in both.items()}
        return figures | {"path": path_of(self.engine)}

    def _answer(self, found: DecodeTiming) -> dict[str, Any]:
        return asdict(found) | {"path": path_of(self.engine)}


def _masked(engine: hw.Engine, prompt: list[int], mask: hw.Mask | None, tokens: int) -> dict[str, float | None]:
    """Milliseconds of a step under this mask, or none: all of it, and its attention by the profile."""

    async def steps(_: hw.Engine) -> list[float]:
        async with engine.context(salt=str(wire.now())) as ctx:
            await ctx.fill(prompt).flush()
            seconds, token = [], prompt[0]
            for number in range(2 * (WARM + tokens)):
                if number == WARM + tokens:  # measured by phases from here on, which takes time of its own
                    engine.enable_profiling()
                began = wire.now()
                forward = ctx.forward().input([token])
                if mask is not None:
                    forward.attention_mask(mask)
                handle = forward.sample([-1], hw.Argmax())
                token = (await forward.execute()).token(handle)
                seconds.append(wire.now() - began)
            engine.disable_profiling()
            return seconds[WARM : WARM + tokens]

    before = len(engine.profile().samples)
    step = 1e3 * statistics.median(engine.run(steps))
    measured = [s for s in engine.profile().samples[before + WARM :] if s.tokens == 1]
    attention = [1e3 * p.seconds for s in measured for p in s.phases if p.name == "attention"]
    return {"step_ms": step, "attention_ms": statistics.median(attention) if attention else None}


if __name__ == "__main__":
    wire.main(Worker)
