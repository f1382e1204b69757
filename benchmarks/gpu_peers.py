"""Another engine at gpu.py's work, on the same device and in the same run: transformers.

It runs in processes of its own. They are prepared at the same time, since compiling is work of the host; then each is
measured by itself and ended, which gives its memory back. A process that is not ready in time, or
does not answer in time, is ended too, and its work is said to be skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_models import config, published

if TYPE_CHECKING:
    from gpu import Size

WORKER = Path(__file__).parent / "peers" / "transformers_gpu_worker.py"
SECONDS = 145.0  # for all of it
READY = 95.0  # of those, until a process must be ready, its step compiled
PATIENCE = 250.0  # for all of it where nothing is timed in earnest
EAGER_TOKENS = 16  # an eager step takes ten times as long as a compiled one
COMPILE_THREADS = "4"  # of a process: several compile at a time


@dataclass(frozen=True)
class Work:
    """One thing to ask of a worker, and Headway's row about the same."""

    name: str
    unit: str
    own: str  # the name of Headway's row
    ask: dict[str, Any]
    limit: float  # seconds
    value: Callable[[dict[str, Any]], float]  # of the answer


@dataclass(frozen=True)
class Group:
    """Works of one process: a shape, and what it is prepared for beforehand."""

    shape: str
    works: tuple[Work, ...]
    static: tuple[int, int] | None = None  # sequences and slots of a compiled step
    batched: dict[str, Any] | None = None  # requests of continuous batching


@dataclass(frozen=True)
class Found:
    """What was measured; where it has no value, the note says why."""

    work: Work
    value: float | None
    note: str

    def beside(self, own: Mapping[str, float | None]) -> str:
        """The note, with Headway's figure of the same run and how many times as fast that is."""
        ours = own.get(self.work.own)
        if ours is None:
            return f"{self.note}; Headway was not measured in this run"
        figure = f"{self.note}; Headway {ours:.2f} {self.work.unit}"
        if self.value is None:
            return figure
        return f"{figure}: {self.value / ours if self.work.unit == 'ms' else ours / self.value:.2f} times as fast"


class PeerFailed(RuntimeError):
    """A worker ended, answered with an error, or did not answer in time."""


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def compare(s: Size, requests: int, device: torch.device, dtype: torch.dtype, began: float) -> Iterator[Found]:
    """Each measurement as it completes; the deadline counts from `began`, by time.perf_counter."""
    compiles = device.type == "cuda"
    ends = began + (SECONDS if compiles else PATIENCE)
    with ExitStack() as stack:
        started = [
            (group, stack.enter_context(Process(_load(group, device, dtype))))
            for group in groups(s, requests, compiles)
        ]
        for group, process in started:
            process.prepare(min(ends, began + READY) if compiles else ends)
            print(f"  {group.works[0].name}: {process.about}", file=sys.stderr, flush=True)
        for group, process in started:
            for work in group.works:
                yield _found(process, work, ends)
            process.close()


def _found(process: Process, work: Work, ends: float) -> Found:
    try:
        answer = process.ask(work.ask, min(ends, time.perf_counter() + work.limit))
        return Found(work, work.value(answer), process.about)
    except PeerFailed as error:
        return Found(work, None, f"skipped: {error}")


# -- what is asked -----------------------------------------------------------------------------------------------------


def groups(s: Size, requests: int, compiles: bool) -> tuple[Group, ...]:
    """Everything: what is compiled comes first, since it takes little time once it is ready."""
    how = "compiled" if compiles else "static cache"
    compiled = (
        Group(shape, (_decode(s, shape, rows, s.tokens, how),), static=(rows, s.context + s.tokens))
        for shape, rows in ((s.small, 1), (s.big, 1), (s.big, s.batch))[: 3 if compiles else 1]
    )
    few = min(s.tokens, EAGER_TOKENS)
    eager = (_decode(s, s.big, rows, few, "eager") for rows in (1, s.batch))
    many = (_many(s, requests, graphs) for graphs in ((True, None) if compiles else (None,)))
    return *compiled, Group(s.big, (_prompt(s), *eager)), *many


