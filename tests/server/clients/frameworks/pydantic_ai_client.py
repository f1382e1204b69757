# /// script
# dependencies = ["pydantic-ai-slim[openai]>=1"]
# ///
"""pydantic-ai: an answer, a stream, a tool and a structured output, by chats and by responses."""

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
provider = OpenAIProvider(openai_client=client)
settings = {"temperature": 0.0, "max_tokens": 80}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


async def main() -> None:
    for model in (OpenAIChatModel("smollm2", provider=provider), OpenAIResponsesModel("smollm2", provider=provider)):
        agent = Agent(model, system_prompt="Answer briefly.", model_settings=settings)
        whole = await agent.run("Name the capital of France.")
        assert "Paris" in whole.output, whole
        async with agent.run_stream("Name the capital of France.") as stream:
            assert "".join([piece async for piece in stream.stream_text(delta=True)]) == whole.output
        for kind in (NativeOutput(Person), Person):  # by a response format, and by a tool that must be called
            shaped = Agent(model, output_type=kind, model_settings=settings)
            assert isinstance((await shaped.run("Describe a person.")).output, Person)
        helper = Agent(model, model_settings=settings)

        @helper.tool_plain
        def get_weather(city: str) -> str:
            """The weather of a city."""
            return f"sunny in {city}"

        result = await helper.run("Use the tool get_weather to tell me the weather in Oslo.")
        assert isinstance(result.output, str)


asyncio.run(main())
