"""Generated tokens with their log-probabilities, in the formats that OpenAI's clients expect.

A token's text is its bytes as UTF-8. If they are not whole characters, completions write `bytes:\\xe2\\x80` and chats
`\\xe2\\x80`, as OpenAI does; chats also have the bytes. A probability of 0 has the log-probability -9999, since JSON
has no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.specs.probes import Rank, Ranked
from headway.program.engine import Engine
from headway.program.generation.steps import Step
from headway.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


@dataclass(frozen=True)
class ScoredToken:
    """One token: the offset of its text, its rank, and the likeliest tokens at its position."""

    id: int
    offset: int
    rank: Rank | None = None
    best: tuple[Rank, ...] = ()


class TokenStream:
    """The tokens of a generation as their text becomes final: one that may belong to a stop string is held back."""

    def __init__(self, engine: Engine, prompt: Sequence[int], offset: int = 0) -> None:
        self._stream = engine.stream(after=prompt) if engine.has_tokenizer else None
        self._vocab = engine.tokenizer.vocab_size if self._stream is not None else 0
        self._decoded = self._final = offset
        self._held: list[tuple[ScoredToken, int]] = []  # with the end of its text
        self._emitted = 0

    def push(self, step: Step, kept: int) -> list[ScoredToken]:
        """The tokens whose text becomes final with a step; `kept` is how many tokens remain if it is the last."""
        for number, token in enumerate(step.tokens):
            self._add(token, step.probes[number] if step.probes else None)
        self._final += len(step.text)
        if step.finish is not None:
            ready = self._held[: max(0, kept - self._emitted)]
            self._held = []
        else:
            ready = [(token, end) for token, end in self._held if end <= self._final]
            del self._held[: len(ready)]
        self._emitted += len(ready)
        return [token for token, _ in ready]

    def _add(self, id: int, ranked: Ranked | None) -> None:
        before = self._decoded
        if self._stream is not None and id < self._vocab:  # ids that the tokenizer does not have have no text
            self._decoded += len(self._stream.push([id]))
        end = self._decoded + (self._stream is not None and self._stream.holds)
        result = (None, ()) if ranked is None else (ranked.drawn[0], ranked.best)
        self._held.append((ScoredToken(id, before, *result), end))


def completion_logprobs(tokens: Sequence[ScoredToken], engine: Engine) -> dict[str, Any]:
    """`logprobs` of a completion's choice."""
    spell = _speller(engine)
    return {
        "tokens": [spell(token.id) for token in tokens],
        "token_logprobs": [None if token.rank is None else json_logprob(token.rank) for token in tokens],
        "top_logprobs": [_by_text(token, spell) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Iterable[ScoredToken], engine: Engine) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    ranked = [token for token in tokens if token.rank is not None]
    content = [_entry(t.rank, engine) | {"top_logprobs": [_entry(o, engine) for o in t.best]} for t in ranked if t.rank]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[ScoredToken], engine: Engine) -> list[dict[str, Any] | None]:
    """For each token of a prompt, the log-probabilities of it and of the likeliest tokens by id; None for the first."""
    spell = _speller(engine)
    return [
        None
        if token.rank is None
        else {
            str(one.id): {"logprob": json_logprob(one), "rank": one.rank, "decoded_token": spell(one.id)}
            for one in (*token.best, token.rank)
        }
        for token in tokens
    ]


def json_logprob(rank: Rank) -> float:
    """A log-probability without infinities, which JSON does not have."""
    return rank.logprob if rank.logprob > -math.inf else MIN_LOGPROB


def text_of(id: int, engine: Engine, unfinished: str = "bytes:") -> str:
    """The text of a token."""
    return _spelled(token_bytes(id, engine), unfinished)


def _speller(engine: Engine) -> Callable[[int], str]:
    """A cached `text_of`: the likeliest tokens at different positions are often the same."""
    return cache(lambda id: text_of(id, engine))


def _by_text(token: ScoredToken, spell: Callable[[int], str]) -> dict[str, float] | None:
    """Log-probabilities of the likeliest tokens and the token itself by text; by id if two have the same text."""
    if token.rank is None:
        return None
    result: dict[str, float] = {}
    ids: dict[str, int] = {}
    for one in (*token.best, token.rank):
        text = spell(one.id)
        if ids.setdefault(text, one.id) != one.id:
            text = f"token_id:{one.id}"
        result[text] = json_logprob(one)
    return result


def _entry(rank: Rank, engine: Engine) -> dict[str, Any]:
    spelled = token_bytes(rank.id, engine)
    return {"token": _spelled(spelled, ""), "logprob": json_logprob(rank), "bytes": list(spelled)}


def _spelled(spelled: bytes, unfinished: str) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return unfinished + "".join(f"\\x{byte:02x}" for byte in spelled)


def token_bytes(id: int, engine: Engine) -> bytes:
    """A token's bytes, or its id in brackets if the tokenizer does not have it."""
    if not engine.has_tokenizer or not _is_known(id, engine.tokenizer):
        return f"<{id}>".encode()
    return engine.tokenizer.token_bytes(id)


def _is_known(id: int, tokenizer: Tokenizer) -> bool:
    return id < tokenizer.vocab_size and (id in tokenizer.special_ids or tokenizer.has(id))
