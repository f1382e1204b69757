"""A remote generation: steps arrive ahead of the program, and those it does not take are undone on the server.

The server is at most `WINDOW` steps ahead, few at first. When the program looks at the context between two steps, or
leaves, the server is told how many steps were taken and takes the others back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Self

from headway.base.errors import Closed, ContextBusy, HeadwayError, InvalidInput, Unsupported, WrongType
from headway.base.masks import Mask
from headway.base.probes import Probe
from headway.base.samplers import Sampler
from headway.base.text import short_repr
from headway.program.constraints.grammar import Grammar
from headway.program.generation.results import Continuation, SpeculationStats
from headway.program.generation.steps import Prepared, Step
from headway.program.generation.stops import listed_stops, parse_json
from headway.program.ids import token_ids
from headway.program.output import ProbeHandle, SampleHandle
from headway.program.readout_checks import check_probe
from headway.remote.callables import check_callable
from headway.remote.codec import as_number
from headway.remote.connection import Connection, Lost
from headway.remote.forward import RemoteForward, adapter_list
from headway.remote.limits import WINDOW
from headway.remote.mailbox import Mailbox
from headway.remote.values import probes_of, spec_json

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext

LOOKUP = {"_most": "max_tokens", "_least_n": "min_ngram", "_most_n": "max_ngram", "_window": "window"}
AWAITED = ("draft", "logits", "prepare")  # calls of functions that may be async
OURS = {  # drafters that a server has too, and where they keep their arguments
    "PromptLookup": ("prompt_lookup", LOOKUP),
    "OwnLayers": ("own_layers", {"_layers": "layers", "_most": "max_tokens"}),
}


def generate(
    context: RemoteContext, sampler: Sampler | None, options: Mapping[str, Any]
) -> RemoteGeneration | RemoteGenerations:
    """The generation of these options."""
    engine, objects = context.engine, []
    number = engine._new_number()
    probe = _probes(engine.config, options.get("probe"))
    given = {name: value for name, value in options.items() if name not in _ENCODED and value is not None}
    given |= {name: _listed(given[name]) for name in ("bad_words_ids", "sequence_bias") if name in given}
    if sampler is not None:
        if not isinstance(sampler, Sampler):
            raise WrongType(f"{short_repr(sampler)} is not a sampler; use one of Argmax(), TopP(0.9), Sampling(...)")
        given["sampler"] = spec_json(sampler)
    if (mask := options.get("attention_mask")) is not None:
        if not isinstance(mask, Mask):
            raise WrongType(f"attention_mask is {short_repr(mask)}; a Mask is needed, such as Mask.window(64)")
        given["attention_mask"] = context._mask_json(mask, context._rule_rows(options) if mask.needs_positions else 0)
    if (stop := options.get("stop")) is not None:
        given["stop"] = [one if isinstance(one, str | bool) else int(one) for one in listed_stops(stop)]
    if probe is not None:
        given["probe"] = [spec_json(one) for one in probe] if isinstance(probe, tuple) else spec_json(probe)
    given["adapter"] = adapter_list(options.get("adapter"))
    constraint = options.get("constrain")
    given["constrain"] = _constraint(constraint, engine._callables.add, objects)
    given["speculate"] = _drafter(options.get("speculate"), engine._callables.add, objects)
    for name in ("prepare", "logits"):
        if (hook := options.get(name)) is not None:
            check_callable(hook, name)
            given[name] = engine._callables.add(hook)
            objects.append(given[name])
    inbox = engine._open_inbox(number)
    try:
        made = engine._connection.request(
            "generation.new",
            context=context._number,
            generation=number,
            options={name: value for name, value in given.items() if value is not None},
        )
    except BaseException:
        engine._close_inbox(number, objects)
        raise
    own = None if constraint is None or isinstance(constraint, Grammar) else constraint
    state = _Ahead(number, inbox, patient=bool(objects))
    kind = RemoteGenerations if made["several"] else RemoteGeneration
    return kind(context, state, made["seed"], probe=probe, constraint=own, objects=objects)


_ENCODED = {"probe", "attention_mask", "stop", "adapter", "constrain", "speculate", "prepare", "logits"}


@dataclass(eq=False)
class _Ahead:
    """How far ahead of its program a generation may be; its finalizer needs it too."""

    number: int
    inbox: Mailbox
    patient: bool  # whether functions of the program's own are called, so that nothing can be ahead
    taken: int = 0  # steps that the program has
    upto: int = 0  # steps that the server may send
    epoch: int = 0
    window: int = 1


class RemoteGeneration:
    """An async iterator of steps, computed on a server. Stops leave the context, as in process."""

    def __init__(
        self,
        context: RemoteContext,
        ahead: _Ahead,
        seed: int,
        *,
        probe: Probe | tuple[Probe, ...] | None,
        constraint: Any,
        objects: list[int],
    ) -> None:
        self._context, self._ahead, self._probe = context, ahead, probe
        self._constraint, self._objects = constraint, objects
        self._connection: Connection = context._connection
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
        self._pull()
        self._waits = True
        try:
            while True:
                message = await self._ahead.inbox.next()
                if isinstance(message, Lost) or message["type"] == "step":
                    if (step := self._step(message)) is not None:
                        return step
                else:
                    await self._serve(message)
        except asyncio.CancelledError:
            self._waits = False
            self._settle()
            raise
        finally:
            self._waits = False

    def _pull(self) -> None:
        """Let the server go on, before the program has taken all that is on its way."""
        own = self._ahead
        if own.upto - own.taken <= own.window // 2:
            own.window = 1 if own.patient or own.upto == 0 else min(2 * own.window, WINDOW)
            own.upto = own.taken + own.window
            self._connection.tell("generation.pull", generation=own.number, upto=own.upto, taken=own.taken)

    def _step(self, message: Any) -> Step[Any] | None:
        """The step of a message; None for one that was taken back meanwhile."""
        own = self._ahead
        if isinstance(message, Lost):
            return self._connection.value(message)
        if message["epoch"] not in (own.epoch, None):
            return None
        if "error" in message:
            own.upto, own.window = own.taken, 1
            raise self._connection.error(message["error"])
        own.taken = message["number"]
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
        found = await self._collect("text", None if grammar is None else _grammar_json(grammar))
        return parse_json(found["text"], found["finish"], schema)

    async def _collect(self, what: str, schema: Any = None) -> dict[str, Any]:
        own = self._ahead
        self._context._check_open()
        self._context._settle(but=self)
        own.epoch, own.upto, own.window = own.epoch + 1, own.taken, 1
        own.inbox.clear_steps()
        found = await self._wait("collect", what=what, taken=own.taken, epoch=own.epoch, schema=schema)
        self._note(found)
        return found

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
            found = self._ask("accept", tokens=ids, followed=constraint is not None)
        except BaseException:
            if constraint is not None and followed:
                constraint.rollback(followed)
            raise
        self._note(found)
        return self._read(found["step"])

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
            found = await self._wait("take", prepared=number, operations=forward.taken())
            forward._read(found["pass"])
            self._note(found)
            return self._read(found["step"])

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
            found = self._ask("fork", fork=number, context=context, seed=seed)
        except BaseException:
            engine._close_inbox(number, [])
            raise
        ahead = _Ahead(number, inbox, self._ahead.patient)
        own, objects = found["object"], [] if found["object"] is None else [found["object"]]
        constraint = None if own is None else engine._callables.get(own)
        forked, given = RemoteContext(engine, context), {"constraint": constraint, "objects": objects}
        twin = type(self)(forked, ahead, found["seed"], probe=self._probe, **given)
        twin.finish, twin.stop_string = found["finish"], self.stop_string
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

    def _settle(self) -> None:
        """Have the server take back what the program has not taken."""
        own = self._ahead
        if own.upto > own.taken and not self._waits:
            own.epoch, own.upto, own.window = own.epoch + 1, own.taken, 1
            own.inbox.clear_steps()
            with suppress(HeadwayError):  # whoever asks next is told
                self._connection.tell("generation.settle", generation=own.number, taken=own.taken, epoch=own.epoch)

    def _ask(self, verb: str, **args: Any) -> Any:
        """A verb, and its reply; waits in this thread, and runs what the server asks of the program meanwhile."""
        self._context.engine._check_open()
        self._context._settle()
        engine, own, later, mailbox, number = self._context.engine, self._ahead.number, [], Mailbox(), 0
        engine._waiters[own].append(mailbox)  # first: the server may ask something before it replies
        try:
            number, _ = self._connection.ask(f"generation.{verb}", mailbox, generation=own, **args)
            while True:
                message = mailbox.get()
                if isinstance(message, Lost) or message["type"] == "reply":
                    return self._connection.value(message)
                if message["method"] in AWAITED:  # of another sequence: for whoever can await it
                    later.append(message)
                else:
                    self._serve_now(message)
        finally:
            self._connection.forget(number)
            engine._waiters[own].remove(mailbox)
            for message in later:
                engine._route(message)

    async def _wait(self, verb: str, **args: Any) -> Any:
        """The same in an event loop; cancelling it undoes what is not done."""
        engine, own, mailbox, number = self._context.engine, self._ahead.number, Mailbox(), 0
        engine._waiters[own].append(mailbox)
        try:
            number, _ = self._connection.ask(f"generation.{verb}", mailbox, generation=own, **args)
            while True:
                message = await mailbox.next()
                if isinstance(message, Lost) or message["type"] == "reply":
                    return self._connection.value(message)
                await self._serve(message)
        except asyncio.CancelledError:
            with suppress(HeadwayError):
                self._connection.tell("session.cancel", request=number)
            raise
        finally:
            self._connection.forget(number)
            engine._waiters[own].remove(mailbox)

    async def _serve(self, message: dict[str, Any]) -> None:
        """Do what the server asks of the program."""
        call = message.get("id")
        try:
            value = self._context.engine._callables.call(message, self)
            if isawaitable(value):
                value = await value
        except Exception as error:
            return None if call is None else self._connection.give(call, error=error)
        if call is not None:
            self._connection.give(call, value)
        return None

    def _serve_now(self, message: dict[str, Any]) -> None:
        """The same for what a constraint is asked, which cannot be awaited."""
        call = message.get("id")
        try:
            value = self._context.engine._callables.call(message, self)
        except Exception as error:
            return None if call is None else self._connection.give(call, error=error)
        return None if call is None else self._connection.give(call, value)

    def _note(self, state: Mapping[str, Any]) -> None:
        self.finish, self.stop_string, self.seed = state["finish"], state["stop_string"], state["seed"]

    def _check_idle(self) -> None:
        if self._waits:
            raise ContextBusy("this generation has a step in flight; await it before steering the generation")

    def _check_one(self, verb: str) -> None:
        if self.finish is not None:
            raise Closed(f"this generation ended ({self.finish}); call resume() to go on")


class RemoteGenerations(RemoteGeneration):
    """Several continuations of one context, generated together: what `num_beams` or `num_return_sequences` gives."""

    _sequences: list[Continuation[Any]] | None = None
    _stepped = False

    async def sequences(self) -> list[Continuation[Any]]:
        """Run to the end; every sequence with its tokens, text, score, finish and seed, the best first."""
        if self._sequences is None:
            self._context._settle()
            found = await self._wait("sequences")
            self._note(found)
            self._sequences = [self._continuation(one) for one in found["sequences"]]
        return list(self._sequences)

    def _continuation(self, found: Mapping[str, Any]) -> Continuation[Any]:
        return Continuation(
            tuple(found["tokens"]),
            found["text"],
            found["finish"],
            as_number(found["score"]),
            found["seed"],
            probes_of(self._probe, found["probes"]),
        )

    async def texts(self) -> list[str]:
        """Run to the end; the text of every sequence, the best first."""
        self._check_text()
        return [one.text for one in await self.sequences()]

    async def contexts(self) -> list[RemoteContext]:
        """Run to the end; a context for every sequence. The first is the context itself, the others are new."""
        from headway.remote.context import RemoteContext

        engine, (_, *others) = self._context.engine, await self.sequences()
        numbers = [engine._new_number() for _ in others]
        count = await self._wait("contexts", contexts=numbers)
        return [self._context, *(RemoteContext(engine, number) for number in numbers[:count])]

    async def tokens(self) -> list[int]:
        """Run to the end; the first sequence's tokens."""
        return list((await self.sequences())[0].tokens)

    async def text(self) -> str:
        """Run to the end; the first sequence's text."""
        self._check_text()
        return (await self.sequences())[0].text

    async def __anext__(self) -> Step[Any]:
        """The first sequence, as one step."""
        if self._stepped:
            raise StopAsyncIteration
        first, *_ = await self.sequences()
        self._stepped = True
        return Step(first.tokens, first.text, first.probes, first.finish)

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the first sequence's text as JSON. With a schema every sequence follows it."""
        self._check_text()
        if schema is None:
            return parse_json(await self.text(), self.finish)
        if self._sequences is not None:
            raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
        return await super().json(schema)

    def _check_text(self) -> None:
        if not self._context.engine.has_tokenizer:
            raise Unsupported("this model has no tokenizer, so its tokens have no text; collect them with tokens()")

    def _check_one(self, verb: str) -> None:
        raise Unsupported(
            f"{verb}() steers one sequence, and num_beams or num_return_sequences ask for several at once; "
            "fork the context and generate in each fork"
        )


