"""Tools: a typed function becomes a schema, arguments are checked with a clear sentence, and become Python values."""

import dataclasses
import enum
import functools
import time
from datetime import date
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import HeadwayError, InvalidInput, WrongType
from headway.text.tools import bind_arguments, check_arguments, tool_schema
from support.properties import examples


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Place:
    name: str
    at: list[float] = dataclasses.field(default_factory=list)
    unit: Unit = Unit.CELSIUS

    def __post_init__(self):
        if len(self.at) not in (0, 2):
            raise ValueError("a place has two coordinates")


class Span(TypedDict):
    days: int
    zone: NotRequired[str]


@dataclasses.dataclass
class Tree:
    children: "list[Tree]"


def get_weather(city: str, days: int = 3, unit: Literal["c", "f"] = "c") -> str:
    """The weather of a city,
    for some days.

    More that no model needs.

    Args:
        city: The name of the city: in English,
            or in its own language.
        days (int, optional): How many.

    Returns:
        text: not an argument
    """
    return f"{city} {days} {unit}"


def test_a_function_becomes_a_tool():
    assert tool_schema(get_weather) == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, for some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {
                        "type": "string",
                        "description": "The name of the city: in English, or in its own language.",
                    },
                    "days": {"type": "integer", "description": "How many.", "default": 3},
                    "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "at": {"type": "array", "items": {"type": "number"}},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list[list[str]], {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        (dict, {"type": "object"}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b", None], {"enum": [1, "b", None]}),
        (Unit, {"type": "string", "enum": ["c", "f"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Optional[str], {"anyOf": [{"type": "string"}, {"type": "null"}]}),  # noqa: UP045
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Union[str, list[int]], {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}),  # noqa: UP007
        (Annotated[str, "a city"], {"type": "string", "description": "a city"}),
        (Place, PLACE),
        (list[Place], {"type": "array", "items": PLACE}),
        (
            Span,
            {
                "type": "object",
                "properties": {"days": {"type": "integer"}, "zone": {"type": "string"}},
                "required": ["days"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_annotations_have_schemas(annotation, schema):
    def tool(value):
        pass

    tool.__annotations__ = {"value": annotation}
    parameters = tool_schema(tool)["function"]["parameters"]
    assert parameters["properties"] == {"value": schema}
    assert parameters["required"] == ["value"]


@pytest.mark.parametrize(
    "annotation",
    [
        bytes,
        date,
        object,
        tuple[int, int],
        set[str],
        dict[int, str],
        Literal[b"a"],
        type,
        Tree,
        list[date],
        "Nowhere",
        complex,
    ],
)
def test_an_annotation_without_a_schema_is_refused_by_name(annotation):
    def tool(value):
        pass

    tool.__annotations__ = {"value": annotation}
    with pytest.raises(InvalidInput, match=r"value.* of tool|annotations of tool"):
        tool_schema(tool)


def test_functions_that_cannot_be_tools_are_refused():
    def bare(city):
        pass

    def many(*cities: str):
        pass

    def named(**cities: str):
        pass

    def only(city: str, /):
        pass

    def described(city: str):
        """Text.

        Args:
            town: no such thing
        """

    for function, why in (
        (bare, "'city' of bare has no annotation; write its type, as in city: str"),
        (many, "cannot be passed by name"),
        (named, "cannot be passed by name"),
        (only, "cannot be passed by name"),
        (described, "describes \\['town'\\]"),
        (lambda: None, "needs a name"),
    ):
        with pytest.raises(InvalidInput, match=why):
            tool_schema(function)
    for thing in (3, int, functools.partial(get_weather, "a")):
        with pytest.raises(WrongType, match="a named function"):
            tool_schema(thing)  # pyright: ignore[reportArgumentType]


def test_methods_and_async_functions_are_tools():
    class Clock:
        async def now(self, zone: str = "UTC") -> str:
            """The time."""
            return zone

    schema = tool_schema(Clock().now)["function"]
    assert (schema["name"], schema["description"]) == ("now", "The time.")
    assert schema["parameters"]["properties"] == {"zone": {"type": "string", "default": "UTC"}}


@pytest.mark.parametrize(
    ("doc", "description"),
    [
        (None, ""),
        ("One.", "One."),
        ("\n    One\n    two.\n\n    Three.\n", "One two."),
        ("One.\n    Args:\n        a: x\n", "One."),
        ("Args:\n    a: x", ""),
    ],
)
def test_the_first_paragraph_describes(doc, description):
    def tool(a: int = 0):
        pass

    tool.__doc__ = doc
    assert tool_schema(tool)["function"]["description"] == description


# --- arguments


def test_arguments_that_fit_pass():
    schema = tool_schema(get_weather)
    check_arguments(schema, {"city": "Zürich"})
    check_arguments(schema["function"]["parameters"], {"city": "Zürich", "days": 2.0, "unit": "f"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "the object of arguments has no 'city', which is required"),
        ({"city": 3}, "'city' is 3; it should be a string"),
        ({"city": None}, "'city' is null; it should be a string"),
        ({"city": "a", "days": "3"}, "'days' is \"3\"; it should be an integer"),
        ({"city": "a", "days": 2.5}, "'days' is 2.5; it should be an integer"),
        ({"city": "a", "days": True}, "'days' is true; it should be an integer"),
        ({"city": "a", "unit": "k"}, '\'unit\' is "k"; it should be one of "c", "f"'),
        ({"city": "a", "town": "b"}, "has 'town', which is not known; it takes 'city', 'days', 'unit'"),
        ([], r"is []; it should be an object"),
        ("x" * 1000, "should be an object"),
    ],
)
def test_arguments_that_do_not_fit_get_a_sentence(arguments, why):
    with pytest.raises(InvalidInput) as caught:
        check_arguments(tool_schema(get_weather), arguments)
    assert str(caught.value).startswith("the call of get_weather does not fit: ")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("schema", "good", "wrong", "why"),
    [
        ({"type": ["string", "null"]}, None, 1, "a string or null"),
        ({"const": 1}, 1, True, "it should be 1"),
        ({"enum": [1, "a"]}, 1.0, "b", 'one of 1, "a"'),
        ({"minimum": 1, "maximum": 3}, 3, 4, "its maximum is 3"),
        ({"exclusiveMinimum": 1}, 2, 1, "exclusiveMinimum is 1"),
        ({"type": "string", "minLength": 2}, "ab", "a", "the length 1; the limits are minLength 2"),
        ({"type": "array", "maxItems": 1}, [1], [1, 2], "the limits are maxItems 1"),
        ({"type": "array", "items": {"type": "integer"}}, [1], [1, "a"], "'x'[1] is \"a\""),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "b"}, "'x'['a'] is \"b\""),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a", "none of its 2 forms"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5, 1, "fits 2 of its forms"),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, 2, 3, "maximum is 2"),
        ({"$ref": "#/$defs/n~1a"}, 1, "a", "an integer"),
        (False, None, 1, "should not be there"),
    ],
)
def test_schemas_of_other_makers_are_checked_too(schema, good, wrong, why):
    whole = {"properties": {"x": schema}, "$defs": {"n/a": {"type": "integer"}}}
    check_arguments(whole, {} if schema is False else {"x": good})
    with pytest.raises(InvalidInput) as caught:
        check_arguments(whole, {"x": wrong})
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": {"$ref": "other.json#/a"}}},
        {"properties": {"x": {"type": "text"}}},
        {"properties": {"x": {"minimum": "one"}}},
        {"properties": {"x": 3}},
        {"properties": {"x": {"enum": 3}}},
        {"properties": []},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"function": {"name": "f", "parameters": 3}},
        3,
    ],
)
def test_schemas_that_make_no_sense_are_refused(schema):
    with pytest.raises(HeadwayError):
        check_arguments(schema, {"x": 1})


