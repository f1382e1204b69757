"""`headway bench decode | prefill | batch | startup`: how fast a model runs here, beside what the memory allows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headway.base.errors import InvalidInput
from headway.base.machine import read_machine
from headway.bench.models import FORMATS, SHAPES, find_shape, write_folder
from headway.bench.speed import Stopwatch, Summary, Timing, pages_for, path_of, startup, step_bytes
from headway.cli.options import WHOLE, Device, Dtype, EngineOptions, Json, MemoryFraction, Model, Quantize, Threads
from headway.cli.render import Listening, counted, emit_json, fetched, loading, note, show_table, size
from headway.models.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    import headway as hw

Found = TypeVar("Found")
LIMIT = 1 << 20  # of every count

ShapeName = Annotated[
    str | None,
    typer.Option(
        "--shape", metavar="SHAPE", help=f"Measure a random model of this shape instead: {', '.join(SHAPES)}."
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="FORMAT", help=f"What the random model is stored in: {', '.join(FORMATS)}."),
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", **WHOLE, help="Tokens each sequence generates.")]
Prompt = Annotated[int, typer.Option("--prompt", "-p", **WHOLE, help="Tokens of each prompt.")]
Sequences = Annotated[int, typer.Option("--sequences", "-s", **WHOLE, help="Sequences at a time.")]
Repeat = Annotated[int, typer.Option("--repeat", "-r", **WHOLE, help="Runs, after one to warm up.")]


@dataclass(frozen=True)
class Subject:
    """What is measured, and how it is loaded."""

    engine: EngineOptions
    shape: str | None
    format: str | None

    def __post_init__(self) -> None:
        if self.shape is None and self.format is not None:
            raise InvalidInput(f"--format is {self.format!r}; it is for --shape, a model file has its own")
        if self.shape is not None:
            find_shape(self.shape)
        if self.format is not None and self.format not in FORMATS:
            raise InvalidInput(f"--format is {self.format!r}; it takes {', '.join(FORMATS)}")

    @property
    def name(self) -> str:
        return self.engine.model if self.shape is None else f"random {self.shape} in {self.format or 'f32'}"

    @contextmanager
    def path(self) -> Iterator[Path]:
        """The model on disk, fetched if need be, or written for this run."""
        if self.shape is None:
            yield fetched(self.engine.model)
            return
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            note(f"writing a {self.name}")
            yield write_folder(find_shape(self.shape), Path(folder), self.format or "f32")


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("decode")(decode)
    app.command("prefill")(prefill)
    app.command("batch")(batch)
    app.command("startup")(start)


def decode(
    *,
    model: Model = DEFAULT_MODEL,
    shape: ShapeName = None,
    form: Format = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    tokens: Tokens = 128,
    prompt: Prompt = 32,
    repeat: Repeat = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Tokens a second of one sequence, and how much of what the memory allows that is.

    Greedy; end-of-text does not end it; the first token counts as the prompt's time.

    The limit is what the memory was measured to read in a second, over the bytes of weights that a token needs.
    """
    subject = Subject(EngineOptions(model, dtype, device, threads, quantize, memory_fraction), shape, form)
    _decoding(subject, "decode", Counts(tokens, prompt, 1, repeat), json)


