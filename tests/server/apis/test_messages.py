"""Anthropic's Messages API with its own client: blocks, tools, thinking, stop reasons, streams, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from headway.server.anthropic.response_schema import Message, MessageError

TOOL: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nhm, rain\n</think>\n\n"
TEXT = {"type": "text", "text": "x"}
USER = [{"role": "user", "content": "Oslo?"}]
FIELDS: dict[str, Any] = {"model": "speaker", "max_tokens": 200, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(scene) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=scene.url, api_key=scene.keys["ada"], max_retries=0) as created:
        yield created


def test_a_message_and_its_tokens(client, scene):
    scene.say("It rains.")
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(messages=USER, system=system, **FIELDS)
    Message.model_validate_json(message.to_json())
    assert (message.content[0].text, message.stop_reason, message.role) == ("It rains.", "end_turn", "assistant")
    usage = message.usage
    count = client.messages.count_tokens(model="speaker", messages=USER, system=system).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usage.output_tokens == len("It rains.")


def test_the_events_of_a_stream_come_in_anthropics_order(client, scene):
    scene.say(THOUGHT + "Let me look. " + CALL)
    with client.messages.stream(messages=USER, tools=[TOOL], **FIELDS) as stream:
        events = [event.type for event in stream if event.type not in ("text", "thinking", "input_json", "signature")]
        final = stream.get_final_message()
    assert [one for i, one in enumerate(events) if one != events[i - 1]] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    thought, text, call = final.content
    assert (thought.thinking.strip(), text.text.strip()) == ("hm, rain", "Let me look.")
    assert (call.name, call.input, final.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    assert call.id.startswith("toolu_")
    assert final.usage.output_tokens > 0


def test_a_whole_round_of_a_tool(client, scene):
    scene.say(THOUGHT + CALL)
    first = client.messages.create(messages=USER, tools=[TOOL], **FIELDS)
    thought, call = first.content
    assert (thought.type, call.type) == ("thinking", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    scene.say("It rains.")
    second = client.messages.create(messages=messages, tools=[TOOL], **FIELDS)
    assert second.content[-1].text == "It rains."
    messages[-1] = {"role": "user", "content": [result | {"tool_use_id": "toolu_0"}]}
    with pytest.raises(anthropic.BadRequestError, match="no earlier tool_use has that id"):
        client.messages.create(messages=messages, tools=[TOOL], **FIELDS)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called_when_it_must_be(client, scene, choice):
    scene.say("I will not.")
    message = client.messages.create(messages=USER, tools=[TOOL], tool_choice=choice, **FIELDS)
    assert message.stop_reason == "tool_use"
    assert message.content[-1].input["city"] in ("Oslo", "Bergen")


def test_stop_reasons(client, scene):
    scene.say("one two three")
    message = client.messages.create(messages=USER, stop_sequences=["three", "two"], **FIELDS)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    scene.say("one two three")
    message = client.messages.create(messages=USER, **FIELDS | {"max_tokens": 3})
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "one")


def test_the_model_continues_the_assistants_last_message(client, scene):
    scene.say(" rains.")
    message = client.messages.create(messages=[*USER, {"role": "assistant", "content": "It"}], **FIELDS)
    assert message.content[0].text == " rains."


def test_an_output_follows_its_schema(client, scene):
    scene.say("no json")
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(messages=USER, output_config=config, **FIELDS)
    assert json.loads(message.content[-1].text) == {"n": 1}


def test_a_stream_that_is_cut_leaves_nothing(client, scene):
    before = scene.engine.stats().pages_held
    scene.say("y" * 3000)
    with client.messages.create(messages=USER, stream=True, **FIELDS | {"max_tokens": 3000}) as stream:
        for _ in range(5):
            next(stream)
    scene.server.until(lambda: scene.engine.stats().queued == 0 and scene.engine.stats().pages_held == before)


def test_thinking_has_a_budget(client, scene):
    scene.say("<think>\n" + "y" * 80)
    thinking = {"type": "enabled", "budget_tokens": 30}
    message = client.messages.create(messages=USER, thinking=thinking, **FIELDS)
    thought, text = message.content
    assert 0 < len(thought.thinking) < 30
    assert (thought.type, set(thought.thinking), set(text.text)) == ("thinking", {"y"}, {"y"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"max_tokens": 1 << 20}, "max_tokens is 1048576"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "source": {"a": 1}}]}]},
            "of a block text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "thinking": "y"}]}]},
            r"\.thinking is not",
        ),
        ({"system": [TEXT | {"data": "y"}]}, r"system\[0\]\.data is not a field"),
        ({"tool_choice": {"type": "auto", "name": "weather"}}, "a name is for type tool"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens is 5 and max_tokens is 5"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] is empty"),
        ({"container": "c"}, "'container' is unknown or not supported"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "it must have text"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            r"tools\[0\]: .* must be custom, got 'web_search_20250305'; there are no built-in tools",
        ),
    ],
)
def test_errors_are_anthropics(scene, fields, message):
    body = {"model": "speaker", "max_tokens": 5, "messages": USER} | fields
    answer = scene.ask("POST", "/v1/messages", body)
    assert answer.status == 400
    error = MessageError.model_validate(answer.json).error
    assert error.type == "invalid_request_error"
    assert re.search(message, error.message), error.message


def test_keys_models_and_paths_in_errors(scene):
    wrong = anthropic.Anthropic(base_url=scene.url, api_key="hw-wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError, match="not valid") as caught:
        wrong.messages.create(messages=USER, **FIELDS)
    assert caught.value.body["error"]["type"] == "authentication_error"
    answer = scene.ask("POST", "/v1/messages", {"model": "claude", "max_tokens": 5, "messages": USER})
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert scene.ask("GET", "/v1/messages/x").json["type"] == "error"
