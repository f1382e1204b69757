"""Numbers in JSON schemas, in the form in which the grammar compiler takes them exactly.

The compiler reads every number of a schema as a double, and writes a multiple with as many decimals as its step has or
with none. What that would round is refused with its place; what it would leave out is written as further choices.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from headway.base.errors import InvalidInput
from headway.base.text import short_repr, shorten

DOUBLES = 1 << 53  # up to here every integer is a double
HIGHEST = (1 << 63) - 1  # the compiler's integers have 64 bits
LOWEST = 1024 - (1 << 63)  # the first double above its smallest integer, which would end the process
HIGHEST_LITERAL = (1 << 63) - 1024  # the last double that is one of its integers
LARGEST_STEP = 10**18  # the compiler cannot count on from larger ones
DECIMALS = 16  # of a step of multipleOf that are looked at
SIDES = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def check_literal(value: float, place: str) -> None:
    """An integer inside const or enum is one that a double holds: else another one would be written."""
    if abs(value) <= DOUBLES or (LOWEST <= value <= HIGHEST_LITERAL and _is_double(value)):
        return
    if not LOWEST <= value <= HIGHEST_LITERAL:
        wanted = f"it must fit in 64 bits, in [{LOWEST}, {HIGHEST_LITERAL}]"
    else:
        wanted = f"beyond 2^53 it must be one that a double holds, as {_neighbors(value)}"
    raise InvalidInput(f"{place} in the JSON schema is {short_repr(value)}; {wanted}. Or make it a string")


def with_exact_numbers(schema: dict[str, Any], at: str) -> dict[str, Any]:
    """A rewritten subschema at pointer `at` whose bounds and multiples the compiler enforces as they are written."""
    for keyword in SIDES:
        if abs(schema.get(keyword, 0)) > DOUBLES:
            schema = _with_large_bound(schema, keyword, at)
    return _with_shorter_decimals(schema)


def _with_large_bound(schema: dict[str, Any], keyword: str, at: str) -> dict[str, Any]:
    """A bound of integers beyond 2^53: the compiler is exact where it is inclusive and a double."""
    side, value = SIDES[keyword], schema[keyword]
    last = int(value) - (side if keyword.startswith("exclusive") else 0)
    largest = value * side < 0 and abs(last) >= LARGEST_STEP  # above a minimum, or below a maximum
    if schema.get("type") != "integer":
        wanted = f'it must be in [{-DOUBLES}, {DOUBLES}], unless "type": "integer" stands beside it'
    elif not LOWEST <= last <= HIGHEST:
        wanted = f"it must be in [{LOWEST}, {HIGHEST}]"
    elif largest:
        wanted = f"it must be in [{1 - LARGEST_STEP}, {LARGEST_STEP - 1}]"
    elif not _is_double(last) and (side, last) != (1, HIGHEST):
        wanted = f"beyond 2^53 the {'first' if side < 0 else 'last'} integer must be a double, as {_neighbors(last)}"
    else:
        plain = "minimum" if side < 0 else "maximum"
        rest = {name: each for name, each in schema.items() if name != keyword}
        tighter = (min if side > 0 else max)(last, rest.get(plain, last))
        return rest | {plain: tighter}
    raise InvalidInput(
        f"#{shorten(at, 200)}/{keyword} in the JSON schema is {short_repr(value)}, which cannot be enforced: {wanted}. "
        "Or take it out and check it afterwards"
    )


def _is_double(value: float) -> bool:
    return int(float(value)) == value


def _neighbors(value: float) -> str:
    """The nearest integers on both sides that are doubles."""
    near = float(value)
    others = {int(near), int(math.nextafter(near, -math.inf)), int(math.nextafter(near, math.inf))}
    below, above = max(n for n in others if n < value), min(n for n in others if n > value)
    return " or ".join(str(n) for n in (below, above) if LOWEST <= n <= HIGHEST_LITERAL)


def _with_shorter_decimals(schema: dict[str, Any]) -> dict[str, Any]:
    """The compiler writes multiples of 0.25 with two decimals or none, and beside a maximum of 8.49 never 8.4.

    Those multiples with one decimal are multiples of 0.5, and single numbers are listed.
    """
    numbers = {name: schema[name] for name in (*SIDES, "multipleOf") if name in schema}
    if schema.get("type") == "integer" or {"const", "enum"} & schema.keys():
        return schema
    steps = _shorter_steps(numbers["multipleOf"]) if "multipleOf" in numbers else []
    single = sorted({float(n) for bound in SIDES.keys() & numbers for n in _beginnings(numbers[bound])})
    single = [n for n in single if _satisfies(Fraction(str(n)), numbers)]
    if not steps and not single:
        return schema
    shorter: list[dict[str, Any]] = [{**numbers, "type": "number", "multipleOf": step} for step in steps]
    listed: list[dict[str, Any]] = [{"enum": single}] if single else []
    rest = {name: value for name, value in schema.items() if name not in numbers}
    return rest | {"allOf": [*rest.get("allOf", ()), {"anyOf": [numbers, *shorter, *listed]}]}


def _shorter_steps(step: float) -> list[float]:
    """What the multiples of `step` with fewer decimals than it has itself are multiples of."""
    units, decimals = _decimal(step)
    if not 0 < decimals <= DECIMALS or units == 1:
        return []
    shorter = (Fraction(math.lcm(units, 10**cut), 10**decimals) for cut in range(1, decimals))
    return [float(each) for each in shorter if each <= DOUBLES]


def _beginnings(bound: float) -> list[Fraction]:
    """A bound with some of its decimals: 8.4 of 8.49."""
    units, decimals = _decimal(bound)
    cuts = range(1, decimals) if decimals <= DECIMALS else ()
    return [Fraction(math.copysign(1, bound)) * Fraction(abs(units) // 10**cut, 10 ** (decimals - cut)) for cut in cuts]


def _decimal(number: float) -> tuple[int, int]:
    """A number as an integer and how many of its digits are decimals."""
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))), -exponent


def _satisfies(number: Fraction, numbers: dict[str, Any]) -> bool:
    """Whether a number satisfies bounds and steps."""
    for keyword, value in numbers.items():
        limit = Fraction(str(value))
        if keyword == "multipleOf":
            if number % limit:
                return False
        elif (number - limit) * SIDES[keyword] > 0 or (number == limit and keyword.startswith("exclusive")):
            return False
    return True
