"""The flags that commands share, and the option objects they make up."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from headway.base.checks import check_fraction, check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.specs.generation import PARAMETERS
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.samplers import Sampling
from headway.base.system.device import MAX_RANKS
from headway.base.system.gc_paused import gc_paused
from headway.cli.flags.declare import BadValue, Option, panel
from headway.cli.startup_marks import mark
from headway.models.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    import headway as hw
    from headway.program.generation.defaults import GenerationDefaults

engine_flag = panel("Model and device")
sampling_flag = panel("Sampling")
FILTERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # of the tokens that are drawn from


def integer(text: str | int) -> int:
    """A flag's value as an integer."""
    try:
        return int(text)
    except ValueError:
        raise BadValue(f"{text!r} is not an integer") from None


def number(text: str | float) -> float:
    """A flag's value as a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadValue(f"{text!r} is not a number")
    return value


INTEGER: dict[str, Any] = {"parser": integer, "metavar": "N"}
NUMBER: dict[str, Any] = {"parser": number, "metavar": "X"}

Model = Annotated[
    str,
    engine_flag("--model", "-m", metavar="MODEL", help="A known name, a folder, a .gguf file or a hub id org/name."),
]
Dtype = Annotated[
    str,
    engine_flag(
        "--dtype",
        metavar="TYPE",
        help="auto (as the file has it; on a GPU float32 and quantized become bfloat16), float32, bfloat16, float16.",
    ),
]
Device = Annotated[str, engine_flag("--device", metavar="DEVICE", help="Where to compute: auto, cpu, cuda, cuda:1 …")]
Threads = Annotated[int | None, engine_flag("--threads", **INTEGER, help="CPU threads; by default all that may run.")]
Quantize = Annotated[
    str | None,
    engine_flag(
        "--quantize",
        metavar="FORMAT",
        help="Quantize weights to int8, int4 or, on CUDA, fp8; on a CPU, quantized files stay as they are.",
    ),
]
KvDtype = Annotated[
    str,
    engine_flag(
        "--kv-dtype",
        metavar="TYPE",
        help="Keys and values on a CPU: float32, float16, bfloat16; auto is float16 for quantized weights.",
    ),
]
Memory = Annotated[
    str | None,
    engine_flag(
        "--memory",
        metavar="AMOUNT",
        help="Memory to use for weights, KV cache and graphs, e.g. 2G; the KV cache alone takes 1/8 of a CPU's memory.",
    ),
]
MemoryFraction = Annotated[
    float | None,
    engine_flag(
        "--memory-fraction",
        parser=number,
        metavar="F",
        help="Fraction of device memory to use for weights, KV cache and graphs, e.g. 0.5.",
    ),
]
TensorParallel = Annotated[
    int,
    engine_flag(
        "--tensor-parallel",
        **INTEGER,
        help="Split the model over N processes: on CUDA a device each, on a CPU of this machine.",
    ),
]


CacheHost = Annotated[
    str | None,
    engine_flag(
        "--cache-host",
        metavar="AMOUNT",
        help="Host memory for pages that leave the prefix cache, e.g. 8G; they come back by copy.",
    ),
]
CacheFolder = Annotated[
    str | None,
    engine_flag("--cache-folder", metavar="FOLDER", help="A folder of yours for pages that leave host memory."),
]
CacheFolderSize = Annotated[
    str | None, engine_flag("--cache-folder-size", metavar="AMOUNT", help="How large that folder may be; 16G.")
]


def _be_quiet(value: bool) -> bool:
    from headway.cli.terminal.render import be_quiet

    be_quiet(value)
    return value


Quiet = Annotated[bool, Option("--quiet", "-q", callback=_be_quiet, help="Show no notes and no progress, only errors.")]
Json = Annotated[bool, Option("--json", help="Print JSON on standard output, errors too.")]

MaxTokens = Annotated[int, sampling_flag("--max-tokens", "-n", **INTEGER, help="Maximum number of tokens.")]
Temperature = Annotated[
    float | None, sampling_flag("--temperature", "-t", **NUMBER, help="0 takes the likeliest token each time.")
]
TopK = Annotated[int | None, sampling_flag("--top-k", **INTEGER, help="Draw only from the k likeliest tokens.")]
TopP = Annotated[
    float | None,
    sampling_flag("--top-p", **NUMBER, help="Draw from the smallest set of tokens with this total probability."),
]
MinP = Annotated[
    float | None, sampling_flag("--min-p", **NUMBER, help="Drop tokens below this fraction of the top probability.")
]
TypicalP = Annotated[
    float | None,
    sampling_flag("--typical-p", **NUMBER, help="Draw among tokens of typical surprise with this total probability."),
]
EpsilonCutoff = Annotated[
    float | None, sampling_flag("--epsilon-cutoff", **NUMBER, help="Drop tokens below this probability.")
]
EtaCutoff = Annotated[
    float | None,
    sampling_flag("--eta-cutoff", **NUMBER, help="The same, by a limit that falls where the distribution is flat."),
]
RepetitionPenalty = Annotated[
    float | None, sampling_flag("--repetition-penalty", **NUMBER, help="Above 1 makes repeated tokens less likely.")
]
PresencePenalty = Annotated[
    float | None,
    sampling_flag("--presence-penalty", **NUMBER, help="Subtracted from the logits of tokens generated before."),
]
FrequencyPenalty = Annotated[
    float | None, sampling_flag("--frequency-penalty", **NUMBER, help="The same, once for each time.")
]
DryMultiplier = Annotated[
    float | None,
    sampling_flag("--dry-multiplier", **NUMBER, help="DRY: what tokens lose that would continue a repetition."),
]
DryBase = Annotated[
    float | None, sampling_flag("--dry-base", **NUMBER, help="How that grows with each repeated token; 1.75.")
]
DryAllowedLength = Annotated[
    int | None, sampling_flag("--dry-allowed-length", **INTEGER, help="Tokens that may repeat before; 2.")
]
DryPenaltyLastN = Annotated[
    int | None, sampling_flag("--dry-penalty-last-n", **INTEGER, help="How many of the last tokens count; -1 is all.")
]
DrySequenceBreaker = Annotated[
    list[str] | None,
    sampling_flag(
        "--dry-sequence-breaker",
        metavar="TEXT",
        help="A text that no repetition goes across, in place of DRY's own. May be repeated.",
    ),
]
XtcProbability = Annotated[
    float | None,
    sampling_flag("--xtc-probability", **NUMBER, help="XTC: how often the top choices but the last are excluded."),
]
XtcThreshold = Annotated[
    float | None,
    sampling_flag("--xtc-threshold", **NUMBER, help="The probability from which a token is a top choice; 0.1."),
]
MirostatVersion = Annotated[
    int | None, sampling_flag("--mirostat", **INTEGER, help="Keep the surprise of the text even, by version 1 or 2.")
]
MirostatTau = Annotated[float | None, sampling_flag("--mirostat-tau", **NUMBER, help="That surprise, in bits; 5.")]
MirostatEta = Annotated[
    float | None, sampling_flag("--mirostat-eta", **NUMBER, help="How quickly it is followed; 0.1.")
]
Seed = Annotated[int | None, sampling_flag("--seed", **INTEGER, help="The same seed draws the same tokens.")]
Stop = Annotated[
    list[str] | None, sampling_flag("--stop", metavar="TEXT", help="Stop before this text. May be repeated.")
]
Logprobs = Annotated[int, sampling_flag("--logprobs", **INTEGER, help="Show the N likeliest tokens at every step.")]
Lora = Annotated[
    list[str] | None,
    engine_flag(
        "--lora", metavar="NAME=FOLDER[:SCALE]", help="A LoRA adapter: a PEFT folder or a GGUF file. May be repeated."
    ),
]
Speculate = Annotated[
    str | None,
    engine_flag(
        "--speculate",
        metavar="DRAFTER",
        help="Draft tokens and verify them: prompt-lookup, layers:N, or a smaller MODEL.",
    ),
]
System = Annotated[str | None, Option("--system", metavar="TEXT", help="The system message of the conversation.")]


@dataclass(frozen=True)
class ModelOption:
    """Which model to run."""

    model: Model = DEFAULT_MODEL


@dataclass(frozen=True)
class ComputeOptions:
    """How to run any model."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    quantize: Quantize = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = "auto"
    memory: Memory = None
    tensor_parallel: TensorParallel = 1
    cache_host: CacheHost = None
    cache_folder: CacheFolder = None
    cache_folder_size: CacheFolderSize = None

    def __post_init__(self) -> None:
        check_fraction(self.memory_fraction, "--memory-fraction")  # before the model is fetched
        check_integer(self.tensor_parallel, "--tensor-parallel", 1, MAX_RANKS)

    def given(self) -> dict[str, Any]:
        """The options of `Engine` that were given."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {name: value for name, value in values.items() if value is not None}

    def changed(self) -> dict[str, Any]:
        """Those of them that are not as they are without a flag."""
        usual = type(self)().given()
        return {name: value for name, value in self.given().items() if value != usual.get(name)}


NO_TIERS: dict[str, None] = dict.fromkeys(("cache_host", "cache_folder", "cache_folder_size"))


@dataclass(frozen=True)
class EngineOptions(ComputeOptions, ModelOption):
    """Which model to run, and how."""

    def of_drafter(self, model: str) -> EngineOptions:
        """A draft model's: on the same device, as its file has it."""
        return replace(
            self, model=model, quantize=None, memory_fraction=None, memory=None, tensor_parallel=1, **NO_TIERS
        )


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
    typical_p: TypicalP = None
    epsilon_cutoff: EpsilonCutoff = None
    eta_cutoff: EtaCutoff = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    dry_multiplier: DryMultiplier = None
    dry_base: DryBase = None
    dry_allowed_length: DryAllowedLength = None
    dry_penalty_last_n: DryPenaltyLastN = None
    dry_sequence_breaker: DrySequenceBreaker = None
    xtc_probability: XtcProbability = None
    xtc_threshold: XtcThreshold = None
    mirostat: MirostatVersion = None
    mirostat_tau: MirostatTau = None
    mirostat_eta: MirostatEta = None
    seed: Seed = None
    stop: Stop = None
    logprobs: Logprobs = 0
    lora: Lora = None

    def __post_init__(self) -> None:
        check_integer(self.max_tokens, "--max-tokens", 1)
        check_integer(self.logprobs, "--logprobs")
        if "" in (self.stop or ()):
            raise InvalidInput("--stop is empty; it must have at least one character")
        for name in (*FILTERS, "mirostat") if self.temperature == 0 else ():
            if getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInput(
                    f"{flag} is {getattr(self, name)} and has no effect at temperature 0, which always takes the "
                    f"likeliest token; set --temperature 1, or leave {flag} out"
                )

    def check(self) -> None:
        """Refuse values out of range and adapters that cannot be read, before the model is loaded."""
        given = self._given()
        Sampling(temperature=1.0 if self.temperature is None else self.temperature, **given)
        LogitsRuleValues.of(given)
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
        drawn = any(name in given for name in (*FILTERS, "mirostat"))
        rules = {name: given.pop(name) for name in RULES if name in given}
        return replace(defaults.sampler(do_sample=True if drawn else None, **given), **rules)

    def _given(self) -> dict[str, Any]:
        names = (*FILTERS, "repetition_penalty", "presence_penalty", "frequency_penalty", *RULES, "seed")
        values = {name: getattr(self, PARAMETERS[name].name_on("cli")) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@contextmanager
def open_engine(options: EngineOptions) -> Iterator[hw.Engine]:
    """An engine for the model, which is fetched if necessary, with progress bars; closed at the end."""
    with gc_paused():
        import headway as hw
        from headway.cli.terminal.render import fetched, loading

        path, new_engine = fetched(options.model), hw.Engine
        mark("imported")
        with loading() as layers:
            engine = new_engine(path, **options.given(), progress=layers)
        gc.freeze()  # what is loaded by now stays, and need not be looked at again
    mark("loaded")
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
    with open_engine(options.of_drafter(name)) as engine:
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
