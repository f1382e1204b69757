"""Tokens of an answer with what is known about them, in the shapes OpenAI's clients expect.

A token's text is that of its bytes. Where they are no whole characters, completions write `bytes:\\xe2\\x80` and chats
`\\xe2\\x80`, as OpenAI does; a chat also has the bytes themselves. A probability of nothing is -9999, since JSON has no
infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headway.base.probes import Rank, Ranked
from headway.program.engine import Engine
from headway.program.generation.steps import Step
from headway.text.tokenizer import Tokenizer

NEVER = -9999.0


@dataclass(frozen=True)
class Token:
    """One token: the characters before it, where it stands, and the likeliest tokens at its place."""

    id: int
    offset: int
    rank: Rank | None = None
    best: tuple[Rank, ...] = ()


class Spelling:
    """Which tokens of a generation are certain, as its text is: one that may belong to a stop is held back."""

    def __init__(self, engine: Engine, offset: int = 0) -> None:
        self._stream = engine.stream() if engine.has_tokenizer else None
        self._words = engine.tokenizer.vocab_size if self._stream is not None else 0
        self._known = self._certain = offset
        self._held: list[tuple[Token, int]] = []  # with the characters that it and those before it have any part of
        self._given = 0

    def push(self, step: Step, kept: int) -> list[Token]:
        """The tokens that a step makes certain; `kept` is how many of all stand when it is the last."""
        ranked = step.probes[0] if step.probes else None
        for token in step.tokens:
            self._add(token, ranked)
        self._certain += len(step.text)
        if step.finish is not None:
            ready = self._held[: max(0, kept - self._given)]
            self._held = []
        else:
            ready = [(token, end) for token, end in self._held if end <= self._certain]
            del self._held[: len(ready)]
        self._given += len(ready)
        return [token for token, _ in ready]

    def _add(self, id: int, ranked: Ranked | None) -> None:
        before = self._known
        if self._stream is not None and id < self._words:  # ids the tokenizer lacks have no text
            self._known += len(self._stream.push([id]))
        end = self._known + (self._stream is not None and self._stream.holds)
        found = (None, ()) if ranked is None else (ranked.drawn[0], ranked.best)
        self._held.append((Token(id, before, *found), end))


def completion_logprobs(tokens: Sequence[Token], engine: Engine) -> dict[str, Any]:
    """`logprobs` of a completion's choice."""
    spell = _speller(engine)
    return {
        "tokens": [spell(token.id) for token in tokens],
        "token_logprobs": [None if token.rank is None else plain(token.rank) for token in tokens],
        "top_logprobs": [_by_text(token, spell) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Iterable[Token], engine: Engine) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    ranked = [token for token in tokens if token.rank is not None]
    content = [_entry(t.rank, engine) | {"top_logprobs": [_entry(o, engine) for o in t.best]} for t in ranked if t.rank]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[Token], engine: Engine) -> list[dict[str, Any] | None]:
    """Of every token of a prompt, where it and the likeliest stand, by id; nothing is known about the first."""
    spell = _speller(engine)
    return [
        None
        if token.rank is None
        else {
            str(one.id): {"logprob": plain(one), "rank": one.rank, "decoded_token": spell(one.id)}
            for one in (*token.best, token.rank)
        }
        for token in tokens
    ]


def plain(rank: Rank) -> float:
    """A log-probability as JSON has it."""
    return rank.logprob if rank.logprob > -math.inf else NEVER


def text_of(id: int, engine: Engine, unfinished: str = "bytes:") -> str:
    """A token as text."""
    return _spelled(_bytes(id, engine), unfinished)


def _speller(engine: Engine) -> Callable[[int], str]:
    """Spells each token once: the likeliest of many places are often the same."""
    return cache(lambda id: text_of(id, engine))


def _by_text(token: Token, spell: Callable[[int], str]) -> dict[str, float] | None:
    """The likeliest tokens and the token itself, by their texts; of two with one text the second is named by its id."""
    if token.rank is None:
        return None
    found: dict[str, float] = {}
    ids: dict[str, int] = {}
    for one in (*token.best, token.rank):
        text = spell(one.id)
        if ids.setdefault(text, one.id) != one.id:
            text = f"token_id:{one.id}"
        found[text] = plain(one)
    return found


def _entry(rank: Rank, engine: Engine) -> dict[str, Any]:
    spelled = _bytes(rank.id, engine)
    return {"token": _spelled(spelled, ""), "logprob": plain(rank), "bytes": list(spelled)}


def _spelled(spelled: bytes, unfinished: str) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return unfinished + "".join(f"\\x{byte:02x}" for byte in spelled)


def _bytes(id: int, engine: Engine) -> bytes:
    """A token's bytes; its number in brackets where it has none, since the tokenizer lacks it."""
    if not engine.has_tokenizer or not _is_known(id, engine.tokenizer):
        return f"<{id}>".encode()
    return engine.tokenizer.token_bytes(id)


def _is_known(id: int, tokenizer: Tokenizer) -> bool:
    return id < tokenizer.vocab_size and (id in tokenizer.special_ids or tokenizer.backend.id_to_token(id) is not None)
