"""The responses and conversations that are kept: whose, how long, how large; and the contexts that keep them warm.

A response, and so a conversation (`conversations`), belongs to the key that made it: no other key can see, continue,
cancel or delete it, or push it out. Each key keeps at most `max_stored_responses` of both and `max_stored_bytes`; the
oldest go first, and each goes after `stored_seconds`. Used only on the event loop.

The context of a response holds the tokens of its prompt and its output, so that the next turn computes only what is
new. It is a snapshot of the engine, the first that gives way when pages run out; without it the next turn computes its
prompt again. Those of one model hold at most a part of its KV cache, the least recently used go first; they are gone
when it is unloaded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError
from headway.base.text import short_repr
from headway.program.context import Context
from headway.program.engine import Engine
from headway.server.api.plan import RequestPlan
from headway.server.api.request_schema import ChatMessage
from headway.server.errors import ApiError
from headway.server.keys import Tenant
from headway.server.responses.conversations import StoredConversation
from headway.server.responses.output import ApprovedCall
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
    approvals: Mapping[str, ApprovedCall] = field(default_factory=dict)  # asked for, by the ids of these requests
    task: asyncio.Task[None] | None = None  # of a background response that is under way
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.conversation_bytes + self.response_bytes


@dataclass(frozen=True, eq=False)
class WarmContext:
    """What a snapshot was computed under, and its pages. It serves only requests to the same engine, of the same salt
    and adapters."""

    engine: Engine
    salt: str
    adapters: tuple[tuple[str, float], ...]
    pages: int


class ResponseStore:
    """The stored responses of one server, by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._kept: dict[
            str, OrderedDict[str, StoredResponse | StoredConversation]
        ] = {}  # by the key's name, oldest first
        self._warm: OrderedDict[str, WarmContext] = OrderedDict()  # by id, least recently used first

    # -- responses -------------------------------------------------------------------------------------------------

    def get(self, tenant: Tenant, id: str) -> StoredResponse:
        """A response of this key; raises a 404 for any other id, and does not say whether it is somebody else's."""
        stored = self._kept.get(tenant.name, {}).get(id)
        if not isinstance(stored, StoredResponse):
            raise ApiError(
                404,
                f"there is no response {short_repr(id)}; it was never stored, or was deleted, or its time is over",
                param="response_id",
                code="response_not_found",
            )
        return stored

    def conversation(self, tenant: Tenant, id: str) -> StoredConversation:
        """A conversation of this key, which counts as used; raises a 404 for any other id."""
        stored = self._kept.get(tenant.name, {}).get(id)
        if not isinstance(stored, StoredConversation):
            raise ApiError(
                404,
                f"there is no conversation {short_repr(id)}; it never was, or was deleted, or its time is over",
                param="conversation",
                code="conversation_not_found",
            )
        self.add(tenant, stored)
        return stored

    def has(self, tenant: Tenant, conversation: StoredConversation) -> bool:
        """Whether a conversation is still kept."""
        return self._kept.get(tenant.name, {}).get(conversation.id) is conversation

    def add(self, tenant: Tenant, stored: StoredResponse | StoredConversation) -> None:
        """Keep a response or a conversation from now on; the oldest of the same key make room for it."""
        own = self._kept.setdefault(tenant.name, OrderedDict())
        own[stored.id] = stored
        own.move_to_end(stored.id)
        if stored.timer is not None:
            stored.timer.cancel()
        stored.timer = asyncio.get_running_loop().call_later(
            self._settings.stored_seconds, self._drop, tenant.name, stored.id
        )
        while len(own) > 1 and self._is_full(own.values()):
            self._drop(tenant.name, next(iter(own)))

    def delete(self, tenant: Tenant, id: str) -> None:
        """Forget a response; one that is under way is cancelled."""
        self.get(tenant, id)
        self._drop(tenant.name, id)

    def delete_conversation(self, tenant: Tenant, id: str) -> None:
        """Forget a conversation."""
        self.conversation(tenant, id)
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
            limit = int(plan.engine.pages * WARM_SHARE)
            if previous is not None:
                self._cool(previous)
            while (own := self._of(plan.engine)) and sum(warm.pages for warm in own.values()) + pages > limit:
                self._cool(next(iter(own)))
            if pages > limit:
                return
            try:
                context.save(id)
            except HeadwayError:  # there are no pages for it now; the conversation itself is kept
                return
            self._warm[id] = WarmContext(plan.engine, plan.salt, _digests(plan), pages)

    def open_warm(self, id: str, plan: RequestPlan) -> Context | None:
        """A fork of a response's context, if it was computed under the same salt and adapters."""
        warm = self._warm.get(id)
        if warm is None or warm.engine is not plan.engine:
            return None
        if (warm.salt, warm.adapters) != (plan.salt, _digests(plan)):
            return None
        self._warm.move_to_end(id)
        try:
            return plan.engine.open(id)
        except HeadwayError:
            return None

    def _cool(self, id: str) -> None:
        if (warm := self._warm.pop(id, None)) is not None:
            warm.engine.delete(id)

    def cool_engine(self, engine: Engine) -> None:
        """Let go of an engine that is about to be closed: what continues its responses computes its prompt again."""
        for id in self._of(engine):
            del self._warm[id]

    def _of(self, engine: Engine) -> dict[str, WarmContext]:
        return {id: warm for id, warm in self._warm.items() if warm.engine is engine}


def _digests(plan: RequestPlan) -> tuple[tuple[str, float], ...]:
    return tuple((adapter.digest, scale) for adapter, scale in plan.adapters)
