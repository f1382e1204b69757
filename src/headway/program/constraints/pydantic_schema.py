"""The JSON Schema of a pydantic model class, with only its own fields, and only what the class then takes."""

from __future__ import annotations

from functools import cache
from typing import Any

from headway.base.errors import InvalidInput
from headway.base.text import shorten
from headway.program.constraints.schema_keywords import LISTS, MAPS, ONE

INTEGER = "^(?:0|-?[1-9][0-9]{0,17})$"


def is_pydantic(schema: Any) -> bool:
    """Whether a schema is given as a pydantic model class."""
    return isinstance(schema, type) and hasattr(schema, "model_json_schema")


def pydantic_schema(model: Any) -> Any:
    """The schema of a pydantic model class."""
    try:
        return _own_fields(_generated(model))
    except Exception as error:  # pydantic's own, and those of the model's own code
        why = shorten(" ".join(str(error).split()), 200)
        raise InvalidInput(f"{model.__name__} has no JSON schema: {why}") from error


def _generated(model: Any) -> Any:
    from pydantic import BaseModel

    made = getattr(model.model_json_schema, "__func__", None)
    if made is not BaseModel.model_json_schema.__func__:  # the class has a method of its own
        return model.model_json_schema()
    return model.model_json_schema(schema_generator=_generator())


@cache
def _generator() -> Any:
    """pydantic's generator of schemas, changed where a class would refuse what fits its schema, or takes more."""
    from pydantic.json_schema import GenerateJsonSchema

    class Followed(GenerateJsonSchema):
        def set_schema(self, schema: Any) -> dict[str, Any]:
            return _set(super().set_schema(schema))

        def frozenset_schema(self, schema: Any) -> dict[str, Any]:
            return _set(super().frozenset_schema(schema))

        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            return _decimal(super().decimal_schema(schema), schema)

        def dict_schema(self, schema: Any) -> dict[str, Any]:
            integers = schema.get("keys_schema", {}).get("type") == "int"
            return super().dict_schema(schema) | ({"propertyNames": {"pattern": INTEGER}} if integers else {})

    return Followed


def _set(array: dict[str, Any]) -> dict[str, Any]:
    """A set drops what comes twice, so that items need not differ, unless there must be several."""
    if array.get("minItems", 0) <= 1:
        array.pop("uniqueItems", None)
    return array


def _decimal(either: dict[str, Any], says: dict[str, Any]) -> dict[str, Any]:
    """A decimal as a number with its digits: as a string it could be any text."""
    number = next((one for one in either.get("anyOf", ()) if one.get("type") == "number"), either)
    places, digits = says.get("decimal_places"), says.get("max_digits")
    if places is None:
        return number
    exact = {"multipleOf": 10.0**-places} if places else {"type": "integer"}
    if digits is None:
        return number | exact
    limit = 10 ** (digits - places)
    low = {} if {"minimum", "exclusiveMinimum"} & number.keys() else {"exclusiveMinimum": -limit}
    high = {} if {"maximum", "exclusiveMaximum"} & number.keys() else {"exclusiveMaximum": limit}
    return number | exact | low | high


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
