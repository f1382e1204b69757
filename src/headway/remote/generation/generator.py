"""A remote generation: steps arrive ahead of the program, and those it does not take are undone on the server.

When the program looks at the context between two steps, or leaves, the server is told how many steps were taken and
takes the others back (`ahead.py`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from headway.base.errors import Closed, ContextBusy, HeadwayError, Unsupported
from headway.base.specs.probes import Probe
from headway.program.checks.ids import token_ids
from headway.program.constraints.grammar import Grammar
from headway.program.generation.results import SpeculationStats
from headway.program.generation.steps import Prepared, Step
from headway.program.generation.stops import parse_json
from headway.program.output import ProbeHandle, SampleHandle
from headway.remote.connection.asking import Asking
from headway.remote.connection.threaded import Connection, Lost
from headway.remote.forward import RemoteForward
from headway.remote.generation.ahead import Ahead
from headway.remote.protocol.values import grammar_json, probes_of

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext


class RemoteGeneration:
    """An async iterator of steps, computed on a server. Stops leave the context, as in process."""

    def __init__(
        self,
        context: RemoteContext,
        ahead: Ahead,
        seed: int,
        *,
        probe: Probe | tuple[Probe, ...] | None,
        constraint: Any,
        objects: list[int],
    ) -> None:
        self._context, self._ahead, self._probe = context, ahead, probe
        self._constraint, self._objects = constraint, objects
        self._connection: Connection = context._connection
        self._asking = Asking(context.engine, ahead.number, "generation")
        self.seed = seed  #: the seed of its samples, which depend on it and the position
        self.finish: str | None = None
        self.stop_string: str | None = None  #: the stop string that ended it, which is not in its text
        self._waits = False  # somebody awaits a step
        self._prepared: Prepared[Any] | None = None  # what the hook was given in this step
        context._generations.add(self)
        weakref.finalize(self, _drop, context.engine, ahead, objects)

    def __repr__(self) -> str:
        try:
            self._settle()
            return self._connection.request("generation.repr", generation=self._ahead.number)
        except HeadwayError as error:
            return f"<Generation: {error}>"

    @property
    def context(self) -> RemoteContext:
        """The context it writes to."""
        return self._context

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens so far: sampled, forced or accepted, and not cut since."""
        return tuple(self._ask("state")["generated"])

    @property
    def speculation(self) -> SpeculationStats | None:
        """Its rounds, drafts and accepted drafts so far; None where it does not speculate."""
        stats = self._ask("state")["speculation"]
        return None if stats is None else SpeculationStats(**stats)

    # -- running -----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Step[Any]]:
        return self

    async def __anext__(self) -> Step[Any]:
        if self.finish is not None:
            raise StopAsyncIteration
        self._check_idle()
        self._context._check_open()
        self._context._settle(but=self)
        self._ahead.pull()
        self._waits = True
        try:
            while True:
                message = await self._ahead.inbox.next()
                if isinstance(message, Lost) or message["type"] == "step":
                    if (step := self._step(message)) is not None:
                        return step
                else:
                    await self._asking.serve(self, message)
        except asyncio.CancelledError:
            self._waits = False
            self._settle()
            raise
        finally:
            self._waits = False

    def _step(self, message: Any) -> Step[Any] | None:
        """The step of a message; None for one that was taken back meanwhile."""
        if isinstance(message, Lost):
            return self._connection.value(message)
        if not self._ahead.take(message):
            return None
        if "pass" in message:
            self._passed(message["pass"])
        return self._read(message)

    def _passed(self, result: dict[str, Any]) -> None:
        """The pass that the hook was given has ended."""
        if self._prepared is not None:
            forward: Any = self._prepared.forward
            forward._read(result)

    def _read(self, message: Mapping[str, Any]) -> Step[Any]:
        step = Step(
            tuple(message["tokens"]),
            message["text"],
            probes_of(self._probe, message.get("probes", ())),
            message.get("finish"),
            message.get("retracted", 0),
            message.get("drafted", 0),
            message.get("accepted", 0),
        )
        if step.finish is not None:
            self.finish = step.finish
            self.stop_string = message.get("stop_string")
        return step

    async def tokens(self) -> list[int]:
        """Run to the end; all tokens that stayed."""
        return (await self._collect("tokens"))["generated"]

    async def text(self) -> str:
        """Run to the end; the whole text."""
        return (await self._collect("text"))["text"]

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the text as JSON. With a schema (dict, text, pydantic model, Grammar) only such can come."""
        grammar = schema if schema is None or isinstance(schema, Grammar) else Grammar.json_schema(schema)
        value = await self._collect("text", None if grammar is None else grammar_json(grammar))
        return parse_json(value["text"], value["finish"], schema)

    async def _collect(self, what: str, schema: Any = None) -> dict[str, Any]:
        own = self._ahead
        self._context._check_open()
        self._context._settle(but=self)
        own.restart()
        reply = await self._wait("collect", what=what, taken=own.taken, epoch=own.epoch, schema=schema)
        self._note(reply)
        return reply

    # -- by hand -----------------------------------------------------------------------------------------------------

    def accept(self, tokens: Iterable[int]) -> Step[Any]:
        """Add tokens by hand, as if they had been sampled: they go through the constraint, the text and the stops."""
        self._check_idle()
        ids = token_ids(tokens, self._context.engine.vocab_size)
        constraint: Any = self._constraint
        followed = 0
        if constraint is not None:
            self._ask("forced")  # it follows what came before
        try:
            if constraint is not None:
                for token in ids:
                    constraint.accept(token)
                    followed += 1
            reply = self._ask("accept", tokens=ids, followed=constraint is not None)
        except BaseException:
            if constraint is not None and followed:
                constraint.rollback(followed)
            raise
        self._note(reply)
        return self._read(reply["step"])

    async def prepare(self) -> Prepared[Any]:
        """The next step, to be taken by hand: a pass with the generation's masks, sampler and probe."""
        self._check_one("prepare")
        self._check_idle()
        self._settle()
        number = self._context.engine._new_number()
        await self._wait("prepare", prepared=number)
        forward, token, probe = self._pass(number)

        async def take(prepared: Prepared[Any]) -> Step[Any]:
            self._settle()
            reply = await self._wait("take", prepared=number, operations=forward._taken())
            forward._read(reply["pass"])
            self._note(reply)
            return self._read(reply["step"])

        return Prepared(forward, token, probe, _taken=take)  # type: ignore[arg-type]

    def forced(self) -> list[int]:
        """Tokens that the constraint forces: fed together, without a pass for each."""
        self._check_idle()
        return self._ask("forced")

    def fork(self, *, seed: int | None = None) -> Self:
        """A second generation that goes on from here, on a fork of the context: `.context`, which is the caller's."""
        from headway.remote.context import RemoteContext

        self._check_idle()
        if self._constraint is not None and not hasattr(self._constraint, "copy"):
            raise Unsupported(
                f"the constraint {type(self._constraint).__name__} has no copy(), so this generation cannot be forked; "
                "give it one that returns a constraint in the same state"
            )
        engine = self._context.engine
        number, context = engine._new_number(), engine._new_number()
        inbox = engine._open_inbox(number)
        try:
            reply = self._ask("fork", fork=number, context=context, seed=seed)
        except BaseException:
            engine._close_inbox(number, [])
            raise
        ahead = Ahead(self._connection, number, inbox, patient=self._ahead.patient)
        own, objects = reply["object"], [] if reply["object"] is None else [reply["object"]]
        constraint = None if own is None else engine._callables.get(own)
        forked, given = RemoteContext(engine, context), {"constraint": constraint, "objects": objects}
        twin = type(self)(forked, ahead, reply["seed"], probe=self._probe, **given)
        twin.finish, twin.stop_string = reply["finish"], self.stop_string
        return twin

    def reseed(self, seed: int | None = None) -> Self:
        """Sample the tokens that follow with another seed, or with fresh entropy."""
        self._check_idle()
        self.seed = self._ask("reseed", seed=seed)
        return self

    def resume(self, max_tokens: int | None = None) -> Self:
        """Go on after an end, with the context as it is now and `max_tokens` more tokens, or those that were left."""
        self._ask("resume", max_tokens=max_tokens)
        self.finish = self.stop_string = None
        return self

    # -- messages ----------------------------------------------------------------------------------------------------

    def _pass(self, number: int | None) -> tuple[RemoteForward, SampleHandle, Any]:
        """The pass of a step, as a builder that more can be added to, and the handles of what the step itself reads."""
        probes = () if self._probe is None else self._probe if isinstance(self._probe, tuple) else (self._probe,)
        forward = RemoteForward(self._context, number, [1, *probes])
        handles = tuple(ProbeHandle(forward, 1 + i, probe) for i, probe in enumerate(probes))
        probe = None if self._probe is None else handles if isinstance(self._probe, tuple) else handles[0]
        return forward, SampleHandle(forward, 0, 1), probe

    def _hooked(self) -> Prepared[Any]:
        """What the hook before a pass gets."""
        forward, token, probe = self._pass(None)
        self._prepared = Prepared(forward, token, probe)  # type: ignore[arg-type]
        return self._prepared

    @contextmanager
    def _beam(self, number: int, generated: Iterable[int]) -> Iterator[Any]:
        """What a hook gets for a beam: its tokens, and its context, which is the server's after the call."""
        from headway.remote.context import RemoteContext

        context = RemoteContext(self._context.engine, number, lent=True)
        yield SimpleNamespace(context=context, generated=tuple(generated))
        context._released = True

    def _settle(self) -> None:
        """Have the server take back what the program has not taken."""
        if not self._waits:
            self._ahead.settle()

    def _ask(self, verb: str, **args: Any) -> Any:
        """A verb, and its reply; waits in this thread."""
        self._context.engine._check_open()
        self._context._settle()
        return self._asking.now(self, verb, **args)

    async def _wait(self, verb: str, **args: Any) -> Any:
        """The same in an event loop."""
        return await self._asking.wait(self, verb, **args)

    def _note(self, state: Mapping[str, Any]) -> None:
        self.finish, self.stop_string, self.seed = state["finish"], state["stop_string"], state["seed"]

    def _check_idle(self) -> None:
        if self._waits:
            raise ContextBusy("this generation has a step in flight; await it before steering the generation")

    def _check_one(self, verb: str) -> None:
        if self.finish is not None:
            raise Closed(f"this generation ended ({self.finish}); call resume() to go on")


def _drop(engine: Any, ahead: Ahead, objects: list[int]) -> None:
    """A generation was let go of."""
    engine._close_inbox(ahead.number, objects)
    ahead.drop()
