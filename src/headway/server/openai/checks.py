"""Values of a request against the model and the server's limits: a 400 names the value, the limit and the field."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headway.runtime.scheduler.order import BID_LIMIT
from headway.server.auth import Tenant
from headway.server.errors import ApiError, bad_request
from headway.server.openai.token_bounds import Words, longest_token
from headway.server.serving import Serving

SHRINKS = 4  # as many characters may become one in a normal form


class Check:
    """Each method gives the value it was given, or raises."""

    def __init__(self, serving: Serving) -> None:
        self.engine, self.settings, self.threads = serving.engine, serving.settings, serving.reading

    def between(self, name: str, value: int | None, low: int, high: int) -> int | None:
        if value is not None and not low <= value <= high:
            raise bad_request(
                f"{name} is {value!r:.60}; it takes a whole number from {low} to {high}", name, "out_of_range"
            )
        return value

    def size(self, name: str, count: int, limit: int) -> None:
        if count > limit:
            raise bad_request(f"{name} has {count} entries; at most {limit} are allowed", name, "too_many")

    def ids(self, name: str, ids: Sequence[int], where: str = "") -> tuple[int, ...]:
        """Token ids of this vocabulary."""
        self.size(name, len(ids), self.settings.max_ids)
        vocab = self.engine.vocab_size
        for i, id in enumerate(ids):
            if not 0 <= id < vocab:
                raise outside(f"{where or name}[{i}]", id, vocab, name)
        return tuple(ids)

    def allowed(self, ids: Sequence[int] | None) -> tuple[int, ...] | None:
        if ids is not None and not ids:
            raise bad_request("allowed_token_ids is empty, so nothing could come; leave it out", "allowed_token_ids")
        return None if ids is None else self.ids("allowed_token_ids", ids)

    def words(self, words: Sequence[str | list[int]]) -> Words | None:
        """Words that must not come."""
        self.size("bad_words", len(words), self.settings.max_bias)
        for i, word in enumerate(words):
            if not word:
                raise bad_request(f"bad_words[{i}] is empty, so nothing could come; leave it out", "bad_words")
            if len(word) > self.settings.max_stop_length:
                most = self.settings.max_stop_length
                raise bad_request(f"bad_words[{i}] has {len(word)} entries; at most {most} are allowed", "bad_words")
        sequences = [self.ids("bad_words", w, f"bad_words[{i}]") for i, w in enumerate(words) if not isinstance(w, str)]
        texts = [word for word in words if isinstance(word, str)]
        return Words(texts, sequences, self.engine.tokenizer if texts else None) if words else None

    def stops(self, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        self.size("stop", len(stops), self.settings.max_stops)
        for i, text in enumerate(stops):
            if len(text) > self.settings.max_stop_length:
                raise bad_request(
                    f"stop[{i}] has {len(text)} characters; at most {self.settings.max_stop_length} are allowed",
                    "stop",
                    "too_long",
                )
            if not text:
                raise bad_request(f"stop[{i}] is empty; it would stop before the first token: leave it out", "stop")
        return stops

    def bias(self, bias: Mapping[str, Any]) -> dict[int, float]:
        self.size("logit_bias", len(bias), self.settings.max_bias)
        found: dict[int, float] = {}
        for key, value in bias.items():
            if not re.fullmatch(r"[0-9]{1,18}", key):
                raise bad_request(f"logit_bias names {key!r:.60}; its keys are token ids", "logit_bias")
            if int(key) >= self.engine.vocab_size:
                raise outside("a token of logit_bias", int(key), self.engine.vocab_size, "logit_bias")
            if int(key) in found:
                raise bad_request(f"logit_bias names token {int(key)} twice; give each one number", "logit_bias")
            number = as_number(value)
            if number is None:
                raise bad_request(f"logit_bias of token {int(key)} is {value!r:.60}; it takes a number", "logit_bias")
            found[int(key)] = number
        return found

    def seed(self, seed: int | None) -> int | None:
        """A seed as the engine has them; a negative one, which OpenAI allows, is the number with the same 64 bits."""
        if seed is not None and not -(1 << 63) <= seed < 1 << 64:
            raise bad_request(
                f"seed is {seed!r:.60}; it takes a whole number from -2**63 to 2**64 - 1", "seed", "out_of_range"
            )
        return None if seed is None else seed % (1 << 64)

    def priority(self, priority: float | None, tenant: Tenant) -> float:
        most = BID_LIMIT if tenant.limits.max_priority is None else tenant.limits.max_priority
        if priority is not None and not -BID_LIMIT <= priority <= most:
            raise bad_request(
                f"priority is {priority:g}; it takes a number from {-BID_LIMIT:g} to {most:g}",
                "priority",
                "out_of_range",
            )
        return min(0.0, most) if priority is None else priority

    def prompt_scores(self, field: str, tokens: int, top: int | None, choices: int = 1) -> None:
        """Raise where log-probabilities of prompts, in all choices that show them, are more than an answer may have."""
        count, most = tokens * choices * ((-1 if top is None else top) + 1), self.settings.max_prompt_scores
        if count > most:
            shown = f" in {choices} choices" if choices > 1 else ""
            raise bad_request(
                f"{field} {top} with {tokens} tokens of prompts{shown} makes {count} log-probabilities; at most {most} "
                "are allowed: ask for fewer, with fewer choices, or of shorter prompts",
                field,
                "too_many",
            )

    def answer_scores(self, streams: bool | None, tokens: int, top: int | None) -> None:
        """Raise where log-probabilities of a whole answer may be more than it may have; a stream keeps none of them."""
        count, most = tokens * ((-1 if top is None else top) + 1), self.settings.max_answer_scores
        if count > most and not streams:
            raise bad_request(
                f"logprobs {top} with up to {tokens} tokens of an answer makes {count} log-probabilities; at most "
                f"{most} are allowed: give a smaller max_tokens, n or logprobs, or stream",
                "logprobs",
                "too_many",
            )

    def text(self, texts: Iterable[str], param: str) -> None:
        """Raise where texts are longer than any tokens that fit, before time is spent on them."""
        tokenizer = self.engine.tokenizer
        if tokenizer.decoding.kind == "opaque":
            return
        slack = 1 if tokenizer.backend.normalizer is None else SHRINKS
        limit, size = self.engine.config.max_positions, sum(map(len, texts))
        if size > limit * longest_token(tokenizer) * slack:
            raise bad_request(
                f"this model's context length is {limit} tokens; the prompt has {size} characters, more than so many "
                "tokens can have: shorten it",
                param,
                "context_length_exceeded",
            )

    def length(self, prompt: int, max_tokens: int | None, min_tokens: int, param: str) -> int:
        """How many tokens may follow a prompt: what was asked for, or what the model's limit leaves."""
        pool = self.engine.allocator.total * self.engine.page_size
        limit = min(self.engine.config.max_positions, pool)
        whose = "this server's pages hold" if limit == pool else "this model's context length is"
        if max_tokens is not None and min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; it must not be larger", "min_tokens"
            )
        if prompt == 0:
            raise bad_request("the prompt is empty and this model has no begin token; give it text or tokens", param)
        if prompt + (1 if max_tokens is None else max_tokens) > limit:
            asked = "" if max_tokens is None else f" and {max_tokens} for the answer, {prompt + max_tokens} in all"
            raise bad_request(
                f"{whose} {limit} tokens; the request has {prompt} in its prompt{asked}: "
                "shorten the prompt, or ask for fewer tokens",
                param,
                "context_length_exceeded",
            )
        return limit - prompt if max_tokens is None else max_tokens


def as_number(value: object) -> float | None:
    """A value as a number that floats can hold; None for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def outside(where: str, id: int, vocab: int, param: str) -> ApiError:
    """A token id that the model does not have."""
    message = f"{where} is {id!r:.60}; this model's vocabulary has {vocab} tokens, with ids 0 to {vocab - 1}"
    return bad_request(message, param, "invalid_token")
