# /// script
# dependencies = ["openai-agents>=0.6"]
# ///
"""openai-agents: an answer, a stream, a tool and a structured output, by chats and by responses."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
settings = ModelSettings(temperature=0, max_tokens=60)
set_tracing_disabled(True)
asked: list[str] = []


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return f"sunny in {city}"


async def main() -> None:
    for model in (OpenAIChatCompletionsModel("smollm2", client), OpenAIResponsesModel("smollm2", client)):
        agent = Agent(name="guide", instructions="Answer briefly.", model=model, model_settings=settings)
        whole = await Runner.run(agent, "Name the capital of France.")
        assert "Paris" in whole.final_output, whole
        streamed = Runner.run_streamed(agent, "Name the capital of France.")
        text = ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text == streamed.final_output == whole.final_output, (text, whole.final_output)
        shaped = Agent(name="registry", model=model, model_settings=settings, output_type=Person)
        assert isinstance((await Runner.run(shaped, "Describe a person.")).final_output, Person)
        forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="get_weather")
        caller = Agent(name="forecaster", model=model, model_settings=forced, tools=[get_weather])
        result = await Runner.run(caller, "What is the weather in Oslo?", max_turns=4)
        assert asked, result
        asked.clear()


asyncio.run(main())
