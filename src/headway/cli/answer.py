"""One answer: streamed from a context, timed, and shown as text, figures and tables or as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import ContextLengthExceeded
from headway.base.probes import Distribution
from headway.bench.models import FORMATS
from headway.cli.options import Decoding
from headway.cli.render import counted, quoted, show_table

if TYPE_CHECKING:
    import headway as hw


@dataclass(frozen=True)
class Figures:
    """What an answer took."""

    model: str
    dtype: str
    format: str  # how the weights are kept
    device: str
    prompt_tokens: int
    tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The pace after the first token, whose time is the prompt's; with one token, its own."""
        if self.tokens > 1:
            return (self.tokens - 1) / max(self.seconds - self.first_token_seconds, 1e-9)
        return self.tokens / max(self.seconds, 1e-9)

    def line(self) -> str:
        """The figures in one line."""
        parts = (
            f"{self.model} · {weights(self.format)} · {self.device}",
            f"{counted(self.prompt_tokens, 'prompt token')} · {counted(self.tokens, 'token')}",
            f"first token {self.first_token_seconds:.2f} s · {self.tokens_per_second:.1f} tokens/s",
        )
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "format": self.format,
            "device": self.device,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "first_token_seconds": round(self.first_token_seconds, 6),
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }


@dataclass(frozen=True)
class Candidate:
    """A token that could have come, and how likely the model held it."""

    id: int
    text: str
    probability: float

    @property
    def logprob(self) -> float | None:
        return math.log(self.probability) if self.probability > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "probability": self.probability, "logprob": self.logprob}


@dataclass(frozen=True)
class Choice:
    """One generated token and the likeliest candidates for its place, likeliest first."""

    id: int
    text: str
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "top": [candidate.to_json() for candidate in self.candidates]}


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    choices: tuple[Choice, ...]
    figures: Figures

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "logprobs": [choice.to_json() for choice in self.choices] or None,
            "figures": self.figures.to_json(),
        }


async def stream(
    engine: hw.Engine,
    ctx: hw.Context,
    name: str,
    decoding: Decoding,
    write: Callable[[str], None],
    *,
    each: Callable[[hw.Step], None] | None = None,
) -> Answer:
    """Generate from what `ctx` holds, handing each piece of text to `write` as it comes, or each step to `each`."""
    _check_room(engine, ctx)
    probe = Distribution(k=decoding.logprobs) if decoding.logprobs else None
    prompt_tokens, start, first = len(ctx.pending), time.perf_counter(), None
    text, probes, finish = "", [], None
    steps = ctx.generate(decoding.sampler(), max_tokens=decoding.max_tokens, stop=list(decoding.stop), probe=probe)
    async for step in steps:
        first = first or time.perf_counter() - start
        probes += step.probes
        finish = step.finish
        text += step.text
        if each is None:
            write(step.text)
        else:
            each(step)
    seconds = time.perf_counter() - start
    tokens = await steps.tokens()  # those that stayed: a stop takes back the tokens that spell it
    info = engine.info
    took = (prompt_tokens, len(tokens), first or seconds, seconds)
    figures = Figures(name, info.dtype, info.format, info.device, *took)
    return Answer(text, tuple(tokens), finish, _choices(engine, tokens, probes), figures)


def weights(format: str) -> str:
    """How the weights are kept, in few words: `int4, int8` for `int4 in groups of 32, int8 in groups of 32`."""
    first = [part.strip().split(" ")[0] for part in format.split(",")]
    return ", ".join(dict.fromkeys(FORMATS.get(word, word) for word in first))


def show_choices(choices: Sequence[Choice]) -> None:
    """The candidates of every step, as tables."""
    for number, choice in enumerate(choices, 1):
        rows = [
            (str(rank), quoted(c.text), str(c.id), _probability(c.probability), _logprob(c.logprob))
            for rank, c in enumerate(choice.candidates, 1)
        ]
        headers = ("rank", "token", "id", "probability", "logprob")
        show_table(headers, rows, title=f"step {number}: {quoted(choice.text)}", numbers=(0, 2, 3, 4))


def _probability(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 else f"{value:.1e}"


def _logprob(value: float | None) -> str:
    return "-inf" if value is None else f"{round(value, 3) + 0.0:.3f}"  # + 0.0 makes -0.0 plain


def _check_room(engine: hw.Engine, ctx: hw.Context) -> None:
    used, limit = ctx.seq_len + len(ctx.pending), engine.config.max_positions
    if used >= limit:
        raise ContextLengthExceeded(
            f"the prompt takes {used} tokens and the context holds {limit}, the answer included; shorten the prompt"
        )


def _choices(engine: hw.Engine, tokens: Sequence[int], probes: Sequence[Any]) -> tuple[Choice, ...]:
    def spelled(token: int) -> str:
        return engine.tokenizer.token_bytes(token).decode(errors="replace")

    return tuple(
        Choice(token, spelled(token), tuple(Candidate(int(i), spelled(int(i)), float(p)) for i, p in zip(*probe)))
        for token, probe in zip(tokens, probes)
    )
