"""Fields that clients of other servers send: each does what it says, or changes nothing where nothing is to be done."""

from __future__ import annotations

import json
import re

import pytest

C, M = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Name a color."}]
GREEDY = {"temperature": 0, "max_tokens": 8}
OFF = {
    "suffix": None,
    "guided_json": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "documents": [],
    "id_slot": -1,
    "lora": [],
    "n_probs": 0,
    "reasoning_format": "auto",
    "return_progress": False,
    "timings_per_token": False,
    "no_such_field": None,
}


def test_what_is_off_is_accepted(served):
    plain = served.complete("The sky is", **GREEDY)["choices"]
    assert served.complete("The sky is", **GREEDY, **OFF)["choices"] == plain
    chat = served.chat(USER, **GREEDY)["choices"]
    more = {"functions": [], "function_call": None, "tools": [], "best_of": 1, "echo": False, "audio": None}
    more |= {"logprobs": False, "top_logprobs": 0}
    assert served.chat(USER, **GREEDY, **OFF, **more)["choices"] == chat


def test_hints_and_names_that_this_model_has_no_place_for_change_nothing(served):
    plain = served.chat(USER, **GREEDY)["choices"]
    hints = {"reasoning_effort": "low", "verbosity": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert served.chat(USER, **GREEDY, **hints)["choices"] == plain
    assert served.chat([USER[0] | {"name": "ada"}], **GREEDY)["choices"] == plain


def test_a_final_message_is_continued(served):
    begun = [*USER, {"role": "assistant", "content": "My favorite color is"}]
    request = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    text = served.chat(**request, **GREEDY)["choices"][0]["message"]["content"]
    ids = served.post("/tokenize", messages=begun, continue_final_message=True).json["tokens"]
    decoded = served.post("/detokenize", tokens=ids).json["prompt"]
    assert decoded.endswith("My favorite color is")
    assert served.complete(ids, **GREEDY)["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_on_request(served, stream):
    ids = served.post("/tokenize", prompt="The sky is").json["tokens"]
    if stream:
        events = served.post(C, prompt="The sky is", stream=True, return_token_ids=True, **GREEDY).events
        choices = [event["choices"][0] for event in events]
        assert choices[0]["prompt_token_ids"] == ids
        tokens = [id for choice in choices for id in choice["token_ids"]]
        text = "".join(choice["text"] for choice in choices)
    else:
        (choice,) = served.complete("The sky is", return_token_ids=True, **GREEDY)["choices"]
        assert choice["prompt_token_ids"] == ids
        tokens, text = choice["token_ids"], choice["text"]
    assert served.engine.tokenizer.decode(tokens) == text
    assert "token_ids" not in served.complete("The sky is", **GREEDY)["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(served, stream):
    if stream:
        events = served.post(M, messages=USER, stream=True, return_token_ids=True, **GREEDY).events
        prompt = events[0]["prompt_token_ids"]
        tokens = [id for event in events for id in event["choices"][0]["token_ids"]]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    else:
        response = served.chat(USER, return_token_ids=True, **GREEDY)
        prompt, tokens = response["prompt_token_ids"], response["choices"][0]["token_ids"]
        text = response["choices"][0]["message"]["content"]
    assert prompt == served.post("/tokenize", messages=USER).json["tokens"]
    assert served.engine.tokenizer.decode(tokens) == text


def test_the_stop_string_is_part_of_the_text_on_request(served):
    whole = served.complete("The sky is", **GREEDY)["choices"][0]["text"]
    stop = whole[3:6]
    cut = whole[: whole.index(stop)]
    request = {"stop": [stop, "never"], **GREEDY}
    assert served.complete("The sky is", **request)["choices"][0]["text"] == cut
    shown = served.complete("The sky is", include_stop_str_in_output=True, **request)["choices"][0]
    assert (shown["text"], shown["finish_reason"]) == (cut + stop, "stop")
    content = served.chat(USER, **GREEDY)["choices"][0]["message"]["content"]
    stop = content[3:6]
    shown = served.chat(USER, include_stop_str_in_output=True, stop=stop, **GREEDY)["choices"][0]["message"]["content"]
    assert shown == content[: content.index(stop)] + stop


def test_special_tokens_are_part_of_the_text_on_request(served):
    id = served.engine.tokenizer.backend.token_to_id("<|im_end|>")
    request = {"allowed_token_ids": [id], "ignore_eos": True, "max_tokens": 2}
    assert served.complete("The sky is", **request)["choices"][0]["text"] == ""
    shown = served.complete("The sky is", skip_special_tokens=False, **request)["choices"][0]["text"]
    assert shown == "<|im_end|><|im_end|>"
    shown = served.chat(USER, skip_special_tokens=False, **request)["choices"][0]["message"]["content"]
    assert shown == "<|im_end|><|im_end|>"


def test_long_prompts_are_truncated_on_the_left(served):
    ids = served.post("/tokenize", prompt="one two three four five six seven").json["tokens"]
    request = {"return_token_ids": True, "max_tokens": 1}
    (choice,) = served.complete(ids, truncate_prompt_tokens=3, **request)["choices"]
    assert choice["prompt_token_ids"] == ids[-3:]
    end = {"max_tokens": 8180, "allowed_token_ids": list(served.engine.eos_ids)}
    (choice,) = served.complete("word " * 9000, truncate_prompt_tokens=-1, **request | end)["choices"]
    assert len(choice["prompt_token_ids"]) == 12
    whole = served.chat(USER, **request)["prompt_token_ids"]
    assert served.chat(USER, truncate_prompt_tokens=5, **request)["prompt_token_ids"] == whole[-5:]


def test_a_cache_salt_keeps_cached_pages_apart(served):
    prompt = list(range(2000, 2064))
    request = {"max_tokens": 1, "temperature": 0}

    def cached(**more):
        return served.complete(prompt, **request, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0
    assert cached(cache_salt="other") == 0


def test_marks_of_what_to_cache_and_what_libraries_add_change_nothing(served):
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    turns = [*USER, {"role": "assistant", "content": "Red."}, *USER]
    plain = served.chat(turns, tools=tools, **GREEDY)["choices"]
    parts = [{"type": "text", "text": turns[0]["content"], **mark, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    marked = [{"role": "user", "content": parts}, turns[1] | {"provider_specific_fields": {"refusal": None}}]
    marked = [*marked, turns[2] | mark]
    options = {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
    assert served.chat(marked, tools=[tools[0] | mark], **options, **GREEDY)["choices"] == plain
    response = served.post("/v1/responses", input="Hi", max_output_tokens=1, store=False, **options)
    assert response.status == 200
    stream = served.post(M, messages=USER, stream=True, stream_options={"continuous_usage_stats": False}, **GREEDY)
    assert stream.events


@pytest.mark.parametrize("type", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_of_the_format_is_enforced(served, type):
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    format = {"type": type, "schema": schema}
    text = served.chat(USER, response_format=format, temperature=0, max_tokens=250)["choices"][0]["message"]["content"]
    assert json.loads(text) == {"a": 7}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "text", "schema": {}}}, "has a schema; remove it"),
        ({"response_format": {"type": "json_schema"}}, "has no json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "'not'"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}},
            "both schema and json_schema",
        ),
        ({"enable_thinking": False}, "use chat_template_kwargs"),
        ({"regex": "a"}, r"use structured_outputs\.regex"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"messages": [*USER, {"role": "assistant", "content": "a", "reasoning": "b"}]}, r"reasoning is not supported"),
        ({"messages": [USER[0] | {"reasoning": "b"}]}, "only allowed in messages of an assistant"),
        ({"messages": [USER[0] | {"cache": 1}]}, "cache"),
    ],
)
def test_what_would_change_a_response_is_refused_with_the_way_out(served, fields, says):
    response = served.post(M, **{"messages": USER, **GREEDY, **fields})
    assert response.status == 400
    assert re.search(says, response.error["message"])
