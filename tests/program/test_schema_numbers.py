"""Numbers in JSON schemas: a value is taken if and only if it satisfies the schema, whatever its size and decimals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
from jsonschema import Draft202012Validator

from headway.base.errors import InvalidInput
from headway.program.constraints.constraint import compile
from headway.program.constraints.grammar import Grammar
from headway.text import Tokenizer
from support.sweeps import swept

I64 = (1 << 63) - 1
STEPS = [0.25, 0.5, 0.01, 0.1, 0.05, 0.125, 0.75, 1.5, 2, 3, 7, 10, 0.3, 0.02, 1e-3, 2.5, 12.5, 100, 0.0625, 0.06]
EDGES = [0, 1, -1, 0.5, 10, -0.1, 0.001, 1e-5, 1e6, 2**31 - 1, 2**53, -(2**53), 2**53 - 1]
Taken = Callable[[dict[str, Any]], Callable[[str], bool]]


@pytest.fixture(scope="module")
def taken(smollm2_path: Path) -> Taken:
    """A schema → whether it takes a text."""
    fields = gguf.GGUFReader(smollm2_path).fields
    tokenizer = Tokenizer.from_gguf({n: f.contents() for n, f in fields.items() if n.startswith("tokenizer.")})
    assert tokenizer is not None

    def of(schema: dict[str, Any]) -> Callable[[str], bool]:
        compiled = compile(Grammar.json_schema(schema, compact=True), tokenizer, tokenizer.vocab_size)

        def takes(text: str) -> bool:
            constraint = compiled.copy()
            try:
                for token in tokenizer.encode(text):
                    constraint.accept(token)
            except InvalidInput:
                return False
            return constraint.may_end

        return takes

    return of


def valid(schema: dict[str, Any], value: Decimal) -> bool:
    """What an independent validator says, in decimal arithmetic."""
    exact = {name: Decimal(str(given)) if name != "type" else given for name, given in schema.items()}
    number = int(value) if value == value.to_integral_value() else value
    with localcontext(prec=400):
        return Draft202012Validator(exact).is_valid(number)  # pyright: ignore[reportArgumentType]  decimals


def short(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def random_schema(rng: random.Random) -> dict[str, Any]:
    def number() -> float:
        return rng.choice(
            [
                rng.randint(-30, 30),
                round(rng.uniform(-30, 30), rng.randint(1, 4)),
                round(rng.uniform(-1, 1), rng.randint(1, 7)),
                rng.choice(EDGES),
                rng.randint(-(10**15), 10**15),
            ]
        )

    low, high = sorted([number(), number()])
    schema: dict[str, Any] = {"type": rng.choice(["number", "number", "integer"])}
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if rng.random() < 0.5:
        schema["multipleOf"] = rng.choice(STEPS)
    return schema


def near(schema: dict[str, Any], rng: random.Random) -> Iterator[Decimal]:
    """Numbers around what a schema says, and some between."""
    bounds = [Decimal(str(value)) for name, value in schema.items() if name not in ("type", "multipleOf")]
    step = Decimal(str(schema.get("multipleOf", "0.1")))
    for bound in [*bounds, Decimal(0)]:
        yield from (bound + Decimal(by) for by in ("0", "1", "-1", "0.1", "-0.01", "0.001", "0.5", "-0.25", "1e-6"))
        whole = bound // step
        yield from ((whole + by) * step for by in (-1, 0, 1))
        yield from (bound.quantize(Decimal(1).scaleb(-places)) for places in range(1, 6))
    low, high = (float(min(bounds, default=Decimal(-9))), float(max(bounds, default=Decimal(9))))
    for _ in range(6):
        between = Decimal(str(round(rng.uniform(low, high), rng.randint(0, 3))))
        yield between
        yield between // step * step


@pytest.mark.parametrize("seed", swept(range(24), 3))
def test_a_number_is_taken_if_and_only_if_it_satisfies_the_schema(taken: Taken, seed: int) -> None:
    """In the shortest spelling; in a longer one it may be refused, and is taken only where it is valid."""
    rng, tried = random.Random(seed), 0
    for _ in range(12):
        schema = random_schema(rng)
        try:
            takes = taken(schema)
        except InvalidInput as error:
            if "nsatisfiable" not in str(error):
                raise
            continue
        tried += 1
        for value in near(schema, rng):
            assert takes(short(value)) == valid(schema, value), (schema, short(value))
            for text in (f"{value:f}0" if "." in f"{value:f}" else f"{value:f}.0", f"{value:f}"):
                assert not takes(text) or valid(schema, value), (schema, text)
    assert tried > 6


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "number", "multipleOf": 0.25}, ["2", "2.0", "2.5", "2.25", "2.50", "-0.75", "0.0"]),
        ({"type": "number", "multipleOf": 0.02}, ["2.5", "2.50", "2.0", "2.48"]),
        (
            {"type": "number", "multipleOf": 0.0625, "maximum": 30, "minimum": -30},
            ["-0.25", "29.75", "0.0625", "-29.5"],
        ),
        ({"type": "number", "maximum": 8.49, "minimum": -3.451}, ["8.4", "-3.4", "-3.45", "8.0", "-3.45"]),
        ({"type": ["number", "null", "string"], "multipleOf": 0.75, "maxLength": 2}, ["1.5", "null", '"ab"', "3.0"]),
        ({"multipleOf": 0.75, "minimum": 0.15}, ["1.5", "null", '"ab"', "[2]", "3.0", '{"a":1}']),
    ],
)
def test_every_spelling_that_json_writers_use_is_taken(taken: Taken, schema: dict[str, Any], texts: list[str]) -> None:
    takes = taken(schema)
    assert {text: takes(text) for text in texts} == dict.fromkeys(texts, True)


@pytest.mark.parametrize(
    ("bounds", "first", "last"),
    [
        ({"maximum": I64, "minimum": 0}, 0, I64),
        ({"maximum": I64}, None, I64),
        ({"exclusiveMaximum": 1 << 63, "minimum": -5}, -5, I64),
        ({"maximum": 1 << 62}, None, 1 << 62),
        ({"maximum": 10**18, "exclusiveMaximum": float(1 << 63)}, None, 10**18),
        ({"minimum": -(10**18), "maximum": 10**18}, -(10**18), 10**18),
        ({"minimum": 1024 - (1 << 63), "maximum": I64}, 1024 - (1 << 63), I64),
        ({"minimum": (1 << 53) + 2}, (1 << 53) + 2, None),
        ({"exclusiveMinimum": (1 << 53) + 1, "maximum": (1 << 54) + 4}, (1 << 53) + 2, (1 << 54) + 4),
    ],
)
def test_bounds_of_integers_beyond_2_to_the_53_are_exact(
    taken: Taken, bounds: dict[str, Any], first: int | None, last: int | None
) -> None:
    takes = taken({"type": "integer", **bounds})
    if first is not None:
        assert [takes(str(first + by)) for by in (-1025, -2, -1, 0, 1, 1025)] == [False] * 3 + [True] * 3
    if last is not None:
        assert [takes(str(last + by)) for by in (-1025, -2, -1, 0, 1, 2, 1025)] == [True] * 4 + [False] * 3


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "integer", "maximum": (1 << 53) + 1}, r"#/maximum .*40993.*9007199254740992 or 9007199254740994"),
        ({"type": "integer", "exclusiveMaximum": I64}, r"#/exclusiveMaximum .*last integer must be a double"),
        ({"type": "integer", "minimum": -(1 << 63)}, r"#/minimum .*\[-9223372036854774784, 9223372036854775807\]"),
        ({"type": "integer", "maximum": (1 << 64) - 1}, r"#/maximum .*18446744073709551615.*check it afterwards"),
        ({"type": "integer", "minimum": 10**400}, r"#/minimum .*cannot be enforced"),
        ({"type": "integer", "minimum": 2 * 10**18}, r"#/minimum .*999999999999999999"),
        ({"type": "number", "maximum": I64}, r'#/maximum .*"type": "integer" stands beside it'),
        ({"properties": {"a/b": {"maximum": 1e300}}}, r"#/properties/a~1b/maximum .*1e\+300"),
        ({"type": "number", "maximum": float("inf")}, r"#/maximum .*must be a number"),
        ({"const": (1 << 53) + 1}, r"#/const .*9007199254740992 or 9007199254740994"),
        ({"enum": [1, {"a": [-(1 << 60) - 1]}]}, r"#/enum .*one that a double holds"),
        ({"const": -(1 << 63)}, r"#/const .*-9223372036854775808; it must fit in 64 bits, in \["),
        ({"const": 1 - (1 << 63)}, r"#/const .*it must fit in 64 bits, in \["),
        ({"type": "integer", "const": -1e19}, r"#/const .*-1e\+19; it must fit in 64 bits, in \["),
        ({"enum": [1 << 63]}, r"#/enum .*it must fit in 64 bits, in \["),
        ({"const": 10**400}, r"#/const .*it must fit in 64 bits, in \["),
    ],
)  # fmt: skip
def test_what_the_compiler_would_round_is_refused_with_its_place(schema: dict[str, Any], match: str) -> None:
    """The smallest integers of 64 bits would end the process, others would become their neighbors."""
    with pytest.raises(InvalidInput, match=match):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    "value", [1 << 62, (1 << 53) + 2, -(1 << 62), 1024 - (1 << 63), (1 << 63) - 1024, 10**15 + 1, 1e22 / 1e4]
)
def test_a_large_literal_is_written_as_it_is(taken: Taken, value: float) -> None:
    for schema in ({"const": value}, {"enum": [None, value]}, {"type": ["integer", "null"], "enum": [value, None]}):
        takes = taken(schema)
        assert [takes(str(int(value) + by)) for by in (-1024, -1, 0, 1, 1024)] == [False, False, True, False, False]
