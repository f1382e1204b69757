"""Generations of a session: steps that run ahead of the client, and are taken back when its program looks.

    pull(upto)             send steps until this number, without being asked for each
    settle(taken, epoch)   the program has taken so many and is about to do something else: take the others back

Steps that were sent and not taken are undone by what any program can do to its own generation: the context is cut, an
end is resumed from, and tokens that are missing (a stop took them away) are accepted again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headway.base.errors import Closed, ContextBusy, InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.program.checks.ids import common
from headway.program.context import Context
from headway.program.generation.generator import Generation
from headway.program.generation.ngrams import NoRepeat
from headway.program.generation.sequences.sequences import Generations
from headway.program.generation.steps import Prepared, Step
from headway.remote.protocol.codec import BadMessage, number
from headway.remote.protocol.limits import WINDOW
from headway.remote.protocol.values import value_json
from headway.server.sessions.callables import ClientConstraint
from headway.server.sessions.passes import ServedPass

TAIL = 256  # characters of the text that the client has, to tell what of them still stands


class ServedGeneration:
    """One generation of a client, and how far ahead of it this side is."""

    def __init__(
        self,
        generation: Generation[Any] | Generations[Any],
        constraint: ClientConstraint | None,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self.generation, self.constraint, self._send = generation, constraint, send
        self.hooked: ServedPass | None = None  # the pass that the client's hook has added to, in this step
        self.task: asyncio.Task[None] | None = None
        self._upto = self._sent = self._epoch = 0
        self._base: list[int] = []  # tokens generated before the steps below
        self._steps: deque[Step[Any]] = deque()  # sent, and perhaps not taken
        self._carry, self._lost, self._tail = "", 0, ""  # text taken back: see `_shown`

    @property
    def context(self) -> Context:
        return self.generation.context

    # -- running ahead ---------------------------------------------------------------------------------------------

    def pull(self, upto: int, taken: int) -> bool:
        """The client has taken so many steps and may be sent more; whether a task must run `pump`."""
        if not 0 <= taken <= self._sent or not taken <= upto <= taken + WINDOW:
            raise BadMessage(f"{taken} steps were taken and {self._sent} sent; up to {upto} cannot be pulled")
        self._take(taken)
        self._upto = max(self._upto, upto)
        return self.task is None

    def _take(self, taken: int) -> None:
        """Steps up to this number are the program's."""
        while self._steps and self._sent - len(self._steps) < taken:
            step = self._steps.popleft()
            self._base += step.tokens
            self._tail = (self._tail[: len(self._tail) - step.retracted] + step.text)[-TAIL:]

    async def pump(self) -> None:
        """Take steps and send them, as far as the client allows."""
        if not self._steps:  # the program has taken all, and may have cut the context since
            self._base = list(self.generation.generated)
        while self._sent < self._upto and self.generation.finish is None:
            self.hooked = None
            step = self._shown(await anext(self.generation))
            self._steps.append(step)
            self._sent += 1
            if step.finish is not None and self.constraint is not None:
                self.constraint.finish()
            self._send(self._message(step))

    def _message(self, step: Step[Any]) -> dict[str, Any]:
        message = {"type": "step", "epoch": self._epoch, "number": self._sent, **step_json(step)}
        if step.finish is not None:
            message["stop_string"] = getattr(self.generation, "stop_string", None)
        if self.hooked is not None:
            message["pass"] = self.hooked.result()
        return message

    def failed(self) -> dict[str, Any]:
        """A step that raised: the number it would have had."""
        self._upto = self._sent
        return {"type": "step", "epoch": self._epoch, "number": self._sent + 1}

    # -- taking back -----------------------------------------------------------------------------------------------

    async def settle(self, taken: int, epoch: int, *, back: bool = True) -> None:
        """Stop, and take back all but the first `taken` steps; steps sent from now on have another epoch.

        With `back=False` they stay: the client collects what follows.
        """
        await self.stop()
        if not 0 <= taken <= self._sent:
            raise BadMessage(f"{taken} steps were taken, and {self._sent} sent")
        self._take(taken)
        self._epoch, self._upto = epoch, taken
        if back and self._steps and isinstance(self.generation, Generation):
            self._rewind(self.generation)
        self._steps.clear()
        self._sent = taken

    async def stop(self) -> None:
        """End the task that takes steps; one in flight is undone."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    def _rewind(self, generation: Generation[Any]) -> None:
        """Back to the tokens that the program has, the last of them pending, as after any step."""
        wanted = self._base
        self._carry, self._lost = "".join(step.text for step in self._steps), 0
        with suppress(Closed, ContextBusy):  # the context is gone, or the program's own pass is in flight
            if generation.finish is not None:
                generation.resume()
            has = list(generation.generated)
            kept = min(common(wanted, has), max(0, len(wanted) - 1))
            generation.context.truncate(len(has) - kept)
            if missing := wanted[kept:]:
                self._note_text(generation.accept(missing))

    def _note_text(self, step: Step[Any]) -> None:
        """What a step changes in the text that the client was not shown."""
        cut = min(step.retracted, len(self._carry))
        self._lost += step.retracted - cut
        self._carry = self._carry[: len(self._carry) - cut] + step.text

    def _shown(self, step: Step[Any]) -> Step[Any]:
        """The step as it follows what the client was shown: without text that was sent before and taken back."""
        if not self._carry and not self._lost:
            return step
        self._note_text(step)
        text, lost = self._carry, self._lost
        gone = self._tail[len(self._tail) - lost :] if lost else ""
        same = common(gone, text) if len(gone) == lost else 0
        self._carry, self._lost = "", 0
        return Step(step.tokens, text[same:], step.probes, step.finish, lost - same, step.drafted, step.accepted)

    # -- steering --------------------------------------------------------------------------------------------------

    def one(self) -> Generation[Any]:
        """It, where it is one sequence; several raise as their own verbs do."""
        if isinstance(self.generation, Generations):
            raise Unsupported(
                "this steers one sequence, and num_beams or num_return_sequences ask for several at once; "
                "fork the context and generate in each fork"
            )
        return self.generation

    async def ready(self) -> None:
        """Have the client's constraint say what may come next, for a verb that asks at once."""
        if self.constraint is not None:
            self.generation.generated  # noqa: B018  # the constraint follows what the program did to the context
            await self.constraint.settle_async()

    def accept(self, tokens: Any, *, followed: bool) -> Step[Any]:
        """Tokens by hand; with `followed`, the client's constraint has accepted them already."""
        generation = self.one()
        if self.constraint is not None and followed:
            self.constraint.skips = len(tokens)
        try:
            step = generation.accept(tokens)
        finally:
            if self.constraint is not None:
                self.constraint.skips = 0
        return self.shown(step)

    def shown(self, step: Step[Any]) -> Step[Any]:
        """A step that the client gets in a reply, and so has taken."""
        step = self._shown(step)
        self._tail = (self._tail[: len(self._tail) - step.retracted] + step.text)[-TAIL:]
        return step

    def forked(
        self, twin: Generation[Any] | Generations[Any], send: Callable[[dict[str, Any]], None]
    ) -> ServedGeneration:
        """A fork of it."""
        constraint = self.constraint
        if constraint is not None and isinstance(twin, Generation):
            own = twin._transcript.constraint
            copied = own.other if isinstance(own, NoRepeat) else own
            assert isinstance(copied, ClientConstraint)
            constraint = copied
        served = ServedGeneration(twin, constraint, send)
        served._tail = self._tail
        served._carry, served._lost = self._carry, self._lost
        return served

    def state(self) -> dict[str, Any]:
        """What its properties say."""
        speculation = getattr(self.generation, "speculation", None)
        return {
            "generated": list(self.generation.generated),
            "finish": self.generation.finish,
            "stop_string": getattr(self.generation, "stop_string", None),
            "seed": self.generation.seed,
            "speculation": None if speculation is None else asdict(speculation),
        }

    async def collect(self, what: Any) -> dict[str, Any]:
        """Run to the end: its tokens, or its text."""
        if what not in ("tokens", "text"):
            raise BadMessage(f"{short_repr(what)} cannot be collected")
        if what == "text" and not self.context.engine.has_tokenizer:
            await self.generation.text()  # raises, before anything is computed
        async for _ in self.generation:
            if self.hooked is not None:  # the client's hook may have read something
                passed, self.hooked = self.hooked.result(), None
                self._send({"type": "tell", "object": 0, "method": "passed", "args": [passed]})
        collected = await (self.generation.text() if what == "text" else self.generation.tokens())
        state = self.state()
        if self.constraint is not None:
            self.constraint.finish()
        return {what: collected, **state}

    async def sequences(self) -> dict[str, Any]:
        """Run to the end: every sequence."""
        if not isinstance(self.generation, Generations):
            raise InvalidInput("this generation has one sequence; collect its tokens or its text")
        sequences = [
            {
                "tokens": list(one.tokens),
                "text": one.text,
                "finish": one.finish,
                "score": number(one.score),
                "seed": one.seed,
                "probes": [value_json(value) for value in one.probes],
            }
            for one in await self.generation.sequences()
        ]
        if self.constraint is not None:
            self.constraint.finish()
        return {"sequences": sequences, **self.state()}


class PreparedStep(ServedPass):
    """A step that the client takes by hand, or that its hook may add to."""

    def __init__(self, prepared: Prepared[Any], context: Context) -> None:
        super().__init__(context, prepared.forward)
        self.prepared = prepared
        probe = prepared.probe
        self.handles = [prepared.token, *(() if probe is None else probe if isinstance(probe, tuple) else (probe,))]


def step_json(step: Step[Any]) -> dict[str, Any]:
    """A step as the client gets it; what has its default is left out."""
    message: dict[str, Any] = {"tokens": list(step.tokens), "text": step.text}
    if step.probes:
        message["probes"] = [value_json(value) for value in step.probes]
    for name in ("finish", "retracted", "drafted", "accepted"):
        if value := getattr(step, name):
            message[name] = value
    return message
