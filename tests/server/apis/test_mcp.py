"""Tools of MCP servers in responses: servers of the official package, OpenAI's client, and servers that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headway.server.responses.response_schema import ResponseObject

FIELDS: dict[str, Any] = {"model": "speaker", "temperature": 0, "store": False, "max_output_tokens": 400}


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


WEATHER = call("weather", city="Oslo")


def server(label: str, url: str | None = None, **more: Any) -> dict[str, Any]:
    where = {} if url is None else {"server_url": url}
    return {"type": "mcp", "server_label": label, "require_approval": "never", **where, **more}


@pytest.fixture(scope="module")
def client(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["ada"], max_retries=0) as created:
        yield created


@pytest.fixture(scope="module")
def bob(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["bob"], max_retries=0) as created:
        yield created


@pytest.fixture(autouse=True)
def nothing_is_left(scene) -> Iterator[None]:
    yield
    scene.server.until(scene.server.is_quiet)


def ask(client: openai.OpenAI, *tools: Any, **fields: Any) -> Any:
    return client.responses.create(**{"input": "Oslo?", "tools": list(tools), **FIELDS, **fields})


def calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "mcp_call"]


@pytest.mark.parametrize("label", ["local", "web"])
def test_the_tools_of_a_server_are_called(client, scene, label):
    """One over the standard streams of a process, one over streamable HTTP."""
    scene.say("Let me see. " + WEATHER, "It rains.")
    response = ask(client, server(label))
    ResponseObject.model_validate_json(response.to_json())
    listed, said, made, _ = response.output
    assert (listed.type, listed.server_label, said.type) == ("mcp_list_tools", label, "message")
    assert [tool.name for tool in listed.tools] == ["weather", "fail", "secret", "who", "long"]
    assert (made.name, made.server_label, made.status, made.error) == ("weather", label, "completed", None)
    assert (json.loads(made.arguments), made.output) == ({"city": "Oslo"}, "rain in Oslo")
    assert (response.output[-1].content[0].text, response.status) == ("It rains.", "completed")
    assert response.usage.input_tokens_details.cached_tokens > 100  # the second round continues the first


def test_the_events_of_mcp_calls_come_in_openais_order(client, scene):
    scene.say(WEATHER, "It rains.")
    events = list(ask(client, server("web"), stream=True))
    types = [event.type.removeprefix("response.") for event in events]
    assert [one for i, one in enumerate(types) if one != types[i - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    first = next(event for event in events if "mcp_call" in event.type)
    assert type(first).__name__ == "ResponseMcpCallInProgressEvent"


def test_a_url_on_the_operators_list_with_the_clients_own_credentials(client, scene):
    scene.say(call("who"), "You.")
    response = ask(client, server("mine", scene.mcp.url, authorization="t0ken", server_description="Mine"))
    assert calls(response)[0].output == "Bearer t0ken"
    assert "t0ken" not in json.dumps(response.to_dict()["tools"])  # not sent back, and not stored
    scene.say(call("who"), "You.")
    response = ask(client, server("mine", scene.mcp.url, headers={"Authorization": "Basic x"}))
    assert calls(response)[0].output == "Basic x"


def test_credentials_belong_to_keys(client, bob, scene):
    for asking, label, tool, output in (
        (client, "web", "who", "Bearer ada"),
        (bob, "web", "who", "Bearer all"),
        (client, "local", "secret", "all's"),
        (bob, "local", "secret", "bob's"),
        (bob, "bobs", "who", "nobody"),
    ):
        scene.say(call(tool), "Yes.")
        assert calls(ask(asking, server(label)))[0].output == output
    with pytest.raises(openai.BadRequestError, match="no MCP server of that name for this key"):
        ask(client, server("bobs"))
    with pytest.raises(openai.BadRequestError, match="which the operator sets for this server"):
        ask(client, server("web", headers={"Authorization": "mine"}))


def test_only_allowed_tools_are_offered(client, scene):
    for tool, names in (
        (server("web", allowed_tools=["who", "long"]), ["who", "long"]),
        (server("web", allowed_tools={"read_only": True}), ["weather"]),
        (server("few", allowed_tools=["who", "weather"]), ["weather"]),  # the operator's list
    ):
        scene.say("No.")
        response = ask(client, tool)
        assert [one.name for one in response.output[0].tools] == names
    scene.say(call("who"), "No.")  # a call of what was not offered is the client's own
    assert [item.type for item in ask(client, server("few")).output] == ["mcp_list_tools", "function_call"]


def test_two_servers_may_have_tools_of_one_name(client, scene):
    own = {"type": "function", "name": "fail", "parameters": {"type": "object", "properties": {}}}
    scene.say(call("b_weather", city="Bergen"), call("fail"))
    response = ask(client, server("web"), server("b", scene.mcp.url), own)
    (made,) = calls(response)
    assert (made.server_label, made.name, made.output) == ("b", "weather", "rain in Bergen")
    assert (response.output[-1].type, response.output[-1].name) == ("function_call", "fail")


def test_a_choice_forces_a_call_once(client, scene):
    for choice in (
        {"type": "mcp", "server_label": "web", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "few"}]},
    ):
        scene.say('{"city": "Oslo"}', "It rains.")
        response = ask(client, server("web"), server("few"), tool_choice=choice)
        assert [one.output for one in calls(response)] == ["rain in Oslo"]
        assert response.output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match="which has no tool 'snow' in this request"):
        ask(client, server("web"), tool_choice={"type": "mcp", "server_label": "web", "name": "snow"})
    scene.say("No.")
    assert [item.type for item in ask(client, server("web"), tool_choice="none").output] == ["message"]


def test_a_conversation_goes_on_after_calls(client, scene):
    scene.say(WEATHER, "It rains.")
    first = ask(client, server("few"), store=True)
    scene.say("Still.")
    second = ask(client, server("few"), store=True, input="And now?", previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens > 100
    items = [{"role": "user", "content": "Oslo?"}, *(item.to_dict() for item in first.output)]
    items.append({"role": "user", "content": "And now?"})
    counted = client.responses.input_tokens.count(model="speaker", input=items, tools=[server("few")])
    assert counted.input_tokens == second.usage.input_tokens
    for response in (first, second):
        client.responses.delete(response.id)


def test_a_background_response_calls_tools(client, scene):
    scene.say(WEATHER, "It rains.")
    begun = ask(client, server("few"), store=True, background=True)
    done = scene.server.until(
        lambda: (one := client.responses.retrieve(begun.id)).status in ("completed", "failed") and one
    )
    assert (done.output_text, calls(done)[0].output) == ("It rains.", "rain in Oslo")
    client.responses.delete(begun.id)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_of_tools_are_told_to_the_model(client, scene):
    scene.say(call("fail", why="no luck"), "Sorry.")
    response = ask(client, server("web"))
    (made,) = calls(response)
    assert (made.status, made.output, made.error.type) == ("failed", None, "mcp_tool_execution_error")
    assert made.error.content == [{"type": "text", "text": "Error executing tool fail: no luck"}]
    scene.say(call("weather", town="Oslo"), "Sorry.")
    (made,) = calls(ask(client, server("web")))
    assert (made.error.type, made.error.code) == ("mcp_protocol_error", -32602)
    assert "has no 'city', which is required" in made.error.message
    scene.say(call("long", count=100_000), "Sorry.")
    response = ask(client, server("web"))
    assert "the tool's output has 100000 bytes; 1000 are left" in calls(response)[0].error.message
    assert response.output_text == "Sorry."


def test_a_loop_of_calls_ends(client, scene):
    scene.say(*[WEATHER] * 20)
    response = ask(client, server("web"), max_output_tokens=2000)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_tool_calls")
    assert [one.status for one in calls(response)] == ["completed"] * 3 + ["failed"]  # rounds
    scene.say(WEATHER * 9)
    response = ask(client, server("web"), max_output_tokens=2000)
    assert [one.status for one in calls(response)] == ["completed"] * 4 + ["failed"] * 5  # calls
    scene.say(WEATHER, WEATHER)
    response = ask(client, server("web"), max_tool_calls=1)
    assert [one.status for one in calls(response)] == ["completed", "failed"]
    scene.say(WEATHER, "x" * 1000)
    response = ask(client, server("web"), max_output_tokens=100)
    assert (response.incomplete_details.reason, response.usage.output_tokens) == ("max_output_tokens", 100)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("initialize-version", "it speaks revision 1999-01-01 of the protocol"),
        ("initialize-redirect", "it redirects, which is not followed"),
        ("list-error", "it answered with the status 500"),
        ("list-garbage", "not valid JSON"),
        ("list-deep", "not valid JSON"),
        ("list-shapes", "not a tool with a name and an inputSchema"),
        ("list-twice", "a name twice"),
        ("list-pages", "more than 32 pages"),
        ("list-many", "more than 256 tools"),
        ("list-large", "the schema of its tool 'go' has 300"),
        ("list-refuse", "it answered: not today"),
    ],
)
def test_a_server_whose_tools_cannot_be_listed_is_an_error(client, scene, path, said):
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError, match=said) as error:
            ask(client, server("bad", f"{scene.mcp.hostile_url}/{path}"), stream=stream)
        assert (error.value.status_code, error.value.code) == (424, "mcp_server_failed")
        assert "the MCP server 'bad' failed" in error.value.message
        assert "secret" not in error.value.message
    assert ("GET", "/elsewhere") not in scene.mcp.seen
    assert all(path != "/elsewhere" for _, path in scene.mcp.seen)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("call-error", "it answered with the status 500"),
        ("call-redirect", "it redirects, which is not followed"),
        ("call-garbage", "not valid JSON"),
        ("call-surrogate", "not valid JSON"),
        ("call-megabytes", "it sent more than 1048576 bytes"),
        ("call-other", "it answered another request"),
        ("call-refuse", "it answered: not today"),
    ],
)
def test_a_call_that_fails_is_an_error_of_the_call(client, scene, path, said):
    scene.say(call("go"), "Sorry.")
    response = ask(client, server("bad", f"{scene.mcp.hostile_url}/{path}"))
    assert said in calls(response)[0].error.message
    assert (response.output_text, response.status) == ("Sorry.", "completed")


def test_servers_that_hang_or_never_end(client, scene):
    with pytest.raises(openai.APIStatusError, match="'slow-list-hang' failed: it did not answer within 3 s"):
        ask(client, server("slow-list-hang"))
    for label, said in (("slow-call-hang", "did not answer within 3 s"), ("slow-call-endless", "more than|within 3 s")):
        scene.say(call("go"), "Sorry.")
        response = ask(client, server(label))
        assert response.output_text == "Sorry."
        assert any(one in calls(response)[0].error.message for one in said.split("|"))


def test_processes_that_misbehave_are_ended(client, scene):
    for label, said in (
        ("hangs", "it did not answer within 1 s"),
        ("ends", "its process has ended"),
        ("talks", "not valid JSON: hello"),
        ("floods", "wrote a line of more than 1048576 bytes"),
        ("missing", "its command cannot be started: No such file or directory"),
    ):
        for _ in range(2):  # each request starts another one
            with pytest.raises(openai.APIStatusError, match=said) as error:
                ask(client, server(label))
            assert error.value.status_code == 424
    scene.say("Hello.")
    assert ask(client).output_text == "Hello."


def test_a_process_that_was_ended_is_started_again(client, scene):
    scene.say(call("long", count=2_000_000), "Sorry.")
    response = ask(client, server("local"))
    assert "wrote a line of more than" in calls(response)[0].error.message
    scene.say(WEATHER, "It rains.")
    assert calls(ask(client, server("local")))[0].output == "rain in Oslo"


def test_a_client_that_leaves_ends_its_calls(client, scene):
    """And nobody else's: another response runs meanwhile."""
    scene.say(call("go"), "Sorry.")
    stream = ask(client, server("x", f"{scene.mcp.hostile_url}/call-hang"), stream=True)
    next(event for event in stream if event.type == "response.mcp_call_arguments.done")
    stream.close()
    scene.server.until(scene.server.is_quiet)
    scene.say("Hello.")
    assert ask(client).output_text == "Hello."


