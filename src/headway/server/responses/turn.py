"""One turn of a conversation: the response that it continues, its new items, and how it is generated and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from headway.program.context import Context
from headway.server import logs
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.message_job import MessageJob, write_message
from headway.server.openai.chat_plan import ChatPlan
from headway.server.openai.request_schema import ChatMessage
from headway.server.openai.respond import client_error
from headway.server.openai.streaming import json_bytes
from headway.server.responses.items import as_items, chat_messages, listed_item
from headway.server.responses.output import ResponseWriter
from headway.server.responses.request_schema import InputItem, PromptRequest
from headway.server.responses.store import ResponseStore, StoredResponse
from headway.server.serving import AdmittedRequest, Serving
from headway.server.settings import ServerSettings


@dataclass(frozen=True, eq=False)
class Turn:
    """What a request continues, and what it adds."""

    previous: StoredResponse | None
    items: tuple[InputItem, ...]
    new: tuple[ChatMessage, ...]  # the items as messages

    @property
    def earlier(self) -> tuple[ChatMessage, ...]:
        return () if self.previous is None else self.previous.messages

    @property
    def previous_id(self) -> str | None:
        return None if self.previous is None else self.previous.id

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """The turn with its response, as it is kept. A call that was cut off is not in the conversation."""
        calls = ("function_call",)
        whole = [item for item in response["output"] if item["type"] not in calls or item["status"] == "completed"]
        output = tuple(InputItem.model_validate(item) for item in whole)
        size = _size(self.previous, (*self.items, *output))
        listed = [listed_item(item, i, response["id"]) for i, item in enumerate(self.items)]
        messages = (*self.earlier, *self.new)
        return StoredResponse(
            id=response["id"],
            response=response,
            input_items=listed,
            messages=(*messages, *chat_messages(output, messages)),
            conversation_bytes=size,
            response_bytes=len(json_bytes(response)),
        )


def previous_response(body: PromptRequest, store: ResponseStore, tenant: Tenant) -> StoredResponse | None:
    """The response that a request continues."""
    if body.previous_response_id is None:
        return None
    try:
        previous = store.get(tenant, body.previous_response_id)
    except ApiError as error:
        raise ApiError(404, error.message, param="previous_response_id", code=error.code) from error
    if previous.response["status"] not in ("completed", "incomplete"):
        raise bad_request(
            f"the previous response is {previous.response['status']}; it must be completed", "previous_response_id"
        )
    return previous


def read_turn(body: PromptRequest, settings: ServerSettings, previous: StoredResponse | None) -> Turn:
    """A request's items as messages, within the limits of the whole conversation. In a thread."""
    items = as_items(body.input)
    earlier = () if previous is None else previous.messages
    new = chat_messages(items, earlier)
    if len(earlier) + len(new) > settings.max_messages:
        raise bad_request(
            f"the conversation has {len(earlier) + len(new)} messages; at most {settings.max_messages} are allowed: "
            "begin another one",
            "input",
            "too_many",
        )
    size = _size(previous, items)
    if getattr(body, "store", None) is not False and size > settings.max_stored_bytes:
        raise bad_request(
            f"the conversation has {size} bytes; at most {settings.max_stored_bytes} can be stored: pass store: false",
            "store",
            "too_large",
        )
    return Turn(previous, items, new)


def _size(previous: StoredResponse | None, items: Sequence[InputItem]) -> int:
    """The bytes of a conversation."""
    own = sum(len(item.model_dump_json(exclude_none=True)) for item in items)
    return own if previous is None else own + previous.conversation_bytes


class TurnJob:
    """A turn that is being generated."""

    def __init__(
        self, turn: Turn, plan: ChatPlan, writer: ResponseWriter, store: ResponseStore, *, keeps: bool
    ) -> None:
        self._turn, self._plan, self._writer, self._store = turn, plan, writer, store
        self.message = MessageJob(plan, warm=self._warm, keeps=keeps)

    def _warm(self) -> Context | None:
        previous = self._turn.previous
        return None if previous is None else self._store.open_warm(previous.id, self._plan.request)

    def store_at_end(self, tenant: Tenant) -> None:
        """Store the response when it is complete."""

        def keep() -> None:
            stored = self._turn.stored(self._writer.stored())
            self._store.add(tenant, stored)
            self._keep_warm(stored)

        self.message.on_end = keep

    def _keep_warm(self, stored: StoredResponse) -> None:
        if (context := self.message.take_context()) is not None:
            self._store.keep_warm(stored.id, context, self._plan.request, self._turn.previous_id)

    # -- in the background -----------------------------------------------------------------------------------------

    async def start(self, serving: Serving, tenant: Tenant, *, model: str | None) -> dict[str, Any]:
        """Generate in a task of its own; returns the response as it is now. A full queue is a 429 here."""
        async with AsyncExitStack() as stack:
            admitted = await stack.enter_async_context(serving.admit(tenant, tokens=self._plan.tokens, model=model))
            first = self._writer.whole()
            stored = self._turn.stored(first)
            self.message.on_end = lambda: self._complete(stored)
            stored.task = asyncio.create_task(self._work(serving, stored, admitted, stack.pop_all()))
            self._store.add(tenant, stored)
            return first
        raise AssertionError("the stack suppresses no exception")

    def _complete(self, stored: StoredResponse) -> None:
        done = self._turn.stored(self._writer.stored())
        stored.response, stored.messages, stored.response_bytes = done.response, done.messages, done.response_bytes
        stored.conversation_bytes = done.conversation_bytes
        self._keep_warm(stored)

    async def _work(
        self, serving: Serving, stored: StoredResponse, admitted: AdmittedRequest, held: AsyncExitStack
    ) -> None:
        """It ends as requests do: when its time is over, or when the server stops."""
        task, limit = asyncio.current_task(), serving.settings.request_timeout

        def stop(why: ApiError | None) -> None:
            assert task is not None
            task.cancel()

        serving.cancels.add(stop)
        try:
            async with held, asyncio.timeout(limit):
                await write_message(admitted, self.message, self._writer)
        except TimeoutError:
            self._writer.fail(ApiError(504, f"the response took longer than {limit:g} s; ask for fewer tokens"))
        except asyncio.CancelledError:
            self._writer.cancel()
        except Exception as error:
            self._writer.fail(client_error(error, log_text=serving.settings.log_prompts))
        finally:
            serving.cancels.discard(stop)
            stored.response, stored.task = self._writer.stored(), None
            logs.info("background response", status=self._writer.status, tokens=self.message.usage.completion)
