"""Checks a request's values against the model and the server's limits: a 400 names the value, limit and field."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headway.base.text import short_repr
from headway.program.engine import Engine
from headway.runtime.scheduler.order import BID_LIMIT
from headway.server.api.streaming import QUEUE_SIZE
from headway.server.api.token_bounds import BadWords, longest_token
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.serving import Serving

MAX_NORMALIZED = 4  # characters that a Unicode normal form may merge into one


class RequestChecks:
    """Each method returns the value it checks, or raises an `ApiError`."""

    def __init__(self, serving: Serving, engine: Engine) -> None:
        self.engine, self.settings, self.threads = engine, serving.settings, serving.readers

    def in_range(self, name: str, value: int | None, low: int, high: int) -> int | None:
        if value is not None and not low <= value <= high:
            raise bad_request(
                f"{name} is {value!r:.60}; it must be an integer in [{low}, {high}]", name, "out_of_range"
            )
        return value

    def size(self, name: str, count: int, limit: int) -> None:
        if count > limit:
            raise bad_request(f"{name} has {count} entries; at most {limit} are allowed", name, "too_many")

    def ids(self, name: str, ids: Sequence[int], where: str = "") -> tuple[int, ...]:
        """Token ids that are in the vocabulary."""
        self.size(name, len(ids), self.settings.max_ids)
        vocab = self.engine.vocab_size
        for i, id in enumerate(ids):
            if not 0 <= id < vocab:
                raise unknown_token(f"{where or name}[{i}]", id, vocab, name)
        return tuple(ids)

    def allowed(self, ids: Sequence[int] | None) -> tuple[int, ...] | None:
        if ids is not None and not ids:
            raise bad_request("allowed_token_ids is empty, which allows no token; remove it", "allowed_token_ids")
        return None if ids is None else self.ids("allowed_token_ids", ids)

    def words(self, words: Sequence[str | list[int]]) -> BadWords | None:
        """The words that must not be generated."""
        self.size("bad_words", len(words), self.settings.max_bias)
        for i, word in enumerate(words):
            if not word:
                raise bad_request(f"bad_words[{i}] is empty, which would forbid everything; remove it", "bad_words")
            if len(word) > self.settings.max_stop_length:
                limit = self.settings.max_stop_length
                raise bad_request(f"bad_words[{i}] has {len(word)} entries; at most {limit} are allowed", "bad_words")
        sequences = [self.ids("bad_words", w, f"bad_words[{i}]") for i, w in enumerate(words) if not isinstance(w, str)]
        texts = [word for word in words if isinstance(word, str)]
        return BadWords(texts, sequences, self.engine.tokenizer if texts else None) if words else None

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
                raise bad_request(f"stop[{i}] is empty; it would stop before the first token: remove it", "stop")
        return stops

    def bias(self, bias: Mapping[str, Any]) -> dict[int, float]:
        self.size("logit_bias", len(bias), self.settings.max_bias)
        result: dict[int, float] = {}
        for key, value in bias.items():
            if not re.fullmatch(r"[0-9]{1,18}", key):
                raise bad_request(f"logit_bias has the key {short_repr(key)}; its keys must be token ids", "logit_bias")
            if int(key) >= self.engine.vocab_size:
                raise unknown_token("a token of logit_bias", int(key), self.engine.vocab_size, "logit_bias")
            if int(key) in result:
                raise bad_request(f"logit_bias has token {int(key)} twice; pass one value for each", "logit_bias")
            number = as_number(value)
            if number is None:
                shown = f"{value!r:.60}" if isinstance(value, int) else short_repr(value)
                raise bad_request(
                    f"logit_bias of token {int(key)} is {shown}; it must be a finite number",
                    "logit_bias",
                )
            result[int(key)] = number
        return result

    def seed(self, seed: int | None) -> int | None:
        """A seed as the engine takes it: a negative one, which OpenAI allows, becomes the same 64 bits unsigned."""
        if seed is not None and not -(1 << 63) <= seed < 1 << 64:
            raise bad_request(
                f"seed is {seed!r:.60}; it must be an integer in [-2**63, 2**64 - 1]", "seed", "out_of_range"
            )
        return None if seed is None else seed % (1 << 64)

    def priority(self, priority: float | None, tenant: Tenant) -> float:
        most = BID_LIMIT if tenant.limits.max_priority is None else tenant.limits.max_priority
        if priority is not None and not -BID_LIMIT <= priority <= most:
            raise bad_request(
                f"priority is {priority:g}; it must be a number in [{-BID_LIMIT:g}, {most:g}]",
                "priority",
                "out_of_range",
            )
        return min(0.0, most) if priority is None else priority

    def top_logprobs(self, field: str, top: int | None) -> int | None:
        """How many of the likeliest tokens to return: of all tokens, unless the server has a limit of its own."""
        return self.in_range(field, top, 0, min(self.settings.max_logprobs, self.engine.vocab_size))

    def prompt_logprobs(self, field: str, tokens: int, top: int | None, choices: int = 1) -> None:
        """Raise if a response would have too many log-probabilities of prompts, over all choices that include them."""
        count, most = tokens * choices * ((-1 if top is None else top) + 1), self.settings.max_prompt_logprobs
        if count > most:
            shown = f" in {choices} choices" if choices > 1 else ""
            raise bad_request(
                f"{field} {top} with {tokens} prompt tokens{shown} makes {count} log-probabilities; at most {most} are "
                "allowed: reduce it, or use fewer choices or shorter prompts",
                field,
                "too_many",
            )

    def response_logprobs(self, streams: bool | None, tokens: int, top: int | None, field: str = "logprobs") -> None:
        """Raise if a response may have too many log-probabilities of generated tokens.

        A stream may have any number; those count that may wait for a slow reader.
        """
        counted = min(tokens, QUEUE_SIZE) if streams else tokens
        count, most = counted * ((-1 if top is None else top) + 1), self.settings.max_response_logprobs
        if count > most:
            what = f"a stream's {counted} waiting tokens" if streams else f"up to {tokens} generated tokens"
            way = "" if streams else ", or stream"
            raise bad_request(
                f"{field} {top} with {what} makes {count} log-probabilities; at most {most} are allowed: use a "
                f"smaller max_tokens, n or {field}{way}",
                field,
                "too_many",
            )

    def text(self, texts: Iterable[str], param: str) -> None:
        """Raise if texts are too long for the context, whatever their tokens are, before tokenizing them."""
        tokenizer = self.engine.tokenizer
        if tokenizer.decoding.kind == "opaque":
            return
        slack = MAX_NORMALIZED if tokenizer.normalizes else 1
        limit, size = self.engine.config.max_positions, sum(map(len, texts))
        if size > limit * longest_token(tokenizer) * slack:
            raise bad_request(
                f"this model's context length is {limit} tokens{self._why(limit)}; the prompt has {size} characters, "
                "more than that many tokens can hold: shorten it",
                param,
                "context_length_exceeded",
            )

    def truncated(self, ids: Sequence[int], limit: int | None, max_tokens: int | None) -> tuple[int, ...]:
        """The last tokens of a prompt, as `truncate_prompt_tokens` says; -1 is what the context length leaves."""
        longest = self.engine.config.max_positions
        if limit is None:
            return tuple(ids)
        if limit != -1 and not 1 <= limit <= longest:
            raise bad_request(
                f"truncate_prompt_tokens is {limit}; it must be an integer in [1, {longest}], or -1 for as many as fit",
                "truncate_prompt_tokens",
                "out_of_range",
            )
        count = limit if limit != -1 else max(1, longest - (1 if max_tokens is None else max_tokens))
        return tuple(ids[-count:])

    def max_new_tokens(self, prompt: int, max_tokens: int | None, min_tokens: int, param: str) -> int:
        """The most tokens to generate after a prompt: `max_tokens`, or what the context length leaves."""
        pool = self.engine.pages * self.engine.page_size
        limit = min(self.engine.config.max_positions, pool)
        what = "this server's KV cache holds" if limit == pool else "this model's context length is"
        if max_tokens is not None and min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; it must be at most that", "min_tokens"
            )
        if prompt == 0:
            raise bad_request("the prompt is empty and this model has no BOS token; pass text or tokens", param)
        if prompt + (1 if max_tokens is None else max_tokens) > limit:
            completion = (
                "" if max_tokens is None else f" and {max_tokens} for the completion, {prompt + max_tokens} in total"
            )
            raise bad_request(
                f"{what} {limit} tokens{self._why(limit)}; the request has {prompt} in its prompt{completion}: "
                "shorten the prompt or reduce max_tokens",
                param,
                "context_length_exceeded",
            )
        return limit - prompt if max_tokens is None else max_tokens

    def _why(self, limit: int) -> str:
        """Why the model's context is shorter than its config says, where that is the limit."""
        config = self.engine.config
        return f" ({config.limit_reason})" if config.limit_reason and limit == config.max_positions else ""


def as_number(value: object) -> float | None:
    """A value as a finite float; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def unknown_token(where: str, id: int, vocab: int, param: str) -> ApiError:
    """The error for a token id that is not in the vocabulary."""
    message = f"{where} is {id!r:.60}; this model's vocabulary has {vocab} tokens, with ids 0 to {vocab - 1}"
    return bad_request(message, param, "invalid_token")
