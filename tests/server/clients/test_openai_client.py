"""The `openai` package as it is: sync and async, whole and streamed, structured outputs, tools, errors."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel, Field

PROMPT = "Kubernetes pods are scheduled by the"
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class GetTime(BaseModel):
    """The time somewhere."""

    zone: str = Field(pattern="^(UTC|CET)$")


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as created:
        yield created


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' does not exist"):
        client.models.retrieve("gpt-4")


def test_completions_with_logprobs(client):
    result = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    (choice,) = result.choices
    assert result.usage.completion_tokens == 5
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_streams_of_completions(client):
    request_body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**request_body)
    chunks = list(client.completions.create(**request_body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat(client):
    result = client.chat.completions.create(
        model="smollm2", messages=HELLO, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = result.choices
    assert choice.message.role == "assistant"
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(choice.logprobs.content)


def test_streams_of_chats_and_the_accumulating_helper(client):
    request_body = {"model": "smollm2", "messages": HELLO, "max_tokens": 60, "seed": 5, "stop": ["!", ".", ","]}
    whole = client.chat.completions.create(**request_body).choices[0]
    chunks = list(client.chat.completions.create(**request_body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    with client.chat.completions.stream(**request_body) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == whole.message.content
    assert final.finish_reason == whole.finish_reason == "stop"


def test_structured_outputs_parse_into_a_model(client):
    result = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format=Person,
        max_tokens=200,
        seed=4,
    )
    person = result.choices[0].message.parsed
    assert isinstance(person, Person)
    assert 0 <= person.age <= 120


def test_any_json_object(client):
    result = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "An empty JSON object."}],
        response_format={"type": "json_object"},
        max_tokens=300,
        extra_body={"allowed_token_ids": [107, 109]},  # the two braces
    )
    assert json.loads(result.choices[0].message.content) == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_are_called(client, choice):
    request_body = {"model": "smollm2", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 120}
    whole = client.chat.completions.create(**request_body, seed=2).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    with client.chat.completions.stream(**request_body, seed=2) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments


def test_a_whole_round_of_a_tool(client):
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Weather in Oslo?"}]
    first = client.chat.completions.create(
        model="smollm2", messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=120, seed=2
    )
    message = first.choices[0].message
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}]
    second = client.chat.completions.create(
        model="smollm2", messages=messages, tools=[WEATHER], max_tokens=16, temperature=0
    )
    assert second.choices[0].message.content


def test_strict_tools_parse_into_models(client):
    result = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "What time is it?"}],
        tools=[openai.pydantic_function_tool(GetTime)],
        tool_choice="required",
        max_tokens=120,
    )
    (call,) = result.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetTime)


def test_many_asynchronous_requests_at_once(served):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            request_body = [{"model": "smollm2", "prompt": PROMPT, "max_tokens": 6, "seed": seed} for seed in range(8)]
            alone = [(await client.completions.create(**one)).choices[0].text for one in request_body]
            together = await asyncio.gather(*(client.completions.create(**one) for one in request_body))
            stream = await client.chat.completions.create(
                model="smollm2", messages=HELLO, max_tokens=6, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return alone, [one.choices[0].text for one in together], "".join(pieces)

    alone, together, streamed = asyncio.run(main())
    assert alone == together
    assert streamed


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2", prompt="x " * 9000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as strange:
        client.chat.completions.create(model="smollm2", messages=HELLO, extra_body={"frobnicate": 3})
    assert strange.value.param == "frobnicate"
    with pytest.raises(openai.APIStatusError, match="--embed MODEL"):
        client.embeddings.create(model="smollm2", input="x")


def test_fields_that_change_nothing_are_taken(client):
    request_body = {"model": "smollm2", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    plain = client.chat.completions.create(**request_body)
    idle = {"user": "ada", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    marked = client.chat.completions.create(**request_body, **idle, prompt_cache_key="k")
    assert plain.choices[0].message.content == marked.choices[0].message.content


def test_responses_go_on_as_if_computed_at_once(client, served):
    """The second turn continues the first one's context; its tokens and their log-probabilities are those of a prompt
    that was computed anew."""
    fields = {"model": "smollm2", "temperature": 0, "max_output_tokens": 12}
    ranked = fields | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    first = client.responses.create(input="Name the capital of France.", **fields)
    warm = client.responses.create(input="And of Japan?", previous_response_id=first.id, **ranked)
    items = [{"role": "user", "content": "Name the capital of France."}, *(item.to_dict() for item in first.output)]
    items += [{"role": "user", "content": "And of Japan?"}]
    fresh = client.responses.create(input=items, store=False, extra_body={"cache_salt": "fresh"}, **ranked)
    assert fresh.usage.input_tokens_details.cached_tokens == 0
    assert warm.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
    assert warm.output_text == fresh.output_text
    (one,), (two,) = warm.output[0].content, fresh.output[0].content
    assert "".join(token.token for token in one.logprobs) == one.text
    assert [token.logprob for token in one.logprobs] == pytest.approx([t.logprob for t in two.logprobs], abs=1e-3)
    assert {len(token.top_logprobs) for token in one.logprobs} == {2}
    assert client.responses.retrieve(warm.id).output[0].content[0].logprobs == []
    for response in (first, warm):
        client.responses.delete(response.id)
    served.until(served.is_quiet)