def _probes(config: Any, given: Any) -> Any:
    """The argument `probe=`: one probe, a tuple of them, or None."""
    if given is None:
        return None
    if isinstance(given, Probe | str | bytes) or not isinstance(given, Iterable):
        check_probe(config, given)
        return given
    listed = tuple(given)
    for number, one in enumerate(listed):
        check_probe(config, one, f"probe[{number}]: ")
    return listed


def _listed(given: Any) -> Any:
    """Token ids and biases as lists."""
    if isinstance(given, Mapping):
        return [[_listed(ids), bias] for ids, bias in given.items()]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return [_listed(each) for each in given]
    return getattr(given, "item", lambda: given)()


def _constraint(given: Any, add: Any, objects: list[int]) -> Any:
    if given is None:
        return None
    if isinstance(given, Grammar):
        return {"grammar": _grammar_json(given)}
    lacks = [verb for verb in ("mask", "accept", "rollback") if not callable(getattr(given, verb, None))]
    if lacks or isinstance(given, type):
        raise WrongType(
            f"constrain is {short_repr(given)}, which is not a Grammar and has no {', '.join(lacks) or 'state'}; give "
            "Grammar.json_schema(...), .regex, .lark or .choices, or an object with mask(), accept() and rollback()"
        )
    objects.append(number := add(given))
    name = type(given).__name__[:80]
    return {"object": number, "copy": hasattr(given, "copy"), "name": name if name.isidentifier() else "Constraint"}


