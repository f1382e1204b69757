"""Sessions: who gets in, what closes one and only that one, what a lost connection leaves behind."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.remote.connection.transport import _UnixTransport, _WebSocketTransport
from headway.remote.protocol.codec import decode
from headway.server.keys import add_key
from headway.server.sessions.sockets import CLOSED
from headway.testing import random_model
from support.live import live
from support.plain_client import WebSocketFrames, from_frame, to_frame
from support.raw_session import HELLO, Raw, opened, until_quiet
from support.through import Served


def bad_messages() -> list[tuple[str, Any]]:
    new = {"context": 1, "seed": None, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
    numbered: dict[str, Any] = {"type": "request", "n": 1, "ack": 0, "id": 1}
    array = b'{"type":"ack","ack":{"array":["<f4",[9],0,36]}}'
    return [
        ("malformed", b""),
        ("malformed", b"\xff\xff\xff\xff{}"),
        ("malformed", struct.pack("<I", 4) + b"{]}]"),
        ("malformed", struct.pack("<I", 2) + b"[]"),
        ("malformed", struct.pack("<I", 2) + b"{}trailing"),
        ("malformed", struct.pack("<I", len(array)) + array + b"few"),
        ("malformed", struct.pack("<I", 200_000) + b"[" * 200_000),
        ("malformed", struct.pack("<I", 15) + b'{"ack":  1e999}'.replace(b" ", b"N")),
        ("out_of_order", {**numbered, "n": 2, "verb": "engine.stats", "args": {}}),
        ("out_of_order", {**numbered, "ack": 99, "verb": "engine.stats", "args": {}}),
        ("out_of_order", {"type": "ack", "ack": -1}),
        ("malformed", {**numbered, "verb": "engine.rm", "args": {}}),
        ("malformed", {**numbered, "verb": "engine.stats", "args": {"more": 1}}),
        ("malformed", {**numbered, "verb": "context.fill", "args": {}}),
        ("malformed", {**numbered, "verb": "context.new", "args": {**new, "context": "x"}}),
        ("malformed", {**numbered, "type": "wish"}),
        ("malformed", {**numbered, "type": "request", "verb": 3, "args": {}}),
        ("bye", {"type": "bye", "n": 1, "ack": 0}),
    ]


def test_what_is_not_the_protocol_closes_that_session_with_a_reason_and_nothing_else(served: Served) -> None:
    with hw.connect(served.url) as bystander:
        context = bystander.context().fill([1, 2, 3])
        expected = bystander.run(lambda e: context.fork().generate(hw.Argmax(), max_tokens=6).tokens())
        for reason, message in bad_messages():
            with opened(served) as raw:
                raw.send_bytes(message) if isinstance(message, bytes) else raw.send(**message)
                assert raw.closing() == reason, message
        with opened(served) as raw:
            raw._socket.sendall((1 << 40).to_bytes(8, "little"))
            assert raw.closing() == "too_large"
        assert bystander.run(lambda e: context.generate(hw.Argmax(), max_tokens=6).tokens()) == expected
        context.release()


def closed_by(frames: WebSocketFrames) -> tuple[str, int]:
    """The reason of the last message, and the code with which the WebSocket is closed."""
    reason = ""
    while True:
        try:
            reason = from_frame(frames.receive()).get("reason", "")
        except EOFError as end:
            return reason, end.args[0]


def test_over_a_websocket_it_is_the_same_with_a_code() -> None:
    with live(hw.Engine(random_model(), pages=32, threads=1), max_body_bytes=1 << 16) as server:
        for reason, message in [*bad_messages(), ("too_large", bytes(1 << 17))]:
            if len(frame := message if isinstance(message, bytes) else to_frame(message)) > 1 << 16:
                reason = "too_large"
            frames = WebSocketFrames("127.0.0.1", server.port)
            frames.send(to_frame(HELLO))
            assert from_frame(frames.receive())["type"] == "welcome"
            frames.send(frame)
            found, code = closed_by(frames)
            assert code == CLOSED.get(reason, 1008), message
            assert found == reason or (not found and reason == "too_large"), message
            frames.cut()
        server.until(server.is_quiet)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"type": "hello", "version": 2}, "version"),
        ({"type": "hello"}, "version"),
        ({"type": "request"}, "hello"),
        ({**HELLO, "resume": {"session": "guessed", "received": 0}}, "unknown_session"),
        ({**HELLO, "resume": 3}, "malformed"),
    ],
)
def test_a_hello_that_does_not_fit_is_answered(served: Served, hello: dict[str, Any], reason: str) -> None:
    raw = Raw(served)
    raw.send(**hello)
    assert raw.closing() == reason


ODD_OPTIONS = [
    ({"sampler": {"kind": [1]}}, "WrongType", "its kind must be one of"),
    ({"probe": {"kind": {}}}, "WrongType", "its kind must be one of"),
    ({"sequence_bias": True}, None, "a list of sequences with values"),
    ({"constrain": {"grammar": ["choices", "{", False]}}, None, "not a list in JSON"),
    ({"constrain": {"grammar": ["choices", "3", False]}}, "WrongType", "choices"),
]


@pytest.mark.parametrize(("options", "kind", "told"), ODD_OPTIONS)
def test_an_option_that_is_not_one_is_refused_by_its_name(served: Served, options: Any, kind: str, told: str) -> None:
    with opened(served) as raw:
        raw.request("context.new", context=1, seed=None, priority=0, salt="", token_budget=None, deadline=None)
        raw.request("generation.new", context=1, generation=2, options=options)
        assert "error" not in raw.receive()
        answer = raw.receive()
        assert (answer["type"], answer.get("error", {}).get("kind")) == ("close" if kind is None else "reply", kind)
        assert told in (answer if kind is None else answer["error"])["message"]


def test_steps_are_counted_in_numbers(served: Served) -> None:
    for verb, args in (("collect", {"what": "text", "epoch": 1, "schema": None}), ("pull", {"upto": 1}), ("drop", {})):
        with opened(served) as raw:
            raw.request(f"generation.{verb}", generation=1, taken=None, **args)
            closed = raw.receive()
            assert (closed["reason"], "taken is None, not a number" in closed["message"]) == ("malformed", True)


def test_a_flush_that_is_cancelled_says_so(served: Served) -> None:
    with opened(served) as raw:
        raw.request("context.new", context=1, seed=None, priority=0, salt="", token_budget=None, deadline=None)
        raw.request("context.fill", context=1, text=list(range(60)), special=False)
        raw.request("context.flush", context=1, number=5, attention_mask=None, adapter=None)
        raw.request("pass.cancel", number=5)
        replies = {message["id"]: message for message in (raw.receive() for _ in range(4))}
        assert replies[3]["error"] == {"kind": "Closed", "message": "this pass was cancelled"}


def test_what_is_refused_because_the_queue_is_full_has_done_nothing() -> None:
    """A pass, and a flush, while a generation has the only place: their contexts are as they were."""
    new = {"seed": None, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
    flush = {"number": 3, "attention_mask": None, "adapter": None}
    server = Served(hw.Engine(random_model(), pages=64, threads=1), max_queue_requests=1)
    try:
        with opened(server) as raw:
            for number in (1, 2, 3):
                raw.request("context.new", context=number, **new)
                raw.request("context.fill", context=number, text=[5] * 40, special=False)
            raw.request("generation.new", context=1, generation=4, options={"logits": 5})
            raw.request("generation.pull", generation=4, upto=1, taken=0)
            while (call := raw.receive())["type"] != "call":
                assert "error" not in call
            for verb, args in (
                ("pass.execute", {"context": 2, "number": 2, "operations": [["input", [1, 2, 3]]]}),
                ("context.flush", {"context": 3, **flush}),
            ):
                raw.request(verb, **args)
                assert raw.receive()["error"]["code"] == "queue_full"
            for number in (2, 3):
                raw.request("context.state", context=number)
                state = raw.receive()["value"]
                assert (state["seq_len"], len(state["pending"])) == (0, 40)
            raw.sent += 1
            raw.send(type="return", n=raw.sent, ack=call["n"], id=call["id"], value=None)
            assert raw.receive()["type"] == "step"
            for _ in range(3):  # one that is cancelled before it begins gives its place back
                raw.request("pass.execute", context=2, number=raw.sent, operations=[["input", [1]]])
                raw.request("session.cancel", request=raw.sent)
                assert {raw.receive()["id"], raw.receive()["id"]} == {raw.sent - 1, raw.sent}
            raw.request("context.flush", context=3, **flush)
            assert "error" not in raw.receive()
        until_quiet(server)
    finally:
        server.close()
        server.engine.close()


def test_what_belongs_to_another_session_does_not_exist(served: Served) -> None:
    with hw.connect(served.url) as one, opened(served) as raw:
        context = one.context().fill([1])
        assert context.tokens == (1,)
        for verb in ("context.tokens", "context.state"):
            raw.request(verb, context=context._number)
            assert raw.receive()["error"]["kind"] == "Closed"
        raw.request("generation.state", generation=1)
        assert raw.receive()["error"]["kind"] == "Closed"
        context.release()


class Cut:
    """Cuts a client's connection when it sends, or has received, a message with a number; hello and welcome are 1."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int, *, receiving: bool, for_good: bool, kind: Any = _UnixTransport
    ) -> None:
        self.at, self.seen, self.for_good, self.cuts, self.kind = at, 0, for_good, 0, kind
        monkeypatch.setattr(kind, "receive" if receiving else "send", self._wrapped(receiving))
        self._open = kind.open.__func__
        monkeypatch.setattr(kind, "open", classmethod(self._opened))

    async def _opened(self, cls: Any, *args: Any) -> Any:
        if self.cuts and self.for_good:
            raise ConnectionError("the cable is cut")
        return await self._open(cls, *args)

    def _wrapped(self, receiving: bool) -> Any:
        before = self.kind.receive if receiving else self.kind.send

        async def wrapped(transport: Any, *args: Any) -> Any:
            self.seen += 1
            if self.seen == self.at and not self.cuts:
                self.cuts += 1
                (transport._writer if self.kind is _UnixTransport else transport._socket).transport.abort()
                raise ConnectionError("cut")
            return await before(transport, *args)

        return wrapped


