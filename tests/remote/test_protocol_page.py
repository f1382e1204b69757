"""docs/protocol.md says what the server does; a client can be written from it alone, as support/plain_client.py was."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.remote.protocol.values import PROBES, SAMPLERS
from headway.server.sessions.sockets import CLOSED
from headway.server.sessions.verbs import VERBS
from headway.testing import random_model
from support.live import Live, live
from support.plain_client import Array, PlainSession, Refused, UnixFrames, WebSocketFrames, from_frame, to_frame

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
V = 97


# --- the tables


def rows(heading: str) -> list[list[str]]:
    """The rows of every table under a heading, without their own headings."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def named(cell: str) -> list[str]:
    """The names in a cell, without those in brackets."""
    return re.findall(r"`([\w.]+)`", re.sub(r"\([^()]*\)", "", cell))


def documented_verbs() -> dict[str, set[str]]:
    found = {}
    for heading, more in (("Requests", ()), ("A generation", ("generation",)), ("A chat", ())):
        for row in rows(heading):
            area = ""
            for name in named(row[0]):
                area = name.partition(".")[0] or area
                verb = name if not name.startswith(".") else f"{area}{name}"
                if "." in verb:
                    found[verb] = {*named(row[1] if len(row) > 1 else ""), *more}
    return found


def test_every_verb_is_on_the_page_with_its_arguments() -> None:
    verbs = {name: set(inspect.signature(verb).parameters) - {"session"} for name, verb in VERBS.items()}
    assert documented_verbs() == verbs


def test_every_sampler_and_probe_is_on_the_page_with_its_fields_and_defaults() -> None:
    found: dict[str, dict[str, Any]] = {}
    for row in rows("A pass"):
        text = re.sub(r"\([^()]*\)", "", row[1] if len(row) > 1 else "")
        values = dict(re.findall(r"`(\w+)`(?: (\[[^\]]*\]|[^,]+))?", text))
        found |= dict.fromkeys(named(row[0]), values)
    for name, kind in {**SAMPLERS, **PROBES}.items():
        expected = {each.name: each.default for each in fields(kind)}
        assert set(found[name]) == set(expected), name
        for field, value in found[name].items():
            default = expected[field]
            assert (default is MISSING) == (value == ""), (name, field)
            if value:
                assert json.loads(value) == (list(default) if isinstance(default, tuple) else default), (name, field)


def test_every_reason_is_on_the_page_with_its_code() -> None:
    sources = (Path(__file__).parents[2] / "src/headway/server/sessions").glob("*.py")
    used = set(re.findall(r'SessionClosed\(\s*"(\w+)"', "".join(file.read_text() for file in sources)))
    listed = {named(row[0])[0]: row[1] for row in rows("A session") if named(row[0])}
    assert used == set(listed)
    assert {reason: str(CLOSED.get(reason, 1008)) for reason in used - {"lost"}} | {"lost": "–"} == listed


# --- the exchange


def exchange() -> list[tuple[str, dict[str, Any]]]:
    """The messages of the page, by who sends them; `…` stands for what is not shown."""
    block = PAGE.partition("\n## An exchange\n")[2].partition("```text\n")[2].partition("```")[0]
    joined = re.sub(r"\n   +", " ", block)
    readable = re.sub(r"([{,]) ?…}", lambda at: at[1] + '"…": 0}', joined)
    return [(line[0], json.JSONDecoder().raw_decode(line[2:])[0]) for line in readable.splitlines()]


def matches(found: Any, shown: Any) -> bool:
    """Whether a value is of the kind that is shown: its names, types and lengths; tokens are the model's own."""
    if shown == "…":
        return isinstance(found, str)
    if isinstance(shown, dict):
        names = set(shown) - {"…"}
        same = names <= set(found) if "…" in shown else names == set(found)
        return same and all(matches(found[name], shown[name]) for name in names)
    if isinstance(shown, list):
        return len(found) == len(shown) and all(map(matches, found, shown))
    if isinstance(shown, str):
        return shown in (found, "")
    return isinstance(shown, bool) is isinstance(found, bool) and isinstance(found, type(shown) | int | float)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    socket = tmp_path_factory.mktemp("socket") / "s"
    with live(hw.Engine(random_model(vocab_size=V), pages=64, threads=1), session_socket=socket) as served:
        served.socket = str(socket)  # type: ignore[attr-defined]
        yield served
        served.until(served.is_quiet)


def opener(server: Live, transport: str) -> Callable[[], UnixFrames]:
    if transport == "unix":
        return lambda: UnixFrames(server.socket)  # type: ignore[attr-defined]
    return lambda: WebSocketFrames("127.0.0.1", server.port)


TRANSPORTS = pytest.mark.parametrize("transport", ["unix", "websocket"])


@TRANSPORTS
def test_the_exchange_is_as_shown(server: Live, transport: str) -> None:
    frames = opener(server, transport)()
    for who, shown in exchange():
        if who == "▸":
            frames.send(to_frame(shown))
            continue
        message = from_frame(frames.receive())
        while message["type"] == "ack":
            message = from_frame(frames.receive())
        found = json.loads(json.dumps(message, default=described))
        for each in (found, shown):  # how far the server has read when it replies is a matter of time
            each.pop("ack", None)
        assert matches(found, shown), (found, shown)
    with pytest.raises(EOFError):
        frames.receive()
    frames.cut()


def described(array: Array) -> dict[str, Any]:
    return {"array": [array.type, array.shape, 0, len(array.data)]}


# --- a client


