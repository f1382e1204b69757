# /// script
# dependencies = ["llama-index-llms-openai-like>=0.5"]
# ///
"""llama-index's openai-like LLM: a completion, a chat, a stream, a tool and a structured output."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


how = {"model": "smollm2", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
chat = OpenAILike(
    **how, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True, max_retries=0
)
messages = [ChatMessage(role="user", content="Name the capital of France.")]
whole = chat.chat(messages).message.content
assert "Paris" in whole
assert "".join(piece.delta or "" for piece in chat.stream_chat(messages)) == whole
tools = [FunctionTool.from_defaults(get_weather)]
result = chat.predict_and_call(tools, "What is the weather in Oslo?", tool_required=True)
assert "sunny" in str(result), result
assert isinstance(chat.structured_predict(Person, PromptTemplate("Describe a person.")), Person)
plain = OpenAILike(**how, is_chat_model=False, max_retries=0)
assert plain.complete("The sky is").text