async def busy(engine: Any) -> Any:
    async with engine.context() as ctx:
        ctx.fill(range(20))
        out = await ctx.forward().input([1, 2]).execute()
        twin = ctx.fork()
        generation = ctx.generate(hw.TopP(0.9, seed=1), max_tokens=12)
        steps = [await anext(generation) for _ in range(5)]
        found = [out.stats.rows, [step.tokens for step in steps], ctx.tokens, await generation.tokens()]
        found.append(await twin.generate(hw.Argmax(), max_tokens=5).tokens())
        twin.release()
        return found


def messages_of(url: str, *, receiving: bool, kind: Any = _UnixTransport) -> int:
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, -1, receiving=receiving, for_good=False, kind=kind)
        with hw.connect(url) as engine:
            engine.run(busy)
        return cut.seen


@pytest.mark.parametrize("receiving", [False, True], ids=["sending", "receiving"])
def test_a_connection_cut_at_any_message_is_resumed_with_the_same_results(
    served: Served, monkeypatch: pytest.MonkeyPatch, receiving: bool
) -> None:
    expected = served.engine.run(busy)
    for at in range(2, messages_of(served.url, receiving=receiving), 3):
        with monkeypatch.context() as patch:
            cut = Cut(patch, at, receiving=receiving, for_good=False)
            with hw.connect(served.url) as engine:
                assert engine.run(busy) == expected, at
            assert cut.cuts == 1 or at > cut.seen
    gc.collect()
    until_quiet(served)


