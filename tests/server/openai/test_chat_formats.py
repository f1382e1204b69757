"""Replies of every family over HTTP: reasoning apart from content, calls, strict tools, one call only, bad calls.

The model says what the test wants, through its family's real template; see support/speaker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.live import Live, live
from support.speaker import TEMPLATES, Stage, speaking_folder

USER = [{"role": "user", "content": "Weather in Oslo?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = {
    "qwen.jinja": (CALL, "<|im_end|>"),
    "hermes.jinja": (CALL, "<|im_end|>"),
    "llama.jinja": ('{"name": "weather", "parameters": {"city": "Oslo"}}', "<|eot_id|>"),
    "mistral.jinja": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]', "</s>"),
    "mistral_args.jinja": ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "</s>"),
    "harmony.jinja": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
        "<|call|>",
    ),
}

FINAL = {"harmony.jinja": "<|channel|>final<|message|>"}

Scene = tuple[Stage, Live]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Scene]]:
    """A server for each template, by its name."""
    folder, created = speaking_folder(tmp_path_factory.mktemp("speaker")), {}
    with ExitStack() as stack:

        def make(template: str) -> Scene:
            if template not in created:
                source = (TEMPLATES / template).read_text() if template.endswith(".jinja") else template
                (folder / "chat_template.jinja").write_text(source)
                stage = Stage(Path(folder))
                assert stage.engine.chat_template is not None  # read now: the next one has another
                created[template] = (stage, stack.enter_context(live(stage.engine)))
            return created[template]

        yield make


def said(scene: Scene, text: str, end: str = "", **fields: Any) -> tuple[dict[str, Any], str]:
    """The message that a reply becomes, and why it ended; the stream must say the same."""
    stage, server = scene
    request_body: dict[str, Any] = {"messages": USER, "temperature": 0, "max_tokens": 400, **fields}
    stage.say(text, end=end)
    choice = server.chat(**request_body)["choices"][0]
    stage.say(text, end=end)
    events = server.post("/v1/chat/completions", stream=True, **request_body).events
    deltas = [event["choices"][0]["delta"] for event in events]
    message = choice["message"]
    assert "".join(d.get("content") or "" for d in deltas) == (message["content"] or "")
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message.get("reasoning_content", "")
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        mine = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        mine["name"] += call["function"].get("name", "")
        mine["arguments"] += call["function"].get("arguments", "")
    assert list(calls.values()) == [call["function"] for call in message.get("tool_calls", ())]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return message, choice["finish_reason"]


@pytest.mark.parametrize("template", CALLS)
def test_calls_of_every_family(scenes, template):
    text, end = CALLS[template]
    message, finish = said(scenes(template), text, end, tools=[WEATHER])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert (finish, message["content"]) == ("tool_calls", None)
    if template.startswith("mistral"):
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


@pytest.mark.parametrize("template", CALLS)
def test_required_calls_of_every_family(scenes, template):
    """Whatever the model would like to say, it calls."""
    _, end = CALLS[template]
    message, finish = said(scenes(template), "I would rather not.", end, tools=[WEATHER], tool_choice="required")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")
    assert finish == "tool_calls"


@pytest.mark.parametrize("template", CALLS)
def test_arguments_of_a_strict_tool_follow_its_schema(scenes, template):
    """The model begins a call of its own; what does not fit the schema never comes."""
    text, end = CALLS[template]
    wrong = text.replace("Oslo", "Atlantis").replace("city", "town")
    loose, _ = said(scenes(template), wrong, end, tools=[WEATHER])
    assert json.loads(loose["tool_calls"][0]["function"]["arguments"]) == {"town": "Atlantis"}
    strict, finish = said(scenes(template), wrong, end, tools=[STRICT], parallel_tool_calls=False)
    (call,) = strict["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")
    assert finish == "tool_calls"


def test_reasoning_stands_apart(scenes):
    text = "<think>\nThey ask for Oslo.\n</think>\n\nIt is sunny."
    message, finish = said(scenes("qwen.jinja"), text, "<|im_end|>")
    assert message["reasoning_content"] == "They ask for Oslo."
    assert message["content"] == "It is sunny."
    assert finish == "stop"
    harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
    message, _ = said(scenes("harmony.jinja"), harmony, "<|return|>")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Sunny.")
    both, _ = said(
        scenes("qwen.jinja"), "<think>\nTool.\n</think>\n\nOne moment." + CALL, "<|im_end|>", tools=[WEATHER]
    )
    assert (both["reasoning_content"], both["content"]) == ("Tool.", "One moment.")
    assert len(both["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("qwen.jinja", "<think>\n", "<|im_end|>"),
        ("harmony.jinja", "<|channel|>analysis<|message|>", "<|return|>"),
    ],
)
def test_reasoning_has_a_budget(scenes, template, begin, end):
    """The model reasons on and on; its reasoning is closed, and what it says then is the content."""
    tokens = len(scenes(template)[0].engine.tokenizer.encode(begin, special=True))
    message, finish = said(scenes(template), begin + "y" * 80, end, thinking_token_budget=tokens + 12)
    assert message["reasoning_content"] == "y" * 12
    if template == "qwen.jinja":
        content = message["content"]
        assert (content, finish) == ("y" * len(content), "stop")
        assert 0 < len(content) < 80 - 12
    free, _ = said(scenes(template), begin + "y" * 80, end, thinking_token_budget=tokens + 80)
    assert free["reasoning_content"] == "y" * 80
    closed, _ = said(scenes("qwen.jinja"), "<think>\nab\n</think>\n\nIt is so.", "<|im_end|>", thinking_token_budget=9)
    assert (closed["reasoning_content"], closed["content"]) == ("ab", "It is so.")
    error = scenes(template)[1].refused("/v1/chat/completions", messages=USER, thinking_token_budget=-1)
    assert error["param"] == "thinking_token_budget"


@pytest.mark.parametrize("template", ["qwen.jinja", "harmony.jinja", "llama.jinja"])
def test_a_form_is_the_content_of_every_family(scenes, template):
    _, end = CALLS[template]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    message, finish = said(scenes(template), "<think>\nNo JSON today.", end, response_format=form)
    assert json.loads(message["content"]) in ("yes", "no")
    assert "reasoning_content" not in message
    assert finish == "stop"


@pytest.mark.parametrize("template", CALLS)
def test_a_form_and_tools_are_one_or_the_other(scenes, template):
    """With both, as agent libraries send them, the model calls a tool or its content follows the format."""
    text, end = CALLS[template]
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {
                "type": "object",
                "properties": {"sky": {"enum": ["blue", "gray"]}},
                "required": ["sky"],
                "additionalProperties": False,
            },
        },
    }
    message, finish = said(scenes(template), text, end, tools=[WEATHER], response_format=form)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert finish == "tool_calls"
    more = text + "\n\nIt is sunny there."  # which does not follow the format, and clients would parse it
    message, finish = said(scenes(template), more, end, tools=[WEATHER, OTHER], response_format=form)
    assert ([call["function"]["name"] for call in message["tool_calls"]], message["content"]) == (["weather"], None)
    unknown = text.replace("weather", "climate")
    message, finish = said(scenes(template), unknown, end, tools=[WEATHER, OTHER], response_format=form)
    assert message["content"] is None or json.loads(message["content"])["sky"] in ("blue", "gray")
    assert {call["function"]["name"] for call in message.get("tool_calls", ())} <= {"weather", "sing"}
    content = FINAL.get(template, "") + '{"sky": "purple"}'
    message, finish = said(scenes(template), content, end, tools=[WEATHER], response_format=form)
    assert json.loads(message["content"])["sky"] in ("blue", "gray")
    assert "tool_calls" not in message
    assert finish == "stop"
    wrong = text.replace("Oslo", "Atlantis")
    message, finish = said(scenes(template), wrong, end, tools=[STRICT], response_format=form)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] in ("Oslo", "Bergen")


def test_a_form_and_a_required_call(scenes):
    form = {"type": "json_object"}
    message, finish = said(
        scenes("qwen.jinja"), "x", "<|im_end|>", tools=[WEATHER], tool_choice="required", response_format=form
    )
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    assert finish == "tool_calls"


OTHER = {"type": "function", "function": {"name": "sing", "parameters": {"type": "object", "properties": {}}}}


def test_only_allowed_tools_are_called(scenes):
    def allow(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    message, finish = said(
        scenes("qwen.jinja"), "No.", "<|im_end|>", tools=[OTHER, WEATHER], tool_choice=allow("required", "weather")
    )
    assert (message["tool_calls"][0]["function"]["name"], finish) == ("weather", "tool_calls")
    message, finish = said(
        scenes("qwen.jinja"), "Fine.", "<|im_end|>", tools=[OTHER, WEATHER], tool_choice=allow("auto", "weather")
    )
    assert (message["content"], finish) == ("Fine.", "stop")
    _, server = scenes("qwen.jinja")
    shown, both = (
        server.chat(USER, max_tokens=1, temperature=0, return_token_ids=True, tools=[OTHER, WEATHER], **more)
        for more in ({"tool_choice": allow("auto", "weather")}, {})
    )
    assert len(shown["prompt_token_ids"]) < len(both["prompt_token_ids"])


def test_functions_are_the_older_tools(scenes):
    stage, server = scenes("qwen.jinja")
    functions = {"functions": [WEATHER["function"]], "temperature": 0, "max_tokens": 200}
    stage.say(CALL, end="<|im_end|>")
    choice = server.chat(USER, **functions)["choices"][0]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("function_call", False)
    stage.say(CALL, end="<|im_end|>")
    events = server.post("/v1/chat/completions", messages=USER, stream=True, **functions).events
    deltas = [one["choices"][0]["delta"].get("function_call") for one in events]
    given = [delta for delta in deltas if delta]
    assert given[0]["name"] == "weather"
    assert "".join(delta.get("arguments", "") for delta in given) == call["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"
    stage.say("Sunny.", end="<|im_end|>")
    history = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert server.chat(history, **functions)["choices"][0]["message"]["content"] == "Sunny."
    stage.say("No.", end="<|im_end|>")
    named = server.chat(USER, function_call={"name": "weather"}, **functions)["choices"][0]["message"]
    assert named["function_call"]["name"] == "weather"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EFFORT = (
    "Reasoning: {{ reasoning_effort | default('medium') }}, {{ verbosity | default('medium') }}\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def prompted(scene: Scene, **fields: Any) -> str:
    """The text of the prompt of a chat."""
    stage, server = scene
    ids = server.chat(USER, max_tokens=1, temperature=0, return_token_ids=True, **fields)["prompt_token_ids"]
    return stage.engine.tokenizer.decode(ids)


def test_thinking_is_turned_off_through_the_template(scenes):
    scene = scenes(THINKING)
    plain = prompted(scene)
    assert "<think>" not in plain
    assert prompted(scene, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert prompted(scene, reasoning_effort="none").endswith("<think>\n\n</think>\n\n")
    assert prompted(scene, chat_template_kwargs={"enable_thinking": True}) == plain
    assert prompted(scene, reasoning_effort="low") == plain  # a hint that this template has no place for


def test_effort_and_verbosity_reach_a_template_that_reads_them(scenes):
    assert prompted(scenes(EFFORT)).startswith("Reasoning: medium, medium")
    assert prompted(scenes(EFFORT), reasoning_effort="high", verbosity="low").startswith("Reasoning: high, low")


def test_several_calls_or_one(scenes):
    text = CALL + "\n" + CALL.replace("Oslo", "Bergen")
    message, _ = said(scenes("qwen.jinja"), text, "<|im_end|>", tools=[WEATHER])
    assert [json.loads(c["function"]["arguments"])["city"] for c in message["tool_calls"]] == ["Oslo", "Bergen"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    message, finish = said(scenes("qwen.jinja"), text, "<|im_end|>", tools=[WEATHER], parallel_tool_calls=False)
    assert [json.loads(c["function"]["arguments"])["city"] for c in message["tool_calls"]] == ["Oslo"]
    assert finish == "tool_calls"


def test_calls_of_a_model_that_has_no_tools_are_text(scenes):
    message, finish = said(scenes("hermes.jinja"), CALL, "<|im_end|>")
    assert message["content"] == CALL
    assert "tool_calls" not in message
    assert finish == "stop"
    message, finish = said(scenes("qwen.jinja"), CALL, "<|im_end|>", tools=[WEATHER], tool_choice="none")
    assert json.loads(message["content"]) == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert finish == "stop"


def test_what_is_no_call_is_text(scenes):
    message, finish = said(scenes("qwen.jinja"), "<tool_call>\nnonsense\n</tool_call>", "<|im_end|>", tools=[WEATHER])
    assert message["content"] == "nonsense"
    assert "tool_calls" not in message
    assert finish == "stop"


def test_a_call_that_is_cut_off_is_as_far_as_it_came(scenes):
    stage, server = scenes("qwen.jinja")
    stage.say(CALL, end="<|im_end|>")
    choice = server.chat(USER, temperature=0, tools=[WEATHER], max_tokens=45)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])


def test_templates_that_refuse_are_a_400(scenes):
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems here') }}{% endif %}"
    stage, server = scenes(source + "{{ m.content + '</s>' }}{% endfor %}")
    error = server.refused("/v1/chat/completions", messages=[{"role": "developer", "content": "Obey."}, *USER])
    assert "no systems here" in error["message"]
    assert (error["code"], error["param"]) == ("template_error", "messages")
    stage.say("fine", end="</s>")
    assert server.chat(USER, temperature=0)["choices"][0]["message"]["content"] == "fine"


def test_an_answer_without_a_limit_is_as_long_as_the_pages_allow(scenes):
    """The model's limit is far away here, and the pool is small."""
    stage, server = scenes("qwen.jinja")
    room = stage.engine.stats().pages_total * stage.engine.page_size
    assert room < stage.engine.config.max_positions
    error = server.refused("/v1/chat/completions", messages=USER, max_tokens=room)
    assert error["code"] == "context_length_exceeded"
    assert str(room) in error["message"]
