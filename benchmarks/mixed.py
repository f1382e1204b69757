"""Mixed load: clients that ask again at once, so that prompts and decoding share every step.

    python benchmarks/mixed.py                           # the cases for this device
    python benchmarks/mixed.py --shape 8b --prompt 1024  # one case
    python benchmarks/mixed.py --quick                   # a tiny random model on any device, seconds: does it run?

Each client is a program: it fills a new context with a random prompt that nobody has seen (the prefix cache never
helps), generates exactly `--new` tokens (end tokens are ordinary ones), releases the context and starts again. Weights
are random: bfloat16 on a CUDA device, int8 on a CPU.

- The first request of each client is cut to a different length, so that the clients are spread evenly over prefill and
  decode from the start. `--together` leaves that out: then they stay in waves.
- The window opens when every client has finished two requests and `--warmup` seconds are over: kernels are compiled and
  graphs captured by then. It is open for `--seconds`, or until `--requests` have finished in it.
- Times are taken at the client, token by token. A figure counts if its token arrived while the window was open: time to
  first token is from before `engine.context()` to the first token; time between tokens is between two of one request.
- The limit, on a CUDA device, is what bytes and operations allow, measured in the same run: all operations of prefill
  and decode at the rate of a large matmul, or weights and KV cache read once for each decode step of all clients,
  whichever takes longer. Steps that do both at once could overlap the two entirely.

The table and the JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headway as hw
from headway.base.system.machine import read_machine

RESULTS = Path(__file__).parent / "results"
WARM = 2  # requests of every client before the window opens
POLL = 0.1  # seconds between looks at the clock


@dataclass(frozen=True)
class Case:
    """One load: a model's shape, and what each client asks for."""

    shape: str
    prompt: int
    new: int
    clients: int
    target: float | None = None  # output tokens/s on one H200

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.clients} clients, {self.prompt} in, {self.new} out"

    @property
    def pages(self) -> int:
        """Pages for every client twice over: nobody is preempted."""
        return 2 * self.clients * (2 + (self.prompt + self.new) // 16) + 64


GPU = (
    Case("8b", 1024, 128, 64, target=3_700),
    Case("8b", 128, 128, 64),
    Case("1b", 128, 128, 64, target=22_000),
)
CPU = (Case("smol", 128, 64, 8),)
QUICK = Case("quick", 40, 12, 3)


@dataclass(eq=False)
class Request:
    """When it began, and when each of its tokens arrived."""

    began: float
    length: int
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """The time in which figures count, and the engine's counters at both ends."""

    opened: float
    closed: float
    before: Any  # engine.stats()
    after: Any
    warmup: float  # seconds from the first request until it opened

    def __contains__(self, moment: float) -> bool:
        return self.opened < moment <= self.closed


class Clients:
    """Programs that ask again at once, until the window closes."""

    def __init__(self, engine: hw.Engine, case: Case, options: argparse.Namespace) -> None:
        self.requests: list[Request] = []
        self._engine, self._case, self._options = engine, case, options
        self._finished = [0] * case.clients
        self._over = False

    async def run(self, _: hw.Engine) -> Window:
        async with asyncio.TaskGroup() as group:
            for i in range(self._case.clients):
                group.create_task(self._client(i))
            watch = group.create_task(self._watch())
        return watch.result()

    async def _client(self, i: int) -> None:
        case, rng = self._case, np.random.default_rng((self._options.seed, i))
        length = case.new if self._options.together else max(1, case.new * (i + 1) // case.clients)
        while not self._over:
            prompt = rng.integers(0, self._engine.vocab_size, case.prompt).tolist()
            await self._ask(prompt, length, self._sampler(rng))
            self._finished[i] += 1
            length = case.new

    def _sampler(self, rng: np.random.Generator) -> Any:
        if self._options.temperature == 0:
            return hw.Argmax()
        return hw.Sampling(temperature=self._options.temperature, top_p=0.95, seed=int(rng.integers(1 << 31)))

    async def _ask(self, prompt: list[int], length: int, sampler: Any) -> None:
        request = Request(time.perf_counter(), length)
        self.requests.append(request)
        async with self._engine.context() as ctx:
            async for step in ctx.fill(prompt).generate(sampler, max_tokens=length, stop_only=True):
                for _ in step.tokens:
                    request.times.append(time.perf_counter())
                if self._over:
                    return
        if len(request.times) != length:
            raise SystemExit(f"a request gave {len(request.times)} tokens, not {length}")

    async def _watch(self) -> Window:
        began, options = time.perf_counter(), self._options
        while min(self._finished) < WARM or time.perf_counter() < began + options.warmup:
            await asyncio.sleep(POLL)
        before, done, opened = self._engine.stats(), sum(self._finished), time.perf_counter()
        most = sys.maxsize if options.requests is None else done + options.requests
        while time.perf_counter() < opened + options.seconds and sum(self._finished) < most:
            await asyncio.sleep(POLL)
        after, closed = self._engine.stats(), time.perf_counter()
        self._over = True
        return Window(opened, closed, before, after, opened - began)


# -- figures -----------------------------------------------------------------------------------------------------------


def summarize(requests: Sequence[Request], window: Window, prompt: int) -> dict[str, Any]:
    """The figures of one case, from what the clients and the engine counted in the window."""
    seconds = window.closed - window.opened
    started = [r for r in requests if r.times and r.times[0] in window]
    finished = sum(len(r.times) == r.length and r.times[-1] in window for r in requests)
    gaps = [b - a for r in requests for a, b in pairwise(r.times) if b in window]
    before, after = window.before, window.after
    steps = after.steps - before.steps
    passes = after.batch_size_mean * after.steps - before.batch_size_mean * before.steps
    return {
        "output_tokens_per_s": sum(moment in window for r in requests for moment in r.times) / seconds,
        "prompt_tokens_per_s": prompt * len(started) / seconds,
        "requests": finished,
        "first_token_ms": _percentiles([r.times[0] - r.began for r in started]),
        "between_tokens_ms": _percentiles(gaps),
        "seconds": seconds,
        "warmup_seconds": window.warmup,
        "steps": steps,
        "steps_per_s": steps / seconds,
        "mean_batch": passes / steps if steps else 0.0,  # sequences in a step
        "mean_tokens": (after.tokens - before.tokens) / steps if steps else 0.0,  # rows in a step
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; empty where nothing was seen."""
    if not seconds:
        return {}
    p50, p99, most = np.percentile(seconds, [50, 99, 100]).tolist()
    return {"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * most}


def throughput_limit(case: Case, device: torch.device) -> float | None:
    """Output tokens/s that the device's memory and matmul rate allow, or None where they are not measured."""
    if device.type != "cuda" or case.shape == QUICK.shape:
        return None
    from gpu_models import config, decode_limit, measure, prompt_limit

    model, limits = config(case.shape), measure(device)
    context = case.prompt + case.new // 2
    reads = case.new * decode_limit(model, case.clients, context, replace(limits, operations=math.inf))
    operations = case.new * decode_limit(model, case.clients, context, replace(limits, bandwidth=math.inf))
    operations += case.clients * prompt_limit(model, case.prompt, limits)
    return case.clients * case.new / max(reads, operations)


# -- engines -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_engine(case: Case, device: torch.device, max_batch_tokens: int | None) -> Iterator[hw.Engine]:
    """An engine with random weights of the case's shape."""
    with (
        open_model(case.shape, device) as (model, options),
        hw.Engine(model, pages=case.pages, max_batch_tokens=max_batch_tokens, **options) as engine,
    ):
        yield engine


@contextmanager
def open_model(shape: str, device: torch.device) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A model, in memory or on disk, and the engine's options for it."""
    if shape == QUICK.shape:
        from headway.testing import random_model

        yield random_model(device=str(device), dtype="bfloat16" if device.type == "cuda" else "float32"), {}
    elif device.type == "cuda":
        from gpu_models import random_decoder

        yield random_decoder(shape, device, torch.bfloat16), {}
    else:
        from headway.bench.models import find_shape, write_folder

        with tempfile.TemporaryDirectory(prefix="headway-mixed-") as folder:
            yield write_folder(find_shape(shape), Path(folder), "f16"), {"device": "cpu", "quantize": "int8"}


def known_shapes(device: torch.device) -> list[str]:
    if device.type == "cuda":
        from gpu_models import SHAPES

        return list(SHAPES)
    from headway.bench.models import SHAPES as CPU_SHAPES

    return list(CPU_SHAPES)


# -- the command -------------------------------------------------------------------------------------------------------


def cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """The cases that the flags select; a flag replaces that figure in all of them."""
    known = GPU if device.type == "cuda" else CPU
    if options.quick:
        known = (QUICK,)
    elif options.shape is not None:
        known = tuple(c for c in known if c.shape == options.shape) or (replace(known[-1], shape=options.shape),)
    given = {name: getattr(options, name) for name in ("prompt", "new", "clients")}
    given = {name: value for name, value in given.items() if value is not None}
    selected = dict.fromkeys(replace(case, target=None, **given) for case in known)
    targets = {replace(case, target=None): case.target for case in GPU}
    return [replace(case, target=targets.get(case)) for case in selected]


def main() -> int:
    options = _options()
    device = torch.device(options.device)
    data: dict[str, Any] = {"about": _about(options, device), "results": []}
    began, lines = time.perf_counter(), [_head(data["about"])]
    progress = sys.stderr if options.json else sys.stdout
    print(lines[0], file=progress, flush=True)
    for case in cases(options, device):
        row = run_case(case, device, options)
        data["results"].append(row)
        lines.append(_lines(row))
        print(lines[-1], file=progress, flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    data["about"]["seconds"] = round(time.perf_counter() - began, 1)
    whole, name = json.dumps(data, indent=1) + "\n", "mixed-gpu" if device.type == "cuda" else "mixed"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(whole)
    (options.out / f"{name}.txt").write_text("\n".join(lines) + "\n")
    if options.json:
        print(whole, end="")
    return 0


def run_case(case: Case, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    limit = throughput_limit(case, device)
    with open_engine(case, device, options.max_batch_tokens) as engine:
        clients = Clients(engine, case, options)
        window = engine.run(clients.run)
        info = asdict(engine.info) | {"name": f"random {case.shape}", "path": None}
    figures = summarize(clients.requests, window, case.prompt)
    return {"case": case.name, **asdict(case), **figures, "limit": limit, "engine": info}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", help="8b or 1b on a CUDA device, smol or 1b on a CPU; all cases without it")
    parser.add_argument("--prompt", type=_count, help="tokens of a prompt")
    parser.add_argument("--new", type=_count, help="tokens generated for a prompt")
    parser.add_argument("--clients", type=_count, help="clients at once (64 on a CUDA device, 8 on a CPU)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the window is open")
    parser.add_argument("--requests", type=_count, help="close the window when so many have finished in it")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds at least before the window opens")
    parser.add_argument("--together", action="store_true", help="full length for the first request of each client, too")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample with top-p 0.95; 0 is greedy")
    parser.add_argument("--max-batch-tokens", type=_count, help="the engine's own unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print the JSON, not the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny random model for a second: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.warmup = min(options.seconds, 1.0), 0.0
    known = known_shapes(torch.device(options.device))
    if options.shape is not None and options.shape not in known:
        parser.error(f"--shape: {options.shape!r} is not known on {options.device}; it takes {', '.join(known)}")
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return value


def _about(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "machine": asdict(read_machine()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {"headway": hw.__version__, "torch": torch.__version__},
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _head(about: dict[str, Any]) -> str:
    machine = about["machine"]
    parts = [machine["cpu"], f"{machine['usable_cores']} cores", f"torch {torch.__version__}", about["started"]]
    return " · ".join(parts if about["device"] == "CPU" else [about["device"], *parts])


def _lines(row: dict[str, Any]) -> str:
    def times(found: dict[str, float]) -> str:
        return f"p50 {found['p50']:8.2f}  p99 {found['p99']:8.2f}  max {found['max']:8.2f} ms" if found else "–"

    aims = ", ".join(f"{name} {row[name]:.0f}" for name in ("limit", "target") if row[name] is not None)
    return f"""{row["case"]}
    output {row["output_tokens_per_s"]:.0f} tok/s{aims and f" ({aims})"}, prompts {row["prompt_tokens_per_s"]:.0f} tok/s
    time to first token  {times(row["first_token_ms"])}
    time between tokens  {times(row["between_tokens_ms"])}
    {row["requests"]} requests finished in {row["seconds"]:.1f} s; {row["steps"]} steps, on average of \
{row["mean_batch"]:.1f} sequences and {row["mean_tokens"]:.1f} tokens"""


if __name__ == "__main__":
    sys.exit(main())
