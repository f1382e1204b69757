"""A completion as llama-server responds it: whole, or as the events of a stream, one object for each sequence."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from headway.base.dataclass import dataclass
from headway.base.specs.probes import Rank
from headway.program.engine import Engine
from headway.server.api.response_schema import ResponseSchema, Usage
from headway.server.api.tokens import ScoredToken, json_logprob, token_bytes
from headway.server.llama_server.request_schema import NativeFields
from headway.server.llama_server.settings_used import settings_used
from headway.server.openai.completions import CompletionJob, SequenceDelta, SequenceEnd

STOP_TYPES = {"eos": "eos", "stop": "word", "constraint": "eos", "length": "limit"}
NO_SLOT = -1  # requests have no slots of their own


class NativeRank(ResponseSchema):
    """One of the likeliest tokens; its probability is that after all samplers."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | None = None
    prob: float | None = None


class NativeProbabilities(NativeRank):
    """A token, and what was likely in its place."""

    top_logprobs: list[NativeRank] | None = None
    top_probs: list[NativeRank] | None = None


class NativeTimings(ResponseSchema):
    """How long the prompt and the tokens took, waiting included, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class NativeText(ResponseSchema):
    """What llama-server responds, and the fields that all responses here have. Several prompts have a list of these;
    with `response_fields` only those are there."""

    id: str
    object: Literal["infill", "completion"]
    created: int
    model: str
    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    stop_type: Literal["none", "eos", "word", "limit"]
    stopping_word: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    has_new_line: bool
    prompt: str | None = None
    generation_settings: dict[str, Any] | None = None
    timings: NativeTimings | None = None
    usage: Usage | None = None
    completion_probabilities: list[NativeProbabilities] | None = None


@dataclass
class NativeSequence:
    """What a sequence has done so far, besides its text."""

    generated: int = 0
    breaks: bool = False  # its text has a line break
    first: float = 0.0  # when its first delta was there
    end: SequenceEnd | None = None


class NativeJob:
    """A completion whose responses have llama-server's fields."""

    last_event = b""

    def __init__(self, job: CompletionJob, kind: str, body: NativeFields, engine: Engine) -> None:
        self.id_prefix, self.object, self.chunk_object = "infill" if kind == "infill" else "cmpl", kind, kind
        self._job, self.usage, self.run = job, job.usage, job.run
        self._body, self._engine = body, engine
        self._settings = settings_used(job, body)
        self._is_ranked = bool(job.plan.top_logprobs)
        self._sequences = [NativeSequence() for _ in range(len(job.prompts) * job.plan.count)]

    def add(self, delta: SequenceDelta, admitted: Any) -> None:
        self._job.add(delta, admitted)
        if not self._body.stream:
            self._take(delta)

    def _take(self, delta: SequenceDelta) -> NativeSequence:
        """The sequence of a delta, after it."""
        sequence = self._sequences[delta.index]
        sequence.first = sequence.first or time.perf_counter()
        sequence.generated += delta.new
        sequence.breaks |= "\n" in delta.text
        sequence.end = delta.end
        return sequence

    def response(self) -> dict[str, Any] | list[dict[str, Any]]:
        whole = [self._fields(i, "".join(one.texts), one.tokens) for i, one in enumerate(self._job.sequences)]
        return whole if len(whole) > 1 else whole[0]

    def chunks(self, delta: SequenceDelta) -> Iterable[dict[str, Any]]:
        self._take(delta)
        if delta.text or delta.tokens or delta.finish:
            yield self._fields(delta.index, delta.text, delta.tokens)

    def _fields(self, index: int, text: str, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        sequence, plan = self._sequences[index], self._job.plan
        prompt = self._job.prompts[index // plan.count]
        end = sequence.end
        fields: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": [token.id for token in tokens] if self._body.return_tokens or self._body.stream else [],
            "id_slot": NO_SLOT,
            "stop": end is not None,
            "stop_type": "none" if end is None else STOP_TYPES[end.reason],
            "stopping_word": "" if end is None else end.stop_string,
            "tokens_predicted": sequence.generated,
            "tokens_evaluated": len(prompt.ids),
            "tokens_cached": 0 if end is None else end.cached,
            "truncated": end is not None and end.reason == "length" and self._fills(sequence.generated, prompt.ids),
            "has_new_line": sequence.breaks,
        }
        if end is not None:
            fields |= {"prompt": prompt.text, "generation_settings": self._settings}
        if end is not None or self._body.timings_per_token:
            fields["timings"] = _timings(sequence, end, len(prompt.ids))
        if self._is_ranked:
            fields["completion_probabilities"] = self._probabilities(tokens)
        return fields

    def _fills(self, generated: int, prompt: Sequence[int]) -> bool:
        """Whether a sequence ended because nothing more fits."""
        engine = self._engine
        return generated + len(prompt) >= min(engine.config.max_positions, engine.pages * engine.page_size)

    def shape(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a response that the request asks for; those of an event before the last are all sent."""
        asked = self._body.response_fields
        if not asked or not fields.get("stop"):
            return fields
        found: dict[str, Any] = {}
        for path in asked:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found

    def _probabilities(self, tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
        sampled = bool(self._body.post_sampling_probs)
        name = "top_probs" if sampled else "top_logprobs"
        listed: list[dict[str, Any]] = []
        for token in tokens:
            if token.rank is not None:
                best = [one for one in token.best if not sampled or one.logprob > -math.inf]
                top = [_rank(one, self._engine, sampled=sampled) for one in best]
                listed.append(_rank(token.rank, self._engine, sampled=sampled) | {name: top})
        return listed

    @property
    def response_size(self) -> int:
        counted = sum(len(token.best) + 1 for one in self._job.sequences for token in one.tokens)
        return counted if self._is_ranked else 0

    def chunk_size(self, deltas: Iterable[SequenceDelta]) -> int:
        return sum(len(token.best) + 1 for delta in deltas for token in delta.tokens) if self._is_ranked else 0


def _timings(sequence: NativeSequence, end: SequenceEnd | None, prompt: int) -> dict[str, Any]:
    """Times of a sequence that ended; before, those of its tokens so far."""
    cached = 0 if end is None else end.cached
    seconds = (
        (0.0, time.perf_counter() - sequence.first) if end is None else (end.first - end.began, end.ended - end.first)
    )
    fields: dict[str, Any] = {"cache_n": cached}
    for name, count, took in zip(("prompt", "predicted"), (prompt - cached, sequence.generated), seconds, strict=True):
        fields |= {
            f"{name}_n": count,
            f"{name}_ms": took * 1000,
            f"{name}_per_token_ms": took * 1000 / count if count else 0.0,
            f"{name}_per_second": count / took if took else 0.0,
        }
    return fields


def _rank(rank: Rank, engine: Engine, *, sampled: bool) -> dict[str, Any]:
    spelled = token_bytes(rank.id, engine)
    chance = {"prob": math.exp(rank.logprob)} if sampled else {"logprob": json_logprob(rank)}
    return {"id": rank.id, "token": spelled.decode("utf-8", "replace"), "bytes": list(spelled), **chance}
