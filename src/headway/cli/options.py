"""The flags that commands share, and the option objects they make up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.base.checks import check_fraction
from headway.base.errors import InvalidInput
from headway.base.samplers import Sampling
from headway.models.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    import headway as hw
    from headway.program.generation.defaults import GenerationDefaults

ENGINE = "Model and device"
SAMPLING = "Sampling"


def integer(text: str | int) -> int:
    """A flag's value as an integer."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def number(text: str | float) -> float:
    """A flag's value as a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a number")
    return value


INTEGER: dict[str, Any] = {"parser": integer, "metavar": "N"}
NUMBER: dict[str, Any] = {"parser": number, "metavar": "X"}

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A known name, a folder, a .gguf file or a hub id org/name.",
        rich_help_panel=ENGINE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="auto (as the file has it; on a GPU float32 and quantized become bfloat16), float32, bfloat16, float16.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="Where to compute: auto, cpu, cuda, cuda:1 …", rich_help_panel=ENGINE
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", **INTEGER, help="CPU threads; by default all that may run.", rich_help_panel=ENGINE),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        metavar="FORMAT",
        help="Quantize weights to int8, int4 or, on CUDA, fp8; on a CPU, quantized files stay as they are.",
        rich_help_panel=ENGINE,
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="TYPE",
        help="Keys and values on a CPU: float32, float16, bfloat16; auto is float16 for quantized weights.",
        rich_help_panel=ENGINE,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="AMOUNT",
        help="Memory to use for weights, KV cache and graphs, e.g. 2G; the KV cache alone takes 1/8 of a CPU's memory.",
        rich_help_panel=ENGINE,
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--memory-fraction",
        parser=number,
        metavar="F",
        help="Fraction of device memory to use for weights, KV cache and graphs, e.g. 0.5.",
        rich_help_panel=ENGINE,
    ),
]


def _be_quiet(value: bool) -> bool:
    from headway.cli.render import be_quiet

    be_quiet(value)
    return value


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_be_quiet, help="Show no notes and no progress, only errors.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, errors too.")]

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", **INTEGER, help="Maximum number of tokens.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        **NUMBER,
        help="0 takes the likeliest token each time.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", **INTEGER, help="Draw only from the k likeliest tokens.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        **NUMBER,
        help="Draw from the smallest set of tokens with this total probability.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", **NUMBER, help="Drop tokens below this fraction of the top probability.", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        **NUMBER,
        help="Above 1 makes repeated tokens less likely.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", **INTEGER, help="The same seed draws the same tokens.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Stop before this text. May be repeated.", rich_help_panel=SAMPLING),
]
Logprobs = Annotated[
    int,
    typer.Option("--logprobs", **INTEGER, help="Show the N likeliest tokens at every step.", rich_help_panel=SAMPLING),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=FOLDER[:SCALE]",
        help="A LoRA adapter: a PEFT folder or a GGUF file. May be repeated.",
        rich_help_panel=ENGINE,
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="DRAFTER",
        help="Draft tokens and verify them: prompt-lookup, layers:N, or a smaller MODEL.",
        rich_help_panel=ENGINE,
    ),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message of the conversation.")]


@dataclass(frozen=True)
class EngineOptions:
    """Which model to run, and how."""

    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    quantize: Quantize = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = "auto"
    memory: Memory = None

    def __post_init__(self) -> None:
        check_fraction(self.memory_fraction, "--memory-fraction")  # before the model is fetched

    def given(self) -> dict[str, Any]:
        """The options of `Engine` that were given."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Decoding:
    """Sampling parameters, stop conditions and adapters. None means the flag was not given.

    Without a temperature, the parameters that were not given are those of the model's generation_config.json.
    """

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    stop: Stop = None
    logprobs: Logprobs = 0
    lora: Lora = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInput(f"--max-tokens is {self.max_tokens}; it must be an integer of at least 1")
        if self.logprobs < 0:
            raise InvalidInput(f"--logprobs is {self.logprobs}; it must be an integer of at least 0")
        if "" in (self.stop or ()):
            raise InvalidInput("--stop is empty; it must have at least one character")
        for name in ("top_k", "top_p", "min_p") if self.temperature == 0 else ():
            if getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInput(
                    f"{flag} is {getattr(self, name)} and has no effect at temperature 0, which always takes the "
                    f"likeliest token; set --temperature 1, or leave {flag} out"
                )

    def check(self) -> None:
        """Refuse values out of range and adapters that cannot be read, before the model is loaded."""
        Sampling(temperature=1.0 if self.temperature is None else self.temperature, **self._given())
        _ = self.adapters

    @cached_property
    def adapters(self) -> tuple[tuple[hw.Adapter, float], ...]:
        """The adapters of --lora, with their scales."""
        from headway.models.adapters.source import AdapterSource

        sources = [AdapterSource.of(text) for text in self.lora or ()]
        if not sources:
            return ()
        from headway.models.adapters.adapter import Adapter

        return tuple((Adapter.load(source.path), source.scale) for source in sources)

    def sampler(self, defaults: GenerationDefaults) -> Sampling:
        """The sampler for these parameters."""
        given = self._given()
        if self.temperature is not None:
            return Sampling(temperature=self.temperature, **given)
        drawn = any(name in given for name in ("top_k", "top_p", "min_p"))
        return defaults.sampler(do_sample=True if drawn else None, **given)

    def _given(self) -> dict[str, Any]:
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@contextmanager
def open_engine(options: EngineOptions) -> Iterator[hw.Engine]:
    """An engine for the model, which is fetched if necessary, with progress bars; closed at the end."""
    import headway as hw
    from headway.cli.render import fetched, loading

    path = fetched(options.model)
    with loading() as layers:
        engine = hw.Engine(path, **options.given(), progress=layers)
    with engine:
        yield engine


@contextmanager
def open_drafter(name: str | None, options: EngineOptions) -> Iterator[hw.Drafter | None]:
    """What --speculate names; a draft model is fetched and loaded on the same device, and closed at the end."""
    import headway as hw

    own = None if name is None else named_drafter(name)
    if name is None or own is not None:
        yield own
        return
    with open_engine(replace(options, model=name, quantize=None, memory_fraction=None, memory=None)) as engine:
        yield hw.DraftModel(engine)


def named_drafter(name: str) -> hw.Drafter | None:
    """The drafter that --speculate names, None if it is a model."""
    import headway as hw

    if name == "prompt-lookup":
        return hw.PromptLookup()
    kind, colon, count = name.partition(":")
    if kind != "layers" or not colon:
        return None
    try:
        return hw.OwnLayers(int(count))
    except ValueError:
        raise InvalidInput(f"--speculate is {name!r}; layers:N takes a number of layers of at least 1") from None
