"""Clients written from docs/protocol.md alone do random things, right and half right, over both transports.

Every reply is compared with what an engine in process gives for the same: values, or the kind of the error and its
text. Connections are cut and resumed in between. Whatever a client does, a bystander's tokens stay the same, and no
page, task, thread or socket is left of it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.testing import random_model
from support.live import Live, _tasks, live
from support.plain_client import Array, PlainSession, Refused, UnixFrames, WebSocketFrames
from support.programs import left_over

V = 97
NEW = {"priority": 0, "salt": "", "token_budget": None, "deadline": None}
MASKS: list[tuple[list[Any], Callable[[], hw.Mask]]] = [
    (["causal"], hw.Mask.causal),
    (["window", 5], lambda: hw.Mask.window(5)),
    (["sink", 2, 3], lambda: hw.Mask.sink(2, 3)),
    (["either", [["window", 2], ["sink", 1, 1]]], lambda: hw.Mask.window(2) | hw.Mask.sink(1, 1)),
    (["not", ["window", 1]], lambda: ~hw.Mask.window(1)),
]
SAMPLERS: list[tuple[dict[str, Any], hw.Sampler]] = [
    ({"kind": "Argmax"}, hw.Argmax()),
    ({"kind": "TopP", "p": 0.9, "seed": 4}, hw.TopP(0.9, seed=4)),
    (
        {"kind": "Sampling", "top_k": 9, "repetition_penalty": 1.3, "seed": 2},
        hw.Sampling(top_k=9, repetition_penalty=1.3, seed=2),
    ),
]
PROBES: list[tuple[dict[str, Any], Any, str]] = [
    ({"kind": "Logits"}, hw.Logits(), "logits"),
    ({"kind": "Entropy"}, hw.Entropy(), "entropy"),
    ({"kind": "Logprobs", "ids": [3, 9]}, hw.Logprobs([3, 9]), "logprobs"),
    ({"kind": "Hidden", "layer": 1}, hw.Hidden(1), "hidden"),
]
IDS = ([3], [1, 2, 3, 4, 5, 6, 7], [96], [97], [-1], [], [5] * 40)


def plain(value: Any) -> Any:
    """Arrays as lists of rounded numbers: passes of others in a batch may change the last bits."""
    if isinstance(value, Array):
        value = value.tolist()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return round(value, 3) + 0.0 if isinstance(value, float) else value


class Pair:
    """One client, and the same things in process."""

    def __init__(self, engine: hw.Engine, open: Callable[[], UnixFrames], seed: int) -> None:
        self.engine, self.session, self.chance = engine, PlainSession(open), random.Random(seed)
        self.contexts: dict[int, hw.Context] = {}
        self.saved: set[str] = set()
        self.done: list[str] = []

    def both(self, verb: str, here: Callable[[], Any], **args: Any) -> tuple[Any, Any]:
        """Do something on both sides; it gives the same, or is refused with the same words."""
        self.done.append(f"{verb} {args}")
        try:
            there: Any = plain(self.session.ask(verb, **args))
        except Refused as error:
            there = (error.args[0]["kind"], error.args[0]["message"])
        try:
            own: Any = plain(here())
        except hw.HeadwayError as error:
            own = (type(error).__name__, str(error))
        if isinstance(own, tuple) or isinstance(there, tuple):
            assert there == own, self.told()
        return there, own

    def same(self, verb: str, here: Callable[[], Any], **args: Any) -> None:
        there, own = self.both(verb, here, **args)
        assert there == own, self.told()

    def told(self) -> str:
        return "\n".join(self.done[-25:])

    def pick(self) -> tuple[int, hw.Context]:
        return self.chance.choice(sorted(self.contexts.items()))

    # -- what it does --------------------------------------------------------------------------------------------------

    def act(self) -> None:
        if not self.contexts or (len(self.contexts) < 6 and self.chance.random() < 0.1):
            return self.create()
        names = [name for name in dir(self) if name.startswith("do_")]
        getattr(self, self.chance.choice(names))()

    def create(self) -> None:
        number, seed = self.session.new(), self.chance.choice([3, 5, -1])
        made: list[hw.Context] = []
        self.both("context.new", lambda: made.append(self.engine.context(seed=seed)), context=number, seed=seed, **NEW)
        if made:
            self.contexts[number] = made[0]
        else:
            self.session.ask("context.release", context=number)

    def do_fill(self) -> None:
        number, own = self.pick()
        ids = list(self.chance.choice(IDS))
        self.same("context.fill", lambda: own.fill(ids) and None, context=number, text=ids, special=False)

    def do_flush(self) -> None:
        number, own = self.pick()
        mask, made = self.chance.choice([(None, lambda: None), *MASKS])
        flush = {"number": self.session.new(), "attention_mask": mask, "adapter": None}
        self.same("context.flush", lambda: run(own.flush(made())), context=number, **flush)

    def do_fork(self) -> None:
        number, own = self.pick()
        if len(self.contexts) < 8:
            fork, made = self.session.new(), list[hw.Context]()
            self.same("context.fork", lambda: made.append(own.fork()), context=number, fork=fork)
            self.contexts[fork] = made[0]

    def do_release(self) -> None:
        number, own = self.pick()
        self.same("context.release", own.release, context=number)
        del self.contexts[number]
        with pytest.raises(Refused, match="released"):
            self.session.ask("context.tokens", context=number)

    def do_truncate(self) -> None:
        number, own = self.pick()
        n = self.chance.choice([0, 1, 3, 17, -1, 10**6])
        self.same("context.truncate", lambda: own.truncate(n) and None, context=number, n=n)

    def do_look(self) -> None:
        number, own = self.pick()
        self.same("context.tokens", lambda: own.tokens, context=number)
        there, _ = self.both("context.state", lambda: None, context=number)
        state = {"seq_len": own.seq_len, "pending": list(own.pending), "next_position": own.next_position}
        assert {name: there[name] for name in state} == state, self.told()
        pages, inner = self.session.ask("pages.state", context=number), own.inner()
        counts = [inner.committed_page_count, inner.working_page_count, inner.working_page_token_count]
        assert [pages["committed"], pages["working"], pages["working_tokens"]] == counts, self.told()
        assert [state for _, state, _ in pages["pages"]] == [page.state for page in inner.pages], self.told()

    def do_pages(self) -> None:
        number, own = self.pick()
        inner, n = own.inner(), self.chance.choice([0, 1, 1, 2, -1, 10**6])
        verb, here, name = self.chance.choice(
            [
                ("pages.reserve", inner.reserve_working_pages, "n"),
                ("pages.release", inner.release_working_pages, "n"),
                ("pages.truncate", inner.truncate_working_page_tokens, "n"),
                ("pages.commit", inner.commit_working_pages, "k"),
            ]
        )
        if verb != "pages.reserve" or n < 10:  # how many there are differs: the server has a bystander
            self.same(verb, lambda: here(n), context=number, **{name: n})

    def do_discard(self) -> None:
        number, own = self.pick()
        start, n = self.chance.choice([0, 1, 2, 50]), self.chance.choice([0, 1, -1])
        self.same("pages.discard", lambda: own.inner().discard_pages(start, n), context=number, start=start, n=n)

    def do_pass(self) -> None:
        number, own = self.pick()
        fwd, operations, reads = own.forward(), list[Any](), list[Callable[[Any], Any]]()

        def built() -> None:
            if ids := self.chance.choice([[], [4], [8, 9], [97]]):
                operations.append(["input", ids])
                fwd.input(ids)
            if self.chance.random() < 0.3:
                mask, made = self.chance.choice(MASKS)
                operations.append(["attention_mask", mask, True])
                fwd.attention_mask(made())
            if self.chance.random() < 0.3:
                operations.append(["mask", [4, V - 4], None])
                fwd.mask([4, V - 4])
            row = self.chance.choice([-1, -1, 0, -2, 7])
            spec, sampler = self.chance.choice(SAMPLERS)
            operations.append(["sample", [row], spec, None, None])
            drawn = fwd.sample([row], sampler)
            reads.append(lambda out: out.tokens(drawn))
            if self.chance.random() < 0.5:
                spec, probe, read = self.chance.choice(PROBES)
                operations.append(["probe", -1, spec])
                handle = fwd.probe(-1, probe)
                reads.append(lambda out: getattr(out, read)(handle))

        def here() -> Any:
            built()
            out = run(fwd.execute())
            return [read(out) for read in reads]

        try:
            expected: Any = plain(here())
        except hw.HeadwayError as error:
            expected = (type(error).__name__, str(error))
        args = {"context": number, "number": self.session.new(), "operations": operations}
        self.done.append(f"pass.execute {args}")
        try:
            found: Any = plain(self.session.ask("pass.execute", **args))["values"]
        except Refused as error:
            found = (error.args[0]["kind"], error.args[0]["message"])
        assert found == expected, self.told()

    def do_generate(self) -> None:
        number, own = self.pick()
        spec, sampler = self.chance.choice(SAMPLERS)
        most, taken = self.chance.choice([1, 6, 12, 0]), self.chance.choice([0, 1, 3])
        generation, made = self.session.new(), list[Any]()
        options = {"max_tokens": most, "sampler": spec, "stop_only": True, "stop": [11]}

        def begun() -> None:
            made.append(own.generate(sampler, max_tokens=most, stop_only=True, stop=[11]))

        there, _ = self.both("generation.new", begun, context=number, generation=generation, options=options)
        if not made:
            return
        used = 0
        if taken and self.chance.random() < 0.7:
            used = self.look_between(generation, made[0], taken)
            there = self.session.ask("generation.state", generation=generation)
            assert there["generated"] == list(made[0].generated), self.told()
        elif self.chance.random() < 0.8:
            collect = {"what": "tokens", "taken": 0, "epoch": 0, "schema": None}
            found, expected = self.both(
                "generation.collect", lambda: run(made[0].tokens()), generation=generation, **collect
            )
            if isinstance(found, dict):
                assert (found["tokens"], found["finish"]) == (expected, made[0].finish), self.told()
        self.session.ask("generation.drop", generation=generation, taken=used)
        self.do_look()

    def look_between(self, generation: int, own: Any, taken: int) -> int:
        """Take steps that were pulled ahead, and take the others back; how many there were to take."""
        expected = []
        try:
            for _ in range(taken):
                expected.append(run(anext(own)).tokens)
        except (StopAsyncIteration, hw.HeadwayError):
            pass
        self.done.append(f"generation.pull {taken} of 8")
        before = len(self.session.steps)
        self.session.request("generation.pull", quiet=True, generation=generation, upto=8, taken=0)
        if not expected:
            while not self.session.steps[before:]:
                self.session.receive()
        while len(self.session.steps) - before < len(expected):
            self.session.receive()
        steps = [step for step in self.session.steps[before:] if step["generation"] == generation]
        assert [list(tokens) for tokens in expected] == [step["tokens"] for step in steps[: len(expected)]], self.told()
        self.session.request("generation.settle", quiet=True, generation=generation, taken=len(expected), epoch=1)
        return len(expected)

    def do_snapshot(self) -> None:
        number, own = self.pick()
        name = self.chance.choice(["one", "two", "", "../up", "x" * 200])
        there, _ = self.both("context.save", lambda: own.save(name), context=number, name=name, durable=False)
        if there is None and len(self.contexts) < 8:
            verb = self.chance.choice(["engine.open", "engine.take"])
            again, made = self.session.new(), list[Any]()
            here = self.engine.open if verb == "engine.open" else self.engine.take
            self.same(verb, lambda: made.append(here(name)) or made[0] is not None, name=name, context=again)
            self.contexts[again] = made[0]
        self.same("engine.delete", lambda: self.engine.delete(name), name=name)

    def do_ask_for_what_is_not_there(self) -> None:
        for verb, args in (
            ("context.fork", {"context": 10**9, "fork": self.session.new()}),
            ("generation.state", {"generation": 10**9}),
            ("chat.state", {"chat": 10**9}),
            ("generation.take", {"generation": 10**9, "prepared": 1, "operations": []}),
            ("pages.append", {"context": 10**9, "other": 1, "pages": [0], "shift": 0}),
        ):
            self.done.append(f"{verb} {args}")
            with pytest.raises(Refused) as refused:
                self.session.ask(verb, **args)
            assert refused.value.args[0]["kind"] in ("Closed", "InvalidInput"), self.told()
        assert self.session.ask("pass.cancel", number=10**9) is None
        assert self.session.ask("session.cancel", request=10**9) is None

    def do_come_back(self) -> None:
        self.done.append("comes back")
        number, own = self.pick()
        waiting = [self.session.request("context.tokens", context=number) for _ in range(self.chance.randrange(4))]
        self.session.come_back()
        for id in waiting:
            assert self.session.value(id) == list(own.tokens), self.told()

    def end(self) -> None:
        """With a word, without one, or with the wrong one."""
        for own in self.contexts.values():
            own.release()
        how = self.chance.randrange(4)
        if how == 0:
            return self.session._frames.cut()
        if how == 1:
            assert self.session.bye() == "bye"
            return None
        wrong = self.chance.choice(
            [
                {"type": "request", "id": "x", "verb": "engine.stats", "args": {}},
                {"type": "request", "id": 1, "verb": "context.fork", "args": {"context": "1", "fork": 2}},
                {"type": "welcome"},
                {"type": "request", "id": 1, "verb": "engine.stats", "args": {"all": True}},
            ]
        )
        self.session.post(**wrong)
        with pytest.raises(EOFError, match="malformed"):
            self.session.value(-1)  # which never comes
        return self.session._frames.cut()


def run(work: Any) -> Any:
    """Wait for what a program awaits."""

    async def waited() -> Any:
        return await work

    return asyncio.run(waited())


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        path = Path(folder) / "socket"
        engine = hw.Engine(random_model(vocab_size=V), pages=256, threads=1)
        with live(engine, session_socket=path, session_grace=0.5) as served:
            served.socket = str(path)  # type: ignore[attr-defined]
            yield served


@pytest.fixture(scope="module")
def oracle() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(vocab_size=V), pages=256, threads=1) as engine:
        yield engine
        assert engine.stats().pages_held == 0


def opener(server: Live, transport: str) -> Callable[[], UnixFrames]:
    if transport == "unix":
        return lambda: UnixFrames(server.socket)  # type: ignore[attr-defined]
    return lambda: WebSocketFrames("127.0.0.1", server.port)


async def bystander(engine: hw.Engine) -> list[int]:
    async with engine.context(seed=7) as ctx:
        return await ctx.fill(range(30)).generate(hw.Multinomial(), max_tokens=16, stop_only=True).tokens()


def clients(server: Live, oracle: hw.Engine, transport: str, seeds: Iterator[int], *, until: float, acts: int) -> int:
    """Clients of these seeds, one after the other, beside a bystander; then nothing is left of them."""
    expected = server.engine.run(bystander)
    server.until(server.is_quiet)
    gc.collect()
    before, tasks, seen, over = left_over(), len(_tasks()), list[list[int]](), threading.Event()

    def watch() -> None:
        while not over.is_set() or not seen:
            seen.append(server.engine.run(bystander))
            over.wait(0.02)

    thread, count = threading.Thread(target=watch), 0
    thread.start()
    try:
        for seed in seeds:
            pair = Pair(oracle, opener(server, transport), seed)
            try:
                for _ in range(acts):
                    pair.act()
                pair.end()
            except BaseException as error:
                error.add_note(f"seed {seed} over {transport}:\n{pair.told()}")
                raise
            count += 1
            if time.monotonic() > until:
                break
    finally:
        over.set()
        thread.join()
    assert all(tokens == expected for tokens in seen)
    server.until(server.is_quiet)
    server.until(lambda: left_over() <= before)
    server.until(lambda: gc.collect() is not None and len(_tasks()) <= tasks)
    assert oracle.stats().pages_held == 0
    return count


@pytest.mark.parametrize("transport", ["unix", "websocket"])
def test_random_clients_get_what_a_program_gets(server: Live, oracle: hw.Engine, transport: str) -> None:
    assert clients(server, oracle, transport, iter(range(4)), until=time.monotonic() + 600, acts=40) == 4


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "websocket"])
def test_many_random_clients_get_what_a_program_gets(server: Live, oracle: hw.Engine, transport: str) -> None:
    seed = time.time_ns() % 10**6
    seeds = iter(range(seed, seed + 10**6))
    assert clients(server, oracle, transport, seeds, until=time.monotonic() + 60, acts=60) > 1
