# /// script
# dependencies = ["instructor>=1.10"]
# ///
"""instructor: objects by tools, by JSON schemas, and as they grow."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Describe a person named Ann who is 30 years old."}],
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    patched = instructor.from_openai(client, mode=mode)
    if mode is not instructor.Mode.JSON:  # which leaves the shape to the model
        person = patched.chat.completions.create(response_model=Person, max_retries=0, **asked)
        assert isinstance(person, Person), mode
    else:
        assert patched.chat.completions.create(response_model=None, **asked).choices[0].message.content
*_, last = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
    response_model=Person, **asked
)
assert last.name
