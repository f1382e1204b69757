"""A minute of messages that are nearly right: each gets a reply or ends its session with a reason, and harms nobody."""

from __future__ import annotations

import copy
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import headway as hw
from headway.remote.protocol.codec import encode
from headway.server.errors import FAILED
from headway.server.sessions.session import NUMBERS
from headway.server.sessions.verbs import VERBS
from support.live import PATIENCE
from support.raw_session import Raw, opened, until_quiet
from support.through import Served

CONTEXT = {"seed": None, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
OPERATIONS = [
    ["input", [1, 2, 3]],
    ["input_at", [4], [9]],
    ["attention_mask", ["all", [["causal"], ["not", ["window", 2]], ["sink", 1, 4]]], True],
    ["mask", [3, 94], None],
    ["bias", [0.0] * 97, [0]],
    ["adapter", "none", 1.0],
    ["defer_commit"],
    ["sample", [-1], {"kind": "TopP", "p": 0.9, "temperature": 1.0, "seed": 2}, None, [1]],
    ["probe", 0, {"kind": "Distribution", "temperature": 1.0, "k": 3, "masked": False}],
    ["feed", 1, 0],
]
OPTIONS: dict[str, Any] = {
    "max_tokens": 5,
    "sampler": {"kind": "Argmax"},
    "stop": ["x", 3],
    "probe": {"kind": "Entropy", "masked": False},
    "attention_mask": ["rows", [[3, [0, 4]]]],
    "constrain": {"object": 1, "copy": True, "name": "Even"},
    "speculate": {"prompt_lookup": {"max_tokens": 3}},
    "sequence_bias": [[[1, 2], 0.5]],
    "bad_words_ids": [[5]],
    "num_beams": 2,
    "logits": 3,
    "prepare": 4,
}
OTHERS: dict[str, list[Any]] = {  # what an option may be besides
    "sampler": [
        {"kind": "Sampling", "top_k": 3, "logit_bias": [[4, 1.5]], "dry_multiplier": 1.0, "dry_sequence_breakers": []},
        {"kind": "MinP", "p": 0.1, "temperature": 0.7, "seed": None},
    ],
    "probe": [[{"kind": "Logits"}, {"kind": "Ranking", "k": 2, "ids": [5], "temperature": 1.0, "masked": True}]],
    "attention_mask": [
        ["blocks", [3, 2], [[1, 0]]],
        ["raw", [[0, 4]], "runs", False],
        ["either", [["causal"], ["window", 4]]],
    ],
    "constrain": [
        {"grammar": ["regex", "[ab]+", False]},
        {"grammar": ["choices", '["a"]', False]},
        {"grammar": ["json", "{}", True]},
        {"grammar": ["lark", 'start: "a"', False]},
    ],
    "speculate": [
        {"own_layers": {"layers": 1}},
        {"object": 7, "copy": False, "name": "D", "adaptive": True, "draws": False},
    ],
}
ARGUMENTS: dict[str, Any] = {  # by name, for every verb
    "context": 1, "fork": 2, "other": 1, "contexts": [7, 8], "generation": 3, "number": 1, "prepared": 4, "chat": 6,
    "request": 2, "n": 1, "k": 1, "start": 0, "slots": [0, 2], "pages": [0], "shift": 1, "bid": 1.0, "text": [1, 2, 3],
    "special": False, "skip_special": False, "ids": [1, 2], "id": 4, "name": "saved", "durable": False, "role": "user",
    "attention_mask": ["window", 3], "adapter": None, "operations": OPERATIONS, "options": OPTIONS, "upto": 4,
    "taken": 0, "epoch": 1, "what": "tokens", "schema": ["json", "{}", False], "tokens": [3], "followed": False,
    "max_tokens": 3, "messages": "hi", "sampler": None, "tools": [], "tool_choice": "auto", "tool_format": None,
    "on_error": "tell", "stop": [], "max_rounds": 1, "topic": "news", "value": [1], **CONTEXT,
}  # fmt: skip
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    96,
    97,
    2**31,
    2**63,
    2**64,
    -(2**70),
    0.5,
    -1.5,
    1e300,
    "",
    "x",
    "\ud800",
]
ODD += [
    [],
    {},
    [[]],
    [None],
    {"kind": "Logits"},
    {"array": []},
    "a" * 300,
    [0] * 200,
    {"object": 5},
    ["not", ["raw", []]],
]