# -- where a request may lead ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost:1/mcp", "the host 'localhost' is not on this server's list"),
        ("http://127.0.0.2:1/mcp", "the host '127.0.0.2' is not on"),
        ("http://[::1]:1/mcp", "the host '::1' is not on"),
        ("http://[::ffff:127.0.0.1]:1/mcp", "is not on"),
        ("http://169.254.169.254/latest", "is not on"),
        ("http://2130706433:1/mcp", "is not on"),
        ("http://127.1:1/mcp", "is not on"),
        ("http://example.org/mcp", "is not on"),
        ("http://127.0.0.1.example.org/", "is not on"),
        ("http://127.0.0.1@example.org/", "has a user or a fragment"),
        ("http://example.org#127.0.0.1", "has a user or a fragment"),
        ("file:///etc/passwd", "it must be http or https"),
        ("http:///mcp", "has no valid host"),
        ("http://127.0.0.1:99999/", "is not valid"),
        ("http://127.0.0.1/\r\nx", "is not valid"),
        ("http://127.0.0.1/ü", "is not valid"),
        ("python -c 1", "is not valid|must be http"),
    ],
)
def test_urls_that_are_not_on_the_list_are_refused(client, scene, url, said):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, server("x", url))
    assert any(one in error.value.message for one in said.split("|"))
    assert error.value.param == "tools[0].server_url"


