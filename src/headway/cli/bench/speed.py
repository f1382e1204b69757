"""`headway bench decode | prefill | batch | startup`: how fast a model runs, against what memory bandwidth allows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.system.machine import read_machine
from headway.bench.models import FORMATS, SHAPES, find_shape, write_folder
from headway.bench.speed import DecodeTiming, SpeedTest, Summary, pages_for, path_of, step_bytes
from headway.bench.startup import PHASES, measure_startup
from headway.cli.flags.declare import Option, with_flags
from headway.cli.flags.shared import INTEGER, EngineOptions, Json
from headway.cli.terminal.render import EngineLog, counted, emit_json, fetched, loading, note, show_table, size

if TYPE_CHECKING:
    import headway as hw

Result = TypeVar("Result")
LIMIT = 1 << 20  # of every count

ShapeName = Annotated[
    str | None,
    Option("--shape", metavar="SHAPE", help=f"Measure a random model of this shape: {', '.join(SHAPES)}."),
]
Format = Annotated[
    str | None,
    Option("--format", metavar="FORMAT", help=f"Storage format of the random model: {', '.join(FORMATS)}."),
]
Tokens = Annotated[int, Option("--tokens", "-n", **INTEGER, help="Tokens each sequence generates.")]
Prompt = Annotated[int, Option("--prompt", "-p", **INTEGER, help="Tokens of each prompt.")]
Sequences = Annotated[int, Option("--sequences", "-s", **INTEGER, help="Concurrent sequences.")]
Repeat = Annotated[int, Option("--repeat", "-r", **INTEGER, help="Runs, after one warmup run.")]


@dataclass(frozen=True)
class BenchModel:
    """The model to measure, and how it is loaded."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    shape: ShapeName = None
    format: Format = None

    def __post_init__(self) -> None:
        if self.shape is None and self.format is not None:
            raise InvalidInput(f"--format is {self.format!r}; it needs --shape, since a model file has its own format")
        if self.shape is not None:
            find_shape(self.shape)
        if self.format is not None and self.format not in FORMATS:
            raise InvalidInput(f"--format is {self.format!r}; it must be one of {', '.join(FORMATS)}")

    @property
    def name(self) -> str:
        return self.engine.model if self.shape is None else f"random {self.shape} in {self.format or 'f32'}"

    @contextmanager
    def path(self) -> Iterator[Path]:
        """The model on disk: fetched if necessary, or written for this run."""
        if self.shape is None:
            yield fetched(self.engine.model)
            return
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            note(f"writing a {self.name}")
            yield write_folder(find_shape(self.shape), Path(folder), self.format or "f32")


@with_flags
def decode(
    *,
    model: BenchModel,
    tokens: Tokens = 128,
    prompt: Prompt = 32,
    repeat: Repeat = 5,
    json: Json = False,
) -> None:
    """Decode speed of one sequence, and how close it comes to the memory-bandwidth limit.

    Greedy; end-of-text tokens do not end it; the first token belongs to the prefill time.

    The limit is the measured memory bandwidth divided by the bytes of weights that a token reads.
    """
    _bench_decode(model, "decode", RunSizes(tokens, prompt, 1, repeat), json)


@with_flags
def batch(
    *,
    model: BenchModel,
    sequences: Sequences = 8,
    tokens: Tokens = 128,
    prompt: Prompt = 32,
    repeat: Repeat = 5,
    json: Json = False,
) -> None:
    """Decode throughput of many concurrent sequences.

    Counted from the moment every sequence has its first token.
    """
    _bench_decode(model, "batch", RunSizes(tokens, prompt, sequences, repeat), json)


@with_flags
def prefill(
    *,
    model: BenchModel,
    prompt: Prompt = 512,
    repeat: Repeat = 5,
    json: Json = False,
) -> None:
    """Prefill speed: prompt tokens per second, up to the first generated token.

    Every run has a new prompt, so the prefix cache never hits.
    """
    sizes = RunSizes(1, prompt, 1, repeat)
    with _open_engine(model, sizes) as engine:
        test = SpeedTest(engine)
        seconds = _repeat(repeat, lambda: test.prefill(test.prompt(prompt)))
        facts = _facts(engine, model)
    rate, to_first = Summary.of([prompt / s for s in seconds]), Summary.of([1e3 * s for s in seconds])
    if json:
        runs = [{"seconds": s, "tokens_per_second": prompt / s} for s in seconds]
        summaries = {"tokens_per_second": asdict(rate), "first_token_ms": asdict(to_first)}
        emit_json({"work": "prefill", **asdict(sizes), **facts, "runs": runs, **summaries})
        return
    _table("prefill", facts, [("tokens/s", rate, "–"), ("ms to the first token", to_first, "–")], sizes)


