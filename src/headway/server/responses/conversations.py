"""Conversations of OpenAI's Responses API: items that belong together, to which responses add theirs.

A conversation is stored as responses are (`store`): with its key's responses it shares their bounds, and it goes when
nobody has used it for `stored_seconds`. The items of a conversation are always ones that a chat can be made of: what
would make it another is refused. A turn sees the items that are there when it begins, and adds its input and output
together when it is complete; turns at the same time add theirs one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.text import short_repr
from headway.server.api.request_schema import ChatMessage
from headway.server.api.streaming import json_bytes
from headway.server.errors import ApiError, bad_request
from headway.server.responses.items import PREFIXES, chat_messages, listed_item
from headway.server.responses.output import new_id
from headway.server.responses.request_schema import InputItem
from headway.server.settings import ServerSettings


@dataclass(frozen=True, eq=False)
class Earlier:
    """A conversation as a turn finds it."""

    conversation: StoredConversation
    messages: tuple[ChatMessage, ...]
    conversation_bytes: int

    @property
    def id(self) -> str:
        return self.conversation.id


@dataclass(eq=False)
class StoredConversation:
    """Items, as clients sent or got them, and the messages of a chat that they are."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: new_id("conv"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    items: dict[str, InputItem] = field(default_factory=dict)  # by id, oldest first
    messages: tuple[ChatMessage, ...] = ()
    items_bytes: int = 0
    task: asyncio.Task[None] | None = None  # never: the store ends those of what it drops
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.items_bytes + len(json_bytes(dict(self.metadata)))

    def earlier(self) -> Earlier:
        """The conversation as it is now."""
        return Earlier(self, self.messages, self.items_bytes)

    def fields(self) -> dict[str, Any]:
        """The conversation as clients get it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }

    def listed(self, ids: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Its items, or some of them, as clients get them."""
        return [listed_item(self.item(id), 0, self.id) for id in (self.items if ids is None else ids)]

    def item(self, id: str) -> InputItem:
        """An item; raises a 404 for any other id."""
        if id not in self.items:
            raise ApiError(
                404,
                f"the conversation has no item {short_repr(id)}",
                param="item_id",
                code="conversation_item_not_found",
            )
        return self.items[id]

    def add(self, new: Sequence[InputItem], settings: ServerSettings | None) -> list[str]:
        """Add items and return their ids. They must fit: within the limits of `settings`, unless it is None."""
        messages = (*self.messages, *chat_messages(new, self.messages))
        added = {}
        for item in new:
            kept = item.id if item.id and item.id not in self.items and item.id not in added else None
            id = kept or new_id(PREFIXES[item.type or "message"])
            added[id] = item.model_copy(update={"id": id})
        size = self.items_bytes + items_size(tuple(added.values()))
        if settings is not None:
            _check_limits(len(messages), size, settings)
        self.items |= added
        self.messages, self.items_bytes = messages, size
        return list(added)

    def remove(self, id: str) -> None:
        """Remove an item; a call whose output is there must go after it."""
        gone = self.item(id)
        left = {other: item for other, item in self.items.items() if other != id}
        try:
            messages = chat_messages(tuple(left.values()))
        except ApiError as error:
            raise bad_request(
                f"item {short_repr(id)} is a call whose output is in the conversation; delete that first", "item_id"
            ) from error
        self.items, self.messages = left, messages
        self.items_bytes -= items_size([gone])


def items_size(items: Sequence[InputItem]) -> int:
    """The bytes of items."""
    return sum(map(_item_size, items))


def _item_size(item: InputItem) -> int:
    """The bytes of one item; each of its parts is written alone, since there may be thousands."""
    if not isinstance(item.content, list):
        return len(item.model_dump_json(exclude_none=True))
    parts = sum(len(part.model_dump_json(exclude_none=True)) + 1 for part in item.content)
    return len(item.model_copy(update={"content": []}).model_dump_json(exclude_none=True)) + parts


def _check_limits(messages: int, size: int, settings: ServerSettings) -> None:
    if messages > settings.max_messages:
        raise bad_request(
            f"the conversation would have {messages} messages; at most {settings.max_messages} are allowed: begin "
            "another one",
            "items",
            "too_many",
        )
    if size > settings.max_stored_bytes:
        raise bad_request(
            f"the conversation would have {size} bytes; at most {settings.max_stored_bytes} can be stored: begin "
            "another one",
            "items",
            "too_large",
        )