def test_a_name_is_resolved_once_and_its_address_is_checked(client, scene, monkeypatch):
    """A name on the list that leads to an address inside is refused, and cannot lead elsewhere later."""
    real, answers = socket.getaddrinfo, []

    def resolve(host, *args, **kwargs):
        if host != "tools.example":
            return real(host, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), args[0]))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = scene.mcp.hostile_url.rpartition(":")[2]
    url = f"http://tools.example:{port}/ok"
    for address in ("10.1.2.3", "127.0.0.2", "169.254.169.254", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"):
        answers[:] = [address]
        with pytest.raises(openai.APIStatusError, match=f"has the address {address}, which is not public"):
            ask(client, server("x", url))
    answers[:] = ["127.0.0.1"]  # is on the list itself; a second lookup would fail
    scene.say(call("go"), "Gone.")
    assert calls(ask(client, server("x", url)))[0].output == "gone"
    assert answers == []


def test_what_a_request_may_not_say(client, scene):
    for tool, said in (
        (server("web", require_approval="sometimes"), "tools[0].require_approval"),
        (server("web", require_approval={"never": {"names": []}}), "tools[0].require_approval"),
        (server("web", server_description="x" * 2_000_000), "server_description has 2000000 characters"),
        (server("two words"), "server_label is 'two words'"),
        (server("unknown"), "no MCP server of that name"),
        (server("x", scene.mcp.url, headers={"Host": "other"}), "'Host', which is not a header that can be set"),
        (server("x", scene.mcp.url, headers={"A": "b\r\nC: d"}), "the value of A must be"),
        (server("x", scene.mcp.url, authorization="a\nb"), "the value of Authorization must be"),
        (server("x", command="sh"), "tools[0].command"),
        (server("x", connector_id="connector_gmail"), "tools[0].connector_id"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, tool)
        assert said in error.value.message
    with pytest.raises(openai.BadRequestError, match="the same server_label"):
        ask(client, server("web"), server("web"))
    with pytest.raises(openai.BadRequestError, match="17 MCP servers; at most 16"):
        ask(client, *[server(f"s{i}") for i in range(17)])