def cut_for_good(url: str, until_nothing_is_held: Callable[[], object], kind: Any, *, receiving: bool) -> None:
    """Run a program once for each of its messages, at which its connection ends for ever."""
    last = messages_of(url, receiving=receiving, kind=kind)
    for at in range(1, last):
        with pytest.MonkeyPatch.context() as patch:
            cut = Cut(patch, at, receiving=receiving, for_good=True, kind=kind)
            with suppress(hw.ConnectionFailed), hw.connect(url) as engine:
                engine.run(busy)
            assert cut.cuts == 1 or at > cut.seen
        until_nothing_is_held()
    assert last > 10


@pytest.mark.parametrize("receiving", [False, True], ids=["sending", "receiving"])
def test_a_connection_cut_for_good_at_every_message_leaves_no_page(receiving: bool) -> None:
    server = Served(hw.Engine(random_model(), pages=64, threads=1), session_grace=0.05)
    try:
        cut_for_good(server.url, lambda: until_quiet(server), _UnixTransport, receiving=receiving)
    finally:
        server.close()
        server.engine.close()


@pytest.mark.parametrize("receiving", [False, True], ids=["sending", "receiving"])
def test_a_websocket_cut_for_good_at_every_message_leaves_no_page(receiving: bool) -> None:
    with live(hw.Engine(random_model(), pages=64, threads=1), session_grace=0.05) as server:
        cut_for_good(server.url, lambda: server.until(server.is_quiet), _WebSocketTransport, receiving=receiving)


