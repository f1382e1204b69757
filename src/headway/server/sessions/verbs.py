"""The verbs of a session: each is a function of the session and the arguments of a request, as `docs/protocol.md` lists
them. What one returns is the reply; an awaitable is awaited concurrently with the requests that follow.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_snapshot_name, check_text
from headway.base.errors import HeadwayError, InvalidInput, SnapshotError
from headway.base.text import short_repr
from headway.program.adapters import mix_of
from headway.program.context import Context
from headway.program.forward import Execution
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import mask_of
from headway.server.sessions.generations import PreparedStep
from headway.server.sessions.passes import ServedPass, adapter_argument

if TYPE_CHECKING:
    from headway.server.sessions.session import Session

VERBS: dict[str, Callable[..., Any]] = {}
WAITING = {  # may wait for pages or the disk, so they run in a thread
    "engine.open", "engine.take", "engine.encode", "engine.decode", "engine.vocabulary", "context.fill", "context.say",
    "context.save", "pages.discard", "pages.keep", "pages.append", "chat.new",
}  # fmt: skip
LISTED = 4096  # ids that are written as a list


class InSlot:
    """Work that has a place in the server's queue before it begins: what is refused in want of one has done nothing."""

    def __init__(self, session: Session, submit: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        with ExitStack() as slot:
            slot.enter_context(session.serving.queue_slot(session.tenant))
            self._work = submit()
            self._slot = slot.pop_all()

    def __await__(self) -> Generator[Any, Any, Any]:
        with self._slot:
            return (yield from self._work.__await__())

    def close(self) -> None:
        """It is dropped before it was awaited."""
        self._work.close()
        self._slot.close()


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
        await asyncio.sleep(0)  # so that its work has begun, and can be undone
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


# --- the engine


@verb
def engine_stats(session: Session) -> dict[str, Any]:
    return asdict(session.engine.stats())


@verb
def engine_encode(session: Session, text: str, special: bool) -> list[int] | np.ndarray:
    """Ids; many of them as an array, which takes no time to write."""
    ids = session.engine.tokenizer.encode(text, special=special)
    return ids if len(ids) <= LISTED else np.asarray(ids, np.int32)


@verb
def engine_decode(session: Session, ids: list[int], skip_special: bool) -> str:
    return session.engine.tokenizer.decode(ids, skip_special=skip_special)


@verb
def engine_token(session: Session, id: int) -> list[Any]:
    tokenizer = session.engine.tokenizer
    return [tokenizer.token_text(id), list(tokenizer.token_bytes(id))]


@verb
def engine_vocabulary(session: Session) -> list[str | None]:
    return session.engine.tokenizer.vocabulary()


@verb
def engine_adapters(session: Session) -> dict[str, float]:
    return {name: served.scale for name, served in session.adapters.items()}


@verb
def engine_open(session: Session, name: str, context: int) -> bool:
    return _opened(session, context, session.engine.open, name)


@verb
def engine_take(session: Session, name: str, context: int) -> bool:
    return _opened(session, context, session.engine.take, name)


@verb
def engine_delete(session: Session, name: str) -> bool:
    own = _own_name(session, name)
    session.serving.sessions.forget_snapshot(session.tenant, name)
    return session.engine.delete(own)


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
    check_snapshot_name(name)
    if not session.tenant.salt:
        return name
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
        check_text(salt, "salt")
        own = session.tenant.salt
        created = session.engine.context(
            seed=seed,
            priority=priority,
            salt=f"{own} {salt}" if own else salt,
            token_budget=token_budget,
            deadline=deadline,
        )
    except HeadwayError as error:
        session.contexts[context] = error  # for what follows: the client does not wait for this reply
        raise
    session.contexts[context] = created


@verb
def context_fill(session: Session, context: int, text: Any, special: bool) -> None:
    session.context(context).fill(text, special=special)


@verb
def context_say(session: Session, context: int, role: str, text: str) -> None:
    if role not in ("system", "user", "assistant"):
        raise BadMessage(f"{short_repr(role)} is not a role")
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
        "text_start": own.text_start,
    }


@verb
def context_tokens(session: Session, context: int) -> list[int]:
    return list(session.context(context).tokens)


@verb
def context_messages(session: Session, context: int) -> list[dict[str, Any]]:
    return [dict(message) for message in session.context(context).messages]


@verb
def context_repr(session: Session, context: int) -> str:
    known = session.contexts.get(context)
    return repr(known) if isinstance(known, Context) else "<Context: released>"


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
    released = session.contexts.pop(context, None)
    if isinstance(released, Context):
        for served in session.passes.pop(released, {}).values():
            served.settle()
        released.release()


@verb
def context_flush(
    session: Session, context: int, number: int, attention_mask: Any, adapter: Any
) -> Awaitable[None] | None:
    mask = None if attention_mask is None else mask_of(attention_mask)
    own = session.context(context)
    mix = mix_of(session.engine, adapter_argument(session.adapters, adapter))
    if not own.pending:
        return own.flush(mask, mix)

    def submit() -> Coroutine[Any, Any, None]:
        session.settle_passes(own)
        served = ServedPass(own, own._flush(mask, mix))
        execution = served.execute()
        session.keep_pass(number, served)
        return flushed(served, execution)

    async def flushed(served: ServedPass, execution: Execution[Any]) -> None:
        await _computed(execution)
        served.result()

    return InSlot(session, submit)


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
    def submit() -> Coroutine[Any, Any, dict[str, Any]]:
        served = _built(session, context, operations, prepared)
        execution = served.execute()
        session.keep_pass(number, served)
        return result(served, execution)

    async def result(served: ServedPass, execution: Execution[Any]) -> dict[str, Any]:
        await _computed(execution)
        return served.result()

    return InSlot(session, submit)


async def _computed(execution: Execution[Any]) -> None:
    """Wait for a pass; a request that is cancelled meanwhile undoes it."""
    try:
        await execution.wait()
    except asyncio.CancelledError:
        execution.cancel()
        raise


@verb
def pass_cancel(session: Session, number: int) -> None:
    served = session.find_pass(number)
    if served is not None and served.execution is not None:
        served.execution.cancel()


def _built(session: Session, context: Any, operations: Any, prepared: int | None) -> ServedPass:
    """A new pass, or one that a generation has prepared, with the client's operations."""
    if prepared is None:
        own = session.context(context)
        served: ServedPass = ServedPass(own, own.forward())
    else:
        served = taken_step(session, prepared)
    kept = session.passes.get(served.context, {})
    served.build(operations, kept, session.adapters)
    if not any(operation[0] == "feed" for operation in operations):  # a chain of passes is undone as one
        session.settle_passes(served.context)
    return served


def taken_step(session: Session, number: Any) -> PreparedStep:
    """A step that a generation has prepared, which can be taken once."""
    prepared = session.prepared.pop(number, None)
    if prepared is None:
        raise InvalidInput(f"no step is prepared under {short_repr(number)}; it was taken, or its pass executed")
    return prepared
