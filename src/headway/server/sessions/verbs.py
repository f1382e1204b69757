"""The verbs of a session: each is a function of the session and the arguments of a request, as `docs/protocol.md` lists
them. What one returns is the reply; an awaitable is awaited concurrently with the requests that follow.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.base.errors import Closed, HeadwayError, InvalidInput, SnapshotError
from headway.program.context import Context
from headway.remote.codec import BadMessage
from headway.remote.values import mask_of
from headway.server.sessions.generations import PreparedStep
from headway.server.sessions.passes import ServedPass, adapter_argument

if TYPE_CHECKING:
    from headway.server.sessions.session import Session

VERBS: dict[str, Callable[..., Any]] = {}
WAITING = {  # may wait for pages or the disk, so they run in a thread
    "engine.open", "engine.take", "engine.encode", "engine.decode", "context.fill", "context.say", "context.save",
    "pages.discard", "pages.keep", "pages.append",
}  # fmt: skip


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """A verb: `context_fill` is context.fill."""
    VERBS[function.__name__.replace("_", ".", 1)] = function
    return function


# --- the session


@verb
async def session_cancel(session: Session, request: int) -> None:
    """The client no longer waits for a request: undo what is not done."""
    task = session.requests.get(request)
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


# --- the engine


@verb
def engine_stats(session: Session) -> dict[str, Any]:
    return asdict(session.engine.stats())


@verb
def engine_encode(session: Session, text: str, special: bool) -> list[int]:
    return session.engine.tokenizer.encode(text, special=special)


@verb
def engine_decode(session: Session, ids: list[int], skip_special: bool) -> str:
    return session.engine.tokenizer.decode(ids, skip_special=skip_special)


@verb
def engine_token(session: Session, id: int) -> list[Any]:
    tokenizer = session.engine.tokenizer
    return [tokenizer.token_text(id), list(tokenizer.token_bytes(id))]


@verb
def engine_adapters(session: Session) -> dict[str, float]:
    return {name: served.scale for name, served in session.serving.adapters.names.items()}


@verb
def engine_open(session: Session, name: str, context: int) -> bool:
    return _opened(session, context, session.engine.open, name)


@verb
def engine_take(session: Session, name: str, context: int) -> bool:
    return _opened(session, context, session.engine.take, name)


@verb
def engine_delete(session: Session, name: str) -> bool:
    session.serving.sessions.forget_snapshot(session.tenant, name)
    return session.engine.delete(_own_name(session, name))


def _opened(session: Session, number: Any, open: Callable[[str], Context | None], name: Any) -> bool:
    own = _own_name(session, name)
    try:
        context = open(own)
    except SnapshotError as error:
        raise SnapshotError(str(error).replace(own, name)) from None
    if context is not None:
        session.hold(number, context)
    return context is not None


def _own_name(session: Session, name: Any) -> str:
    """The name under which the engine has a client's snapshot: names belong to the key."""
    if not isinstance(name, str) or not session.tenant.salt:
        return name
    from headway.program.snapshots import check_name

    check_name(name)
    return hashlib.sha256(f"{session.tenant.salt} {name}".encode()).hexdigest()


# --- contexts


@verb
def context_new(
    session: Session,
    *,
    context: int,
    seed: int | None,
    priority: float,
    salt: str,
    token_budget: int | None,
    deadline: float | None,
) -> None:
    session.check_number(context)
    try:
        session.check_new(context)
        session.check_bid(priority)
        if not isinstance(salt, str):
            raise InvalidInput(f"salt is {salt!r:.80}; it must be a string")
        own = session.tenant.salt
        made = session.engine.context(
            seed=seed,
            priority=priority,
            salt=f"{own} {salt}" if own else salt,
            token_budget=token_budget,
            deadline=deadline,
        )
    except HeadwayError as error:
        session.contexts[context] = error  # for what follows: the client does not wait for this reply
        raise
    session.contexts[context] = made


@verb
def context_fill(session: Session, context: int, text: Any, special: bool) -> None:
    session.context(context).fill(text, special=special)


@verb
def context_say(session: Session, context: int, role: str, text: str) -> None:
    if role not in ("system", "user", "assistant"):
        raise BadMessage(f"{role!r:.40} is not a role")
    getattr(session.context(context), role)(text)


@verb
def context_cue(session: Session, context: int) -> None:
    session.context(context).cue()


@verb
def context_seal(session: Session, context: int) -> None:
    session.context(context).seal()


@verb
def context_bid(session: Session, context: int, bid: float) -> None:
    session.check_bid(bid)
    session.context(context).set_bid(bid)


@verb
def context_state(session: Session, context: int) -> dict[str, Any]:
    own = session.context(context)
    return {
        "seq_len": own.seq_len,
        "pending": list(own.pending),
        "next_position": own.next_position,
        "cached_tokens": own.cached_tokens,
        "seed": own.seed,
    }


