# /// script
# dependencies = ["litellm>=1.80", "mcp"]  # litellm imports mcp for any call of tools, and does not require it
# ///
"""litellm: a chat, a stream, a tool, a structured output, a completion, a response and Ollama's chat."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm  # it looks at the environment

litellm.suppress_debug_info = True
asked = {
    "model": "openai/smollm2",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 60,
    "max_retries": 0,
}
messages = [{"role": "user", "content": "Name the capital of France."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}

whole = litellm.completion(messages=messages, **asked)
assert "Paris" in whole.choices[0].message.content
pieces = litellm.completion(messages=messages, stream=True, **asked)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
called = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", **asked)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "get_weather"
assert "city" in json.loads(call.function.arguments)
shape = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}}
shaped = litellm.completion(messages=messages, response_format=shape, **asked)
assert set(json.loads(shaped.choices[0].message.content)) == {"n"}
text = litellm.text_completion(prompt="The sky is", **{**asked, "model": "text-completion-openai/smollm2"})
assert text.choices[0].text
other = {name: value for name, value in asked.items() if name not in ("max_tokens", "max_retries")}
responded = litellm.responses(input="Name the capital of France.", max_output_tokens=60, **other)
assert "Paris" in responded.output[0].content[0].text
ollama = {**asked, "model": "ollama_chat/smollm2", "api_base": sys.argv[1]}
assert "Paris" in litellm.completion(messages=messages, **ollama).choices[0].message.content
