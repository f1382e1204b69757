"""Stop strings and stop ids, and the text of a generation without half characters or beginnings of stop strings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headway.base.checks import check_list
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr, shorten
from headway.program.checks.ids import common, token_ids
from headway.program.constraints.pydantic_schema import is_pydantic
from headway.program.generation.stop_search import StopSearch

if TYPE_CHECKING:
    from headway.program.engine import Engine

STOPS = 1024  # stop strings and stop ids at most


class EngineEnds(Protocol):
    """What stops are checked against: an engine, here or on a server."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Collection[int]: ...


def read_stops(
    stop: str | Iterable[str | int], engine: EngineEnds, only: bool
) -> tuple[tuple[str, ...], frozenset[int]]:
    """The stop strings, and the stop ids, which include the model's own end tokens unless `only`."""
    given = listed_stops(stop)
    if len(given) > STOPS:
        raise InvalidInput(f"{len(given)} stops were given; at most {STOPS} are allowed")
    strings = tuple(s for s in given if isinstance(s, str))
    if "" in strings:
        raise InvalidInput("a stop string is empty; it would stop before the first token")
    others = [s for s in given if not isinstance(s, str)]
    if any(isinstance(s, bool) for s in others):
        raise WrongType("a stop is True or False; give strings and token ids")
    ids = token_ids(others, engine.vocab_size, "stop")
    return strings, frozenset(ids) | frozenset(() if only else engine.eos_ids)


def listed_stops(stop: str | Iterable[str | int]) -> list[str | int]:
    """Stops as a list: one stop string, or several strings and ids."""
    if isinstance(stop, str):
        return [stop]
    return check_list(stop, "stop", "a string, or a list of strings and token ids")


class StopText:
    """The text of the tokens pushed so far: returned, certain and not returned yet, or held back.

    It goes on after the tokens of a prompt, so a leading space is stripped only where those have no text.
    """

    def __init__(self, engine: Engine, stops: tuple[str, ...], prompt: Sequence[int] = ()) -> None:
        if stops and engine.tokenizer.decoding.kind == "opaque":
            raise Unsupported("this tokenizer decodes only whole sequences, so it supports no stop strings")
        self._engine, self._stops, self._search = engine, stops, StopSearch(stops)
        self._before = prompt
        self._stream = engine.stream(after=prompt) if engine.has_tokenizer else None
        self._words = engine.tokenizer.vocab_size if self._stream is not None else 0
        self._pushed: list[int] = []
        self._held = ""  # text that may still become a stop string
        self._ends: list[int] = []  # characters that tokens up to each one have any part of
        self._known = 0  # characters decoded so far
        self._cut: int | None = None  # where the stop string starts
        self._given: list[str] = []
        self._certain: list[str] = []
        self.stopped = False
        self.stop_string: str | None = None  # the one that ended the text

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

    def push(self, token: int) -> None:
        """One more token."""
        if self._stream is None:
            return
        self._pushed.append(token)
        text = self._stream.push([token]) if token < self._words else ""  # ids the tokenizer lacks have no text
        self._known += len(text)
        self._ends.append(self._known + self._stream.holds)
        self._look(text)

    def take(self) -> str:
        """The text that has become certain since the last call."""
        fresh, self._certain = "".join(self._certain), []
        if fresh:
            self._given.append(fresh)
        return fresh

    def close(self) -> None:
        """No token will follow: what is held back is certain, and an incomplete character becomes U+FFFD."""
        if self._stream is None or self.stopped:
            return
        rest = self._stream.flush()
        self._known += len(rest)
        self._certain.append(self._held + rest)
        self._held, self._search = "", self._search.again()

    def begin(self, prompt: Sequence[int]) -> None:
        """The text goes on after these tokens; none has been pushed yet."""
        self._before = prompt
        if self._stream is not None:
            self._stream = self._engine.stream(after=prompt)

    def border(self, token: int) -> None:
        """A token of the program follows in the context: no character and no stop string spans it."""
        if self._stream is not None:
            self.close()
            last = self._engine.tokenizer.last_with_text([*self._pushed, token])
            self._before, self._pushed = self._before if last is None else (last,), []
            self._stream = self._engine.stream(after=self._before)

    def surplus(self) -> int:
        """How many trailing tokens hold any part of the stop string."""
        assert self._cut is not None
        return sum(end > self._cut for end in self._ends)

    def whole(self) -> str:
        """All text returned so far."""
        return "".join(self._given)

    def again(self, prompt: Sequence[int], tail: Iterable[tuple[int, bool]]) -> tuple[StopText, int]:
        """The text of other tokens after a prompt, each with whether it was generated, and how many returned characters
        it lacks."""
        new = StopText(self._engine, self._stops, prompt)
        for token, generated in tail:
            if generated:
                new.push(token)
            else:
                new.border(token)
        before, now = self.whole(), "".join(new._certain)
        same = common(before, now)
        new._given, new._certain = [now[:same]], [now[same:]]
        return new, len(before) - same

    def copy(self) -> StopText:
        """An independent copy."""
        twin = object.__new__(StopText)
        twin.__dict__.update(self.__dict__)
        twin._stream = None if self._stream is None else self._stream.copy()
        twin._pushed, twin._ends = list(self._pushed), list(self._ends)
        twin._given, twin._certain = list(self._given), list(self._certain)
        twin._search = self._search.copy()
        return twin

    def _look(self, text: str) -> None:
        """Take in text that came: it is certain, held back as the beginning of a stop string, or holds one."""
        match = self._search.push(text)
        held = self._held + text
        if match is not None:
            first, self.stop_string = match
            self._cut = first
            self.stopped, self._held = True, ""
            self._certain.append(held[: len(held) - (self._known - first)])
            return
        keep = self._search.longest
        self._held = held[len(held) - keep :]
        self._certain.append(held[: len(held) - keep])


def parse_json(text: str, finish: str | None, schema: Any = None) -> Any:
    """A generation's text as JSON, or as an object of a pydantic class; the error says how to get valid JSON."""
    try:
        return schema.model_validate_json(text) if is_pydantic(schema) else json.loads(text)
    except ValueError as error:
        raise InvalidInput(_not_json(text, finish, str(error), schema)) from None


def _not_json(text: str, finish: str | None, why: str, schema: Any) -> str:
    if finish == "length":
        return f"the JSON was cut off by max_tokens: it ends with {short_repr(text[-40:])}; raise max_tokens"
    if schema is not None:
        return f"the text does not fit the schema: {shorten(' '.join(why.split()), 300)}"
    return f"the text is not valid JSON: {why}; constrain it with json(schema)"
