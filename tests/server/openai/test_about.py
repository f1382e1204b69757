"""Models, tokens and the tokenizer, as clients ask for them."""

from __future__ import annotations

import pytest

TEXT = "Hello, wörld! 🦜"


def test_models(served):
    listed = served.get("/v1/models").json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == served.get("/v1/models/smollm2").json
    assert (model["id"], model["object"], model["max_model_len"]) == ("smollm2", "model", 8192)
    assert model["created"] > 1_600_000_000
    assert served.get("/v1/models/a/b").status == 404


def test_tokens_there_and_back(served):
    result = served.post("/tokenize", prompt=TEXT, return_token_strs=True).json
    assert result["tokens"] == served.engine.tokenizer.encode(TEXT)
    assert result["count"] == len(result["tokens"]) == len(result["token_strs"])
    assert result["max_model_len"] == 8192
    assert served.post("/detokenize", tokens=result["tokens"]).json == {"prompt": TEXT, "content": TEXT}
    assert served.post("/tokenize", prompt="").json["tokens"] == []
    assert served.post("/detokenize", tokens=[]).json == {"prompt": "", "content": ""}


def test_special_tokens_are_named_alone_or_on_request(served):
    end = served.engine.tokenizer.eos_ids[0]
    assert served.post("/tokenize", prompt="<|im_end|>", add_special_tokens=False).json["tokens"] == [end]
    assert end not in served.post("/tokenize", prompt="a<|im_end|>").json["tokens"]
    assert end in served.post("/tokenize", prompt="a<|im_end|>", special=True).json["tokens"]
    assert end not in served.post("/tokenize", prompt="<|im_end|>", special=False).json["tokens"]
    assert served.post("/detokenize", tokens=[end]).json["prompt"] == "<|im_end|>"


def test_too_many_ids_are_refused_unread(served):
    error = served.refused("/detokenize", tokens=[5] * 262_145)
    assert (error["param"], error["code"]) == ("tokens", "too_many")


def test_tools_of_a_chat_are_bounded_here_too(served):
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 9000}} for i in range(200)]
    error = served.refused("/tokenize", messages=[{"role": "user", "content": "hi"}], tools=tools)
    assert (error["param"], error["code"]) == ("tools", "schema_too_large")


def test_a_chat_has_the_tokens_of_its_prompt(served):
    messages = [{"role": "user", "content": "hi"}]
    ids = served.post("/tokenize", messages=messages).json["tokens"]
    assert len(ids) == served.chat(messages, max_tokens=1)["usage"]["prompt_tokens"]
    without = served.post("/tokenize", messages=messages, add_generation_prompt=False).json["tokens"]
    assert ids[: len(without)] == without
    assert len(without) < len(ids)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "special": True}, "special"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_bad_questions(served, path, body, param):
    assert served.refused(path, **body)["param"] == param


def test_the_tokenizer_describes_itself(served):
    info = served.get("/tokenizer_info").json
    assert (info["bos_token"], info["eos_token"], info["vocab_size"]) == ("<|im_start|>", "<|im_end|>", 49152)
    assert info["chat_template"] == served.engine.chat_template.source


def test_embeddings_say_how_to_have_them(served):
    response = served.post("/v1/embeddings", model="smollm2", input="x")
    assert response.status == 400
    assert "--embed MODEL" in response.error["message"]


def test_the_description_covers_every_route(served):
    paths = served.get("/openapi.json").json["paths"]
    routes = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info"}
    assert routes <= set(paths)
    body = served.get("/openapi.json").json["components"]["schemas"]["CompletionRequest"]
    assert body["additionalProperties"] is False
    assert "422" not in paths["/v1/completions"]["post"]["responses"]