def _grammar_json(grammar: Grammar) -> list[Any]:
    return [grammar.kind, grammar.text, grammar.compact]


def _drafter(given: Any, add: Any, objects: list[int]) -> Any:
    if given is None:
        return None
    name = type(given).__name__
    if type(given).__module__.startswith("headway."):
        if name not in OURS:
            raise Unsupported(f"{name} drafts with an engine of this process; over a connection use PromptLookup()")
        kind, fields = OURS[name]
        return {kind: {"adaptive": given.adaptive, **{own: getattr(given, at) for at, own in fields.items()}}}
    if isinstance(given, type) or not all(callable(getattr(given, verb, None)) for verb in ("draft", "accept")):
        raise WrongType(
            f"speculate is {short_repr(given)}; give PromptLookup(), OwnLayers(n), or an object with "
            "draft(tokens, limit) and accept(tokens)"
        )
    objects.append(number := add(given))
    return {"object": number, "copy": hasattr(given, "copy"), "adaptive": bool(getattr(given, "adaptive", True))}


def _drop(engine: Any, ahead: _Ahead, objects: list[int]) -> None:
    """A generation was let go of."""
    engine._close_inbox(ahead.number, objects)
    engine._connection.tell_later("generation.drop", generation=ahead.number, taken=ahead.taken)
