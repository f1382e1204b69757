"""Custom tools, which take a text and not JSON: in chats and in responses, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.server.api.response_schema import ChatCompletion
from headway.server.chats.custom_input import CustomInput
from headway.server.responses.response_schema import ResponseObject

TEXT = 'SELECT "a"\nFROM b -- ümläut \\ 😀'
SUM = 'start: NUMBER ("+" NUMBER)+ "\\n"?\nNUMBER: /[0-9]+/'
QUOTED = 'start: LINE+ "end"\nLINE: "\\"" /[a-z]+/ "\\"" "\\n"'
FIELDS: dict[str, Any] = {"model": "speaker", "temperature": 0}


def call(name: str, text: str) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def raw_call(name: str, text: str) -> str:
    """A call as a model writes it whose text follows a grammar: not as JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"input": "{text}"}}}}\n</tool_call>'


def tool(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    format = {"format": {"type": "grammar", "syntax": syntax, "definition": definition}} if syntax else {}
    return {"type": "custom", "name": name, "description": "Takes a text.", **format}


def chat_tool(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, **({"format": grammar} if syntax else {})}}


@pytest.fixture(scope="module")
def client(scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["ada"], max_retries=3) as created:
        yield created


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"input": "Go.", "store": False, "max_output_tokens": 300, **FIELDS, **fields})


def test_a_custom_tool_is_called_with_a_text(client, scene):
    scene.say("Well. " + call("sql", TEXT))
    response = ask(client, tools=[tool("sql")])
    ResponseObject.model_validate_json(response.to_json())
    message, made = response.output
    assert (made.type, made.name, made.input, made.status) == ("custom_tool_call", "sql", TEXT, "completed")
    output = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "3 rows"}
    scene.say("Three rows.")
    items = [{"role": "user", "content": "Go."}, message.to_dict(), made.to_dict(), output]
    assert ask(client, input=items, tools=[tool("sql")]).output_text == "Three rows."
    with pytest.raises(openai.BadRequestError, match="no earlier custom_tool_call has that id"):
        ask(client, input=[output], tools=[tool("sql")])


def test_the_text_of_a_custom_tool_is_streamed(client, scene):
    scene.say(call("sql", TEXT))
    with client.responses.stream(input="Go.", tools=[tool("sql")], store=False, **FIELDS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == final.output[0].input == TEXT
    assert len(deltas) > 10


def test_a_chat_calls_custom_tools(client, scene):
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    fields = {"messages": messages, "tools": [chat_tool("sql")], "max_tokens": 300, **FIELDS}
    scene.say(call("sql", TEXT))
    whole = client.chat.completions.create(**fields)
    ChatCompletion.model_validate_json(whole.to_json())
    (made,) = whole.choices[0].message.tool_calls
    assert (made.type, made.custom.name, made.custom.input) == ("custom", "sql", TEXT)
    scene.say(call("sql", TEXT))
    pieces = [chunk.choices[0].delta.tool_calls for chunk in client.chat.completions.create(stream=True, **fields)]
    parts = [part.to_dict() for piece in pieces for part in piece or ()]
    assert parts[0]["type"] == "custom"
    assert "".join(part["custom"]["input"] for part in parts) == TEXT
    messages += [whole.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": made.id, "content": "3 rows"}]
    scene.say("Three rows.")
    assert client.chat.completions.create(**fields).choices[0].message.content == "Three rows."


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "sum"}])
def test_the_text_follows_its_lark_grammar(client, scene, choice):
    scene.say(raw_call("sum", "1+22") if choice == "auto" else '1+22"}')  # what stands before it is filled in
    response = ask(client, tools=[tool("sum", "lark", SUM)], tool_choice=choice)
    assert [(item.type, item.input) for item in response.output] == [("custom_tool_call", "1+22")]
    assert response.usage.output_tokens < 120
    scene.say(raw_call("sum", "x") if choice == "auto" else 'x"}')  # which it does not allow
    response = ask(client, tools=[tool("sum", "lark", SUM)], tool_choice=choice, max_output_tokens=120)
    text = response.output[0].input
    assert set(text) <= set("0123456789+\n")


def test_a_text_of_a_grammar_may_have_what_json_escapes(client, scene):
    """In the context it is JSON: the second call is read from it."""
    text = '"ab"\n"cd"\nend'
    longer = len(json.dumps(text)) - 2 - len(text)  # tokens of its JSON that the model did not write
    scene.say(raw_call("lines", text) + "-" * longer + raw_call("lines", text))
    response = ask(client, tools=[tool("lines", "lark", QUOTED)])
    assert [item.input for item in response.output if item.type == "custom_tool_call"] == [text, text]


def test_the_text_follows_its_regular_expression(client, scene):
    scene.say('{"input": "2024-02-30"}')
    date = tool("date", "regex", r"\d{4}-\d{2}-\d{2}")
    assert ask(client, tools=[date], tool_choice="required").output[0].input == "2024-02-30"
    scene.say('{"input": "tomorrow"}')
    cut = ask(client, tools=[date], tool_choice="required", max_output_tokens=70).output[0]
    assert set(cut.input) <= set("0123456789-")


def test_grammars_that_cannot_be_used_are_refused_by_name(client, scene):
    for syntax, definition, said in (
        ("lark", "start: (", "Lark grammar"),
        ("regex", "(?<=a)b", "look-around"),
        ("lark", "x" * 300_000, "bytes"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            ask(client, tools=[tool("t", syntax, definition)])
    broken = {"type": "custom", "name": "t", "format": {"type": "grammar", "syntax": "lark"}}
    with pytest.raises(openai.BadRequestError, match="'t' needs a definition and a syntax"):
        ask(client, tools=[broken])
    bad: Any = {"type": "custom", "custom": {"name": "t", "format": {"type": "grammar"}}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].*a format of type grammar has a grammar"):
        client.chat.completions.create(messages=[{"role": "user", "content": "x"}], tools=[bad], **FIELDS)
    with pytest.raises(openai.BadRequestError, match="must be function, custom or mcp"):
        ask(client, tools=[{"type": "web_search"}])


@given(st.text(), st.integers(1, 7))
def test_a_text_is_decoded_piece_by_piece(text, size):
    for written in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False)):
        reader = CustomInput()
        if any("\ud800" <= char <= "\udfff" for char in text):
            return
        assert "".join(reader.push(written[i : i + size]) for i in range(0, len(written), size)) == text
