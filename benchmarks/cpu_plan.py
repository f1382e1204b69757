"""What `cpu.py` measures: works, who does them in which format, and how far ahead Headway means to be. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

PEERS = ("llama", "transformers", "openvino", "vllm")
BF16_KV = "+kv-bf16"  # after a form: Headway's keys and values in bfloat16, which OpenVINO computes in by itself
FORKS = 32


@dataclass(frozen=True)
class Work:
    """One kind of work and its size. `sequences` are forks where it forks."""

    kind: str  # decode | prefill | fork | first | startup | trim
    prompt: int
    tokens: int = 1
    sequences: int = 1
    window: int = 0

    @property
    def label(self) -> str:
        match self.kind:
            case "decode":
                return f"decode {self.sequences}"
            case "prefill":
                return f"prompt {self.prompt}"
            case "fork":
                return f"{self.sequences} forks of {self.prompt} to {self.tokens}"
            case "first":
                return f"first token of {self.prompt}, warm"
            case "startup":
                return "process start to first token"
        return f"window {self.window} of {self.prompt}"

    @property
    def unit(self) -> str:
        return {"first": "ms", "startup": "s", "trim": "ms a token"}.get(self.kind, "tokens/s")

    @property
    def slots(self) -> int:
        """Slots that its longest sequence takes."""
        extra = 2 * (self.tokens + 8) if self.kind == "trim" else self.tokens
        return self.prompt + extra

    @property
    def total(self) -> int:
        """Slots that all of it takes at once."""
        return self.slots + (self.sequences - 1) * (self.tokens if self.kind == "fork" else self.slots)

    def value(self, answer: dict[str, float]) -> float:
        """A worker's answer as one figure, in `unit`."""
        match self.kind:
            case "decode":
                return answer["tokens"] / answer["seconds"]
            case "prefill":
                return self.prompt / answer["seconds"]
            case "fork":
                return self.sequences * self.tokens / (answer["prompt_seconds"] + answer["seconds"])
            case "first":
                return 1e3 * answer["seconds"]
        return answer["seconds"]


@dataclass(frozen=True)
class Rival:
    """A peer, its format, and how many times as good Headway means to be; None where that is only looked at."""

    peer: str
    form: str
    wanted: float | None = None


@dataclass(frozen=True)
class Entry:
    """A shape, a format and a work, Headway's rivals in it, and the share of the machine's limit it means to reach."""

    shape: str
    form: str
    work: Work
    rivals: tuple[Rival, ...] = ()
    share: float | None = None
    wanted: float | None = None  # of a window with trimmed pages, against attention to all slots

    @property
    def label(self) -> str:
        return f"{self.shape} {self.form} {self.work.label}"


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    tokens: int = 128  # generated after the first
    prompt: int = 32  # of what is decoded
    prompts: tuple[int, int] = (512, 2048)
    batches: tuple[int, int] = (8, 32)
    forks: int = FORKS
    branch: int = 64
    short: int = 8
    slots: int = 4000
    window: int = 256


FULL = Sizes()
QUICK = Sizes(6, 5, (24, 40), (2, 3), 3, 5, 8, 300, 32)


def plan(sizes: Sizes = FULL, small: str = "smol", large: str = "1b") -> list[Entry]:
    """Every comparison, ordered so that entries over the same files stand together."""
    found = [*_quantized(sizes, small, large), *_floats(sizes, small, large), *_others(sizes, small, large)]
    forms = list(dict.fromkeys((e.shape, e.form) for e in found))
    return sorted(found, key=lambda e: forms.index((e.shape, e.form)))


def quick() -> list[Entry]:
    """Every kind of work on the tiny shape, without aims: does it run?"""
    found = {(e.form, e.work): e for e in plan(QUICK, "tiny", "tiny")}.values()
    plain = [tuple(replace(rival, wanted=None) for rival in e.rivals) for e in found]
    return [replace(e, rivals=rivals, share=None, wanted=None) for e, rivals in zip(found, plain)]


def _quantized(z: Sizes, small: str, large: str) -> Iterator[Entry]:
    decode, long, longer = _works(z)
    for form, other, ahead in (("q4_0", "ov-int4", 1.5), ("q8_0", "ov-int8", 1.3)):
        both = (Rival("llama", form, ahead), Rival("openvino", other, ahead))
        yield Entry(small, form, decode, both, 0.75)
        yield Entry(large, form, decode, tuple(replace(rival, wanted=1.0) for rival in both), 0.80)
        for n, wanted in zip(z.batches, (1.4, 1.3)):
            rivals = (Rival("llama", form, 2.5), Rival("vllm", "f32", 2.5), Rival("openvino", other, wanted))
            yield Entry(small, form, replace(decode, sequences=n), rivals)
        for work, wanted in ((long, 1.1), (longer, 1.0)):
            yield Entry(small, form, work, (Rival("llama", form, 2.0), Rival("openvino", other, wanted)))
        yield Entry(small, form + BF16_KV, longer, (Rival("openvino", other, 1.1),))
        yield Entry(large, form, long, (Rival("llama", form), Rival("openvino", other, 1.2)))
        forks = Work("fork", z.prompts[0], z.branch, z.forks)
        yield Entry(small, form, forks, (Rival("llama", form, 4.0), Rival("transformers", "f32", 4.0)))
        yield Entry(small, form, Work("first", z.short), (Rival("openvino", other, 1.0), Rival("llama", form)))
    yield Entry(small, "q4_0", Work("trim", z.slots, z.tokens, window=z.window), wanted=8.0)
    rivals = (Rival("transformers", "f32", 2.5), Rival("llama", "q4_0"))
    yield Entry(small, "q4_0", Work("startup", z.short), rivals)


def _floats(z: Sizes, small: str, large: str) -> Iterator[Entry]:
    decode, long, _ = _works(z)
    for shape in dict.fromkeys((small, large)):
        others = (Rival("transformers", "f32"), Rival("llama", "gguf-f32"))
        yield Entry(shape, "f32", decode, others, 0.85)
        yield Entry(shape, "f32", long, others, 0.75)
    wide = replace(decode, sequences=z.batches[0])
    yield Entry(small, "f32", wide, (Rival("transformers", "f32"), Rival("vllm", "f32")))
    for shape in dict.fromkeys((small, large)):
        for work, wanted in ((decode, 3.0), (long, 1.3)):
            yield Entry(shape, "bf16", work, (Rival("transformers", "bf16", wanted), Rival("vllm", "bf16")))
    yield Entry(small, "f16", decode, (Rival("llama", "gguf-f16"), Rival("openvino", "ov-fp16")))


def _others(z: Sizes, small: str, large: str) -> Iterator[Entry]:
    """Formats without a target of their own: llama.cpp's mixed one, and what Headway quantizes while loading."""
    decode, long, _ = _works(z)
    for shape in dict.fromkeys((small, large)):
        for work in (decode, long):
            wanted = 1.3 if work is decode else None
            yield Entry(shape, "q4_k", work, (Rival("llama", "q4_k", wanted),))
            yield Entry(shape, "int8", work, (Rival("llama", "q8_0"), Rival("openvino", "ov-int8")))
            yield Entry(shape, "int4", work, (Rival("llama", "q4_0"), Rival("openvino", "ov-int4")))


def _works(z: Sizes) -> tuple[Work, Work, Work]:
    """Decoding one sequence, and the two prompts. One token more is generated: the first is the prompt's."""
    return Work("decode", z.prompt, z.tokens + 1), Work("prefill", z.prompts[0]), Work("prefill", z.prompts[1])
