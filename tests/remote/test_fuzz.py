"""A minute of messages that are nearly right: each gets a reply or ends its session with a reason, and harms nobody."""

from __future__ import annotations

import copy
import gc
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

import headway as hw
from headway.remote.protocol.codec import encode
from headway.server.errors import FAILED
from headway.server.sessions.verbs import VERBS
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
ARGUMENTS: dict[str, Any] = {  # by name, for every verb
    "context": 1, "fork": 2, "other": 1, "contexts": [7, 8], "generation": 3, "number": 1, "prepared": 4, "chat": 6,
    "request": 2, "n": 1, "k": 1, "start": 0, "slots": [0, 2], "pages": [0], "shift": 1, "bid": 1.0, "text": [1, 2, 3],
    "special": False, "skip_special": False, "ids": [1, 2], "id": 4, "name": "saved", "durable": False, "role": "user",
    "attention_mask": ["window", 3], "adapter": None, "operations": OPERATIONS, "options": OPTIONS, "upto": 4,
    "taken": 0, "epoch": 1, "what": "tokens", "schema": ["json", "{}", False], "tokens": [3], "followed": False,
    "max_tokens": 3, "messages": "hi", "sampler": None, "tools": [], "tool_choice": "auto", "tool_format": None,
    "on_error": "tell", "stop": [], "max_rounds": 1, **CONTEXT,
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
        for _ in range(self._chance.randrange(1, 30)):
            verb = self._chance.choice(sorted(VERBS))
            names = [name for name in VERBS[verb].__annotations__ if name not in ("session", "return")]
            arguments = {name: copy.deepcopy(ARGUMENTS[name]) for name in names if name in ARGUMENTS}
            if "options" in arguments:
                kept = self._chance.sample(sorted(OPTIONS), self._chance.randrange(4))
                arguments["options"] = {name: copy.deepcopy(OPTIONS[name]) for name in kept}
            if "operations" in arguments:
                arguments["operations"] = copy.deepcopy(self._chance.choices(OPERATIONS, k=self._chance.randrange(5)))
            for _ in range(self._chance.choice([0, 0, 1, 1, 2])):
                arguments = self._changed(arguments)
            yield verb, arguments

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


def one_session(served: Served, fuzz: Fuzzer) -> None:
    """Everything that comes back is a message, and no error is one of the server's own."""
    with opened(served) as raw:
        raw._socket.settimeout(0.2)
        try:
            for verb, arguments in fuzz.requests():
                if not isinstance(arguments, dict):
                    raw.send(type="request", n=raw.sent + 1, ack=0, id=raw.sent + 1, verb=verb, args=arguments)
                elif fuzz.now_and_then(0.02):
                    raw.send_bytes(fuzz.damaged(encode({"type": "request", "n": raw.sent + 1, "args": arguments})))
                else:
                    raw.request(verb, **arguments)
            while True:
                answered(raw.receive(), raw, fuzz)
        except (OSError, EOFError):
            return  # it was closed, or has said all


def answered(message: dict[str, Any], raw: Raw, fuzz: Fuzzer) -> None:
    assert message["type"] in ("reply", "step", "call", "tell", "ack", "close"), message
    if "error" in message:
        assert message["error"]["message"] != FAILED, json.dumps(message)[:500]
    if message["type"] == "close":
        assert message["reason"] in ("malformed", "out_of_order", "bye", "too_large"), message
    if message["type"] == "call":
        raw.sent += 1
        value = fuzz._chance.choice([*ODD, {"mask": None, "forced": [], "may_end": True, "finished": False}])
        raw.send(type="return", n=raw.sent, ack=message["n"], id=message["id"], value=value)


def fuzzed(served: Served, seeds: Iterator[int], until: float) -> int:
    count = 0
    with hw.connect(served.url) as bystander:
        context = bystander.context().fill([1, 2, 3])
        expected = bystander.run(lambda e: context.fork().generate(hw.Argmax(), max_tokens=6).tokens())
        for seed in seeds:
            one_session(served, Fuzzer(seed))
            count += 1
            found = bystander.run(lambda e: context.fork().generate(hw.Argmax(), max_tokens=6).tokens())
            assert found == expected, seed
            if time.monotonic() > until:
                break
        context.release()
    gc.collect()
    until_quiet(served)
    return count


def test_messages_that_are_nearly_right_harm_nobody(served: Served) -> None:
    fuzzed(served, iter(range(5)), time.monotonic() + 5)


@pytest.mark.slow
def test_a_minute_of_messages_that_are_nearly_right_harms_nobody(served: Served) -> None:
    seed = time.time_ns() % 10**6
    assert fuzzed(served, iter(range(seed, seed + 10**6)), time.monotonic() + 60) > 10
