"""The generator: many passes in a loop, written only with what a user also has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import DeadlineExceeded, InvalidInput, OutOfPages, PassFailed, TokenBudgetExceeded, WrongType
from headway.base.probes import Probe
from headway.base.rng import fresh_seed
from headway.base.samplers import Sampler, resolve
from headway.program.constraints import Constraint
from headway.program.constraints import compile as compile_grammar
from headway.program.forward import Execution
from headway.program.grammar import Grammar
from headway.program.ids import integers, token_ids
from headway.program.output import Output, ProbeHandle, SampleHandle

if TYPE_CHECKING:
    from headway.program.context import Context

STOPS = 1024  # stop strings at most


@dataclass(frozen=True)
class Step:
    """One turn: the tokens it added, the text that became certain, its probe's values, and why it ended, if it did."""

    tokens: tuple[int, ...]
    text: str
    probes: tuple[Any, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, eq=False)
class _Turn:
    execution: Execution[Output]
    token: SampleHandle
    probe: ProbeHandle[Any] | None


class Generation:
    """An async iterator of steps. Stops leave the context: tokens that hold any part of one are taken back.

    It stays one pass ahead of the program. Whoever changes the context between two steps finds it idle all the same:
    the pass ahead is taken back then, and its token waits in the pending buffer.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop: str | Iterable[str | int] = (),
        stop_only: bool = False,
        constrain: Grammar | Constraint | None = None,
        probe: Probe | None = None,
    ) -> None:
        (self._left,) = integers([max_tokens], "max_tokens")
        if self._left < 1:
            raise InvalidInput(f"max_tokens is {max_tokens}; it takes a whole number from 1")
        (self._least,) = integers([min_tokens], "min_tokens")
        if not 0 <= self._least <= self._left:
            raise InvalidInput(
                f"min_tokens is {min_tokens}; it takes a whole number from 0 to max_tokens ({max_tokens})"
            )
        what = resolve(sampler)
        seed = what.seed if what.seed is not None else context.seed
        self.seed = fresh_seed() if seed is None else seed
        self._sampler = replace(what, seed=self.seed)
        self._context, self._probe = context, probe
        self._strings, self._ids = _stops(stop, context, stop_only)
        self._grammar = constrain if isinstance(constrain, Grammar) else None  # compiled before the first pass
        self._constraint = None if isinstance(constrain, Grammar) else constrain
        self._generated: list[int] = []
        self._text = _StopText(context, self._strings)
        self._next: _Turn | None = None  # the pass that is one ahead of the program
        self.finish: str | None = None

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        if self.finish is not None:
            raise StopAsyncIteration
        if self._generated and self._context.room() < 0:  # the last token stands at the limit: it cannot be computed
            return self._end("length")
        if self._grammar is not None:
            await self._compile()
        forced = self._forced()
        if forced:
            return self._take(forced)
        turn, self._next = self._next or self._begin(None), None
        self._context.retract = None
        if self._left > 1 and self._can_run_ahead():
            self._run_ahead(turn)
        out = await self._outcome(turn)
        token = out.token(turn.token)
        if token in self._ids:
            self._retract(None)
            return self._end("eos" if token in self._context.engine.eos_ids else "stop")
        probes = () if turn.probe is None else (_value(out, turn.probe),)
        text = self._add(token)
        if self._text.stopped or self._next is None:
            self._retract(token)
        return self._step((token,), text, probes)

    def _step(self, tokens: tuple[int, ...], text: str, probes: tuple[Any, ...] = ()) -> Step:
        """The step that these tokens make, the last one if they end it."""
        if self._text.stopped:
            return self._stop(tokens, text, probes)
        if getattr(self._constraint, "finished", False):
            return self._end("constraint", tokens, text, probes)
        if self._left == 0:
            return self._end("length", tokens, text, probes)
        return Step(tokens, text, probes)

    def _add(self, token: int) -> str:
        """Count a token as generated; the text that became certain."""
        if self._constraint is not None:
            self._constraint.accept(token)
        self._generated.append(token)
        self._left -= 1
        return self._text.push(token)

    async def _compile(self) -> None:
        """Compile the grammar, beside the event loop."""
        engine, grammar = self._context.engine, self._grammar
        assert grammar is not None
        self._constraint = await asyncio.to_thread(compile_grammar, grammar, engine.tokenizer, engine.vocab_size)
        self._grammar = None

    def _forced(self) -> list[int]:
        """Tokens that the constraint leaves no choice about: fed together, without a pass for each."""
        tokens = getattr(self._constraint, "forced", list)()[: self._left]
        ends = [i for i, token in enumerate(tokens) if token in self._ids]
        return tokens[: ends[0]] if ends else tokens

    def _take(self, tokens: list[int]) -> Step:
        """Add tokens that were not drawn."""
        text = ""
        for i, token in enumerate(tokens):
            text += self._add(token)
            if self._text.stopped:
                tokens = tokens[: i + 1]
                break
        self._context.fill(tokens)
        return self._step(tuple(tokens), text)

    def _can_run_ahead(self) -> bool:
        """Whether the next pass can be built before this one's token is known."""
        free = self._constraint is None and len(self._generated) + 1 >= self._least
        return free and not self._sampler.penalises and self._context.room() > 1

    def _begin(self, fed: SampleHandle | None) -> _Turn:
        """Submit a pass that draws one token, behind the context's last or behind one that is being drawn."""
        forward = self._context.forward()
        if fed is not None:
            forward.input(fed)
        if self._constraint is not None and (bits := self._constraint.mask()) is not None:
            forward.mask(bits)
        if len(self._generated) < self._least and self._ids:
            forward.mask(forbid=sorted(self._ids))
        counted = self._generated if self._sampler.penalises else None
        handle = forward.sample([-1], self._sampler, generated=counted)
        looking = None if self._probe is None else forward.probe(-1, self._probe)
        return _Turn(forward.execute(), handle, looking)

    def _run_ahead(self, turn: _Turn) -> None:
        """Queue the next pass with the token that this one draws, so that the device never waits for the program."""
        # What stands in its way will be said in its own turn, or by this turn's outcome if that has failed already.
        with suppress(OutOfPages, TokenBudgetExceeded, DeadlineExceeded, PassFailed):
            self._next = self._begin(turn.token)
            self._context.retract = lambda: self._retract(self._generated[-1])

    async def _outcome(self, turn: _Turn) -> Output:
        try:
            return await turn.execution
        except BaseException:
            self._next = self._context.retract = None  # the pass ahead went with this one
            raise

    def _retract(self, token: int | None) -> None:
        """Take the pass ahead back; its token waits in the pending buffer instead."""
        ahead, self._next, self._context.retract = self._next, None, None
        if ahead is not None:
            ahead.execution.cancel()
        if token is not None:
            self._context.fill([token])

    def _stop(self, tokens: tuple[int, ...], text: str, probes: tuple[Any, ...]) -> Step:
        """A stop string is complete: the tokens that hold any part of it leave the context."""
        surplus = self._text.surplus()
        self._context.truncate(surplus)
        if self._constraint is not None:
            self._constraint.rollback(surplus)
        del self._generated[len(self._generated) - surplus :]
        self.finish = "stop"
        return Step(tokens[: max(0, len(tokens) - surplus)], text, probes, "stop")

    def _end(self, why: str, tokens: tuple[int, ...] = (), text: str = "", probes: tuple[Any, ...] = ()) -> Step:
        self.finish = why
        return Step(tokens, text + self._text.flush(), probes, why)

    async def tokens(self) -> list[int]:
        """Run to the end; the tokens that stayed."""
        async for _ in self:
            pass
        return list(self._generated)

    async def text(self) -> str:
        """Run to the end; the text."""
        return "".join([step.text async for step in self])

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the text as JSON. With a schema (dict, text, pydantic model) only such a text can come."""
        if schema is not None:
            if self._generated or self._constraint is not None or self._grammar is not None:
                raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
            self._grammar = Grammar.json_schema(schema)
        text = await self.text()
        try:
            return json.loads(text)
        except ValueError as e:
            cut = " (it was cut off: raise max_tokens)" if self.finish == "length" else ""
            raise InvalidInput(f"the text is no JSON: {e}{cut}; constrain it with json(schema)") from None


class _StopText:
    """Text as it becomes certain: no half characters, nothing that may be the beginning of a stop string."""

    def __init__(self, context: Context, stops: tuple[str, ...]) -> None:
        self._stream = context.engine.stream() if context.engine.has_tokenizer else None
        if stops and self._stream is None:
            context.engine.tokenizer  # noqa: B018 - raises: stop strings need one
        self._words = context.engine.tokenizer.vocab_size if self._stream is not None else 0
        self._stops = stops
        self._held = ""  # text that is not certain yet
        self._ends: list[int] = []  # characters known after each token
        self._known = 0  # characters decoded so far
        self._cut: int | None = None  # where the stop string starts
        self.stopped = False

    def push(self, token: int) -> str:
        if self._stream is None:
            return ""
        text = self._stream.push([token]) if token < self._words else ""  # ids the tokenizer lacks have no text
        self._known += len(text)
        self._ends.append(self._known)
        return self._certain(self._held + text)

    def flush(self) -> str:
        """What is left when generation ends for another reason."""
        rest, self._held = self._held, ""
        return rest if self._stream is None or self.stopped else rest + self._stream.flush()

    def surplus(self) -> int:
        """How many trailing tokens hold any part of the stop string."""
        assert self._cut is not None
        return sum(end > self._cut for end in self._ends)

    def _certain(self, text: str) -> str:
        begins = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if begins:
            first = min(begins)
            self._cut = self._known - len(text) + first
            self.stopped, self._held = True, ""
            return text[:first]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text


def _overlap(text: str, stop: str) -> int:
    """The longest end of text that begins a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _stops(stop: str | Iterable[str | int], context: Context, only: bool) -> tuple[tuple[str, ...], frozenset[int]]:
    given = [stop] if isinstance(stop, str) else list(stop)
    if len(given) > STOPS:
        raise InvalidInput(f"{len(given)} stops were given; at most {STOPS} are allowed")
    strings = tuple(s for s in given if isinstance(s, str))
    if "" in strings:
        raise InvalidInput("a stop string is empty; it would stop before the first token")
    others = [s for s in given if not isinstance(s, str)]
    if any(isinstance(s, bool) for s in others):
        raise WrongType("a stop is True or False; give strings and token ids")
    ids = token_ids(others, context.engine.vocab_size, "stop")
    return strings, frozenset(ids) | frozenset(() if only else context.engine.eos_ids)


def _value(out: Output, handle: ProbeHandle[Any]) -> Any:
    for reader in (out.distribution, out.logits, out.logprobs, out.entropy, out.hidden, out.attention, out.lens):
        value = reader(handle)
        if value is not None:
            return value
    raise AssertionError(handle)
