"""Decoding, prompts, batches, masks and samplers on a CUDA device, through the engine, on random weights.

    python benchmarks/gpu.py                    # everything, in some minutes
    python benchmarks/gpu.py --only decode      # one section
    python benchmarks/gpu.py --quick            # a tiny model, on any device: does it run?

Each row has what was measured, what bytes and operations allow on this device (measured in the same run) and the
target. Rows of the engine are medians of a few runs after one to warm up; the window's are single runs after one.
Table and JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_forks
import numpy as np
import torch
from gpu_models import Limits, config, decode_limit, measure, prompt_limit, random_decoder

import headway as hw
from headway.base.specs.samplers import Sampling
from headway.models.decoder import Decoder

RESULTS = Path(__file__).parent / "results"
Build = Callable[[hw.Context, int], Any]  # a generation for sequence i
SECTIONS = ("step", "quantized", "decode", "small", "batch", "many", "prompt", "window", "forks", "load", "peers")


@dataclass(frozen=True)
class Row:
    """One measurement, with its limit and its target."""

    work: str
    value: float | None  # none where it could not be measured: the note says why
    unit: str
    limit: float | None = None
    target: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    big: str = "8b"
    small: str = "1b"
    context: int = 512
    tokens: int = 128
    batch: int = 64
    many: int = 256
    ask: int = 128  # prompt and answer of each of the many
    prompt: int = 4096
    long: int = 16_000
    window: int = 1024
    forks: int = 32
    idle: int = 200
    repeats: int = 2


QUICK = Size("tiny", "tiny", 24, 6, 3, 4, 6, 40, 60, 8, 3, 6, 1)


@dataclass(frozen=True)
class Timing:
    """Seconds until every sequence had its first token; then, until the first of them ended, seconds and tokens."""

    first: float
    rest: float
    tokens: int
    whole: float

    @property
    def rate(self) -> float:
        return self.tokens / self.rest if self.rest > 0 else 0.0


def generate(engine: hw.Engine, prompts: Sequence[Sequence[int]], build: Build) -> Timing:
    """All prompts at once, each continued as `build` says."""

    async def one(i: int, prompt: Sequence[int]) -> list[float]:
        async with engine.context() as ctx:
            moments = []
            async for step in build(ctx.fill(prompt), i):
                moments += [time.perf_counter()] * len(step.tokens)
            return moments

    async def everyone(_: hw.Engine) -> tuple[float, list[list[float]]]:
        began = time.perf_counter()
        return began, await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))

    began, found = engine.run(everyone)
    ready, first, last = max(m[0] for m in found), min(m[-1] for m in found), max(m[-1] for m in found)
    after = sum(ready < moment <= first for moments in found for moment in moments)
    if not after:  # a run so short that one ended before the last began
        return Timing(ready - began, last - began, sum(map(len, found)), last - began)
    return Timing(ready - began, first - ready, after, last - began)


def greedy(tokens: int) -> Build:
    return lambda ctx, i: ctx.generate(hw.Argmax(), max_tokens=tokens, stop_only=True)


class HalfOfTheWords:
    """A constraint of its own for a sequence: another half of the vocabulary at every token."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        halves = np.pad(rng.random((4, vocab)) < 0.5, ((0, 0), (0, -vocab % 32)))
        self._masks = np.packbits(halves, axis=1, bitorder="little").view(np.uint32)
        self._at = 0

    def mask(self) -> np.ndarray:
        return self._masks[self._at % len(self._masks)]

    def accept(self, token: int) -> None:
        self._at += 1

    def rollback(self, count: int) -> None:
        self._at -= count


