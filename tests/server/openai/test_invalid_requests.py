"""What cannot be answered is a 400 that names the field, the value and the limit; nothing that matters is ignored."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from headway.server.api.request_schema import IGNORED, ChatRequest, CompletionRequest

C, M = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
F = {"type": "function", "function": {"name": "f"}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}


def named(name):
    return {"id": "a", "function": {"name": name, "arguments": "{}"}}


def described(name, text):
    return {"type": "function", "function": {"name": name, "description": text}}


COMMON = [
    ({"nonsense": 1}, "nonsense", ["unknown"]),
    ({"guided_json": {}}, "guided_json", ["structured_outputs.json"]),
    ({"temperature": -1}, "temperature", ["-1"]),
    ({"temperature": "hot"}, "temperature", ["hot"]),
    ({"temperature": True}, "temperature", ["number"]),
    ({"top_p": 0}, "top_p", ["0"]),
    ({"top_p": 1.5}, "top_p", ["1.5"]),
    ({"top_k": -2}, "top_k", ["-2"]),
    ({"top_k": 1.5}, "top_k", ["integer"]),
    ({"min_p": 2}, "min_p", ["2"]),
    ({"typical_p": 0}, "typical_p", ["0"]),
    ({"dry_multiplier": -1}, "dry_multiplier", ["-1"]),
    ({"dry_base": 2}, "dry_base", ["dry_multiplier"]),
    ({"xtc_probability": 2}, "xtc_probability", ["2"]),
    ({"mirostat": 3}, "mirostat", ["3"]),
    ({"repeat_penalty": 2, "repetition_penalty": 3}, "repeat_penalty", ["2", "3"]),
    ({"mirostat": 2, "temperature": 0}, "mirostat", ["temperature"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["0"]),
    ({"seed": -(1 << 63) - 1}, "seed", [str(-(1 << 63) - 1)]),
    ({"seed": 1 << 64}, "seed", [str(1 << 64)]),
    ({"n": 0}, "n", ["0", "64"]),
    ({"n": 10**9}, "n", ["1000000000", "64"]),
    ({"max_tokens": -1}, "max_tokens", ["-1"]),
    ({"max_tokens": 8193}, "max_tokens", ["8193", "8192"]),
    ({"min_tokens": -1}, "min_tokens", ["-1"]),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ["9", "8"]),
    ({"priority": 1001}, "priority", ["1001", "1000"]),
    ({"stop": ""}, "stop", ["empty"]),
    ({"stop": ["a"] * 65}, "stop", ["65", "64"]),
    ({"stop": "a" * 1025}, "stop", ["1025", "1024"]),
    ({"stop": [5]}, "stop[0]", ["5"]),
    ({"stop_token_ids": [49152]}, "stop_token_ids", ["49152", "49151"]),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", ["integer"]),
    ({"logit_bias": {"49152": 1}}, "logit_bias", ["49152", "49151"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["-1"]),
    ({"logit_bias": {"one": 1}}, "logit_bias", ["one"]),
    ({"logit_bias": {"1": "much"}}, "logit_bias", ["much"]),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", ["1000", "number"]),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", ["twice"]),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", ["4097", "4096"]),
    ({"allowed_token_ids": [0, 1 << 40]}, "allowed_token_ids", [str(1 << 40), "49152"]),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", ["-1"]),
    ({"allowed_token_ids": []}, "allowed_token_ids", ["empty"]),
    ({"bad_words": [""]}, "bad_words", ["empty"]),
    ({"bad_words": [[]]}, "bad_words", ["empty"]),
    ({"bad_words": [[49152]]}, "bad_words", ["49152", "49151"]),
    ({"bad_words": ["a"] * 4097}, "bad_words", ["4097", "4096"]),
    ({"prompt_logprobs": 49153}, "prompt_logprobs", ["49153", "49152"]),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ["stream"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", ["unknown"]),
    ({"logprobs_mode": "cooked"}, "logprobs_mode", ["raw", "processed"]),
    ({"structured_outputs": {}}, "structured_outputs", ["exactly one"]),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", ["exactly one"]),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", ["(a"]),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs.regex", ["5000"]),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ["empty"]),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs", ["Lark"]),
    ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json", ["nothing"]),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ["JSON"]),
    ({"structured_outputs": {"json": {"enum": ["x" * 300_000]}}}, "structured_outputs.json", ["262144"]),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", ["unknown"]),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["0", "8192"]),
    ({"truncate_prompt_tokens": 8193}, "truncate_prompt_tokens", ["8193", "8192"]),
    ({"cache_salt": ""}, "cache_salt", ["1"]),
    ({"use_beam_search": True, "stream": True}, "stream", ["use_beam_search"]),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature", ["use_beam_search"]),
    ({"use_beam_search": True, "n": 2, "xtc_probability": 0.5}, "xtc_probability", ["use_beam_search"]),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of", ["3", "2"]),
    ({"use_beam_search": True, "n": 2, "length_penalty": 1e300}, "use_beam_search", ["length_penalty", "overflows"]),
    ({"length_penalty": 2.0}, "length_penalty", ["use_beam_search"]),
    ({"length_penalty": True}, "length_penalty", ["number"]),
    ({"early_stopping": True}, "early_stopping", ["use_beam_search"]),
    ({"early_stopping": "often"}, "early_stopping", []),
]
COMPLETIONS = [
    ({"suffix": "end"}, "suffix", ["suffix"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": [[]]}, "prompt", ["empty"]),
    ({"prompt": None}, "prompt", ["NoneType"]),
    ({"prompt": {"a": 1}}, "prompt", ["dict"]),
    ({"prompt": ["a", 1]}, "prompt", ["int", "str"]),
    ({"prompt": [["a"]]}, "prompt", ["'a'"]),
    ({"prompt": [1, True]}, "prompt", ["bool"]),
    ({"prompt": [0, 49152]}, "prompt", ["49152", "49151"]),
    ({"prompt": [[0], [-1]]}, "prompt", ["prompt[1][0]", "-1"]),
    ({"prompt": ["a"] * 257}, "prompt", ["257", "256"]),
    ({"prompt": [5] * 8190}, "prompt", ["8190", "8192", "16", "8206"]),
    ({"prompt": [5] * 9000}, "prompt", ["9000", "8192"]),
    ({"prompt": "a" * 4_000_000}, "prompt", ["4000000", "8192"]),
    ({"prompt": [5] * 8000, "max_tokens": 193}, "prompt", ["8000", "8192", "193"]),
    ({"prompt": "\ud800"}, None, ["D800"]),
    ({"max_tokens": 0}, "max_tokens", ["echo"]),
    ({"best_of": 65}, "best_of", ["65", "64"]),
    ({"best_of": 1, "n": 2}, "best_of", ["1", "2"]),
    ({"best_of": 2, "stream": True}, "best_of", ["stream"]),
    ({"logprobs": 49153}, "logprobs", ["49153", "49152"]),
    ({"logprobs": True}, "logprobs", ["integer"]),
    (
        {"prompt": [5] * 1000, "n": 64, "echo": True, "logprobs": 64, "max_tokens": 0},
        "logprobs",
        ["4160000", "1048576"],
    ),
    ({"prompt": [5] * 1000, "n": 64, "prompt_logprobs": 64, "max_tokens": 0}, "prompt_logprobs", ["4160000", "64"]),
    ({"prompt": [[5] * 1000] * 64, "prompt_logprobs": 64, "max_tokens": 0}, "prompt_logprobs", ["64000", "1048576"]),
    ({"n": 64, "logprobs": 64, "max_tokens": 1100}, "logprobs", ["70400", "4194304"]),
    ({"logprobs": 49152, "max_tokens": 100}, "logprobs", ["4915300", "4194304", "stream"]),
    ({"messages": USER}, "messages", ["unknown"]),
]
CHATS = [
    ({"messages": []}, "messages", ["empty"]),
    ({"messages": "hi"}, "messages", ["list"]),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", ["required"]),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", ["robot"]),
    ({"messages": [{"role": "user"}]}, "messages[0].content", ["no content"]),
    ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood", ["unknown"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        None,
        ["only text"],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
        ["image_url", "text"],
    ),
    (
        {"messages": [*USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *USER]},
        "messages[1].reasoning_content",
        ["template"],
    ),
    (
        {"messages": [*USER, {"role": "assistant", "content": "a", "refusal": "b"}, *USER]},
        "messages[1].refusal",
        ["content"],
    ),
    (
        {"messages": [*USER, CALLED, {"role": "tool", "content": "5", "tool_call_id": "a", "name": "g"}]},
        "messages[2].name",
        ["'g'", "'f'"],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16385}]},
        "messages",
        ["16385", "16384"],
    ),
    ({"messages": [CALLED | {"tool_calls": CALLED["tool_calls"] * 16385}]}, "messages", ["16385", "16384"]),
    ({"messages": [CALLED | {"tool_calls": [named("f" * 4_000_000)]}]}, "messages", ["4000002", "8192"]),
    ({"tools": [described(f"f{i}", "x" * 9000) for i in range(200)]}, "tools", ["1048576"]),
    ({"n": 64, "logprobs": True, "top_logprobs": 20}, "top_logprobs", ["max_tokens", "4194304"]),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", ["neither"]),
    ({"messages": [*USER, CALLED, {"role": "tool", "content": "5"}]}, "messages[2].tool_call_id", ["id of the call"]),
    (
        {"messages": [*USER, CALLED, {"role": "tool", "content": "5", "tool_call_id": "b"}]},
        "messages[2].tool_call_id",
        ["'b'"],
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        ["JSON"],
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id", ["tool"]),
    ({"messages": USER * 4097}, "messages", ["4097", "4096"]),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages", ["8192"]),
    ({"max_tokens": 0}, "max_tokens", ["0"]),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", ["5", "6"]),
    ({"max_tokens": 8190}, "messages", ["8192", "8190"]),
    ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ({"logprobs": True, "top_logprobs": 49153}, "top_logprobs", ["49153", "49152"]),
    ({"logprobs": 2}, "logprobs", ["boolean"]),
    ({"functions": [{"name": "f"}], "tools": [F]}, "functions", ["tools"]),
    ({"function_call": {"name": "f"}}, "function_call", ["no functions"]),
    (
        {"messages": [CALLED | {"function_call": {"name": "f", "arguments": "{}"}}, *USER]},
        "messages[0].function_call",
        ["both"],
    ),
    ({"reasoning_effort": "enormous"}, "reasoning_effort", ["enormous"]),
    ({"verbosity": "loud"}, "verbosity", ["loud"]),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking", ["template"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["server"]),
    ({"continue_final_message": True}, "continue_final_message", ["assistant"]),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        ["add_generation_prompt"],
    ),
    (
        {
            "tools": [F],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        },
        "tool_choice",
        ["'g'", "f"],
    ),
    ({"best_of": 2}, "best_of", ["use_beam_search"]),
    ({"add_special_tokens": True}, "add_special_tokens", ["unknown"]),
    ({"modalities": ["audio"]}, "modalities[0]", ["text"]),
    ({"audio": {}}, "audio", ["text"]),
    ({"tool_choice": "required"}, "tool_choice", ["no tools"]),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
        ["at least 1"],
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [], "most": 1}}},
        "tool_choice.allowed_tools.most",
        ["unknown"],
    ),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", ["'g'", "f"]),
    ({"tools": [F, F]}, "tools", ["two tools"]),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools", ["bad name"]),
    ({"tools": [{"type": "search"}]}, "tools[0].type", ["function"]),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
            "tool_choice": "required",
        },
        "tools (f)",
        ["no"],
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", ["json_schema"]),
    ({"response_format": {"type": "json_schema"}}, "response_format", ["json_schema"]),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        ["both"],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        "response_format.json_schema.schema",
        ["no"],
    ),
    ({"prompt": "hi"}, "prompt", ["unknown"]),
]
ALL = [
    *((C, {"prompt": "hi", **body}, *rest) for body, *rest in [*COMMON, *COMPLETIONS]),
    *((M, {"messages": USER, **body}, *rest) for body, *rest in [*COMMON, *CHATS]),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), ALL, ids=lambda value: str(value)[:40])
def test_what_cannot_be_answered_is_named(served, path, body, param, words):
    error = served.refused(path, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 500


def test_after_all_that_nothing_is_held(served):
    served.until(served.is_quiet)


@pytest.mark.parametrize("path", [C, M])
def test_an_unknown_model_is_a_404(served, path):
    response = (
        served.post(path, model="gpt-4", prompt="x") if path == C else served.post(path, model="gpt-4", messages=USER)
    )
    assert response.status == 404
    assert response.error["code"] == "model_not_found"
    assert "'gpt-4'" in response.error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"text"', b"null", b'{"prompt": "a", "prompt"}', b"\xff\xfe", b"[" * 100_000]
)
def test_bodies_that_are_no_request(served, body):
    response = served.ask("POST", C, body)
    assert response.status == 400
    assert response.error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", ["nested too deeply"]),
        (b'{"prompt": "\\ud800", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", ["nested too deeply"]),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", ["digits"]),
        (b'{"prompt": "\xff"}', ["UTF-8", "12"]),
        (b'{"prompt": }', ["not valid JSON", "11"]),
    ],
)
@pytest.mark.parametrize("path", [C, "/tokenize"])
def test_what_cannot_be_read_says_why(served, path, body, words):
    response = served.ask("POST", path, body)
    assert (response.status, response.error["code"]) == (400, "invalid_json")
    for word in words:
        assert word in response.error["message"]


@pytest.mark.parametrize("kind", ["text/html", "application/xml", "multipart/form-data; boundary=x"])
def test_a_body_of_another_type_is_refused_by_its_name(served, kind):
    request_body = urllib.request.Request(f"{served.url}{C}", b'{"prompt": "a"}', {"content-type": kind})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request_body)
    message = json.loads(error.value.read())["error"]["message"]
    assert error.value.code == 400
    assert kind.partition(";")[0] in message
    assert "b'" not in message


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "priority",
        "n",
        "seed",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "best_of",
    ],
)
def test_a_number_that_no_float_holds_is_refused(served, field):
    error = served.refused(C, prompt="a", **{field: 10**400})
    assert error["param"] == field
    assert len(error["message"]) < 300


def test_a_negative_seed_is_a_seed(served):
    request_body = {"max_tokens": 8, "logprobs": 0}
    first, again, same = (served.complete("Once", seed=seed, **request_body)["choices"] for seed in (-7, -7, 2**64 - 7))
    assert first == again == same
    assert served.complete("Once", seed=-8, **request_body)["choices"] != first


def test_numbers_that_json_lacks_are_refused(served):
    for text in ("NaN", "Infinity", "1e999"):
        response = served.ask("POST", C, b'{"prompt": "hi", "temperature": %s}' % text.encode())
        assert response.status == 400
        assert response.error["param"] == "temperature"


def test_a_million_wrong_entries_are_one_error(served):
    for body in (
        {"prompt": "a", "allowed_token_ids": ["x"] * 500_000},
        {"prompt": "a", "stop": [1] * 500_000},
        {"prompt": "a", **{f"x{i}": 1 for i in range(200_000)}},
    ):
        response = served.ask("POST", C, json.dumps(body).encode())
        assert response.status == 400
        assert len(response.body) < 1000


def test_fields_that_change_nothing_are_those_of_the_list(served):
    """Every other field does something or is refused."""
    plain = served.complete("The sky is", max_tokens=6, temperature=0)["choices"]
    values = {"metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "store": True}
    values |= {"prompt_cache_options": {"mode": "implicit"}}
    idle = {name: values.get(name, "x") for name in IGNORED}
    assert served.complete("The sky is", max_tokens=6, temperature=0, **idle)["choices"] == plain
    for model in (CompletionRequest, ChatRequest):
        assert set(IGNORED) <= set(model.model_fields)


def test_no_error_shows_the_inside(served):
    for path, body, *_ in ALL[::7]:
        text = served.post(path, **body).body.decode()
        assert "Traceback" not in text
        assert "/site-packages/" not in text
        assert "0x7" not in text