def _decode(s: Size, shape: str, rows: int, tokens: int, how: str) -> Work:
    """Milliseconds a token of one sequence, tokens a second of more, as Headway's rows have it."""
    name = f"{shape}, {rows} sequence{'s' * (rows > 1)}, {s.context} context"
    ask = {"do": "decode", "sequences": rows, "context": s.context, "tokens": tokens, "repeats": s.repeats}
    unit, value = ("ms", lambda a: 1e3 * a["seconds"]) if rows == 1 else ("tok/s", lambda a: rows / a["seconds"])
    return Work(f"{name}, {how}", unit, f"{name}, engine", ask, 25.0, value)


def _prompt(s: Size) -> Work:
    name = f"{s.big}, prompt of {s.prompt}"
    ask = {"do": "prefill", "tokens": s.prompt, "repeats": s.repeats}
    return Work(name, "tok/s", name, ask, 15.0, lambda answer: s.prompt / answer["seconds"])


def _many(s: Size, requests: int, graphs: bool | None) -> Group:
    """Continuous batching as it is by default, or told to capture graphs."""

    def rate(answer: dict[str, Any]) -> float:
        if answer["tokens"] != requests * s.ask:
            raise PeerFailed(f"it generated {answer['tokens']} of {requests * s.ask} tokens")
        return answer["tokens"] / answer["seconds"]

    own, sizes = whole_run(s, requests), {"requests": requests, "prompt": s.ask, "tokens": s.ask}
    name = f"{own}, {'graphs' if graphs else 'batched'}"
    work = Work(name, "tok/s", own, {"do": "many", **sizes}, 45.0, rate)
    return Group(s.big, (work,), batched={**sizes, "graphs": graphs})


def whole_run(s: Size, requests: int) -> str:
    return f"{s.big}, {requests} × {s.ask} in, {s.ask} out, greedy"


def _load(group: Group, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    shape = published(config(group.shape))
    kind = str(dtype).removeprefix("torch.")
    prepared = {"static": group.static, "batched": group.batched}
    return {"do": "load", "shape": shape, "device": str(device), "dtype": kind, **prepared}


# -- who is asked ------------------------------------------------------------------------------------------------------


class Process:
    """A worker that loads a model: asked in lines of JSON, and ended when an answer is late."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.about = ""
        self._ended: str | None = None  # why, where it has
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        more = {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | more,
        )
        self._send(load)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, until: float) -> None:
        """Wait until it is loaded and compiled; what is not by then is ended."""
        try:
            facts = self._answer(until)
        except PeerFailed as error:
            self.close()
            self.about = self._ended = f"not ready: {error}"
            return
        self.about = f"{facts['version']}, {facts['attention']}"
        if facts["compiled"]:
            self.about += f", compiled in {facts['seconds']:.0f} s"

    def ask(self, what: dict[str, Any], until: float) -> dict[str, Any]:
        if self._ended is not None:
            raise PeerFailed(self._ended)
        if until <= time.perf_counter():
            raise PeerFailed("no time was left")
        self._send(what)
        return self._answer(until)

    def close(self, why: str = "it was ended") -> None:
        """End it at once: it has nothing to keep."""
        if self._ended is not None:
            return
        self._ended = why
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _send(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as its answer will say
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _answer(self, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        began = time.perf_counter()
        if not select.select([self._process.stdout], [], [], max(0.0, until - began))[0]:
            raise self._failed(f"no answer in {time.perf_counter() - began:.0f} s", ended=True)
        line = self._process.stdout.readline()
        if not line:
            raise self._failed(f"it ended with code {self._process.wait()}", ended=True)
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"].splitlines()[0][:120], ended=False)
        return answer

    def _failed(self, why: str, ended: bool) -> PeerFailed:
        """The reason, after its last words have gone to standard error; it is closed where it has ended."""
        self._errors.seek(0)
        print(*self._errors.read().splitlines()[-12:], sep="\n", file=sys.stderr)
        if ended:
            self.close(why)
        return PeerFailed(why)