class Bench:
    """Measures one section after the other."""

    def __init__(self, size: Size, device: torch.device, limits: Limits) -> None:
        self.size, self.device, self.limits = size, device, limits
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows: list[Row] = []
        self._random = random.Random(0)

    def add(self, work: str, value: float | None, unit: str, **more: Any) -> None:
        row = Row(work, value, unit, **more)
        self.rows.append(row)
        print(_line(row), flush=True)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        vocab = config(self.size.big).vocab_size
        return [self._random.choices(range(vocab), k=tokens) for _ in range(count)]

    @contextmanager
    def engine(self, shape: str, sequences: int, slots: int, budget: int | None = None) -> Iterator[hw.Engine]:
        """An engine with twice the pages that these sequences need."""
        pages = 2 * sequences * (2 + slots // 16) + 64
        decoder = self.decoder(shape)
        with hw.Engine(decoder, pages=pages, max_batch_tokens=budget) as engine:
            yield engine
        del engine, decoder
        self.clear()

    def rates(self, engine: hw.Engine, sequences: int, tokens: int, build: Build | None = None) -> float:
        """Tokens a second while all sequences decode, the standard context being the middle of it: the median."""
        found, before = [], self.size.context - tokens // 2
        for _ in range(self.size.repeats + 1):
            done = generate(engine, self.prompts(sequences, before), build or greedy(tokens))
            found.append(done.rate)
        return statistics.median(found[1:])

    # -- sections --------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Decode steps alone, by the device's clock."""
        from gpu_steps import decode_batch, host_seconds, runner_for, step_seconds

        s = self.size
        for shape, rows, target in ((s.big, 1, 4.1), (s.small, 1, 0.85), (s.big, s.batch, 6.1), (s.big, s.many, None)):
            decoder, least = self.decoder(shape), decode_limit(config(shape), rows, s.context, self.limits)
            runner = runner_for(decoder, rows, s.context)
            taken = step_seconds(runner, decode_batch(rows, s.context))
            name = f"{shape}, {rows} sequences, {s.context} context, step"
            whole = host_seconds(runner, decode_batch(rows, s.context))
            note = f"{rows / taken:.0f} tok/s; with the host's part {1e3 * whole:.2f} ms"
            self.add(name, 1e3 * taken, "ms", limit=1e3 * least, target=target, note=note)
            if rows == s.batch:
                self._step_variants(runner, taken)
            del runner, decoder
            self.clear()

    def _step_variants(self, runner: Any, plain: float) -> None:
        from gpu_steps import decode_batch, step_seconds

        s = self.size
        sink = hw.Mask.sink(4, s.context // 2).bind(s.context, 1)[0]
        masked = step_seconds(runner, decode_batch(s.batch, s.context, sink))
        self.add("… step with sink and window masks", plain / masked, "of plain", target=0.9)
        for name, how in (("top-p 0.95", Sampling(top_p=0.95)), ("top-k 40, top-p 0.9", Sampling(top_k=40, top_p=0.9))):
            drawn = step_seconds(runner, decode_batch(s.batch, s.context, None, how))
            self.add(f"… step with {name}", plain / drawn, "of plain", target=0.9)

    def quantized(self) -> None:
        """Decode steps and prompts with quantized weights."""
        from gpu_steps import decode_batch, runner_for, step_seconds

        from headway.kernels.triton.quantized import KINDS
        from headway.models.quantized.cuda import quantize_decoder

        s, c = self.size, config(self.size.big)
        counts = (1, s.batch)

        def steps(decoder: Decoder) -> list[float]:
            runners = (runner_for(decoder, rows, s.context) for rows in counts)
            found = [step_seconds(r, decode_batch(rows, s.context)) for r, rows in zip(runners, counts, strict=True)]
            self.clear()
            return found

        plain = self.decoder(s.big)
        floats = steps(plain)
        for kind in KINDS:
            decoder = quantize_decoder(plain, kind)
            weights = sum(decoder.nbytes().values())
            for rows, taken, whole in zip(counts, steps(decoder), floats, strict=True):
                read = weights + rows * s.context * c.kv_values_per_token * 2
                name = f"{s.big} in {kind}, {rows} sequences, {s.context} context, step"
                self.add(name, 1e3 * taken, "ms", limit=1e3 * read / self.limits.bandwidth)
                target = 2.2 if (kind, rows) == ("int4", 1) else None
                note = f"bfloat16 {1e3 * whole:.2f} ms"
                self.add("… against bfloat16", whole / taken, "times", target=target, note=note)
            if self.device.type == "cuda":
                self.add(f"{s.big} in {kind}, prompt of {s.prompt}", self._prompt_rate(decoder), "tok/s")
            del decoder
            self.clear()

    def decoder(self, shape: str) -> Decoder:
        return random_decoder(shape, self.device, self.dtype)

    def clear(self) -> None:
        """Give memory back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def one(self, shape: str, target: float) -> None:
        """Milliseconds a token of one sequence."""
        s = self.size
        with self.engine(shape, 1, s.context + s.tokens) as engine:
            rate = self.rates(engine, 1, s.tokens)
        least = decode_limit(config(shape), 1, s.context, self.limits)
        self.add(
            f"{shape}, 1 sequence, {s.context} context, engine", 1e3 / rate, "ms", limit=1e3 * least, target=target
        )

    def batch(self) -> None:
        s, c = self.size, config(self.size.big)
        with self.engine(s.big, s.batch, s.context + s.tokens, 4096) as engine:
            plain = self.rates(engine, s.batch, s.tokens)
            least = decode_limit(c, s.batch, s.context, self.limits)
            self.add(
                f"{s.big}, {s.batch} sequences, {s.context} context, engine",
                plain,
                "tok/s",
                limit=s.batch / least,
                target=10_500,
            )
            self._varied(engine, plain)
            self._idle(engine)

    def _varied(self, engine: hw.Engine, plain: float) -> None:
        """The same decode with a mask on every row, and with another sampler, seed and constraint in every row."""
        s, vocab = self.size, engine.vocab_size
        masked = self.rates(
            engine,
            s.batch,
            s.tokens,
            lambda ctx, i: ctx.generate(
                hw.Argmax(), max_tokens=s.tokens, stop_only=True, attention_mask=hw.Mask.sink(4, s.context // 2)
            ),
        )
        self.add("… with sink and window masks", masked / plain, "of plain", target=0.9)
        samplers = [
            lambda i: hw.Multinomial(0.8, seed=i),
            lambda i: hw.TopK(20 + i, seed=i),
            lambda i: hw.TopP(0.9, seed=i),
            lambda i: hw.MinP(0.05, seed=i),
            lambda i: hw.TopKTopP(40, 0.95, temperature=0.7, seed=i),
        ]
        mixed = self.rates(
            engine,
            s.batch,
            s.tokens,
            lambda ctx, i: ctx.generate(samplers[i % 5](i), max_tokens=s.tokens, stop_only=True),
        )
        self.add("… with a sampler and seed for each row", mixed / plain, "of plain", target=0.9)
        how = {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2}
        penalized = self.rates(
            engine,
            s.batch,
            s.tokens,
            lambda ctx, i: ctx.generate(hw.Sampling(**how, seed=i), max_tokens=s.tokens, stop_only=True),
        )
        self.add("… with penalties in each row", penalized / plain, "of plain", target=0.9)
        self._grammars(engine, plain, samplers)
        bound = self.rates(
            engine,
            s.batch,
            s.tokens,
            lambda ctx, i: ctx.generate(
                samplers[i % 5](i), max_tokens=s.tokens, stop_only=True, constrain=HalfOfTheWords(vocab, i)
            ),
        )
        self.add("… and a constraint of its program's own for each row", bound / plain, "of plain", target=0.8)
        probes = {"the 20 likeliest": hw.Distribution(k=20), "entropy": hw.Entropy(), "20 ranks": hw.Ranking(k=20)}
        for name, probe in probes.items():
            read = self.rates(
                engine,
                s.batch,
                s.tokens,
                lambda ctx, i, probe=probe: ctx.generate(hw.Argmax(), max_tokens=s.tokens, stop_only=True, probe=probe),
            )
            self.add(f"… with a probe of {name} in each row", read / plain, "of plain", target=0.85)

    def _grammars(self, engine: hw.Engine, plain: float, samplers: list[Callable[[int], hw.Sampler]]) -> None:
        from gpu_grammars import grammars

        s = self.size
        try:
            grammar = grammars(engine.vocab_size)
        except hw.Unsupported as error:
            self.add("… and a grammar for each row", None, "of plain", target=0.9, note=str(error))
            return
        ready = [grammar(i) for i in range(s.batch)]
        bound = self.rates(
            engine,
            s.batch,
            s.tokens,
            lambda ctx, i: ctx.generate(
                samplers[i % 5](i), max_tokens=s.tokens, stop_only=True, constrain=ready[i].copy()
            ),
        )
        self.add("… and a grammar for each row", bound / plain, "of plain", target=0.9)

    def _idle(self, engine: hw.Engine) -> None:
        """The share of the time in which no kernel runs, while all sequences decode."""
        s = self.size
        if self.device.type != "cuda":
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            done = generate(engine, self.prompts(s.batch, 16), greedy(s.idle))
        spans = sorted(
            (e.time_range.start, e.time_range.end)
            for e in found.events()
            if e.device_type != torch.autograd.DeviceType.CPU
        )
        spans = spans[len(spans) // 4 :]  # decoding alone: the first steps computed the prompts
        busy, reached = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        share = 1 - busy / (reached - spans[0][0])
        self.add(f"idle share, {s.batch} sequences", 100 * share, "%", target=5, note=f"{done.rate:.0f} tok/s profiled")

    def many(self) -> None:
        """A whole run of many requests with sampling: generated tokens over all of its time."""
        s, c = self.size, config(self.size.big)
        found = []
        with self.engine(s.big, s.many, 2 * s.ask, 8192) as engine:
            for _ in range(s.repeats + 2):  # a second run still meets sizes that are new
                build: Build = lambda ctx, i: ctx.generate(  # noqa: E731
                    hw.Sampling(temperature=0.8, top_p=0.95, seed=i), max_tokens=s.ask, stop_only=True
                )
                found.append(s.many * s.ask / generate(engine, self.prompts(s.many, s.ask), build).whole)
        least = prompt_limit(c, s.ask, self.limits) * s.many
        least += s.ask * decode_limit(c, s.many, s.ask + s.ask // 2, self.limits)
        name = f"{s.big}, {s.many} sequences, {s.ask} in, {s.ask} out, whole run"
        self.add(name, statistics.median(found[2:]), "tok/s", limit=s.many * s.ask / least, target=13_000)

    def prompt(self) -> None:
        s = self.size
        rate = self._prompt_rate(self.decoder(s.big))
        most = s.prompt / prompt_limit(config(s.big), s.prompt, self.limits)
        self.add(f"{s.big}, prompt of {s.prompt}", rate, "tok/s", limit=most, target=38_000)

    def _prompt_rate(self, decoder: Decoder) -> float:
        """Tokens a second from a long prompt to its first token."""
        s = self.size
        with hw.Engine(decoder, pages=2 * (2 + s.prompt // 16) + 64, max_batch_tokens=s.prompt) as engine:
            taken = [generate(engine, self.prompts(1, s.prompt), greedy(1)).first for _ in range(s.repeats + 2)]
        return s.prompt / statistics.median(taken[2:])

    def load(self) -> None:
        """A safetensors folder from the page cache to the device, and process start to first token."""
        from gpu_loading import measure, write_folder

        s = self.size
        with tempfile.TemporaryDirectory() as folder:
            size = write_folder(Path(folder), s.big, self.device)
            self.clear()
            found = [measure(Path(folder), 64) for _ in range(s.repeats + 1)][1:]
        loaded, first, start = (statistics.median(f[name] for f in found) for name in ("load", "first", "start"))
        note = f"{size / 1e9:.1f} GB in {loaded:.2f} s, everything that opening an engine does counted"
        self.add(f"{s.big}, loading from the page cache", size / loaded / 1e9, "GB/s", target=5, note=note)
        note = f"{start:.2f} s of it until torch, Headway and the device are there"
        self.add(f"{s.big}, process start to first token", first, "s", note=note)

    def peers(self) -> None:
        """The same work by transformers, beside what this run has found of Headway."""
        from gpu_peers import compare, installed, whole_run

        began, s = time.perf_counter(), self.size
        if not installed():
            self.add("transformers", None, "", note="not installed: nothing to compare with")
            return
        requests = s.many // 2
        with self.engine(s.big, requests, 2 * s.ask, 8192) as engine:
            runs = [generate(engine, self.prompts(requests, s.ask), greedy(s.ask)) for _ in range(s.repeats + 1)]
        del engine  # with it go its weights and pages: the others need the memory
        self.clear()
        whole = statistics.median(run.whole for run in runs[1:])
        self.add(whole_run(s, requests), requests * s.ask / whole, "tok/s")
        own = {row.work: row.value for row in self.rows}
        for found in compare(s, requests, self.device, self.dtype, began):
            self.add(f"transformers: {found.work.name}", found.value, found.work.unit, note=found.beside(own))


def _line(row: Row) -> str:
    value = "–" if row.value is None else f"{row.value:.2f}"
    parts = [f"{row.work:<58}{value:>10} {row.unit:<9}"]
    parts.append(f"limit {row.limit:>9.2f} " if row.limit is not None else " " * 16)
    parts.append(f"target {row.target:>9.2f}  " if row.target is not None else " " * 18)
    return "".join(parts) + row.note


def run(bench: Bench, sections: Sequence[str]) -> None:
    size = bench.size
    if "step" in sections and bench.device.type == "cuda":
        bench.steps()
    if "quantized" in sections and bench.device.type == "cuda":
        bench.quantized()
    if "decode" in sections:
        bench.one(size.big, 4.1)
    if "small" in sections:
        bench.one(size.small, 0.85)
    if "batch" in sections:
        bench.batch()
    if "many" in sections:
        bench.many()
    if "prompt" in sections:
        bench.prompt()
    if "window" in sections:
        gpu_forks.window(bench)
    if "forks" in sections:
        gpu_forks.forks(bench)
    if "load" in sections:
        bench.load()
    if "peers" in sections:
        bench.peers()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"--only: there is no section {unknown[0]!r}; it takes {', '.join(SECTIONS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        print("there is no CUDA device here; --quick runs a tiny model on the CPU", file=sys.stderr)
        return 2
    limits = measure(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}: {limits.bandwidth / 1e12:.2f} TB/s, {limits.operations / 1e12:.0f} TFLOP/s"
    )
    bench = Bench(QUICK if options.quick else Size(), device, limits)
    began = time.perf_counter()
    run(bench, sections)
    about = {"device": name, "torch": torch.__version__, "seconds": time.perf_counter() - began, **asdict(limits)}
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"about": about, "results": [asdict(row) for row in bench.rows]}
    (options.out / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"{name} · torch {torch.__version__} · {time.strftime('%FT%TZ', time.gmtime())}", *map(_line, bench.rows)]
    (options.out / "gpu.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
