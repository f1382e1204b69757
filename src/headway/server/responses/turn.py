"""One turn of a conversation: the response that it continues, its new items, and how it is generated and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.text import short_repr
from headway.program.context import Context
from headway.server import logs
from headway.server.api.request_schema import ChatMessage
from headway.server.api.respond import client_error
from headway.server.api.streaming import json_bytes
from headway.server.chats.message_job import MessageJob, write_message
from headway.server.chats.plan import ChatPlan
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.models import ModelLease
from headway.server.responses.conversations import Earlier, StoredConversation, items_size
from headway.server.responses.items import as_items, chat_messages, listed_item
from headway.server.responses.output import ApprovedCall, ResponseWriter
from headway.server.responses.request_schema import InputItem, PromptRequest, conversation_id
from headway.server.responses.store import ResponseStore, StoredResponse
from headway.server.responses.tool_loop import ToolLoop, ToolLoopJob
from headway.server.serving import AdmittedRequest, Serving
from headway.server.settings import ServerSettings

CALLS = ("function_call", "custom_tool_call", "mcp_call")
ENDED = ("completed", "failed")


@dataclass(frozen=True, eq=False)
class Turn:
    """What a request continues, and what it adds."""

    previous: StoredResponse | Earlier | None
    items: tuple[InputItem, ...]
    new: tuple[ChatMessage, ...]  # the items as messages
    approved: tuple[ApprovedCall, ...] = ()  # calls that it approves, and that are not made yet

    @property
    def earlier(self) -> tuple[ChatMessage, ...]:
        return () if self.previous is None else self.previous.messages

    @property
    def all_messages(self) -> tuple[ChatMessage, ...]:
        return (*self.earlier, *self.new)

    @property
    def conversation(self) -> StoredConversation | None:
        return self.previous.conversation if isinstance(self.previous, Earlier) else None

    @property
    def previous_id(self) -> str | None:
        return None if self.previous is None else self.previous.id

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """The turn with its response, as it is kept."""
        output = _whole_output(response)
        size = _size(self.previous, (*self.items, *output))
        listed = [listed_item(item, i, response["id"]) for i, item in enumerate(self.items)]
        messages = self.all_messages
        return StoredResponse(
            id=response["id"],
            response=response,
            input_items=listed,
            messages=(*messages, *chat_messages(output, messages)),
            conversation_bytes=size,
            response_bytes=len(json_bytes(response)),
            approvals={**_approvals(self.previous), **_requests((*self.items, *output))},
        )


def _whole_output(response: Mapping[str, Any]) -> tuple[InputItem, ...]:
    """The output of a response as input of the next. A call that was cut off is not in the conversation."""
    whole = [item for item in response["output"] if item["type"] not in CALLS or item["status"] in ENDED]
    return tuple(InputItem.model_validate(item) for item in whole)


def continued(body: PromptRequest, store: ResponseStore, tenant: Tenant) -> StoredResponse | Earlier | None:
    """The response or the conversation that a request continues."""
    conversation = conversation_id(body)
    if conversation is not None and body.previous_response_id is not None:
        raise bad_request("previous_response_id and conversation are both set; pass one of them", "conversation")
    if conversation is not None:
        return store.conversation(tenant, conversation).earlier()
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


def read_turn(body: PromptRequest, settings: ServerSettings, previous: StoredResponse | Earlier | None) -> Turn:
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
    in_conversation = isinstance(previous, Earlier)
    is_kept = getattr(body, "store", None) is not False or in_conversation
    if is_kept and size > settings.max_stored_bytes:
        raise bad_request(
            f"the conversation has {size} bytes; at most {settings.max_stored_bytes} can be stored: "
            + ("begin another one" if in_conversation else "pass store: false"),
            "conversation" if in_conversation else "store",
            "too_large",
        )
    return Turn(previous, items, new, _approved(items, _approvals(previous)))


def _approvals(previous: StoredResponse | Earlier | None) -> Mapping[str, ApprovedCall]:
    """The calls for which a conversation asked for approval, by the ids of these requests."""
    if previous is None:
        return {}
    if isinstance(previous, StoredResponse):
        return previous.approvals
    return _requests(tuple(previous.conversation.items.values()))


def _requests(items: Sequence[InputItem]) -> dict[str, ApprovedCall]:
    asked = [item for item in items if item.type == "mcp_approval_request"]
    return {
        str(item.id): ApprovedCall(str(item.id), item.server_label or "", str(item.name), str(item.arguments))
        for item in asked
    }


def _approved(items: Sequence[InputItem], earlier: Mapping[str, ApprovedCall]) -> tuple[ApprovedCall, ...]:
    """The calls that items approve and do not have."""
    requests = {**earlier, **_requests(items)}
    made = {item.approval_request_id for item in items if item.type == "mcp_call"}
    pending: list[ApprovedCall] = []
    for i, item in enumerate(items):
        if item.type == "mcp_approval_response":
            id = str(item.approval_request_id)
            if id not in requests:  # a call of another kind
                raise bad_request(
                    f"input[{i}].approval_request_id is {short_repr(id)}, which asks for no approval", "input"
                )
            pending += [requests[id]] if item.approve and id not in made else []
        elif pending:
            raise bad_request(
                f"input[{i}] is after an approval of a call, whose output comes first; send it in the next turn",
                "input",
            )
    return tuple(pending)


def _size(previous: StoredResponse | Earlier | None, items: Sequence[InputItem]) -> int:
    """The bytes of a conversation."""
    own = items_size(items)
    return own if previous is None else own + previous.conversation_bytes


class TurnJob:
    """A turn that is being generated."""

    def __init__(
        self,
        turn: Turn,
        plan: ChatPlan,
        writer: ResponseWriter,
        store: ResponseStore,
        *,
        is_stored: bool,
        tools: ToolLoop | None = None,
    ) -> None:
        """`tools` calls those of MCP servers."""
        self._turn, self._plan, self._writer, self._store, self._is_stored = turn, plan, writer, store, is_stored
        keeps = is_stored or turn.conversation is not None
        if tools is None:
            self.message = MessageJob(plan, warm=self._warm, keeps=keeps)
        else:
            self.message = ToolLoopJob(plan, tools, writer.id, warm=self._warm, keeps=keeps)

    def _warm(self) -> Context | None:
        previous = self._turn.previous
        return None if previous is None else self._store.open_warm(previous.id, self._plan.request)

    def store_at_end(self, tenant: Tenant) -> None:
        """Store the response when it is complete, if it is to be; its conversation gets its items."""

        def keep() -> None:
            stored = self._turn.stored(self._writer.stored())
            if self._is_stored:
                self._store.add(tenant, stored)
            self._keep(stored, tenant)

        self.message.on_end = keep

    def _keep(self, stored: StoredResponse, tenant: Tenant) -> None:
        """Add to the conversation, and keep the context: for the conversation, or else for the response."""
        context, conversation = self.message.take_context(), self._turn.conversation
        name = stored.id if self._is_stored else None
        if conversation is not None and self._store.has(tenant, conversation):
            name = conversation.id
            try:
                conversation.add((*self._turn.items, *_whole_output(stored.response)), None)
            except ApiError as error:  # a call was deleted meanwhile, and this turn has its output
                logs.warn("a conversation was changed during a turn, which is not added to it", error=error.message)
            self._store.add(tenant, conversation)
        if context is not None and name is not None:
            self._store.keep_warm(name, context, self._plan.request, self._turn.previous_id)
        elif context is not None:
            context.release()

    # -- in the background -----------------------------------------------------------------------------------------

    async def start(self, serving: Serving, tenant: Tenant, lease: ModelLease) -> dict[str, Any]:
        """Generate in a task of its own; returns the response as it is now. A full queue is a 429 here."""
        async with AsyncExitStack() as stack:
            admitted = await stack.enter_async_context(serving.admit(tenant, tokens=self._plan.tokens, lease=lease))
            first = self._writer.whole()
            stored = self._turn.stored(first)
            self.message.on_end = lambda: self._complete(stored, tenant)
            stored.task = asyncio.create_task(self._work(serving, stored, admitted, stack.pop_all()))
            self._store.add(tenant, stored)
            return first
        raise AssertionError("the stack suppresses no exception")

    def _complete(self, stored: StoredResponse, tenant: Tenant) -> None:
        done = self._turn.stored(self._writer.stored())
        stored.response, stored.messages, stored.response_bytes = done.response, done.messages, done.response_bytes
        stored.conversation_bytes = done.conversation_bytes
        self._keep(stored, tenant)

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
            logs.info("background response", status=self._writer.status, **admitted.figures())
