"""Calls of MCP tools that a client must approve: asked for, approved, refused, and approved wrongly."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headway.server.responses.response_schema import ResponseObject

FIELDS: dict[str, Any] = {"model": "speaker", "temperature": 0, "max_output_tokens": 400}


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


WEATHER = call("weather", city="Oslo")


def server(label: str = "web", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, **more}


@pytest.fixture
def client(scene) -> Iterator[openai.OpenAI]:
    """Ada's, whose stored responses are deleted afterwards."""
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["ada"], max_retries=0) as created:
        created.stored = []
        yield created
        for id in created.stored:
            with contextlib.suppress(openai.NotFoundError):
                created.responses.delete(id)
    scene.server.until(scene.server.is_quiet)


def ask(client: openai.OpenAI, *tools: Any, **fields: Any) -> Any:
    given = {"input": "Oslo?", "tools": list(tools) or [server()], **FIELDS, **fields}
    response = client.responses.create(**given)
    if given.get("stream"):
        response = list(response)
        client.stored.append(response[-1].response.id)
    elif given.get("store") is not False:
        client.stored.append(response.id)
    return response


def approval(request: Any, approve: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **more}


def requests(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "mcp_approval_request"]


def test_a_call_waits_for_an_approval_and_is_then_made(client, scene):
    """As OpenAI has it, a server in a request needs approvals unless the request says otherwise."""
    scene.say("Let me see. " + WEATHER)
    first = ask(client)
    ResponseObject.model_validate_json(first.to_json())
    (wanted,) = requests(first)
    assert (wanted.name, wanted.server_label, json.loads(wanted.arguments)) == ("weather", "web", {"city": "Oslo"})
    assert [item.type for item in first.output] == ["mcp_list_tools", "message", "mcp_approval_request"]
    assert first.status == "completed"
    scene.say("It rains.")
    second = ask(client, input=[approval(wanted)], previous_response_id=first.id)
    ResponseObject.model_validate_json(second.to_json())
    _, made, said = second.output
    assert (made.type, made.approval_request_id, made.output) == ("mcp_call", wanted.id, "rain in Oslo")
    assert (said.content[0].text, second.status) == ("It rains.", "completed")
    items = client.responses.input_items.list(second.id).data
    assert [(item.type, item.approve) for item in items] == [("mcp_approval_response", True)]
    scene.say("Still.")
    third = ask(client, input="And now?", previous_response_id=second.id)
    history = [{"role": "user", "content": "Oslo?"}, *first.output, approval(wanted), *second.output]
    again = [item if isinstance(item, dict) else item.to_dict() for item in history]
    again.append({"role": "user", "content": "And now?"})
    counted = client.responses.input_tokens.count(model="speaker", input=again, tools=[server()])
    assert counted.input_tokens == third.usage.input_tokens  # the items that were sent and received are the chat


def test_the_events_of_an_approval_come_in_openais_order(client, scene):
    scene.say(WEATHER)
    events = ask(client, stream=True)
    types = [event.type.removeprefix("response.") for event in events]
    assert types[-3:] == ["output_item.added", "output_item.done", "completed"]
    assert events[-2].item == requests(events[-1].response)[0]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    scene.say("It rains.")
    wanted, first = events[-2].item, events[-1].response
    events = ask(client, input=[approval(wanted)], previous_response_id=first.id, stream=True)
    types = [event.type.removeprefix("response.") for event in events if "list_tools" not in event.type]
    assert types[4:9] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"),
        "output_item.done",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


def test_a_call_that_is_not_approved_is_told_to_the_model(client, scene):
    scene.say(WEATHER)
    first = ask(client, store=False)
    (wanted,) = requests(first)
    scene.say("As you like.")
    before = [{"role": "user", "content": "Oslo?"}, *(item.to_dict() for item in first.output)]
    second = ask(client, input=[*before, approval(wanted, False, reason="it costs")], store=False)
    assert second.output_text == "As you like."
    assert not [item for item in second.output if item.type == "mcp_call"]
    denied = [*before, approval(wanted, False)]
    longer = [*before, approval(wanted, False, reason="it costs far too much")]
    counts = [client.responses.input_tokens.count(model="speaker", input=one).input_tokens for one in (denied, longer)]
    assert counts[0] < counts[1]  # the model reads the reason


