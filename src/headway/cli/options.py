"""The flags that commands share, each written once, and the values they add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.base.checks import check_fraction
from headway.base.errors import InvalidInput
from headway.base.samplers import Sampling
from headway.models.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    import headway as hw

ENGINE = "Model and device"
SAMPLING = "Sampling"


def whole_number(text: str | int) -> int:
    """A flag's value as an integer."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str | float) -> float:
    """A flag's value as a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a number")
    return value


WHOLE: dict[str, Any] = {"parser": whole_number, "metavar": "N"}
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
        help="auto (as the file has it), float32, bfloat16, float16.",
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
    typer.Option("--threads", **WHOLE, help="CPU threads; by default what this machine gives.", rich_help_panel=ENGINE),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        metavar="FORMAT",
        help="Keep float weights as int8, int4 or, on a CUDA device, fp8; a CPU leaves quantised files as they are.",
        rich_help_panel=ENGINE,
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--memory-fraction",
        parser=number,
        metavar="F",
        help="How much of the device's memory to use in all, as 0.5: weights, pages, graphs.",
        rich_help_panel=ENGINE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, errors too.")]

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", **WHOLE, help="Tokens at most.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", **NUMBER, help="0 takes the likeliest token each time.", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", **WHOLE, help="Draw only from the k likeliest tokens.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", **NUMBER, help="Draw from the fewest tokens that reach this probability.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", **NUMBER, help="Drop tokens below this share of the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        **NUMBER,
        help="Above 1 makes tokens that were there less likely.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", **WHOLE, help="The same seed draws the same tokens.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Stop before this text. May be repeated.", rich_help_panel=SAMPLING),
]
Logprobs = Annotated[
    int,
    typer.Option("--logprobs", **WHOLE, help="Show the N likeliest tokens at every step.", rich_help_panel=SAMPLING),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="A system message ahead of the conversation.")
]


@dataclass(frozen=True)
class EngineOptions:
    """Which model, and how it is to run."""

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    quantize: str | None = None
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        check_fraction(self.memory_fraction, "--memory-fraction")  # before a model is fetched

    def given(self) -> dict[str, Any]:
        """What `Engine` takes besides the model, as far as it was said."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and when to stop. A knob that is None was not turned."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInput(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        if self.logprobs < 0:
            raise InvalidInput(f"--logprobs is {self.logprobs}; it must be at least 1, or 0 for none")
        if "" in self.stop:
            raise InvalidInput("--stop is empty; it must have at least one character")
        for name in ("top_k", "top_p", "min_p") if self.temperature == 0 else ():
            if getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInput(
                    f"{flag} is {getattr(self, name)} and has no effect at temperature 0, which always takes the "
                    f"likeliest token; draw with --temperature 1, or leave {flag} out"
                )

    def sampler(self) -> Sampling:
        """The library's sampler for these knobs; it refuses values that make no sense."""
        knobs = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
        turned = {name: getattr(self, name) for name in knobs if getattr(self, name) is not None}
        return Sampling(temperature=self.temperature, **turned)


@contextmanager
def open_engine(options: EngineOptions) -> Iterator[hw.Engine]:
    """The model, fetched if need be with a bar, loaded, and closed at the end."""
    import headway as hw
    from headway.cli.render import fetched, loading

    path = fetched(options.model)
    with loading() as layers:
        engine = hw.Engine(path, **options.given(), progress=layers)
    with engine:
        yield engine
