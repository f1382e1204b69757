"""The routes of /v1/conversations: create, retrieve, update, delete; and their items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from headway.base.text import short_repr
from headway.server.api.parsing import ConversationRoute
from headway.server.api.request_schema import FailAtFirst, RequestSchema
from headway.server.api.response_schema import ERRORS, QUEUE_ERRORS, ResponseSchema, ok
from headway.server.api.streaming import json_bytes
from headway.server.errors import bad_request, fields_named
from headway.server.responses.conversations import StoredConversation
from headway.server.responses.items import ItemOrder, item_page
from headway.server.responses.output import new_id
from headway.server.responses.request_schema import InputItem, Metadata
from headway.server.responses.response_schema import InputItems
from headway.server.responses.store import ResponseStore
from headway.server.serving import Serving

MOST = 20  # items of one request, as OpenAI has it
FIELDS = {"input": "items"}
Items = Annotated[list[InputItem], FailAtFirst(), Field(max_length=MOST)]
Limit = Annotated[int, Query(ge=1, le=100)]


class NewConversation(RequestSchema):
    """`POST /v1/conversations`."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestSchema):
    metadata: Metadata


class NewItems(RequestSchema):
    items: Annotated[list[InputItem], FailAtFirst(), Field(min_length=1, max_length=MOST)]


class ConversationObject(ResponseSchema):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(ResponseSchema):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


router = APIRouter(route_class=ConversationRoute, responses={**ERRORS, **QUEUE_ERRORS})
OBJECT: dict[str, Any] = {"response_model": None, "responses": ok(ConversationObject)}
LISTED: dict[str, Any] = {"response_model": None, "responses": ok(InputItems)}


@router.post("/v1/conversations", summary="Begin a conversation", **OBJECT)
async def create_conversation(body: NewConversation, request: Request) -> dict[str, Any]:
    """A conversation, empty or with items, that responses continue with `conversation`."""
    serving: Serving = request.app.state.serving
    conversation = StoredConversation(metadata=body.metadata or {}, id=new_id("conv", serving.settings.replica))
    with serving.queue_slot(serving.tenant(request)), fields_named(FIELDS):
        await serving.readers.run(conversation.add, body.items or [], serving.settings)
    request.app.state.responses.add(serving.tenant(request), conversation)
    return conversation.fields()


@router.get("/v1/conversations/{conversation_id}", summary="A conversation", **OBJECT)
async def retrieve_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
    """A conversation, without its items."""
    return _own(conversation_id, request).fields()


@router.post("/v1/conversations/{conversation_id}", summary="Change a conversation's metadata", **OBJECT)
async def update_conversation(conversation_id: str, body: ConversationUpdate, request: Request) -> dict[str, Any]:
    """The conversation with other metadata."""
    conversation = _own(conversation_id, request)
    conversation.metadata = body.metadata
    return conversation.fields()


@router.delete(
    "/v1/conversations/{conversation_id}",
    summary="Delete a conversation",
    response_model=None,
    responses=ok(DeletedConversation),
)
async def delete_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
    """Forget a conversation, its items and its context; responses that were made in it stay."""
    serving: Serving = request.app.state.serving
    request.app.state.responses.delete_conversation(serving.tenant(request), conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


# -- items -------------------------------------------------------------------------------------------------------------


@router.get("/v1/conversations/{conversation_id}/items", summary="A conversation's items", **LISTED)
async def list_items(
    conversation_id: str, request: Request, limit: Limit = 20, order: ItemOrder = "desc", after: str | None = None
) -> Response:
    """The items of a conversation, newest first unless `order` is asc."""
    return _page(_own(conversation_id, request).listed(), limit, order, after)


@router.post("/v1/conversations/{conversation_id}/items", summary="Add items to a conversation", **LISTED)
async def create_items(conversation_id: str, body: NewItems, request: Request) -> Response:
    """The items that were added, with their ids."""
    serving: Serving = request.app.state.serving
    conversation = _own(conversation_id, request)
    with serving.queue_slot(serving.tenant(request)), fields_named(FIELDS):
        ids = conversation.add(body.items, serving.settings)  # at once: a turn may add to it at any moment
    return _page(conversation.listed(ids), MOST, "asc", None)


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="An item of a conversation",
    response_model=None,
    responses={200: {"description": "The item", "content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """One item."""
    conversation = _own(conversation_id, request)
    conversation.item(item_id)
    (listed,) = conversation.listed([item_id])
    return Response(json_bytes(listed), media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", summary="Delete an item", **OBJECT)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
    """The conversation without this item."""
    conversation = _own(conversation_id, request)
    conversation.remove(item_id)
    return conversation.fields()


def _own(id: str, request: Request) -> StoredConversation:
    serving: Serving = request.app.state.serving
    store: ResponseStore = request.app.state.responses
    return store.conversation(serving.tenant(request), id)


def _page(items: list[dict[str, Any]], limit: int, order: ItemOrder, after: str | None) -> Response:
    if after is not None and all(item["id"] != after for item in items):
        raise bad_request(f"after is {short_repr(after)}; it must be the id of an item", "after")
    return Response(json_bytes(item_page(items, limit, order, after)), media_type="application/json")