class Fuzzer:
    """Messages of a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """A session that begins well; then any verb, with arguments of which some are changed."""
        yield "context.new", {"context": 1, **CONTEXT}
        yield "context.fill", {"context": 1, "text": [1, 2, 3], "special": False}
        for new in range(100, 100 + self._chance.randrange(1, 30)):
            verb = self._chance.choice(sorted(VERBS))
            names = [name for name in VERBS[verb].__annotations__ if name not in ("session", "return")]
            arguments = {name: copy.deepcopy(ARGUMENTS[name]) for name in names if name in ARGUMENTS}
            arguments |= {"context": new} if verb == "context.new" else {}
            arguments |= {"fork": new} if verb == "context.fork" else {}
            arguments |= {"text": "x\n"} if verb == "program.print" else {}
            if "options" in arguments:
                kept = self._chance.sample(sorted(OPTIONS), self._chance.randrange(4))
                values = {name: self._chance.choice([OPTIONS[name], *OTHERS.get(name, [])]) for name in kept}
                arguments["options"] = copy.deepcopy(values)
            if "operations" in arguments:
                arguments["operations"] = copy.deepcopy(self._chance.choices(OPERATIONS, k=self._chance.randrange(5)))
            for _ in range(self._chance.choice([0, 0, 1, 1, 2])):
                arguments = self._altered(arguments)
            yield verb, arguments

    def _altered(self, arguments: Any) -> Any:
        """Arguments of which one is changed. What would close the session at once is rare, so that much is tried."""
        if not isinstance(arguments, dict) or self.now_and_then(0.01):
            return self._changed(arguments)
        if not arguments:
            return arguments
        name = self._chance.choice(sorted(arguments))
        if name in NUMBERS and not self.now_and_then(0.05):
            return {**arguments, name: self._chance.choice([1, 2, 3, 4, 7, 100, 101, 105, -1, 2**63])}
        return {**arguments, name: self._changed(arguments[name])}

    def _changed(self, value: Any) -> Any:
        """A value with one part of it replaced, left out or doubled."""
        inside = isinstance(value, dict | list) and value and self._chance.random() < 0.8
        if not inside:
            return copy.deepcopy(self._chance.choice(ODD))
        if isinstance(value, dict):
            name = self._chance.choice(sorted(value))
            return {**value, name: self._changed(value[name])}
        at = self._chance.randrange(len(value))
        new = [] if self._chance.random() < 0.1 else [self._changed(value[at])] * self._chance.choice([1, 1, 1, 2])
        return [*value[:at], *new, *value[at + 1 :]]

    def damaged(self, frame: bytes) -> bytes:
        """Bytes that were a frame."""
        cut = self._chance.randrange(len(frame) + 1)
        return self._chance.choice([frame[:cut], frame[:cut] + self._chance.randbytes(3) + frame[cut:], frame + b"x"])

    def now_and_then(self, share: float) -> bool:
        return self._chance.random() < share


def one_session(served: Served, fuzz: Fuzzer) -> bool:
    """Whether it stayed open to its end. Each request gets a reply, unless the session is closed with a reason."""
    with opened(served) as raw:
        begun = time.monotonic()
        is_damaged = sent_all(raw, fuzz)
        asked, closed = set(range(1, raw.sent + 1)), None
        while (asked or is_damaged) and closed is None:
            message = raw.receive()  # raises when nothing comes, and when it is closed without a word
            answered(message, raw, fuzz)
            if message["type"] == "reply":
                asked.remove(message["id"])  # once
                assert message["id"] > 2 or "error" not in message, message
            closed = message if message["type"] == "close" else None
        assert time.monotonic() < begun + PATIENCE
        if closed is not None:
            assert closed["message"]
            with pytest.raises((EOFError, ConnectionResetError)):
                raw.receive()
            return False
        ended_well(raw, fuzz)
        return True


def sent_all(raw: Raw, fuzz: Fuzzer) -> bool:
    """Send a session's messages; whether one of them is none, so that the session has to be closed."""
    is_damaged = False
    with suppress(BrokenPipeError, ConnectionResetError):  # it is closed: what it was told meanwhile can be read
        for verb, arguments in fuzz.requests():
            if not isinstance(arguments, dict):
                is_damaged = True
                raw.send(type="request", n=raw.sent + 1, ack=0, id=raw.sent + 1, verb=verb, args=arguments)
            elif fuzz.now_and_then(0.01):
                is_damaged = True
                raw.send_bytes(fuzz.damaged(encode({"type": "request", "n": raw.sent + 1, "args": arguments})))
            else:
                raw.request(verb, **arguments)
    return is_damaged