@with_flags
def startup(
    *,
    model: BenchModel,
    repeat: Repeat = 5,
    json: Json = False,
) -> None:
    """Seconds from process start to the first token of `headway run`, and to its end, by phase."""
    RunSizes(1, 8, 1, repeat)
    with model.path() as path:
        # Opened here first: bad options are reported once, and the files are in the page cache.
        with _load_engine(model, path, pages_for(1, 16)) as engine:
            if not engine.has_tokenizer:
                raise InvalidInput(f"{model.name} has no tokenizer, which `headway run` needs; measure another model")
            facts = _facts(engine, model, bandwidth=False)
        options = model.engine.given() | {"model": path}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        runs = _repeat(repeat, lambda: measure_startup(flags))
    summaries = {name: Summary.of([getattr(run, name) for run in runs]) for name in PHASES}
    if json:
        timed = [asdict(run) for run in runs]
        seconds = {name: asdict(summary) for name, summary in summaries.items()}
        emit_json({"work": "startup", "repeat": repeat, **facts, "runs": timed, "seconds": seconds})
        return
    _show_startup(facts, summaries, repeat)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSizes:
    """Tokens, prompt tokens, sequences and repeats of a run."""

    tokens: int
    prompt: int
    sequences: int
    repeat: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_integer(value, f"--{name}", 1, LIMIT)


def _bench_decode(model: BenchModel, work: str, sizes: RunSizes, json: bool) -> None:
    if sizes.tokens < 2:
        raise InvalidInput(f"--tokens is {sizes.tokens}; at least 2 are needed, as the first belongs to the prefill")
    with _open_engine(model, sizes) as engine:
        test = SpeedTest(engine)

        def once() -> DecodeTiming:
            return test.decode([test.prompt(sizes.prompt) for _ in range(sizes.sequences)], sizes.tokens)

        runs = _repeat(sizes.repeat, once)
        facts = _facts(engine, model)
    limit = sizes.sequences * facts["limit"]["tokens_per_second"]
    rate = Summary.of([run.rate for run in runs])
    first = Summary.of([1e3 * run.prompt_seconds for run in runs])
    if json:
        names = ("prompt_seconds", "seconds", "tokens")
        timed = [{n: getattr(run, n) for n in names} | {"tokens_per_second": run.rate} for run in runs]
        summaries = {"tokens_per_second": asdict(rate), "first_token_ms": asdict(first)}
        emit_json(
            {"work": work, **asdict(sizes), **facts, "runs": timed, **summaries, "share_of_limit": rate.median / limit}
        )
        return
    step = Summary.of([1e3 * sizes.sequences / run.rate for run in runs])
    rows = [
        ("tokens/s", rate, f"{rate.median / limit:.0%}"),
        ("ms per step", step, f"{rate.median / limit:.0%}"),
        ("ms to the first token", first, "–"),
    ]
    _table(work, facts, rows, sizes)


def _repeat(repeat: int, once: Callable[[], Result]) -> list[Result]:
    once()
    rows = []
    for number in range(repeat):
        rows.append(once())
        note(f"run {number + 1} of {repeat}")
    return rows


@contextmanager
def _open_engine(model: BenchModel, sizes: RunSizes) -> Iterator[hw.Engine]:
    with (
        EngineLog(),
        model.path() as path,
        _load_engine(model, path, pages_for(sizes.sequences, sizes.prompt + sizes.tokens)) as e,
    ):
        total, most = sizes.prompt + sizes.tokens, e.config.max_positions
        if total > most:
            raise InvalidInput(
                f"--prompt {sizes.prompt} and --tokens {sizes.tokens} make {total} positions; this model has {most}"
            )
        yield e


def _load_engine(model: BenchModel, path: Path, pages: int) -> hw.Engine:
    import headway as hw

    with loading() as layers:
        return hw.Engine(path, pages=pages, progress=layers, **model.engine.given())


def _facts(engine: hw.Engine, model: BenchModel, *, bandwidth: bool = True) -> dict[str, Any]:
    """The machine, the model, its execution path, and the memory-bandwidth limit of one sequence."""
    import torch

    from headway.runtime.profile import measure_bandwidth

    info = engine.info
    facts = {
        "machine": asdict(read_machine()),
        "model": asdict(info) | {"name": model.name},
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


def _table(work: str, facts: dict[str, Any], rows: list[tuple[str, Summary, str]], sizes: RunSizes) -> None:
    text = f"prompt {sizes.prompt}" + (f", {sizes.tokens} tokens" if sizes.tokens > 1 else "")
    text += f", {sizes.sequences} sequences" if sizes.sequences > 1 else ""
    show_table(
        ("what", "median", "min", "max", "spread", "of limit"),
        [
            (what, f"{s.median:.2f}", f"{s.min:.2f}", f"{s.max:.2f}", f"{s.spread:.0%}", share)
            for what, s, share in rows
        ],
        title=_title(work, facts, f"{text}, {counted(sizes.repeat, 'run')}"),
        numbers=range(1, 6),
    )
    limit = facts["limit"]
    read, needed = size(limit["bytes_per_second"]), size(limit["bytes_per_token"])
    print(f"memory: {read}/s over {needed} of weights per token: {limit['tokens_per_second']:.1f} steps/s at most")


def _show_startup(facts: dict[str, Any], summaries: dict[str, Summary], repeat: int) -> None:
    show_table(
        ("seconds from process start", "median", "min", "max"),
        [
            (label, *(f"{value:.3f}" for value in (summaries[name].median, summaries[name].min, summaries[name].max)))
            for name, label in PHASES.items()
        ],
        title=_title("startup", facts, counted(repeat, "run")),
        numbers=range(1, 4),
    )
