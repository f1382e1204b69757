"""Ollama's API with its own client: chats, texts, lines, tools, thinking, models, errors."""

from __future__ import annotations

import json
import re
from typing import Any

import ollama
import pytest

from headway.server.ollama.response_schema import OllamaChat, OllamaError, OllamaShown, OllamaText

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nhm, rain\n</think>\n\n"
USER = [{"role": "user", "content": "Oslo?"}]
FIELDS: dict[str, Any] = {"model": "speaker", "options": {"temperature": 0, "num_predict": 200}}


@pytest.fixture(scope="module")
def client(scene) -> Any:
    return ollama.Client(host=scene.url, headers={"authorization": f"Bearer {scene.keys['ada']}"})


def test_a_chat_whole_and_in_lines(client, scene):
    scene.say("It rains.")
    whole = client.chat(messages=USER, **FIELDS)
    assert (whole.message.content, whole.done_reason, whole.eval_count) == ("It rains.", "stop", len("It rains."))
    assert whole.total_duration >= whole.prompt_eval_duration > 0
    scene.say("It rains.")
    *lines, last = client.chat(messages=USER, stream=True, **FIELDS | {"model": "speaker:latest"})
    assert "".join(line.message.content for line in lines) == "It rains."
    assert (last.done, last.message.content, last.prompt_eval_count) == (True, "", whole.prompt_eval_count)
    assert not any(line.done for line in lines)
    assert last.model == "speaker:latest"


def test_lines_are_the_default(scene):
    scene.say("One.")
    answer = scene.ask("POST", "/api/chat", {"messages": USER, **FIELDS})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [OllamaChat.model_validate_json(line) for line in answer.body.splitlines()]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_texts_in_the_template_and_raw(client, scene):
    scene.say(THOUGHT + "It rains.")
    text = client.generate(prompt="Oslo?", system="Be brief.", think=True, **FIELDS)
    assert (text.response.strip(), text.thinking.strip()) == ("It rains.", "hm, rain")
    scene.say(" and it rains")
    body = {"prompt": "It is cold", "raw": True, "stream": False, **FIELDS}
    raw = OllamaText.model_validate(scene.ask("POST", "/api/generate", body).json)
    assert raw.response == " and it rains"
    assert raw.prompt_eval_count == len("It is cold")
    assert client.generate(model="speaker").done_reason == "load"
    assert client.chat(model="speaker").done_reason == "load"


def test_a_whole_round_of_a_tool(client, scene):
    scene.say(THOUGHT + CALL)
    first = client.chat(messages=USER, tools=[TOOL], **FIELDS)
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    scene.say("It rains.")
    messages = [*USER, first.message, {"role": "tool", "content": "rain", "tool_name": "weather"}]
    assert client.chat(messages=messages, tools=[TOOL], **FIELDS).message.content == "It rains."
    with pytest.raises(ollama.ResponseError, match="no earlier call waits for it") as caught:
        client.chat(messages=[*messages, messages[-1]], tools=[TOOL], **FIELDS)
    assert caught.value.status_code == 400


def test_formats(client, scene):
    scene.say("no json")
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(client.chat(messages=USER, format=schema, **FIELDS).message.content) == {"n": 1}
    scene.say("{}")
    assert json.loads(client.generate(prompt="x", format="json", raw=True, **FIELDS).response) == {}


def test_models(client, scene):
    (model,) = client.list().models
    assert model.model == "speaker"
    assert [one.model for one in client.ps().models] == ["speaker"]
    shown = client.show("speaker")
    assert {"completion", "tools", "thinking"} == set(shown.capabilities)
    OllamaShown.model_validate(scene.ask("POST", "/api/show", {"model": "speaker:latest"}).json)
    assert scene.ask("GET", "/api/version").json["version"]


def test_a_stream_that_is_cut_leaves_nothing_here(client, scene):
    before = scene.engine.stats().pages_held
    scene.say("y" * 3000)
    stream = client.chat(messages=USER, stream=True, model="speaker", options={"temperature": 0})
    for _ in range(5):
        next(stream)
    stream.close()
    scene.server.until(lambda: scene.engine.stats().queued == 0 and scene.engine.stats().pages_held == before)


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/api/chat", {"model": "llama"}, 404, "model 'llama' does not exist"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "images"),
        ("/api/chat", {"options": {"mirostat": 3}}, 400, r"mirostat is 3"),
        ("/api/chat", {"options": {"num_ctx": 1 << 30}}, 400, "this model's context length is"),
        ("/api/chat", {"options": {"num_predict": 0}}, 400, r"options\.num_predict is 0"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system is for the template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
        ("/api/embed", {"input": "x"}, 400, "this server has no embedding model"),
        ("/api/show", {"model": "llama"}, 404, "does not exist"),
        ("/api/pull", {}, 404, "models are not managed here"),
    ],
)
def test_errors_are_ollamas(scene, path, fields, status, message):
    body = {"model": "speaker", **({"messages": USER} if path == "/api/chat" else {})} | fields
    answer = scene.ask("POST", path, body)
    assert answer.status == status, answer.body
    assert re.search(message, OllamaError.model_validate(answer.json).error), answer.body