def ended_well(raw: Raw, fuzz: Fuzzer) -> None:
    """After all that a session takes valid requests, and ends when it is asked to."""
    number = raw.sent = raw.sent + 1
    raw.send(type="request", n=number, ack=0, id=1 << 30, verb="engine.stats", args={})
    while (message := raw.receive())["type"] != "reply":
        answered(message, raw, fuzz)
    assert message["value"]["pages_total"] > 0
    raw.send(type="bye", n=raw.sent + 1, ack=0)
    assert raw.closing() == "bye"


def answered(message: dict[str, Any], raw: Raw, fuzz: Fuzzer) -> None:
    """It is a message, and no error is one of the server's own; a call is returned from."""
    assert message["type"] in ("reply", "step", "call", "tell", "ack", "close"), message
    if "error" in message:
        assert message["error"]["message"] != FAILED, json.dumps(message)[:500]
    if message["type"] == "close":
        assert message["reason"] in ("malformed", "out_of_order"), message
    if message["type"] == "call":
        raw.sent += 1
        value = fuzz._chance.choice([*ODD, {"mask": None, "forced": [], "may_end": True, "finished": False}])
        raw.send(type="return", n=raw.sent, ack=message["n"], id=message["id"], value=value)


def fuzzed(served: Served, seeds: Iterator[int], until: float) -> Counter[bool]:
    """How many sessions stayed open to their end, and how many were closed."""
    counts: Counter[bool] = Counter()
    with hw.connect(served.url) as bystander:
        context = bystander.context().fill([1, 2, 3])
        expected = bystander.run(lambda e: context.fork().generate(hw.Argmax(), max_tokens=6).tokens())
        for seed in seeds:
            try:
                counts[one_session(served, Fuzzer(seed))] += 1
            except Exception as error:
                error.add_note(f"the seed is {seed}")
                raise
            found = bystander.run(lambda e: context.fork().generate(hw.Argmax(), max_tokens=6).tokens())
            assert found == expected, seed
            if time.monotonic() > until:
                break
        context.release()
        for name in ("saved", *(odd for odd in ODD if isinstance(odd, str))):
            with suppress(hw.HeadwayError):
                bystander.delete(name)
    gc.collect()
    until_quiet(served)
    return counts


def test_messages_that_are_nearly_right_harm_nobody(served: Served) -> None:
    counts = fuzzed(served, iter(range(100)), time.monotonic() + PATIENCE)
    assert min(counts[True], counts[False]) > 9


@pytest.mark.slow
def test_a_minute_of_messages_that_are_nearly_right_harms_nobody(served: Served) -> None:
    seed = time.time_ns() % 10**6
    counts = fuzzed(served, iter(range(seed, seed + 10**6)), time.monotonic() + 60)
    assert min(counts[True], counts[False]) > 5
