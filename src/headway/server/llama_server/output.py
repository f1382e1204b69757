"""A completion as llama-server responds it: whole, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from headway.base.specs.probes import Rank
from headway.program.engine import Engine
from headway.server.api.response_schema import ResponseSchema, Usage
from headway.server.api.tokens import ScoredToken, json_logprob, token_bytes
from headway.server.openai.completions import CompletionJob, SequenceDelta

STOP_TYPES = {"eos": "eos", "stop": "word", "constraint": "eos", "length": "limit"}


class NativeRank(ResponseSchema):
    """One of the likeliest tokens."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeProbabilities(NativeRank):
    """A token, and what was likely in its place."""

    top_logprobs: list[NativeRank]


class NativeText(ResponseSchema):
    """What llama-server responds, and the fields that all responses here have."""

    id: str
    object: Literal["infill", "completion"]
    created: int
    model: str
    index: int
    content: str
    tokens: list[int]
    stop: bool
    stop_type: Literal["none", "eos", "word", "limit"]
    stopping_word: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    usage: Usage
    completion_probabilities: list[NativeProbabilities] | None = None


class NativeJob:
    """A completion of one prompt whose response has llama-server's fields; with `ranked` also log-probabilities."""

    last_event = b""

    def __init__(self, job: CompletionJob, kind: str, *, returns_tokens: bool, ranked: Engine | None = None) -> None:
        self.id_prefix, self.object, self.chunk_object = "infill" if kind == "infill" else "cmpl", kind, kind
        self._job, self.usage, self.run = job, job.usage, job.run
        self._returns_tokens, self._ranked = returns_tokens, ranked
        self._texts: list[str] = []
        self._tokens: list[ScoredToken] = []
        self._end: SequenceDelta | None = None

    def add(self, delta: SequenceDelta, admitted: Any) -> None:
        self._job.add(delta, admitted)
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        if delta.finish is not None:
            self._end = delta

    def response(self) -> dict[str, Any]:
        return self._fields("".join(self._texts), self._tokens, self._end)

    def chunks(self, delta: SequenceDelta) -> Iterable[dict[str, Any]]:
        if delta.text or delta.tokens or delta.finish:
            yield self._fields(delta.text, delta.tokens, delta if delta.finish is not None else None)

    def _fields(self, text: str, tokens: Iterable[ScoredToken], end: SequenceDelta | None) -> dict[str, Any]:
        ranked = {} if self._ranked is None else {"completion_probabilities": _probabilities(tokens, self._ranked)}
        return {
            "index": 0,
            "content": text,
            "tokens": [token.id for token in tokens] if self._returns_tokens else [],
            "stop": end is not None,
            "stop_type": "none" if end is None else STOP_TYPES[end.reason or "eos"],
            "stopping_word": "" if end is None else end.stop_string,
            "tokens_predicted": self._job.generated,
            "tokens_evaluated": self.usage.prompt,
            "tokens_cached": self.usage.cached,
            "truncated": False,
            **ranked,
        }

    @property
    def response_size(self) -> int:
        return sum(len(token.best) + 1 for token in self._tokens) if self._ranked is not None else 0

    def chunk_size(self, deltas: Iterable[SequenceDelta]) -> int:
        return sum(len(token.best) + 1 for delta in deltas for token in delta.tokens) if self._ranked else 0


def _probabilities(tokens: Iterable[ScoredToken], engine: Engine) -> list[dict[str, Any]]:
    ranked = ((token.rank, token.best) for token in tokens if token.rank is not None)
    return [_rank(rank, engine) | {"top_logprobs": [_rank(one, engine) for one in best]} for rank, best in ranked]


def _rank(rank: Rank, engine: Engine) -> dict[str, Any]:
    spelled = token_bytes(rank.id, engine)
    text = spelled.decode("utf-8", "replace")
    return {"id": rank.id, "token": text, "bytes": list(spelled), "logprob": json_logprob(rank)}
