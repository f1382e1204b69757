"""One answer: streamed from a context, timed, and shown as text and tables or as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import ContextLengthExceeded
from headway.base.specs.probes import Ranked, Ranking
from headway.cli.flags.shared import Decoding
from headway.cli.startup_marks import mark
from headway.cli.terminal.render import counted, quoted, show_table

if TYPE_CHECKING:
    import headway as hw


@dataclass(frozen=True)
class AnswerTimings:
    """The model, token counts and times of an answer."""

    model: str
    dtype: str
    format: str  # of the weights
    device: str
    prompt_tokens: int
    tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: the first token's time belongs to the prefill, unless it is the only one."""
        if self.tokens > 1:
            return (self.tokens - 1) / max(self.seconds - self.first_token_seconds, 1e-9)
        return self.tokens / max(self.seconds, 1e-9)

    def line(self) -> str:
        """Everything in one line."""
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
    """A token the model considered, and its log-probability, which stays where its probability underflows."""

    id: int
    text: str
    logprob: float

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "probability": self.probability, "logprob": self.logprob}


@dataclass(frozen=True)
class TokenChoice:
    """One generated token and the likeliest candidates for its position, likeliest first."""

    id: int
    text: str
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "top": [candidate.to_json() for candidate in self.candidates]}


@dataclass(frozen=True)
class GeneratedAnswer:
    """A complete answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    choices: tuple[TokenChoice, ...]
    figures: AnswerTimings

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
    drafter: hw.Drafter | None = None,
) -> GeneratedAnswer:
    """Generate from `ctx`, passing each piece of text to `write` as it arrives, or each step to `each`."""
    _check_room(engine, ctx)
    probe = Ranking(k=decoding.logprobs) if decoding.logprobs else None
    prompt_tokens, start, first = len(ctx.pending), time.perf_counter(), None
    text, probes, finish = "", [], None
    sampler = decoding.sampler(engine.generation_defaults)
    steps = ctx.generate(
        sampler,
        max_tokens=decoding.max_tokens,
        stop=list(decoding.stop or ()),
        probe=probe,
        adapter=decoding.adapters,
        speculate=drafter,
    )
    async for step in steps:
        if first is None:
            first = time.perf_counter() - start
            mark("answered")
        probes += step.probes
        finish = step.finish
        text += step.text
        if each is None:
            write(step.text)
        else:
            each(step)
    seconds = time.perf_counter() - start
    tokens = await steps.tokens()  # without the tokens of a stop string
    info = engine.info
    took = (prompt_tokens, len(tokens), first or seconds, seconds)
    figures = AnswerTimings(name, info.dtype, info.format, info.device, *took)
    return GeneratedAnswer(text, tuple(tokens), finish, _choices(engine, tokens, probes), figures)


def weights(format: str) -> str:
    """The weight format in short: `int4, int8` for `int4 in groups of 32, int8 in groups of 32`."""
    from headway.bench.models import FORMATS

    first = [part.strip().split(" ")[0] for part in format.split(",")]
    return ", ".join(dict.fromkeys(FORMATS.get(word, word) for word in first))


def show_choices(choices: Sequence[TokenChoice]) -> None:
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


def _logprob(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0 makes -0.0 plain


def _check_room(engine: hw.Engine, ctx: hw.Context) -> None:
    used, limit = ctx.seq_len + len(ctx.pending), engine.config.max_positions
    if used >= limit:
        raise ContextLengthExceeded(
            f"the prompt has {used} tokens and the context holds {limit}, including the answer; shorten the prompt"
        )


def _choices(engine: hw.Engine, tokens: Sequence[int], probes: Sequence[Ranked]) -> tuple[TokenChoice, ...]:
    def spelled(token: int) -> str:
        return engine.tokenizer.token_bytes(token).decode(errors="replace")

    return tuple(
        TokenChoice(token, spelled(token), tuple(Candidate(r.id, spelled(r.id), r.logprob) for r in ranked.best))
        for token, ranked in zip(tokens, probes)
    )
