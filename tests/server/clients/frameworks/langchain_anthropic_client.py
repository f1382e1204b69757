# /// script
# dependencies = ["langchain-anthropic>=0.3"]
# ///
"""langchain-anthropic: a message, a stream, a tool."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


chat = ChatAnthropic(
    model_name="smollm2", base_url=sys.argv[1], api_key="none", temperature=0, max_tokens_to_sample=60, max_retries=0
)
whole = chat.invoke("Name the capital of France.")
assert "Paris" in whole.content, whole
assert "".join(piece.text for piece in chat.stream("Name the capital of France.")) == whole.content
called = chat.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Oslo?")
assert called.tool_calls[0]["name"] == "get_weather"
