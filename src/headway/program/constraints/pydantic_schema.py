"""The JSON Schema of a pydantic model class, with only its own fields."""

from __future__ import annotations

from typing import Any

from headway.base.errors import InvalidInput
from headway.base.text import shorten
from headway.program.constraints.schema_keywords import LISTS, MAPS, ONE


def is_pydantic(schema: Any) -> bool:
    """Whether a schema is given as a pydantic model class."""
    return isinstance(schema, type) and hasattr(schema, "model_json_schema")


def pydantic_schema(model: Any) -> Any:
    """The schema of a pydantic model class."""
    try:
        return _own_fields(model.model_json_schema())
    except Exception as error:  # pydantic's own, and those of the model's own code
        raise InvalidInput(f"{model.__name__} has no JSON schema: {shorten(str(error), 200)}") from error


def _own_fields(schema: Any) -> Any:
    """A pydantic model's schema with only its own fields, nested models' too. Where a model says what else it takes
    (extra="allow"), and for dicts, that stands."""
    if isinstance(schema, list):
        return [_own_fields(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            out[keyword] = {name: _own_fields(each) for name, each in value.items()}
        elif keyword in ONE or keyword in LISTS or keyword == "items":
            out[keyword] = _own_fields(value)
    if "properties" in schema:
        out.setdefault("additionalProperties", False)
    return out
