"""The verbs of generations: see `verbs.py`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, InvalidInput
from headway.base.specs.generation import parameters_of
from headway.base.text import short_repr
from headway.program.constraints.grammar import Grammar
from headway.program.generation.sequences.sequences import Generations
from headway.program.generation.speculation.draft_model import OwnLayers
from headway.program.generation.speculation.prompt_lookup import PromptLookup
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import mask_of, sampler_of
from headway.server.sessions.callables import (
    Caller,
    ClientConstraint,
    client_constraint,
    client_drafter,
    logits_hook,
)
from headway.server.sessions.generations import PreparedStep, ServedGeneration, step_json
from headway.server.sessions.passes import adapter_argument, probe_argument
from headway.server.sessions.verbs import taken_step, verb

if TYPE_CHECKING:
    from headway.program.generation.steps import Prepared
    from headway.server.sessions.session import Session

OTHERS = {"sampler", "stop", "constrain", "probe", "attention_mask", "prepare", "logits", "adapter", "speculate"}
PLAIN = {parameter.name for parameter in parameters_of("generate")} - OTHERS  # numbers, flags and words


@verb
def generation_new(session: Session, context: int, generation: int, options: dict[str, Any]) -> dict[str, Any]:
    own = session.context(context)
    if not isinstance(generation, int) or generation in session.generations:
        raise BadMessage(f"{short_repr(generation)} is not a new number of a generation")
    if len(session.generations) >= session.serving.settings.max_contexts:
        raise InvalidInput(f"this session has {len(session.generations)} generations; let go of some")
    arguments, constraint = _arguments(session, options)
    running = own.generate(**arguments)
    served = ServedGeneration(running, constraint, partial(_send_step, session, generation))
    session.generations[generation] = served
    return {"several": isinstance(running, Generations), "seed": running.seed, "repr": repr(running)}


def _send_step(session: Session, generation: int, message: dict[str, Any]) -> None:
    session.send({**message, "generation": generation})


def _arguments(session: Session, options: Any) -> tuple[dict[str, Any], ClientConstraint | None]:
    """The arguments of `ctx.generate`, and the client's own constraint among them."""
    unknown = sorted(set(options) - PLAIN - OTHERS) if isinstance(options, dict) else [options]
    if unknown:
        raise BadMessage(f"generate has no option {short_repr(unknown[0])}")
    caller, engine = session.caller, session.engine
    arguments = {name: value for name, value in options.items() if name in PLAIN}
    if (given := options.get("sequence_bias")) is not None:
        if not isinstance(given, list):
            raise BadMessage(f"sequence_bias is {short_repr(given)}; it must be a list of sequences with values")
        arguments["sequence_bias"] = [tuple(pair) if isinstance(pair, list) else pair for pair in given]
    if (given := options.get("sampler")) is not None:
        arguments["sampler"] = sampler_of(given)
    if (given := options.get("stop")) is not None:
        arguments["stop"] = given
    if (given := options.get("attention_mask")) is not None:
        arguments["attention_mask"] = mask_of(given)
    arguments["probe"] = probe_argument(options.get("probe"))
    arguments["adapter"] = adapter_argument(session.adapters, options.get("adapter"))
    constraint = None
    if (given := options.get("constrain")) is not None:
        arguments["constrain"] = constraint_given = _constraint(caller, given, engine.vocab_size)
        constraint = constraint_given if isinstance(constraint_given, ClientConstraint) else None
    if (given := options.get("speculate")) is not None:
        arguments["speculate"] = _drafter(caller, given)
    if (of := options.get("logits")) is not None:
        arguments["logits"] = logits_hook(caller, of)
    if (of := options.get("prepare")) is not None:
        arguments["prepare"] = _prepare_hook(session, of)
    return arguments, constraint


def _constraint(caller: Caller, given: Any, vocab: int) -> Any:
    if isinstance(given, dict) and "grammar" in given:
        return grammar_of(given["grammar"])
    return client_constraint(caller, given, vocab)


def grammar_of(given: Any) -> Grammar:
    """The grammar of its JSON, checked as when it is created."""
    match given:
        case ["regex", str(text), False]:
            return Grammar.regex(text)
        case ["lark", str(text), False]:
            return Grammar.lark(text)
        case ["choices", str(text), False]:
            try:
                choices = json.loads(text)
            except (ValueError, RecursionError):
                raise BadMessage(f"the choices {short_repr(text)} are not a list in JSON") from None
            return Grammar.choices(choices)
        case ["json", str(text), bool(compact)]:
            Grammar.json_schema(text)  # raises; the text is one that was checked and rewritten before
            return Grammar("json", text, compact)
    raise BadMessage(f"{short_repr(given)} is not a grammar; see docs/protocol.md")


def _drafter(caller: Caller, given: Any) -> Any:
    match given:
        case {"prompt_lookup": dict(options)}:
            kind: Any = PromptLookup
        case {"own_layers": dict(options)}:
            kind = OwnLayers
        case _:
            return client_drafter(caller, given)
    try:
        return kind(**options)
    except TypeError as error:
        if isinstance(error, HeadwayError):
            raise
        raise BadMessage(f"the drafter {short_repr(given)}: {error}") from None


def _prepare_hook(session: Session, of: int) -> Callable[[Prepared[Any]], Awaitable[None]]:
    """The client's hook before every pass: it returns the operations to add to the pass."""

    async def hook(prepared: Prepared[Any]) -> None:
        served = session.generation(session.running)
        step = PreparedStep(prepared, served.context)
        operations = await session.caller.ask(of, "prepare", len(step.handles))
        served.hooked = step
        step.build(operations, {}, session.adapters)

    return hook


