"""What a program costs in messages: a pass one round trip, a generation none a token, verbs that cannot fail none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import headway as hw
from headway.remote.connection.transport import _UnixTransport
from headway.remote.protocol.codec import decode
from support.through import Served


class Traffic:
    """The messages of connections, in both directions: kinds of what is sent, types of what comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        self.came: list[str] = []
        self.sizes: dict[str, int] = {}  # of the last of each type
        send, receive = _UnixTransport.send, _UnixTransport.receive

        async def sending(transport: Any, frame: bytes) -> None:
            message = decode(frame)
            quiet = "quiet " if message.get("quiet") else ""
            self.sent.append(f"{quiet}{message.get('verb', message['type'])}")
            await send(transport, frame)

        async def receiving(transport: Any) -> bytes:
            frame = await receive(transport)
            self.came.append(decode(frame)["type"])
            self.sizes[self.came[-1]] = len(frame)
            return frame

        monkeypatch.setattr(_UnixTransport, "send", sending)
        monkeypatch.setattr(_UnixTransport, "receive", receiving)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


def of(traffic: Traffic, engine: hw.RemoteEngine, program: Callable[[Any], Any]) -> tuple[list[str], Counter[str]]:
    """What a program sends, and how many of which come back."""
    traffic.sent.clear()
    traffic.came.clear()
    engine.run(program)
    return list(traffic.sent), Counter(each for each in traffic.came if each != "ack")


def test_a_pass_costs_one_round_trip(served: Served, traffic: Traffic) -> None:
    async def program(engine: Any) -> None:
        with engine.context(seed=1) as ctx:
            fwd = ctx.fill([1, 2, 3]).forward().input([4]).attention_mask(hw.Mask.window(3)).mask(forbid=[5])
            token, logits = fwd.sample([-1], hw.TopP(0.9)), fwd.probe(-1, hw.Logits())
            out = await fwd.execute()
            assert len(out.logits(logits)) == engine.vocab_size
            assert 0 <= out.token(token) < engine.vocab_size

    with hw.connect(served.url) as engine:
        sent, came = of(traffic, engine, program)
    assert sent[:3] == ["quiet context.new", "quiet context.fill", "pass.execute"], sent
    assert set(sent[3:]) <= {"quiet context.release"}  # which nobody waits for
    assert came == {"reply": 1}
    assert 97 * 4 < traffic.sizes["reply"] < 97 * 4 + 1000  # the logits, as they are


def test_many_passes_are_sent_before_the_first_comes_back(served: Served, traffic: Traffic) -> None:
    async def program(engine: Any) -> None:
        contexts = [engine.context().fill([number]) for number in range(6)]
        running = [ctx.forward().input([1]).execute() for ctx in contexts]
        for each in running:
            await each
        for ctx in contexts:
            ctx.release()

    with hw.connect(served.url) as engine:
        sent, came = of(traffic, engine, program)
    assert came == {"reply": 6}
    assert [each for each in sent if each == "pass.execute"] == ["pass.execute"] * 6


def test_a_generation_streams_without_a_round_trip_a_token(served: Served, traffic: Traffic) -> None:
    async def program(engine: Any) -> None:
        with engine.context() as ctx:
            ctx.fill([1, 2, 3])
            async for _ in ctx.generate(hw.Argmax(), max_tokens=128, stop_only=True):
                pass

    with hw.connect(served.url) as engine:
        sent, came = of(traffic, engine, program)
    assert came["step"] == 128
    assert came["reply"] == 1, came  # of generation.new
    assert len(sent) <= 24, Counter(sent)


def test_a_generation_that_is_collected_costs_one(served: Served, traffic: Traffic) -> None:
    async def program(engine: Any) -> None:
        with engine.context() as ctx:
            await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=64, stop_only=True).tokens()

    with hw.connect(served.url) as engine:
        sent, came = of(traffic, engine, program)
    assert came == {"reply": 2}, (sent, came)  # of generation.new and generation.collect


class Any_:
    """A constraint that allows everything."""

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...


def test_a_constraint_of_the_program_costs_a_round_trip_a_token(served: Served, traffic: Traffic) -> None:
    async def program(engine: Any) -> None:
        with engine.context() as ctx:
            tokens = ctx.fill([1]).generate(hw.Argmax(), max_tokens=10, stop_only=True, constrain=Any_()).tokens()
            assert len(await tokens) == 10

    with hw.connect(served.url) as engine:
        sent, came = of(traffic, engine, program)
    assert came["call"] == sent.count("return")
    assert 10 <= came["call"] <= 11