@verb
def context_tokens(session: Session, context: int) -> list[int]:
    return list(session.context(context).tokens)


@verb
def context_messages(session: Session, context: int) -> list[dict[str, Any]]:
    return [dict(message) for message in session.context(context).messages]


@verb
def context_repr(session: Session, context: int) -> str:
    found = session.contexts.get(context)
    return repr(found) if isinstance(found, Context) else "<Context: released>"


@verb
def context_positions(session: Session, context: int) -> dict[str, Any]:
    """For a mask's rule: the positions of the slots, and how many tokens are pending."""
    own = session.context(context)
    with own.engine._lock:
        pending = len(own.pending)  # first: it takes back what runs ahead
        return {"positions": list(own._table.positions), "pending": pending, "next": own.next_position}


@verb
def context_fork(session: Session, context: int, fork: int) -> None:
    session.check_new(fork)
    session.hold(fork, session.context(context).fork())


@verb
def context_truncate(session: Session, context: int, n: int) -> None:
    session.context(context).truncate(n)


@verb
def context_save(session: Session, context: int, name: str, durable: bool) -> None:
    own = session.context(context)
    internal = _own_name(session, name)
    with session.serving.sessions.snapshot(session.tenant, name):
        own.save(internal, durable=durable)


@verb
def context_release(session: Session, context: int) -> None:
    found = session.contexts.pop(context, None)
    if isinstance(found, Context):
        for served in session.passes.pop(found, {}).values():
            served.settle()
        found.release()


@verb
def context_flush(session: Session, context: int, attention_mask: Any, adapter: Any) -> Awaitable[None]:
    mask = None if attention_mask is None else mask_of(attention_mask)
    own = session.context(context)
    return own.flush(mask, adapter_argument(session.serving.adapters.names, adapter))


# --- pages


@verb
def pages_state(session: Session, context: int) -> dict[str, Any]:
    inner = session.context(context).inner()
    return {
        "committed": inner.committed_page_count,
        "working": inner.working_page_count,
        "working_tokens": inner.working_page_token_count,
        "pages": [[page.page, page.state, page.holders] for page in inner.pages],
    }


@verb
def pages_reserve(session: Session, context: int, n: int) -> None:
    session.context(context).inner().reserve_working_pages(n)


@verb
def pages_commit(session: Session, context: int, k: int) -> None:
    session.context(context).inner().commit_working_pages(k)


@verb
def pages_release(session: Session, context: int, n: int) -> None:
    session.context(context).inner().release_working_pages(n)


@verb
def pages_truncate(session: Session, context: int, n: int) -> None:
    session.context(context).inner().truncate_working_page_tokens(n)


@verb
def pages_discard(session: Session, context: int, start: int, n: int) -> None:
    session.context(context).inner().discard_pages(start, n)


@verb
def pages_keep(session: Session, context: int, slots: list[int], start: int | None) -> None:
    session.context(context).inner().keep_slots(slots, start)


@verb
def pages_append(session: Session, context: int, other: int, pages: list[int], shift: int) -> None:
    session.context(context).inner().append_from(session.context(other), pages, shift)


# --- passes


@verb
def pass_execute(
    session: Session, context: int, number: int, operations: list[Any], prepared: int | None = None
) -> Awaitable[dict[str, Any]]:
    served = _built(session, context, operations, prepared)
    execution = served.execute()
    session.keep_pass(number, served)

    async def result() -> dict[str, Any]:
        with session.serving.queue_slot(session.tenant):
            await execution.wait()
        try:
            return served.result()
        except CancelledError:
            raise Closed("this pass was cancelled") from None

    return result()


@verb
def pass_cancel(session: Session, number: int) -> None:
    served = session.find_pass(number)
    if served is not None and served.execution is not None:
        served.execution.cancel()


def _built(session: Session, context: Any, operations: Any, prepared: int | None) -> ServedPass:
    """A new pass, or one that a generation has prepared, with the client's operations."""
    if prepared is None:
        own = session.contexts.get(context)
        own = own if isinstance(own, Context) else session.context(context)
        served: ServedPass = ServedPass(own, own.forward())
    else:
        served = taken_step(session, prepared)
    kept = session.passes.get(served.context, {})
    served.build(operations, kept, session.serving.adapters.names)
    for number, earlier in kept.items():
        if not any(operation[:2] == ["feed", number] for operation in operations if isinstance(operation, list)):
            earlier.settle()
    return served


def taken_step(session: Session, number: Any) -> PreparedStep:
    """A step that a generation has prepared, which can be taken once."""
    found = session.prepared.pop(number, None)
    if found is None:
        raise InvalidInput(f"no step is prepared under {number!r:.40}; it was taken, or its pass executed")
    return found