def test_which_tools_need_an_approval(client, scene):
    never = {"never": {"tool_names": ["weather"]}}
    for require, asked in (
        (never, False),
        ({"always": {"tool_names": ["weather"]}}, True),
        ({"always": {"tool_names": ["who"]}}, True),  # what neither names needs one
        ({**never, "always": {"tool_names": ["weather"]}}, True),
        ({"never": {}}, True),
        ({"never": {"read_only": True}}, False),  # which the tool says it is
        ({"never": {"read_only": False}}, True),
        ("never", False),
        ("always", True),
    ):
        scene.say(WEATHER, "It rains.")
        response = ask(client, server(require_approval=require), store=False)
        assert bool(requests(response)) is asked, require
    scene.say(WEATHER + call("who"))  # one of each in a message
    response = ask(client, server(require_approval=never), store=False)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]


def test_a_conversation_keeps_what_waits_for_an_approval(client, scene):
    conversation = client.conversations.create()
    scene.say(WEATHER)
    few = {"conversation": conversation.id, "tools": [server("few")], "store": False}
    (wanted,) = requests(ask(client, **few))
    scene.say("It rains.")
    response = ask(client, **few, input=[approval(wanted)])
    assert (response.output[-1].content[0].text, response.output[1].output) == ("It rains.", "rain in Oslo")
    scene.say("Still.")
    assert ask(client, **few, input="And now?").output_text == "Still."
    client.conversations.delete(conversation.id)


def test_what_is_approved_wrongly_is_refused_and_nothing_is_called(client, scene):
    scene.say(WEATHER)
    first = ask(client)
    (wanted,) = requests(first)
    user = {"role": "user", "content": "Well?"}
    for fields, said in (
        ({"input": [approval(wanted)]}, "no earlier mcp_approval_request has that id"),
        ({"input": [approval(wanted), approval(wanted)], "previous_response_id": first.id}, "answered before"),
        ({"input": [approval(wanted), user], "previous_response_id": first.id}, "send it in the next turn"),
        ({"input": [approval(wanted)], "previous_response_id": first.id, "tools": [server("few", allowed_tools=[])]},
         "'weather' of the MCP server 'web', which this request does not have"),
        ({"input": [approval(wanted)], "previous_response_id": first.id, "tools": []}, "which this request does not"),
        ({"input": [{"type": "mcp_approval_response", "approve": True}]}, "approval_request_id is missing"),
        ({"input": [{"type": "mcp_approval_response", "approval_request_id": "x"}]}, "approve is missing"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, **fields)
        assert said in error.value.message
    other = {"type": "function_call", "call_id": hashlib.sha256(b"x").hexdigest()[:9], "name": "f", "arguments": "{}"}
    with pytest.raises(openai.BadRequestError, match="'x', which asks for no approval"):
        ask(client, input=[user, other, {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}])
    made = {"type": "mcp_approval_request", "id": "mine", "name": "fail", "server_label": "web", "arguments": "{}"}
    scene.say("Sorry.")  # a request of the client's own: its arguments are checked as any others
    own = {"type": "mcp_approval_response", "approval_request_id": "mine", "approve": True}
    response = ask(client, input=[user, made, own], store=False)
    assert response.output[1].error.code == -32602
    with pytest.raises(openai.BadRequestError, match="must be the text of a JSON object"):
        ask(client, input=[user, made | {"arguments": "[]"}, own])


def test_a_servers_description_is_read_by_the_model(client):
    counts = [
        client.responses.input_tokens.count(
            model="speaker", input="Oslo?", tools=[server("few", server_description=text)]
        ).input_tokens
        for text in ("", "Knows the weather of all towns.")
    ]
    assert counts[0] < counts[1]


def test_another_key_cannot_approve(client, scene):
    scene.say(WEATHER)
    first = ask(client)
    with (
        openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["bob"], max_retries=0) as bob,
        pytest.raises(openai.NotFoundError),
    ):
        ask(bob, input=[approval(requests(first)[0])], previous_response_id=first.id)


def test_a_chat_refuses_mcp_tools_by_name(client):
    """OpenAI's chats have none either."""
    with pytest.raises(openai.BadRequestError, match=r"chats have no tools of MCP servers; use /v1/responses") as error:
        client.chat.completions.create(
            model="speaker", messages=[{"role": "user", "content": "Oslo?"}], tools=[server()]
        )
    assert error.value.param == "tools[0]"