@TRANSPORTS
def test_a_client_can_be_written_from_the_page(server: Live, transport: str) -> None:
    """What it gets is what a program in this process gets."""
    expected = server.engine.run(program)
    session = PlainSession(opener(server, transport))
    context = {"seed": 3, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
    ctx, numbers = session.new(), list(range(20))
    session.request("context.new", quiet=True, context=ctx, **context)
    session.request("context.fill", quiet=True, context=ctx, text=numbers, special=False)
    operations = [
        ["input", [7, 8]],
        ["attention_mask", ["either", [["window", 9], ["sink", 2, 1]]], True],
        ["mask", [4, V - 4], None],
        ["bias", Array.of("<f8", [0.0] * 30 + [2.0] + [0.0] * (V - 31)), [-1]],
        ["sample", [-1], {"kind": "TopP", "p": 0.9}, None, None],
        ["probe", 0, {"kind": "Logits"}],
    ]
    first = session.new()
    id = session.request("pass.execute", context=ctx, number=first, operations=operations)
    fed = [["feed", first, 0], ["sample", [-1], {"kind": "Argmax"}, None, None]]
    after = session.request("pass.execute", context=ctx, number=session.new(), operations=fed)
    session.come_back()  # before any reply was read
    drawn, logits = session.value(id)["values"]
    assert (drawn, session.value(after)["values"][0]) == (expected["drawn"], expected["fed"])
    assert logits.shape == [V]
    assert logits.tolist() == pytest.approx(expected["logits"], abs=1e-4)
    assert session.ask("context.tokens", context=ctx) == expected["tokens"]

    generation = session.new()
    options = {"max_tokens": 12, "sampler": {"kind": "Multinomial", "seed": 5}, "stop_only": True}
    assert session.ask("generation.new", context=ctx, generation=generation, options=options)["several"] is False
    session.request("generation.pull", quiet=True, generation=generation, upto=8, taken=0)
    while len(session.steps) < 8:
        session.receive()
    session.request("generation.settle", quiet=True, generation=generation, taken=3, epoch=1)
    assert session.ask("context.tokens", context=ctx)[len(expected["tokens"]) :] == expected["generated"][:3]
    collected = session.ask("generation.collect", generation=generation, what="tokens", taken=3, epoch=2, schema=None)
    assert (collected["tokens"], collected["finish"]) == (expected["generated"], "length")

    even = {"mask": Array.of("<u4", [0x55555555] * ((V + 31) // 32)), "forced": [], "may_end": False, "finished": False}
    session.methods["follow"] = lambda since: even
    fork, constrained = session.new(), session.new()
    session.ask("context.fork", context=ctx, fork=fork)
    options = {
        "max_tokens": 5,
        "stop_only": True,
        "constrain": {"object": session.new(), "copy": False, "name": "Even"},
    }
    session.ask("generation.new", context=fork, generation=constrained, options=options)
    found = session.ask("generation.collect", generation=constrained, what="tokens", taken=0, epoch=0, schema=None)
    assert [token % 2 for token in found["tokens"]] == [0] * 5
    with pytest.raises(Refused, match="InvalidInput"):
        session.ask("context.truncate", context=ctx, n=10**6)
    assert session.bye() == "bye"


async def program(engine: hw.Engine) -> dict[str, Any]:
    """The same in process."""
    async with engine.context(seed=3) as ctx:
        fwd = ctx.fill(range(20)).forward().input([7, 8])
        fwd.attention_mask(hw.Mask.window(9) | hw.Mask.sink(2, 1)).mask([4, V - 4])
        fwd.bias([2.0 if id == 30 else 0.0 for id in range(V)], rows=[-1])
        token, logits = fwd.sample([-1], hw.TopP(0.9)), fwd.probe(0, hw.Logits())
        out = await fwd.execute()
        found: dict[str, Any] = {"drawn": out.tokens(token), "logits": out.logits(logits).tolist()}
        fwd = ctx.forward().input(found["drawn"])
        token = fwd.sample([-1], hw.Argmax())
        found["fed"] = (await fwd.execute()).tokens(token)
        found["tokens"] = list(ctx.tokens)
        generation = ctx.generate(hw.Multinomial(seed=5), max_tokens=12, stop_only=True)
        found["generated"] = await generation.tokens()
        return found


# --- requests without a reply, and cancelled ones


def test_a_request_that_is_cancelled_has_a_reply_and_a_quiet_one_has_none(server: Live) -> None:
    session = PlainSession(opener(server, "unix"))
    context = {"seed": 3, "priority": 0, "salt": "", "token_budget": None, "deadline": None}
    ctx, generation = session.new(), session.new()
    session.request("context.new", quiet=True, context=ctx, **context)
    session.request("context.fill", quiet=True, context=ctx, text=[1, 2, 3], special=False)
    flush = {"attention_mask": None, "adapter": None}
    quiet = session.request("context.flush", quiet=True, context=ctx, number=session.new(), **flush)
    session.methods["follow"] = lambda since: {"mask": None, "forced": [], "may_end": False, "finished": False}
    options = {
        "max_tokens": 9,
        "stop_only": True,
        "constrain": {"object": session.new(), "copy": False, "name": "Late"},
    }
    session.ask("generation.new", context=ctx, generation=generation, options=options)
    collect = session.request("generation.collect", generation=generation, what="tokens", taken=0, epoch=0, schema=None)
    session.ask("session.cancel", request=collect)  # before the constraint says anything
    with pytest.raises(Refused, match="cancelled"):
        session.value(collect)
    server.until(lambda: session.ask("context.state", context=ctx)["seq_len"] == 3)  # the flush goes on, unasked
    execute = session.request("pass.execute", context=ctx, number=session.new(), operations=[["input", [4]]])
    session.ask("session.cancel", request=execute)
    try:
        session.value(execute)
        expected = 4  # it was done already
    except Refused:
        expected = 3
    assert session.ask("context.state", context=ctx)["seq_len"] == expected
    assert quiet not in session._replies
    assert session.bye() == "bye"