def test_a_schema_that_explodes_is_stopped():
    twice = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    chain = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)}
    start = time.thread_time()
    with pytest.raises(InvalidInput, match="levels"):
        check_arguments({"properties": {"x": twice}, "$defs": {"a": twice}}, {"x": 1})
    with pytest.raises(InvalidInput, match="comparisons"):
        check_arguments({"properties": {"x": chain["0"]}, "$defs": {**chain, "30": {"type": "null"}}}, {"x": 1})
    assert time.thread_time() - start < 20


# --- arguments as Python values


def plan(  # noqa: PLR0917
    where: Place | str,
    unit: Unit,
    level: Level,
    span: Span,
    at: float,
    stops: list[Place] | None = None,
    notes: dict[str, Unit] | None = None,
    raw: Any = None,
):
    return where, unit, level, span, at, stops, notes, raw


def test_arguments_become_the_values_a_function_is_annotated_with():
    arguments = {
        "where": {"name": "Bern", "at": [1, 2]},
        "unit": "f",
        "level": 2,
        "span": {"days": 3.0},
        "at": 7,
        "stops": [{"name": "Thun", "unit": "f"}],
        "notes": {"a": "c"},
        "raw": {"x": [1]},
    }
    bound = bind_arguments(plan, arguments)
    assert bound == {
        "where": Place("Bern", [1.0, 2.0]),
        "unit": Unit.FAHRENHEIT,
        "level": Level.HIGH,
        "span": {"days": 3},
        "at": 7.0,
        "stops": [Place("Thun", unit=Unit.FAHRENHEIT)],
        "notes": {"a": Unit.CELSIUS},
        "raw": {"x": [1]},
    }
    assert type(bound["at"]) is float
    assert type(bound["span"]["days"]) is int
    assert plan(**bound)[0].name == "Bern"
    assert bind_arguments(plan, {**arguments, "where": "home"})["where"] == "home"
    assert bind_arguments(get_weather, {"city": "a"}) == {"city": "a"}


def test_values_that_a_type_refuses_are_refused_with_its_reason():
    fitting = {"unit": "c", "level": 1, "span": {"days": 1}, "at": 1}
    with pytest.raises(InvalidInput, match="plan does not fit: a place has two coordinates"):
        bind_arguments(plan, {**fitting, "where": {"name": "x", "at": [1]}})
    with pytest.raises(InvalidInput, match="too large to convert to float"):
        bind_arguments(plan, {**fitting, "where": "x", "at": 10**400})
    with pytest.raises(InvalidInput, match="'unit' is \"k\""):
        bind_arguments(plan, {**fitting, "where": "x", "unit": "k"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(st.sampled_from(["where", "unit", "level", "span", "at", "x"]), JSON), JSON)
def test_random_arguments_bind_or_are_refused(arguments, other):
    fitting = {"where": "x", "unit": "c", "level": 1, "span": {"days": 1}, "at": 1}
    for given_arguments in (arguments, {**fitting, **arguments}, {**fitting, "raw": other}):
        try:
            check_arguments(tool_schema(plan), given_arguments)
        except InvalidInput:
            with pytest.raises(InvalidInput, match="plan does not fit"):
                bind_arguments(plan, given_arguments)
        else:
            assert plan(**bind_arguments(plan, given_arguments))[1] in Unit