def batch(
    *,
    model: Model = DEFAULT_MODEL,
    shape: ShapeName = None,
    form: Format = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    sequences: Sequences = 8,
    tokens: Tokens = 128,
    prompt: Prompt = 32,
    repeat: Repeat = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Tokens a second of many sequences at a time, all of them together.

    Counted from the moment every sequence has its first token.
    """
    subject = Subject(EngineOptions(model, dtype, device, threads, quantize, memory_fraction), shape, form)
    _decoding(subject, "batch", Counts(tokens, prompt, sequences, repeat), json)


def prefill(
    *,
    model: Model = DEFAULT_MODEL,
    shape: ShapeName = None,
    form: Format = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    prompt: Prompt = 512,
    repeat: Repeat = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Tokens a second of a prompt, to its first token.

    Every run has a prompt of its own, so the cache helps nowhere.
    """
    subject = Subject(EngineOptions(model, dtype, device, threads, quantize, memory_fraction), shape, form)
    counts = Counts(1, prompt, 1, repeat)
    with _opened(subject, counts) as engine:
        watch = Stopwatch(engine)
        seconds = _repeated(repeat, lambda: watch.prefill(watch.prompt(prompt)))
        facts = _facts(engine, subject)
    rate, to_first = Summary.of([prompt / s for s in seconds]), Summary.of([1e3 * s for s in seconds])
    if json:
        runs = [{"seconds": s, "tokens_per_second": prompt / s} for s in seconds]
        found = {"tokens_per_second": asdict(rate), "first_token_ms": asdict(to_first)}
        emit_json({"work": "prefill", **asdict(counts), **facts, "runs": runs, **found})
        return
    _table("prefill", facts, [("tokens/s", rate, "–"), ("ms to the first token", to_first, "–")], counts)


def start(
    *,
    model: Model = DEFAULT_MODEL,
    shape: ShapeName = None,
    form: Format = None,
    quantize: Quantize = None,
    memory_fraction: MemoryFraction = None,
    repeat: Repeat = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Seconds from the start of a process to the first token of a prompt of eight, beside `import torch` alone."""
    subject = Subject(EngineOptions(model, dtype, device, threads, quantize, memory_fraction), shape, form)
    Counts(1, 8, 1, repeat)
    with subject.path() as path:
        # Opened here first: a mistake is said in one sentence, the files are in the disk's cache, the path is known.
        with _engine(subject, path, pages_for(1, 16)) as engine:
            facts = _facts(engine, subject, bandwidth=False)
        options = subject.engine.given() | {"model": str(path)}
        runs = _repeated(repeat, lambda: startup(options))
    names = ("torch", "imported", "loaded", "answered", "beyond_torch")
    found = {name: Summary.of([getattr(run, name) for run in runs]) for name in names}
    if json:
        timed = [asdict(run) | {"beyond_torch": run.beyond_torch} for run in runs]
        seconds = {name: asdict(summary) for name, summary in found.items()}
        emit_json({"work": "startup", "repeat": repeat, **facts, "runs": timed, "seconds": seconds})
        return
    _show_startup(facts, found, repeat)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """How much of everything."""

    tokens: int
    prompt: int
    sequences: int
    repeat: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 1 <= value <= LIMIT:
                raise InvalidInput(f"--{name} is {value}; it takes a whole number from 1 to {LIMIT}")


def _decoding(subject: Subject, work: str, counts: Counts, json: bool) -> None:
    if counts.tokens < 2:
        raise InvalidInput(f"--tokens is {counts.tokens}; at least 2 are needed, the first belongs to the prompt")
    with _opened(subject, counts) as engine:
        watch = Stopwatch(engine)

        def once() -> Timing:
            return watch.decode([watch.prompt(counts.prompt) for _ in range(counts.sequences)], counts.tokens)

        runs = _repeated(counts.repeat, once)
        facts = _facts(engine, subject)
    limit = counts.sequences * facts["limit"]["tokens_per_second"]
    rate = Summary.of([run.rate for run in runs])
    first = Summary.of([1e3 * run.prompt_seconds for run in runs])
    if json:
        names = ("prompt_seconds", "seconds", "tokens")
        timed = [{n: getattr(run, n) for n in names} | {"tokens_per_second": run.rate} for run in runs]
        found = {"tokens_per_second": asdict(rate), "first_token_ms": asdict(first)}
        emit_json(
            {"work": work, **asdict(counts), **facts, "runs": timed, **found, "share_of_limit": rate.median / limit}
        )
        return
    step = Summary.of([1e3 * counts.sequences / run.rate for run in runs])
    rows = [
        ("tokens/s", rate, f"{rate.median / limit:.0%}"),
        ("ms a step", step, f"{rate.median / limit:.0%}"),
        ("ms to the first token", first, "–"),
    ]
    _table(work, facts, rows, counts)


def _repeated(repeat: int, once: Callable[[], Found]) -> list[Found]:
    once()
    found = []
    for number in range(repeat):
        found.append(once())
        note(f"run {number + 1} of {repeat}")
    return found


@contextmanager
def _opened(subject: Subject, counts: Counts) -> Iterator[hw.Engine]:
    with (
        Listening(),
        subject.path() as path,
        _engine(subject, path, pages_for(counts.sequences, counts.prompt + counts.tokens)) as e,
    ):
        total, most = counts.prompt + counts.tokens, e.config.max_positions
        if total > most:
            raise InvalidInput(
                f"--prompt {counts.prompt} and --tokens {counts.tokens} make {total} positions; this model has {most}"
            )
        yield e


def _engine(subject: Subject, path: Path, pages: int) -> hw.Engine:
    import headway as hw

    with loading() as layers:
        return hw.Engine(path, pages=pages, progress=layers, **subject.engine.given())


def _facts(engine: hw.Engine, subject: Subject, *, bandwidth: bool = True) -> dict[str, Any]:
    """What was measured, where, on which path, and what the memory allows one sequence."""
    import torch

    from headway.runtime.profile import measure_bandwidth

    info = engine.info
    facts = {
        "machine": asdict(read_machine()),
        "model": asdict(info) | {"name": subject.name},
        "path": path_of(engine),
    }
    if bandwidth:
        torch.set_num_threads(info.threads)
        read, needed = measure_bandwidth(info.device), step_bytes(engine)
        facts["limit"] = {"bytes_per_second": read, "bytes_per_token": needed, "tokens_per_second": read / needed}
    return facts


# -- showing -----------------------------------------------------------------------------------------------------------


def _title(work: str, facts: dict[str, Any], rest: str) -> str:
    info = facts["model"]
    return f"{work} · {info['name']} · {facts['path']} · {counted(info['threads'], 'thread')} · {rest}"


def _table(work: str, facts: dict[str, Any], rows: list[tuple[str, Summary, str]], counts: Counts) -> None:
    amounts = f"prompt {counts.prompt}" + (f", {counts.tokens} tokens" if counts.tokens > 1 else "")
    amounts += f", {counts.sequences} sequences" if counts.sequences > 1 else ""
    show_table(
        ("what", "median", "least", "most", "spread", "of limit"),
        [
            (what, f"{s.median:.2f}", f"{s.least:.2f}", f"{s.most:.2f}", f"{s.spread:.0%}", share)
            for what, s, share in rows
        ],
        title=_title(work, facts, f"{amounts}, {counted(counts.repeat, 'run')}"),
        numbers=range(1, 6),
    )
    limit = facts["limit"]
    read, needed = size(limit["bytes_per_second"]), size(limit["bytes_per_token"])
    print(f"memory: {read}/s over {needed} of weights a token: {limit['tokens_per_second']:.1f} steps/s at most")


def _show_startup(facts: dict[str, Any], found: dict[str, Summary], repeat: int) -> None:
    names = {
        "torch": "import torch, by itself",
        "imported": "everything imported",
        "loaded": "model loaded",
        "answered": "first token",
        "beyond_torch": "first token, beyond import torch",
    }
    show_table(
        ("seconds from the start of the process", "median", "least", "most"),
        [
            (label, *(f"{value:.3f}" for value in (found[name].median, found[name].least, found[name].most)))
            for name, label in names.items()
        ],
        title=_title("startup", facts, counted(repeat, "run")),
        numbers=range(1, 4),
    )
