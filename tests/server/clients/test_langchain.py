"""`langchain-openai` as it is: invoke, stream, structured output, tools."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def chat(served):
    return ChatOpenAI(
        model="smollm2", base_url=f"{served.url}/v1", api_key=SecretStr("none"), max_retries=0, temperature=0, seed=1
    )


def test_messages_in_message_out(chat):
    result = chat.invoke([SystemMessage("You are brief."), HumanMessage("Say hello.")], max_tokens=8)
    assert isinstance(result, AIMessage)
    assert result.usage_metadata is not None
    assert result.usage_metadata["output_tokens"] <= 8
    pieces = list(chat.stream([SystemMessage("You are brief."), HumanMessage("Say hello.")], max_tokens=8))
    assert "".join(str(piece.content) for piece in pieces) == result.content
    assert asyncio.run(chat.ainvoke("Say hello.", max_tokens=4)).content


def test_completions(served):
    model = OpenAI(
        model="smollm2",
        base_url=f"{served.url}/v1",
        api_key=SecretStr("none"),
        max_tokens=6,
        temperature=0,
        max_retries=0,
    )
    expected = served.complete("The sky is", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert model.invoke("The sky is") == expected
    assert "".join(model.stream("The sky is")) == expected
    assert model.generate(["The sky is", "One, two,"]).generations[0][0].text == expected


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    result = chat.with_structured_output(Person, method=method).invoke("Describe a person.")
    assert isinstance(result, Person)


def test_tools(chat):
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    asked = [HumanMessage("Weather in Oslo?")]
    result = bound.invoke(asked, max_tokens=120)
    (call,) = result.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    response = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    last = chat.bind_tools([get_weather]).invoke([*asked, result, response], max_tokens=12)
    assert isinstance(last, AIMessage)
    streamed = None
    for piece in bound.stream(asked, max_tokens=120):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]
