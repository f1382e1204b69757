"""OpenAI's Responses API with its own client: items, streams, stored responses and their warm contexts, and whose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from pydantic import BaseModel

from headway.server.responses.output import NOT_HERE
from headway.server.responses.response_schema import ResponseObject

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nhm, rain\n</think>\n\n"
FIELDS: dict[str, Any] = {"model": "speaker", "temperature": 0, "max_output_tokens": 200}


@pytest.fixture(scope="module")
def client(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["ada"], max_retries=0) as created:
        yield created


@pytest.fixture(scope="module")
def other(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["bob"], max_retries=0) as created:
        yield created


def quiet(scene) -> None:
    scene.server.until(lambda: scene.engine.stats().pages_held == 0 and scene.engine.stats().queued == 0)


def test_a_text_is_answered_and_not_stored(client, scene):
    scene.say("Hello, Ada.")
    response = client.responses.create(input="Say hello.", instructions="Be brief.", store=False, **FIELDS)
    ResponseObject.model_validate_json(response.to_json())
    assert (response.output_text, response.status, response.error) == ("Hello, Ada.", "completed", None)
    assert response.usage.output_tokens == len("Hello, Ada.")  # a token for each byte
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(response.id)
    quiet(scene)


def test_a_response_has_every_field_that_clients_look_for(client, scene):
    scene.say("Hello.")
    raw = client.responses.with_raw_response.create(input="Say hello.", store=False, **FIELDS).http_response.json()
    required = {name for name, field in OpenAIResponse.model_fields.items() if field.is_required()}
    assert {*required, *NOT_HERE, "service_tier", "prompt_cache_key", "safety_identifier"} <= set(raw)
    assert {raw[name] for name in NOT_HERE} == {None}


def test_the_events_of_a_stream_come_in_openais_order(client, scene):
    scene.say(THOUGHT + "Let me look. " + CALL)
    events = list(client.responses.create(input="Oslo?", tools=[TOOL], stream=True, store=False, **FIELDS))
    types = [event.type.removeprefix("response.") for event in events]
    assert [one for i, one in enumerate(types) if one != types[i - 1]] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    thought, message, call = events[-1].response.output
    assert (thought.content[0].text.strip(), message.content[0].text.strip()) == ("hm, rain", "Let me look.")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert 0 < events[-1].response.usage.output_tokens_details.reasoning_tokens < len(THOUGHT)
    quiet(scene)


def test_the_client_adds_a_stream_up_to_the_whole(client, scene):
    scene.say("One, two, three.")
    with client.responses.stream(input="Count.", **FIELDS) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "One, two, three."
    assert client.responses.retrieve(final.id).output_text == text
    client.responses.delete(final.id)
    quiet(scene)


def test_a_conversation_goes_on_where_it_was(client, scene):
    """Its context stays: the next turn computes what is new, and says what it would without."""
    scene.say("First answer.")
    first = client.responses.create(input="First?", **FIELDS)
    held = scene.engine.stats().pages_held
    assert held > 0
    before = scene.engine.stats().tokens
    scene.say("Second answer.")
    second = client.responses.create(input="Second?", previous_response_id=first.id, **FIELDS)
    computed = scene.engine.stats().tokens - before
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert computed < second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens + 40
    items = [{"role": "user", "content": "First?"}, *first.output, {"role": "user", "content": "Second?"}]
    count = client.responses.input_tokens.count(model="speaker", input=[_plain(item) for item in items])
    assert count.input_tokens == second.usage.input_tokens  # the same prompt
    assert [item.content[0].text for item in client.responses.input_items.list(second.id)] == ["Second?"]
    client.responses.delete(first.id)
    scene.say("Third.")
    third = client.responses.create(input="Third?", previous_response_id=second.id, **FIELDS)
    assert third.usage.input_tokens > second.usage.total_tokens  # what was deleted is still its beginning
    for response in (second, third):
        client.responses.delete(response.id)
    quiet(scene)


def _plain(item: Any) -> Any:
    return item if isinstance(item, dict) else item.to_dict()


def test_tools_and_their_outputs(client, scene):
    scene.say(CALL)
    first = client.responses.create(input="Oslo?", tools=[TOOL], tool_choice="required", **FIELDS)
    (call,) = first.output
    scene.say("It rains.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(input=[output], previous_response_id=first.id, tools=[TOOL], **FIELDS)
    assert second.output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].call_id is 'call_0'; no earlier function_call"):
        client.responses.create(input=[output | {"call_id": "call_0"}], previous_response_id=first.id, **FIELDS)
    named = {"type": "function", "name": "rain"}
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'rain'; the tools are weather"):
        client.responses.create(input="Oslo?", tools=[TOOL], tool_choice=named, **FIELDS)
    for response in (first, second):
        client.responses.delete(response.id)
    quiet(scene)


def test_structured_text(client, scene):
    class City(BaseModel):
        city: str

    scene.say('{"city": "Oslo"}')
    response = client.responses.parse(input="A city?", text_format=City, store=False, **FIELDS)
    assert response.output_parsed == City(city="Oslo")


def test_top_logprobs_need_logprobs(client):
    with pytest.raises(openai.BadRequestError, match="top_logprobs requires"):
        client.responses.create(input="Yes?", top_logprobs=2, **FIELDS)


def test_a_response_that_is_cut_off_is_incomplete(client, scene):
    scene.say("A long answer.")
    response = client.responses.create(input="Long?", store=False, **FIELDS | {"max_output_tokens": 5})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("A lon", "incomplete")


def test_a_background_response_is_fetched_or_cancelled(client, scene):
    scene.say("Done.")
    started = client.responses.create(input="Work.", background=True, **FIELDS)
    assert started.status == "queued"
    done = scene.server.until(lambda: _ended(client, started.id))
    assert (done.status, done.output_text) == ("completed", "Done.")
    scene.say("x" * 4000)
    long = client.responses.create(input="Work.", background=True, **FIELDS | {"max_output_tokens": 4000})
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="the previous response is cancelled"):
        client.responses.create(input="On.", previous_response_id=long.id, **FIELDS)
    for response in (started, long):
        client.responses.delete(response.id)
    quiet(scene)


def _ended(client: openai.OpenAI, id: str) -> OpenAIResponse | None:
    response = client.responses.retrieve(id)
    return response if response.status in ("completed", "failed") else None


def test_responses_belong_to_their_key(client, other, scene):
    scene.say("Secret.")
    mine = client.responses.create(input="Tell me.", **FIELDS)
    for attempt in (
        lambda: other.responses.retrieve(mine.id),
        lambda: other.responses.delete(mine.id),
        lambda: other.responses.cancel(mine.id),
        lambda: other.responses.input_items.list(mine.id),
        lambda: other.responses.create(input="More.", previous_response_id=mine.id, **FIELDS),
        lambda: other.responses.input_tokens.count(model="speaker", input="x", previous_response_id=mine.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            attempt()
        assert caught.value.code == "response_not_found"
    assert client.responses.retrieve(mine.id).output_text == "Secret."
    client.responses.delete(mine.id)
    quiet(scene)


def test_stored_responses_are_bounded_for_each_key(client, other, scene):
    """The oldest go first, by number and by bytes; those of another key stay."""
    scene.say("Kept.")
    kept = other.responses.create(input="Keep.", **FIELDS)
    ids = []
    for number in range(6):
        scene.say(f"{number}.")
        ids.append(client.responses.create(input=f"{number}?", **FIELDS).id)
    gone = [id for id in ids if not _is_there(client, id)]
    assert gone == ids[:2]
    scene.say("Large.")
    ids.append(client.responses.create(input="x" * 6800, **FIELDS).id)
    assert [id for id in ids if _is_there(client, id)] == ids[-1:]
    with pytest.raises(openai.BadRequestError, match="at most 8000 can be stored: pass store: false"):
        client.responses.create(input="x" * 2000, previous_response_id=ids[-1], **FIELDS)
    assert other.responses.retrieve(kept.id).output_text == "Kept."
    client.responses.delete(ids[-1])
    other.responses.delete(kept.id)
    quiet(scene)


def _is_there(client: openai.OpenAI, id: str) -> bool:
    try:
        client.responses.retrieve(id)
    except openai.NotFoundError:
        return False
    return True


def test_a_conversation_that_never_ends_is_refused(client, scene):
    last = None
    for _ in range(6):
        scene.say("On.")
        last = client.responses.create(input="On?", previous_response_id=last, **FIELDS).id
    with pytest.raises(openai.BadRequestError, match="the conversation has 13 messages; at most 12 are allowed"):
        client.responses.create(input="On?", previous_response_id=last, **FIELDS)


def test_streams_that_are_cut_leave_nothing(client, scene):
    before = scene.engine.stats().pages_held  # of responses that are stored
    for read in range(0, 12, 3):
        scene.say("y" * 3000)
        fields = FIELDS | {"max_output_tokens": 3000}
        with client.responses.create(input="Go on.", stream=True, **fields) as stream:
            for _ in range(read):
                next(stream)
    scene.server.until(lambda: scene.engine.stats().queued == 0 and scene.engine.stats().pages_held == before)


TEXT = {"type": "input_text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "pass the item itself"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "encrypted_content"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "a JSON object"),
        (
            {"input": [{"role": "user", "content": "x", "arguments": "{}"}]},
            "is not a field of an item message",
        ),
        ({"input": [{"role": "user", "content": [TEXT | {"image_url": "y"}]}]}, "image_url is not a field of a part"),
        ({"input": [{"type": "reasoning", "summary": [], "output": "x"}]}, "is not a field of an item reasoning"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "prompt": {"id": "p"}}, "'prompt' is unknown or not supported"),
        ({"input": "x", "truncation": "auto"}, "'truncation'"),
        ({"input": "x", "background": True, "stream": True}, "is not streamed"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "has no schema"),
        ({"input": "x", "max_output_tokens": 1 << 20}, "max_output_tokens is 1048576"),
    ],
)
def test_what_cannot_be_done_is_named(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "speaker", **fields})