@verb
def generation_pull(session: Session, generation: int, upto: int, taken: int) -> None:
    try:
        served = session.generation(generation)
        session.settle_passes(served.context)
        if served.pull(upto, taken):
            served.task = session.start(session.pump(generation, served))
    except BadMessage:
        raise
    except HeadwayError as error:  # the client waits for a step, not for a reply
        session.send({"type": "step", "generation": generation, "epoch": None, "error": session.error(error)})


@verb
async def generation_settle(session: Session, generation: int, taken: int, epoch: int) -> None:
    await session.generation(generation).settle(taken, epoch)


@verb
def generation_collect(
    session: Session, *, generation: int, what: str, taken: int, epoch: int, schema: Any
) -> Awaitable[dict[str, Any]]:
    served = session.generation(generation)
    session.settle_passes(served.context)

    async def collected() -> dict[str, Any]:
        await served.settle(taken, epoch, back=False)
        with session.serving.queue_slot(session.tenant):
            if schema is not None:
                await served.generation.json(grammar_of(schema))
            return await served.collect(what)

    return collected()


@verb
def generation_sequences(session: Session, generation: int) -> Awaitable[dict[str, Any]]:
    served = session.generation(generation)
    session.settle_passes(served.context)

    async def found() -> dict[str, Any]:
        with session.serving.queue_slot(session.tenant):
            return await served.sequences()

    return found()


@verb
def generation_contexts(session: Session, generation: int, contexts: list[int]) -> Awaitable[int]:
    served = session.generation(generation)
    several = served.generation
    if not isinstance(several, Generations):
        raise InvalidInput("this generation has one sequence, in its own context")
    if not isinstance(contexts, list) or len(set(map(str, contexts))) < len(contexts):
        raise BadMessage(f"{short_repr(contexts)} are not new numbers of contexts")
    for number in contexts:
        session.check_number(number)
    session.settle_passes(served.context)

    async def held() -> int:
        with session.serving.queue_slot(session.tenant):
            _, *others = await several.contexts()
        try:
            if len(contexts) < len(others):
                raise BadMessage(f"{len(others)} contexts need a number each")
            for number, context in zip(contexts, others, strict=False):
                session.hold(number, context)
        except BaseException:
            for number, context in zip(contexts, others, strict=False):
                if session.contexts.get(number) is context:
                    del session.contexts[number]
            for context in others:
                context.release()
            raise
        return len(others)

    return held()


@verb
def generation_state(session: Session, generation: int) -> Awaitable[dict[str, Any]]:
    served = session.generation(generation)

    async def state() -> dict[str, Any]:
        state = served.state()
        if served.constraint is not None and served.constraint.is_behind:
            await served.constraint.settle_async()
        return state

    return state()


@verb
def generation_repr(session: Session, generation: int) -> str:
    return repr(session.generation(generation).generation)


@verb
def generation_accept(
    session: Session, generation: int, tokens: list[int], followed: bool
) -> Awaitable[dict[str, Any]]:
    served = session.generation(generation)

    async def accepted() -> dict[str, Any]:
        if not followed:
            await served.ready()
        step = served.accept(tokens, followed=followed)
        return {"step": step_json(step), **served.state()}

    return accepted()


@verb
def generation_forced(session: Session, generation: int) -> Awaitable[list[int]]:
    served = session.generation(generation)

    async def forced() -> list[int]:
        one = served.one()
        await served.ready()
        return one.forced()

    return forced()


@verb
def generation_fork(session: Session, generation: int, fork: int, context: int, seed: int | None) -> dict[str, Any]:
    session.check_new(context)
    if not isinstance(fork, int) or fork in session.generations:
        raise BadMessage(f"{short_repr(fork)} is not a new number of a generation")
    served = session.generation(generation)
    twin = served.generation.fork(seed=seed)
    session.hold(context, twin.context)
    send = partial(_send_step, session, fork)
    session.generations[fork] = served.forked(twin, send)
    constraint = session.generations[fork].constraint
    own = None if constraint is None or constraint is served.constraint else constraint.number
    return {"seed": twin.seed, "finish": twin.finish, "object": own}


@verb
def generation_reseed(session: Session, generation: int, seed: int | None) -> int:
    return session.generation(generation).generation.reseed(seed).seed


@verb
def generation_resume(session: Session, generation: int, max_tokens: int | None) -> None:
    session.generation(generation).one().resume(max_tokens)


@verb
def generation_prepare(session: Session, generation: int, prepared: int) -> Awaitable[None]:
    served = session.generation(generation)

    async def made() -> None:
        one = served.one()
        if not isinstance(prepared, int) or len(session.prepared) >= session.serving.settings.max_contexts:
            raise InvalidInput("too many steps are prepared; take them")
        session.prepared[prepared] = PreparedStep(await one.prepare(), served.context)

    return made()


@verb
def generation_take(
    session: Session, generation: int, prepared: int, operations: list[Any]
) -> Awaitable[dict[str, Any]]:
    served, step = session.generation(generation), taken_step(session, prepared)
    step.build(operations, session.passes.get(step.context, {}), session.adapters)

    async def taken() -> dict[str, Any]:
        taken = await step.prepared.take()
        if served.constraint is not None:
            served.constraint.finish()
        return {"step": step_json(served.shown(taken)), "pass": step.result(), **served.state()}

    return taken()


@verb
async def generation_drop(session: Session, generation: int, taken: int) -> None:
    """The client's program has let go of it; steps that it has not taken are undone."""
    served = session.generations.pop(generation, None)
    if served is not None:
        await served.settle(taken, 0)
