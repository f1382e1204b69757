"""Grammars that a text must match: a JSON schema, a regular expression, a Lark or GBNF grammar, or a list of choices.

A `Grammar` is a plain value: checked against limits when it is created, compared and hashed by its text, and compiled
to a `Constraint` for one tokenizer by `constraints/constraint.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from headway.base.checks import check_flag, check_list
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr
from headway.program.constraints.json_schema import checked_schema
from headway.program.constraints.patterns import PATTERN

LARK_BYTES = 64 * 1024
LARK_NAMES = 512  # rules and terminals
CHOICES = 10_000
CHOICE_BYTES = 256 * 1024
WHITESPACE = (
    64  # characters at one place between the parts of a JSON document: a model that pads with spaces must continue
)

# What may be inside a Lark grammar: literals and comments are skipped, the rest is looked at. Each is matched in one
# way only, and a literal without an end up to the end of its line: a search that goes back and forth in a long one
# would hold Python's global lock for seconds.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?i?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])++/?[imslux]*'
    r"|(?P<embed>%(?:json|llguidance)\b)|(?P<name>^[?!]*+[A-Za-z_][\w-]*+)",
    re.MULTILINE,
)
_TO_COLON = re.compile(r'[^\n"/#:<]*+:')
_REFUSED_OPTION = re.compile(r"\b(temperature|stop|stop_capture|capture|max_tokens)\b")
_LARK_OPTIONS = {"no_forcing", "allow_initial_skip"}


@dataclass(frozen=True)
class Grammar:
    """What a text must match. Create one with `Grammar.json_schema`, `.json_object`, `.regex`, `.lark`, `.gbnf`, …"""

    kind: Literal["json", "regex", "lark", "choices"]
    text: str  # the schema as JSON, the pattern, the Lark grammar, or the choices as a JSON list
    compact: bool = False

    @classmethod
    def json_schema(cls, schema: Any, *, compact: bool = False) -> Grammar:
        """JSON that satisfies `schema`: a dict, JSON text or a pydantic model class.

        Properties come in the schema's order. Control characters without a short escape are never written. Between
        its parts the document may have up to 64 characters of white space, or none with `compact`. `pattern` is read as
        ECMAScript's and `format` is enforced.
        """
        return cls("json", checked_schema(schema), check_flag(compact, "compact"))

    @classmethod
    def json_object(cls, *, compact: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, compact=compact)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that `pattern` matches from its first to its last character, in the syntax of Rust's `regex`.

        Look-around, word borders and back references are refused.
        """
        text = _text(pattern, "the regular expression")
        if len(text) > PATTERN:
            raise InvalidInput(f"the regular expression has {len(text)} characters; at most {PATTERN} are allowed")
        return cls("regex", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a Lark grammar produces from its rule `start`, in llguidance's variant of Lark.

        `%json {…}` embeds a schema; special tokens are named as `<|name|>`.
        """
        return cls("lark", _checked_lark(_text(text, "the Lark grammar")))

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Text that a GBNF grammar, llama.cpp's notation, produces from its rule `root`.

        It is translated to a Lark grammar with the same texts. References to tokens (`<think>`) are refused.
        """
        from headway.program.constraints.gbnf_lark import lark_of_gbnf

        lark = lark_of_gbnf(_text(text, "the GBNF grammar"))
        try:
            return cls.lark(lark)
        except InvalidInput as error:
            raise InvalidInput(f"the GBNF grammar is too large: as Lark, {error}") from None

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Grammar:
        """One of `texts`, exactly."""
        listed = check_list(texts, "choices", "a list of strings")
        given = list(dict.fromkeys(_text(text, "a choice") for text in listed))
        if not given:
            raise InvalidInput("the list of choices is empty; give at least one")
        size = sum(len(text.encode()) for text in given)
        if len(given) > CHOICES or size > CHOICE_BYTES:
            raise InvalidInput(
                f"{len(given)} choices with {size} bytes were given; at most {CHOICES} with {CHOICE_BYTES} are allowed"
            )
        return cls("choices", json.dumps(given, ensure_ascii=False))

    @property
    def key(self) -> bytes:
        """The key of compiled grammars in the cache."""
        return f"{self.kind}\0{int(self.compact)}\0{self.text}".encode("utf-8", "surrogatepass")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise WrongType(f"{what} is {short_repr(value)} of type {type(value).__name__}; it must be a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} has a lone surrogate U+{ord(value[error.start]):04X}; it is not Unicode") from None
    return value


def _checked_lark(text: str) -> str:
    """The grammar, with its embedded schemas checked and rewritten."""
    size = len(text.encode())
    if size > LARK_BYTES:
        raise InvalidInput(f"the Lark grammar has {size} bytes; at most {LARK_BYTES} are allowed")
    names, at, out = 0, 0, []
    while (match := _LARK.search(text, at)) is not None:
        out.append(text[at : match.end()])
        at = match.end()
        if match["embed"] is not None:
            written, at = _embedded(match["embed"], text, at)
            out.append(" " + written)
        elif match["name"] is not None and (rule := _defined(text, at)) is not None:
            names += 1
            _check_options(rule[0])
            out.append(text[at : rule[1]])
            at = rule[1]
    if names > LARK_NAMES:
        raise InvalidInput(f"the Lark grammar has {names} rules and terminals; at most {LARK_NAMES} are allowed")
    return "".join(out) + text[at:]


def embedded_schemas(text: str) -> list[str]:
    """The schemas after %json in a checked Lark grammar, as JSON texts."""
    rules, at = [], 0
    while (each := _LARK.search(text, at)) is not None:
        at = each.end()
        if each["embed"] == "%json":
            written, at = _embedded("%json", text, at)
            rules.append(written)
    return rules


def _defined(text: str, at: int) -> tuple[str, int] | None:
    """The options of the rule or terminal whose name ends at `at`, and where its colon ends; None if it has none."""
    end = max(at, text.find("]", at) + 1) if text.startswith("[", at) else at
    colon = _TO_COLON.match(text, end)
    return None if colon is None else (text[at:end], colon.end())


def _embedded(keyword: str, text: str, at: int) -> tuple[str, int]:
    """The JSON after %json or %llguidance, checked, and where it ends."""
    start = re.compile(r"\s*").match(text, at)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start.end() if start else at)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(f"the Lark grammar has no JSON after {keyword}: {error}") from None
    if keyword == "%json":
        return checked_schema(value), end
    unknown = sorted(set(value) - _LARK_OPTIONS) if isinstance(value, dict) else ["a value that is not an object"]
    if unknown:
        raise InvalidInput(
            f"%llguidance in the Lark grammar has {', '.join(unknown)!r:.80}; "
            f"the options known are {', '.join(sorted(_LARK_OPTIONS))}"
        )
    return json.dumps(value), end


def _check_options(options: str) -> None:
    refused = _REFUSED_OPTION.search(options)
    if refused is not None:
        raise InvalidInput(
            f"the Lark grammar has the option {refused[1]!r}, which has no effect on a mask or cannot be rolled back; "
            "use lazy or suffix= to end a text early, and the sampler for the temperature"
        )
