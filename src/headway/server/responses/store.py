"""The responses that are kept: whose they are, how long, how large; and the contexts that keep a conversation warm.

A response belongs to the key that made it: no other key can see, continue, cancel or delete it, or push it out. Each
key keeps at most `max_stored_responses` and `max_stored_bytes`; the oldest go first, and each goes after
`stored_seconds`. Used only on the event loop.

The context of a response holds the tokens of its prompt and its output, so that the next turn computes only what is
new. It is a snapshot of the engine, the first that gives way when pages run out; without it the next turn computes its
prompt again. All of them together hold at most a part of the KV cache, the least recently used go first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.base.errors import HeadwayError
from headway.program.context import Context
from headway.program.engine import Engine
from headway.server.errors import ApiError
from headway.server.keys import Tenant
from headway.server.openai.plan import RequestPlan
from headway.server.openai.request_schema import ChatMessage
from headway.server.settings import ServerSettings

WARM_SHARE = 0.25  # of the KV cache


@dataclass(eq=False)
class StoredResponse:
    """One response: what clients get of it, and the conversation that another response may continue."""

    id: str
    response: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: tuple[ChatMessage, ...]  # of the whole conversation, without instructions
    conversation_bytes: int
    response_bytes: int
    task: asyncio.Task[None] | None = None  # of a background response that is under way
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.conversation_bytes + self.response_bytes


@dataclass(frozen=True)
class WarmContext:
    """What a snapshot was computed under, and its pages. It serves only requests of the same salt and adapters."""

    salt: str
    adapters: tuple[tuple[str, float], ...]
    pages: int


class ResponseStore:
    """The stored responses of one server, by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}  # by the key's name, oldest first
        self._warm: OrderedDict[str, WarmContext] = OrderedDict()  # by the response's id, least recently used first
        self._engine: Engine | None = None

    # -- responses -------------------------------------------------------------------------------------------------

    def get(self, tenant: Tenant, id: str) -> StoredResponse:
        """A response of this key; raises a 404 for any other id, and does not say whether it is somebody else's."""
        stored = self._kept.get(tenant.name, {}).get(id)
        if stored is None:
            raise ApiError(
                404,
                f"there is no response {id!r:.80}; it was never stored, or was deleted, or its time is over",
                param="response_id",
                code="response_not_found",
            )
        return stored

    def add(self, tenant: Tenant, stored: StoredResponse) -> None:
        """Keep a response; the oldest of the same key make room for it."""
        own = self._kept.setdefault(tenant.name, OrderedDict())
        own[stored.id] = stored
        stored.timer = asyncio.get_running_loop().call_later(
            self._settings.stored_seconds, self._drop, tenant.name, stored.id
        )
        while len(own) > 1 and self._is_full(own.values()):
            self._drop(tenant.name, next(iter(own)))

    def delete(self, tenant: Tenant, id: str) -> None:
        """Forget a response; one that is under way is canceled."""
        self.get(tenant, id)
        self._drop(tenant.name, id)

    def close(self) -> None:
        """Forget everything."""
        for name, own in list(self._kept.items()):
            for id in list(own):
                self._drop(name, id)

    def _is_full(self, own: Any) -> bool:
        most = self._settings
        return len(own) > most.max_stored_responses or sum(one.size for one in own) > most.max_stored_bytes

    def _drop(self, name: str, id: str) -> None:
        own = self._kept.get(name, OrderedDict())
        stored = own.pop(id, None)
        if not own:
            self._kept.pop(name, None)
        if stored is None:
            return
        if stored.timer is not None:
            stored.timer.cancel()
        if stored.task is not None:
            stored.task.cancel()
        self._cool(id)

    # -- warm contexts ---------------------------------------------------------------------------------------------

    def keep_warm(self, id: str, context: Context, plan: RequestPlan, previous: str | None) -> None:
        """Keep the context of a response, instead of that of the response it continues. Releases the context."""
        with context:
            pages = -(-len(context.tokens) // context.page_size)
            self._engine, limit = plan.engine, int(plan.engine.pages * WARM_SHARE)
            if previous is not None:
                self._cool(previous)
            while self._warm and sum(warm.pages for warm in self._warm.values()) + pages > limit:
                self._cool(next(iter(self._warm)))
            if pages > limit:
                return
            try:
                context.save(id)
            except HeadwayError:  # there are no pages for it now; the conversation itself is kept
                return
            self._warm[id] = WarmContext(plan.salt, _digests(plan), pages)

    def open_warm(self, id: str, plan: RequestPlan) -> Context | None:
        """A fork of a response's context, if it was computed under the same salt and adapters."""
        warm = self._warm.get(id)
        if warm is None or (warm.salt, warm.adapters) != (plan.salt, _digests(plan)):
            return None
        self._warm.move_to_end(id)
        try:
            return plan.engine.open(id)
        except HeadwayError:
            return None

    def _cool(self, id: str) -> None:
        if self._warm.pop(id, None) is not None and self._engine is not None:
            self._engine.delete(id)


def _digests(plan: RequestPlan) -> tuple[tuple[str, float], ...]:
    return tuple((adapter.digest, scale) for adapter, scale in plan.adapters)
