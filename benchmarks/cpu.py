"""Headway against other engines on this CPU: interleaved, on the same weights, against the machine's limits.

    python benchmarks/cpu.py --peer llama=/venvs/llama/bin/python --peer openvino=/venvs/openvino/bin/python \\
        --peer transformers=python --peer vllm=/venvs/vllm/bin/python --models /tmp/models
    python benchmarks/cpu.py --quick --path any           # a tiny model, seconds: does it run?
    python benchmarks/cpu.py --only "smol q4_0 decode" …  # some of it

Limits are measured first (`bandwidth.py`). Each engine runs in a process of its own, loaded once and frozen while
another one runs; all of them do the same work on the same random prompts, greedy and to the same length, --rounds times
in turns after one to warm up. The table and the JSON go to benchmarks/results/. The code is 1 when Headway failed or
computed on another path than --path says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import bandwidth
from cpu_files import CannotWrite, Files, weight_bytes
from cpu_plan import BF16_KV, PEERS, Entry, Work, plan, quick
from cpu_report import Measured, Outcome, table
from cpu_runner import Command, PeerFailed, Runner, start_to_first_token

from headway.base.system.machine import read_machine
from headway.bench.models import SHAPES

RESULTS = Path(__file__).parent / "results"
BUSY = 0.3  # of one core: a load above it makes figures doubtful
Key = tuple[str, str]  # peer, format


@dataclass
class Bench:
    """One run: the engines and files it uses, and its results."""

    files: Files
    commands: dict[str, Command]
    rounds: int
    random: random.Random = field(default_factory=lambda: random.Random(0))
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def group(self, entries: list[Entry]) -> None:
        """All entries over one shape and format, with the engines they need loaded once."""
        with ExitStack() as stack:
            load = _load_options(entries)
            wanted = list(dict.fromkeys((r.peer, r.form) for e in entries for r in e.rivals))
            runners = {}
            for peer, form in [("headway", entries[0].form), *wanted]:
                opened = self._open(peer, form, entries[0].shape, load, stack)
                if opened is None and peer == "headway":
                    return
                if opened is not None:
                    runners[peer, form] = opened
            for entry in entries:
                self._guarded(entry, runners)

    def _open(self, peer: str, form: str, shape: str, load: dict[str, Any], stack: ExitStack) -> Loaded | None:
        """A loaded engine; None, with a note, if there is no such peer or it cannot load."""
        if peer not in self.commands:
            return self._note(f"{peer} was not given with --peer")
        try:
            stored = "f16" if form in ("int8", "int4") else form.removesuffix(BF16_KV)
            path = self.files.get(SHAPES[shape], stored)
            command = self.commands[peer]
            named = {"path": str(path), "form": form.removeprefix("ov-").removeprefix("gguf-")}
            options = load | named | {"threads": command.threads}
            runner = Runner(command, options)
        except (PeerFailed, CannotWrite) as error:
            where = self.failures if peer == "headway" else self.notes
            where.append(f"{peer} {form} on {shape} was not measured: {error}")
            print(where[-1], flush=True)
            return None
        stack.callback(runner.close)
        # What the file's format needs, whatever an engine makes of it in memory; its own word where it made the format.
        own = form in ("int8", "int4") or form.startswith("ov-")
        return Loaded(runner, command, options, runner.facts["weight_bytes"] if own else weight_bytes(path))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            print(text, flush=True)

    def _guarded(self, entry: Entry, runners: dict[Key, Loaded]) -> None:
        try:
            self._entry(entry, runners)
        except PeerFailed as error:
            self.failures.append(f"{entry.label}: {error}")
            print(self.failures[-1], flush=True)

    def _entry(self, entry: Entry, runners: dict[Key, Loaded]) -> None:
        if entry.work.kind == "trim":
            self._trim(entry, runners["headway", entry.form])
            return
        rivals = [r for r in entry.rivals if (r.peer, r.form) in runners]
        keys = [("headway", entry.form), *((r.peer, r.form) for r in rivals)]
        found = {key: _measured(key, runners[key]) for key in keys}
        for number in range(self.rounds + 1):
            prompts = self._prompts(entry)
            for key in keys[:: -1 if number % 2 else 1]:
                if key in found and not self._once(entry, runners[key], prompts, found[key], keep=number > 0):
                    del found[key]
        wanted: dict[Key, float | None] = {(r.peer, r.form): r.wanted for r in rivals}
        measured = [found[key] for key in keys if key in found]
        self._add(Outcome(entry, entry.label, entry.work.unit, measured, wanted))

    def _once(self, entry: Entry, loaded: Loaded, prompts: list[list[int]], into: Measured, *, keep: bool) -> bool:
        """One run; False when a peer failed, whose figures are then left out."""
        try:
            answer = loaded.do(entry.work, prompts)
        except PeerFailed as error:
            if into.engine == "headway":
                raise
            self._note(f"{entry.label}: {error}")
            return False
        if keep:
            into.values.append(entry.work.value(answer))
            into.paths.add(answer.get("path", loaded.runner.facts["path"]))
            into.chosen = answer.get("chosen", [])
        return True

    def _trim(self, entry: Entry, loaded: Loaded) -> None:
        """A window over a long context: attention by the profile and by the difference to a short one; whole steps."""
        work, answers = entry.work, []
        for _ in range(self.rounds + 1):
            (prompt,) = self._prompts(entry)
            answers.append(loaded.runner.ask("trim", prompt=prompt, window=work.window, tokens=work.tokens))
        kept = answers[1:]
        ways = {"headway": "trimmed", "no trim": "kept", "no window": "whole"}
        figures: dict[str, Callable[[dict[str, Any], str], float]] = {
            "attention by difference": lambda answer, way: answer[f"{way}_step_ms"] - answer["near_step_ms"],
            "whole step": lambda answer, way: answer[f"{way}_step_ms"],
        }
        judged = "attention by difference"
        if all(answer[f"{way}_attention_ms"] for answer in kept for way in ways.values()):
            judged = "attention by profile"
            figures[judged] = lambda answer, way: answer[f"{way}_attention_ms"]
        for what, figure in figures.items():
            measured = [_measured((name, entry.form), loaded) for name in ways]
            for one in measured:
                one.values = [figure(answer, ways[one.engine]) for answer in kept]
                one.paths = {answer["path"] for answer in kept}
            # Against no window: a path that reads only what a mask leaves has nothing to gain from trimming.
            wanted = {("no window", entry.form): entry.wanted if what == judged else None}
            self._add(Outcome(entry, f"{entry.label}, {what}", work.unit, measured, wanted))

    def _prompts(self, entry: Entry) -> list[list[int]]:
        """Random ids, so that no cache has seen them."""
        work, words = entry.work, SHAPES[entry.shape].vocab
        count = work.sequences if work.kind == "decode" else 1
        return [self.random.choices(range(100, words), k=work.prompt) for _ in range(count)]

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        figures = "  ".join(f"{m.engine} {m.form} {m.median:.4g}" for m in outcome.measured)
        print(f"{outcome.label}, {outcome.unit}: {figures}", flush=True)


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready, and how another one like it is started."""

    runner: Runner
    command: Command
    options: dict[str, Any]
    bytes: int | None

    def do(self, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
        match work.kind:
            case "decode":
                return self.runner.ask("decode", prompts=prompts, tokens=work.tokens)
            case "fork":
                return self.runner.ask("fork", prompt=prompts[0], forks=work.sequences, tokens=work.tokens)
            case "startup":
                return {"seconds": start_to_first_token(self.command, self.options)}
        return self.runner.ask("prefill", prompt=prompts[0])


def _measured(key: Key, loaded: Loaded) -> Measured:
    return Measured(*key, loaded.runner.facts, loaded.bytes)


def _load_options(entries: list[Entry]) -> dict[str, Any]:
    works = [entry.work for entry in entries]
    return {
        "slots": max(work.slots for work in works),
        "sequences": max(work.sequences for work in works),
        "total": max(work.total for work in works),
    }


# -- the run -----------------------------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the workers' own ends: some are frozen
    began = time.time()
    entries = [
        entry
        for entry in (quick() if options.quick else plan())
        if not options.only or any(text in entry.label for text in options.only)
    ]
    if not entries:
        raise SystemExit(f"--only is {options.only!r}; no work has that in its name")
    about = _about(options)
    with tempfile.TemporaryDirectory(prefix="headway-cpu-") as scratch:
        limits = asdict(_limits(options))
        files = Files(options.models or Path(scratch), options.peers, options.threads)
        commands = {n: Command(n, p, options.threads) for n, p in {"headway": sys.executable, **options.peers}.items()}
        bench = Bench(files, commands, options.rounds)
        for _, group in groupby(entries, lambda e: (e.shape, e.form)):
            bench.group(list(group))
    about["seconds"] = round(time.time() - began, 1)
    return _finish(bench, limits, about, options)


def _finish(bench: Bench, limits: dict[str, Any], about: dict[str, Any], options: argparse.Namespace) -> int:
    found = [outcome.to_json(limits, options.path) for outcome in bench.outcomes]
    fallen = [f"{o['work']} ran on {o['fell_back']!r}, not on {options.path!r}" for o in found if o["fell_back"]]
    failures = bench.failures + fallen
    text = "\n".join(
        [_head(about, limits), "", table(found), "", *bench.notes, *(f"FAILED: {f}" for f in failures), ""]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"cpu-{options.name}" if options.name else "cpu"
    (options.out / f"{name}.txt").write_text(text)
    data = {"about": about, "limits": limits, "results": found, "notes": bench.notes, "failures": failures}
    (options.out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwritten to {options.out}")
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--threads", type=int, default=read_machine().fair_threads)
    parser.add_argument("--rounds", type=int, help="runs of each engine, after one to warm up (5)")
    parser.add_argument("--only", action="append", default=[], help="works whose name has this in it; may be repeated")
    parser.add_argument("--path", default="native", help="what must be in the name of Headway's path, or any")
    parser.add_argument("--models", type=Path, help="a folder that keeps the model files for the next time")
    parser.add_argument("--quick", action="store_true", help="a tiny model and little work, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="", help="goes into the names of the results' files")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads take whole numbers from 1")
    options.peers = dict(_peer(parser, text) for text in options.peer)
    return options


def _peer(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS:
        parser.error(f"--peer has {name!r}; it must be NAME=PYTHON with NAME one of {', '.join(PEERS)}")
    found = sys.executable if python in ("", "python") else shutil.which(python)
    if found is None:
        parser.error(f"--peer {name}: there is no interpreter {python!r}")
    return name, found


def _limits(options: argparse.Namespace) -> bandwidth.Limits:
    if options.quick:
        return bandwidth.measure(options.threads, megabytes=32, tries=2, cube=256)
    return bandwidth.measure(options.threads)


def _about(options: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): figures from now are worth little", flush=True)
    return {
        "machine": asdict(read_machine()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": options.threads,
        "rounds": options.rounds,
        "load_before": load,
        "path_required": options.path,
        "quick": options.quick,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _head(about: dict[str, Any], limits: dict[str, Any]) -> str:
    machine, read, product = about["machine"], limits["read_memory"]["best"], limits["float32_product"]["best"]
    first = (
        f"{machine['cpu']}, {', '.join(machine['instructions'])}; {about['threads']} of {machine['usable_cores']} cores"
    )
    second = (
        f"memory {read / 1e9:.1f} GB/s ({limits['read_memory_one_thread']['best'] / 1e9:.1f} with one thread), "
        f"float32 {product / 1e9:.0f} GFLOP/s, int8 {limits['int8_product']['best'] / 1e9:.0f} GOP/s"
    )
    busy = f", load before {about['load_before']:.1f}" + (" (BUSY)" if about["load_before"] > BUSY else "")
    return f"{first}\n{second}\n{about['rounds']} rounds in turns, medians; {about['started']}{busy}"


if __name__ == "__main__":
    sys.exit(main())
