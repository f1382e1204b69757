"""Conversations of the Responses API with OpenAI's own client: items, turns and their warm context, and whose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headway.server.responses.response_schema import ResponseObject
from support.live import live
from support.small import small_engine

FIELDS: dict[str, Any] = {"model": "speaker", "temperature": 0, "max_output_tokens": 60}
HELLO: dict[str, Any] = {"type": "message", "role": "user", "content": "My name is Ada."}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "3"}


@pytest.fixture(scope="module")
def client(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["ada"], max_retries=0) as created:
        yield created


@pytest.fixture(scope="module")
def other(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["bob"], max_retries=0) as created:
        yield created


def test_turns_of_a_conversation_see_what_was_said_and_compute_only_what_is_new(client, scene):
    conversation = client.conversations.create(items=[HELLO], metadata={"topic": "names"})
    assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "names"})
    scene.say("Hello, Ada.")
    first = client.responses.create(input="Greet me.", conversation=conversation.id, **FIELDS)
    ResponseObject.model_validate_json(first.to_json())
    assert (first.output_text, first.conversation.id) == ("Hello, Ada.", conversation.id)
    scene.say("Ada.")
    second = client.responses.create(
        input="What is my name?", conversation={"id": conversation.id}, store=False, **FIELDS
    )
    messages = [
        HELLO,
        {"role": "user", "content": "Greet me."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    counted = client.responses.input_tokens.count(model="speaker", input=messages)
    assert second.usage.input_tokens == counted.input_tokens  # the model saw exactly this chat
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens  # its pages were kept

    listed = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.content[0].text for item in listed] == [
        *("My name is Ada.", "Greet me.", "Hello, Ada.", "What is my name?", "Ada."),
    ]
    newest = client.conversations.items.list(conversation.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["Ada.", "What is my name?"]
    assert len(list(newest)) == 5  # the client follows the pages
    assert client.conversations.items.retrieve(listed[2].id, conversation_id=conversation.id) == listed[2]
    assert client.conversations.update(conversation.id, metadata={}).metadata == {}
    deleted = client.conversations.delete(conversation.id)
    assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        client.conversations.retrieve(conversation.id)
    client.responses.delete(first.id)


def test_a_stream_and_a_background_response_add_their_items(client, scene):
    conversation = client.conversations.create()
    scene.say("One.")
    list(client.responses.create(input="1?", conversation=conversation.id, stream=True, **FIELDS))
    scene.say("Two.")
    under_way = client.responses.create(input="2?", conversation=conversation.id, background=True, **FIELDS)
    scene.server.until(lambda: client.responses.retrieve(under_way.id).status == "completed")
    listed = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.content[0].text for item in listed] == ["1?", "One.", "2?", "Two."]
    client.conversations.delete(conversation.id)


def test_items_are_added_and_deleted_and_always_make_a_chat(client):
    conversation = client.conversations.create(items=[HELLO])
    added = client.conversations.items.create(conversation.id, items=[CALL, OUTPUT])
    call, output = added.data
    with pytest.raises(openai.BadRequestError, match="delete that first"):
        client.conversations.items.delete(call.id, conversation_id=conversation.id)
    client.conversations.items.delete(output.id, conversation_id=conversation.id)
    client.conversations.items.delete(call.id, conversation_id=conversation.id)
    assert len(client.conversations.items.list(conversation.id).data) == 1
    with pytest.raises(openai.BadRequestError, match=r"items\[0\].call_id"):
        client.conversations.items.create(conversation.id, items=[OUTPUT])
    with pytest.raises(openai.BadRequestError, match="at most 12"):
        client.conversations.items.create(conversation.id, items=[HELLO] * 13)
    with pytest.raises(openai.BadRequestError, match="at most 8000"):
        client.conversations.items.create(conversation.id, items=[HELLO | {"content": "x" * 9000}])
    with pytest.raises(openai.BadRequestError):
        client.conversations.items.create(conversation.id, items=[HELLO] * 21)
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.conversations.items.retrieve("msg_0", conversation_id=conversation.id)
    with pytest.raises(openai.BadRequestError, match="both set"):
        client.responses.create(
            input="x", conversation=conversation.id, extra_body={"previous_response_id": "r"}, **FIELDS
        )
    client.conversations.delete(conversation.id)


def test_a_conversation_belongs_to_its_key_and_makes_room(client, other, scene):
    conversation = client.conversations.create(items=[HELLO])
    for attempt in (
        lambda: other.conversations.retrieve(conversation.id),
        lambda: other.conversations.delete(conversation.id),
        lambda: other.conversations.items.list(conversation.id),
        lambda: other.conversations.items.create(conversation.id, items=[HELLO]),
        lambda: other.responses.create(input="x", conversation=conversation.id, **FIELDS),
        lambda: client.responses.retrieve(conversation.id),  # nor is it a response
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    for _ in range(4):  # others push out others' own only
        other.conversations.create(items=[HELLO])
    assert client.conversations.retrieve(conversation.id).id == conversation.id
    for _ in range(4):
        client.conversations.create()
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    scene.server.until(lambda: scene.engine.stats().pages_held == 0)


def test_what_is_stored_goes_when_its_time_is_over(tmp_path):
    """With the pages of its context. A conversation that is used stays for as long again."""
    with live(small_engine(tmp_path / "model"), stored_seconds=0.5) as served:
        response = served.post("/v1/responses", input="hi", max_output_tokens=16).json["id"]
        conversation = served.post("/v1/conversations").json["id"]
        served.until(lambda: served.get(f"/v1/responses/{response}").status == 404)
        served.until(served.is_quiet)
        error = served.post("/v1/responses", input="more", previous_response_id=response).error
        assert error["code"] == "response_not_found"
        assert "its time is over" in error["message"]
        seen, end = 200, time.monotonic() + 60
        while seen == 200 and time.monotonic() < end:
            time.sleep(0.6)  # each look begins its time anew
            seen = served.get(f"/v1/conversations/{conversation}").status
        assert seen == 404