def test_a_session_ends_after_its_grace_time(served: Served) -> None:
    until_quiet(served)
    with opened(served) as raw:
        raw.request("context.new", context=1, seed=None, priority=0, salt="", token_budget=None, deadline=None)
        raw.request("context.fill", context=1, text=list(range(40)), special=False)
        raw.request("context.flush", context=1, number=2, attention_mask=None, adapter=None)
        for _ in range(3):
            assert "error" not in raw.receive()
        assert served.engine.stats().pages_held == 3
    until_quiet(served)


def test_keys_hosts_and_origins_are_checked_as_for_http(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    one, other = add_key(keys, "one"), add_key(keys, "other")
    with live(hw.Engine(random_model(), pages=32, threads=1), key_file=keys) as server:
        with pytest.raises(hw.ConnectionFailed, match="requires an API key"):
            hw.connect(server.url)
        with pytest.raises(hw.ConnectionFailed, match="401: this API key is not valid"):
            hw.connect(server.url, api_key="hw-wrong")
        with hw.connect(server.url, api_key=one) as first, hw.connect(server.url, api_key=other) as second:
            first.context().fill([1, 2]).save("mine")
            assert second.open("mine") is None
            found = first.open("mine")
            assert found is not None
            assert found.tokens == (1, 2)
            assert second.delete("mine") is False
            assert first.delete("mine") is True
            found.release()
        asyncio.run(_browsers(server.url.replace("http", "ws") + "/v1/session", one))
        gc.collect()
        server.until(server.is_quiet)


async def _browsers(url: str, key: str) -> None:
    """What browsers do: an Origin, no header for the key, text messages."""
    import json

    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus

    for address, origin, status in ((url, "https://elsewhere.org", 403), (f"{url}?key={key}", None, 400)):
        with pytest.raises(InvalidStatus) as refused:
            await connect(address, additional_headers={} if origin is None else {"Origin": origin})
        assert refused.value.response.status_code == status
    own = url.replace("ws:", "http:").removesuffix("/v1/session")
    async with connect(url, additional_headers={"Origin": own}) as page:
        await page.send(json.dumps({**HELLO, "key": key}))
        assert decode(await page.recv())["type"] == "welcome"  # type: ignore[arg-type]
        await page.send("not JSON")
        assert decode(await page.recv())["reason"] == "malformed"  # type: ignore[arg-type]
        await page.wait_closed()
        assert page.close_code == 1007
