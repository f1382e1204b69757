# /// script
# dependencies = ["llm>=0.26"]
# ///
"""llm with a model of extra-openai-models.yaml: a prompt, a stream, a schema, a tool, and its command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: smollm2\n  api_base: {sys.argv[1]}/v1\n  api_key_name: none\n"
    "  supports_schema: true\n  supports_tools: true\n"
)
(folder / "keys.json").write_text(json.dumps({"none": "none"}))

import llm  # noqa: E402  # it reads the folder


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


model = llm.get_model("local")
how = {"temperature": 0, "max_tokens": 60}
whole = model.prompt("Name the capital of France.", stream=False, **how).text()
assert "Paris" in whole
assert "".join(model.prompt("Name the capital of France.", **how)) == whole
shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
shaped = model.prompt('Answer with the text {"n": 1} and nothing else.', schema=shape, stream=False, **how).text()
assert set(json.loads(shaped)) == {"n"}
assert model.chain("Use get_weather for the weather in Oslo.", tools=[get_weather], options=how).text() is not None
command = [sys.executable, "-m", "llm", "-m", "local", "-o", "max_tokens", "20", "-o", "temperature", "0"]
command += ["Name the capital of France."]
done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
assert "Paris" in done.stdout, done
