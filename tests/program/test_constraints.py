"""Constraints: documents drawn under a mask are valid, states can be left and found again, bad grammars are refused."""

import asyncio
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy, deepcopy
from datetime import datetime, time
from decimal import Context as DecimalContext
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Annotated, Literal

import gguf
import numpy as np
import pydantic
import pytest
from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator, validator_for
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

import headway as hw
from headway.base.errors import InvalidInput, InvalidToken, WrongType
from headway.base.specs.masks import logit_mask
from headway.program.constraints import cache as grammar_cache
from headway.program.constraints.constraint import compile
from headway.program.constraints.grammar import CHOICES, LARK_NAMES, Grammar
from headway.program.constraints.json_schema import DEPTH, NODES, OPTIONAL
from headway.program.constraints.patterns import PATTERN
from headway.text import Tokenizer
from headway.text.stream import TextStream
from support.schemas import array, obj, schemas
from support.sweeps import swept

ALL = schemas()
NULL = {"type": "null"}
PERSON = obj({"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}})


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    fields = gguf.GGUFReader(smollm2_path).fields
    found = Tokenizer.from_gguf({n: f.contents() for n, f in fields.items() if n.startswith("tokenizer.")})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def start(tokenizer):
    """A grammar → its constraint for SmolLM2."""
    return lambda grammar: compile(grammar, tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def closers(tokenizer):
    """The tokens that bring a document to its end, for a model that knows nothing."""
    texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    return np.array([bool(set(t) & set(b'"]}')) for t in texts])


@pytest.fixture(scope="module")
def enders(tokenizer, closers):
    """Those of them that open nothing again, and null: the shortest way out of a recursion."""
    texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    opens = np.array([bool(set(t) & set(b"[{")) for t in texts])
    return (closers & ~opens) | np.array([t.strip() in (b"n", b"null") for t in texts])


def ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def draw(constraint, tokenizer, closers, rng, temperature, max_tokens, *, push=2.0):  # noqa: PLR0917
    """Tokens of a random model under the mask, and whether it ended by itself. `push` favours what closes things."""
    out = []
    for _ in range(max_tokens):
        if constraint.finished:
            return out, True
        allowed = ids(constraint.mask())
        ends = [id for id in tokenizer.eos_ids if id in allowed]
        assert bool(ends) == constraint.may_end
        close = allowed[closers[allowed]]
        some = [rng.choice(part, min(len(part), 32), replace=False) for part in (allowed, close)]
        few = np.concatenate([*some, np.array(ends, np.int64)])
        logits = rng.normal(size=len(few)) * 2 + push * closers[few] + push * np.isin(few, tokenizer.eos_ids)
        weights = np.exp((logits - logits.max()) / temperature)
        token = int(rng.choice(few, p=weights / weights.sum()))
        if token in tokenizer.eos_ids:
            constraint.accept(token)
            assert constraint.finished
            return out, True
        constraint.accept(token)
        out.append(token)
    return out, constraint.finished


def number(text):
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        return float(text)


def errors(schema, text):
    """What an independent validator says; numbers are decimal, as they are written."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    document = json.loads(text, parse_float=number)
    validator = validator_for(schema, default=Draft202012Validator)
    with localcontext(DecimalContext(prec=2000)):
        return list(validator(exact, format_checker=FORMATS).iter_errors(document))


FORMATS = FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])


@FORMATS.checks("date-time", raises=ValueError)
def _date_time(text):
    return not isinstance(text, str) or datetime.fromisoformat(text.upper()).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def _time(text):
    return not isinstance(text, str) or time.fromisoformat(text.upper()).tzinfo is not None


# --- JSON


def test_there_are_two_hundred_schemas_and_each_is_a_valid_schema():
    assert len(ALL) == 200
    assert len({json.dumps(schema) for schema in ALL.values()}) == 200
    for schema in ALL.values():
        validator_for(schema, default=Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize("name", ALL)
def test_a_document_that_ended_is_valid_and_a_cut_one_is_the_beginning_of_a_valid_one(name, start, tokenizer, closers):
    schema = ALL[name]
    rng = np.random.default_rng(sorted(ALL).index(name))
    ended = 0
    for temperature, compact in ((1.0, False), (2.0, True)):
        constraint = start(Grammar.json_schema(schema, compact=compact))
        tokens, whole = draw(constraint, tokenizer, closers, rng, temperature, 120)
        ended += whole
        if not whole:  # a second constraint takes the same tokens and finds a way to the end
            constraint = start(Grammar.json_schema(schema, compact=compact))
            for token in tokens:
                constraint.accept(token)
            more, whole = draw(constraint, tokenizer, closers, rng, 1.0, 400, push=8.0)
            tokens += more
        text = tokenizer.decode(tokens)
        if whole:
            assert errors(schema, text) == [], text
        else:
            assert name in ENDLESS, f"{name} found no end: {text!r:.200}"
            check_beginning(start(Grammar.json_schema(schema, compact=compact)), tokens)
    assert ended or name in LONG


def check_beginning(constraint, tokens):
    """The constraint, which has seen nothing yet, takes these tokens one by one and lets others follow."""
    for token in tokens:
        constraint.accept(token)  # raises unless the text so far can still become a document
    assert not constraint.finished
    assert constraint.mask().any()


ENDLESS = {
    "string-8",
    "array-18",
    "pattern-8",
    "pattern-10",
    "document-0",
}  # a random model may miss their end
LONG = ENDLESS | {"string-6", "reference-6"}  # seldom over in 120 tokens


async def documents(engine, names, temperature, max_tokens):
    """What the model writes under each schema, all at once: tokens, text and why it ended, by name."""

    async def one(number, name):
        async with engine.context().fill(f"A JSON document, {name}:\n") as context:
            sampler = hw.Multinomial(temperature, seed=number)
            generation = context.generate(
                sampler, max_tokens=max_tokens, constrain=Grammar.json_schema(ALL[name], compact=bool(number % 2))
            )
            return name, (await generation.tokens(), await generation.text(), generation.finish, bool(number % 2))

    return dict(await asyncio.gather(*(one(number, name) for number, name in enumerate(names))))


def check_documents(engine, names, temperature, max_tokens, enders):
    """Every document that ended is valid; one that was cut can be gone on with to a valid end."""
    found = engine.run(lambda engine: documents(engine, names, temperature, max_tokens))
    rng, ended = np.random.default_rng(7), 0
    for name, (tokens, text, why, compact) in found.items():
        whole = why in ("constraint", "eos")
        ended += whole
        if not whole:
            assert (why, len(tokens)) == ("length", max_tokens)
            constraint = compile(Grammar.json_schema(ALL[name], compact=compact), engine.tokenizer, engine.vocab_size)
            check_beginning(constraint, tokens)
            more, whole = draw(constraint, engine.tokenizer, enders, rng, 1.0, 400, push=8.0)
            text = engine.tokenizer.decode([*tokens, *more])
        assert whole or name in ENDLESS, f"{name} found no end: {text!r:.200}"
        assert not whole or errors(ALL[name], text) == [], text
    assert engine.stats().pages_held == 0
    return ended


@pytest.mark.parametrize("temperature", swept([1.0, 2.0]))
def test_some_documents_of_the_default_model_are_valid(temperature, smollm2, enders):
    assert check_documents(smollm2, list(ALL)[::40], temperature, 40, enders) > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("part", range(4))
def test_all_documents_of_the_default_model_are_valid(part, temperature, smollm2, enders):
    assert check_documents(smollm2, list(ALL)[part::4], temperature, 120, enders) > 25


def test_any_object(start, tokenizer, closers):
    rng = np.random.default_rng(5)
    for _ in range(5):
        tokens, ended = draw(start(Grammar.json_object()), tokenizer, closers, rng, 1.0, 300, push=4.0)
        assert not ended or isinstance(json.loads(tokenizer.decode(tokens)), dict)


def matches(constraint, tokenizer, text):
    """Whether the constraint takes this text, as the tokenizer writes it, for a complete one."""
    try:
        for token in tokenizer.encode(text):
            constraint.accept(token)
    except InvalidInput:
        return False
    return constraint.may_end


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1,"b":"x"}', '{"\\u0061":"x"}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"a":1,"a":"x"}'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"0001-01-01"', '"0000-01-01"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "string", "pattern": r"^\d$"}, '"5"', '"٣"'),
        ({"type": "string", "pattern": r"^\w$"}, '"a"', '"é"'),
        ({"type": "string", "pattern": "^.$"}, '"é"', '"\\n"'),
        ({"type": "string", "pattern": "^[[&&b]$"}, '"["', '"a"'),
        ({"type": "string", "pattern": "^[[a]]$"}, '"a]"', '"a"'),
        ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
        ({"type": "string", "pattern": '^[^"]$'}, '"a"', '"\\""'),
        ({"type": "string", "pattern": r"^[^\\]$"}, '"\\n"', r'"\\"'),
        ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, '"\\t"', r'"\\"'),
        ({"type": "string", "pattern": r"^[^\d\W]$"}, '"a"', '"5"'),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "integer"}}}, "3", '"a"'),
        ({"type": "integer", "minimum": 3}, "3", "2"),
        ({"type": "number", "exclusiveMinimum": 0.5}, "0.51", "0.5"),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", "[1,2]"),
        ({"x-note": "an annotation", "type": "null"}, "null", "1"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]", '["a"]'),
        ({"type": "string", "nullable": False, "unevaluatedProperties": True}, '"a"', "null"),
        (obj({"a": {"type": "null"}, "b": {"type": "null"}}, [], maxProperties=2), '{"b":null}', '{"c":null}'),
        (
            {
                "propertyNames": {"$ref": "#/$defs/n"},
                "additionalProperties": {"type": "null"},
                "type": "object",
                "$defs": {"n": {"enum": ["a", "b"], "type": "string"}},
            },
            '{"b":null}',
            '{"c":null}',
        ),
        (
            {"propertyNames": {"const": "a"}, "properties": {"a": {"type": "null"}, "b": {}}, "type": "object"},
            '{"a":null}',
            '{"b":null}',
        ),
        (obj({"a": {"type": "null"}}, minProperties=1) | {"additionalProperties": True}, '{"a":null}', "{}"),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NULL}, '{"":null}', '{"a":1}'),
        ({"type": "object", "propertyNames": True, "maxProperties": 1}, '{"a":1}', "[]"),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, '{"a":1,"b":{}}', '{"a1":1}'),
        (obj({}) | {"propertyNames": {"pattern": "a"}}, "{}", '{"a":1}'),
        ({"propertyNames": {"minLength": 2}, "type": "object", "required": ["ab"]}, '{"ab":1}', '{"ab":1,"c":1}'),
        ({"propertyNames": {"maxLength": 2}, "type": "object"}, '{"\\"é":[]}', '{"abc":1}'),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, "[1]", "[1,1]"),
        ({"oneOf": [{"const": 1}, {"const": True}, {"enum": [0, "1"]}]}, "true", "2"),
        ({"oneOf": [obj({"ok": {"const": True}}), obj({"ok": {"const": False}})]}, '{"ok":false}', '{"ok":0}'),
        ({"oneOf": [obj({"v": {"$ref": "#/$defs/a"}}), obj({"v": {"const": 2}})], "$defs": {"a": {"const": 1}}},
         '{"v":2}', '{"v":3}'),
        ({"oneOf": [obj({"a": {}}), obj({"a": {}, "b": {}})]}, '{"a":1,"b":2}', '{"b":2}'),
        ({"oneOf": [obj({"a": {}}) | {"additionalProperties": {}}, obj({"a": False}, [])]}, '{"a":1,"b":2}', '{"b":2}'),
    ],
)  # fmt: skip
def test_single_documents(schema, good, bad, start, tokenizer):
    assert matches(start(Grammar.json_schema(schema)), tokenizer, good)
    assert not matches(start(Grammar.json_schema(schema)), tokenizer, bad)
    assert errors(schema, good) == []


def test_white_space_is_bounded_and_compact_has_none(start, tokenizer):
    loose, tight = Grammar.json_schema(PERSON), Grammar.json_schema(PERSON, compact=True)
    padded = '{\n    "name": "x",\n    "age": 3\n}'
    assert matches(start(loose), tokenizer, padded)
    assert not matches(start(tight), tokenizer, padded)
    assert matches(start(tight), tokenizer, '{"name":"x","age":3}')
    assert not matches(start(loose), tokenizer, "{" + " " * 65 + '"name":"x","age":3}')
    assert matches(start(loose), tokenizer, "{" + " " * 64 + '"name":"x","age":3}')


def test_schemas_come_as_text_and_as_models(start):
    class Person(pydantic.BaseModel):
        name: str
        age: int = 3

    assert Grammar.json_schema(json.dumps(PERSON)) == Grammar.json_schema(PERSON)
    assert json.loads(Grammar.json_schema(Person).text)["required"] == ["name"]
    start(Grammar.json_schema(Person))


class Red(pydantic.BaseModel):
    ok: Literal[True]
    shades: set[int]


class Blue(pydantic.BaseModel):
    ok: Literal[False]
    price: Annotated[Decimal, pydantic.Field(max_digits=4, decimal_places=2, ge=0)]


class Paint(pydantic.BaseModel):
    one: Annotated[Red | Blue, pydantic.Field(discriminator="ok")]
    counts: dict[int, Decimal]
    names: frozenset[Literal["a", "b"]]


@pytest.mark.parametrize(
    ("one", "counts", "fits"),
    [
        ('"ok":true,"shades":[3,3]', '"-7":1.50', True),
        ('"ok":false,"price":99.99', "", True),
        ('"ok":false,"price":0', '"0":1,"1":-2.5', True),
        ('"ok":false,"price":99.999', "", False),
        ('"ok":false,"price":100', "", False),
        ('"ok":false,"price":"cheap"', "", False),
        ('"ok":false,"shades":[]', "", False),
        ('"ok":false,"price":0', '"x":1', False),
        ('"ok":false,"price":0', '"1":"x"', False),
    ],
)
def test_a_text_is_taken_if_and_only_if_the_pydantic_model_takes_it(one, counts, fits, start, tokenizer):
    text = f'{{"one":{{{one}}},"counts":{{{counts}}},"names":["a","a","b"]}}'
    assert matches(start(Grammar.json_schema(Paint, compact=True)), tokenizer, text) == fits
    try:
        Paint.model_validate_json(text)
    except pydantic.ValidationError:
        assert not fits
    else:
        assert fits


def test_models_with_schemas_of_their_own(start, tokenizer):
    class Own(pydantic.BaseModel):
        @classmethod
        def model_json_schema(cls):
            return NULL

    class Pair(pydantic.BaseModel):
        both: Annotated[set[int], pydantic.Field(min_length=2)]

    class Called(pydantic.BaseModel):
        function: Callable[[int], int]

    assert matches(start(Grammar.json_schema(Own)), tokenizer, "null")
    for model, says in ((Pair, "uniqueItems"), (Called, "Called has no JSON schema: Cannot")):
        with pytest.raises(InvalidInput, match=says) as caught:
            Grammar.json_schema(model)
        assert "\n" not in str(caught.value)


# --- the other kinds


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-c]{2,4}",
        "(foo|ba[rz])+",
        "[0-9]{3}-[0-9]{2}",
        "x*y+z?",
        "[^,\n]{1,5},",
        "(?i)yes|no",
        "é+|日本",
        "a(b(c)?)*",
        "^q.$",
    ],
)
def test_a_regex_allows_what_pythons_re_matches(pattern, start, tokenizer, closers):
    rng = np.random.default_rng(len(pattern))
    alphabet = list("abcfoxyzrqn013-, é日本YESno")
    made = []
    for _ in range(12):
        tokens, ended = draw(start(Grammar.regex(pattern)), tokenizer, closers, rng, 1.5, 40)
        if ended:
            made.append(tokenizer.decode(tokens))
            assert re.fullmatch(pattern, made[-1]), made[-1]
    assert made
    for text in made:  # and its neighbors, which mostly do not match
        at = int(rng.integers(len(text) + 1))
        other = text[:at] + str(rng.choice(alphabet)) + text[at + 1 :]
        got = matches(start(Grammar.regex(pattern)), tokenizer, other)
        assert got == bool(re.fullmatch(pattern, other)), other


def reachable(constraint, tokenizer, text=b""):
    """Every text that the masks lead to."""
    found = {text} if constraint.may_end else set()
    for token in ids(constraint.mask()):
        if token not in tokenizer.eos_ids:
            way = constraint.copy()
            way.accept(int(token))
            found |= reachable(way, tokenizer, text + tokenizer.token_bytes(int(token)))
    return found


def test_choices_are_all_reachable_and_nothing_else_is(start, tokenizer):
    choices = ["yes", "yesno", "no", "größe", 'a"b\\', "two\nlines", "🙂", "\0"]
    assert reachable(start(Grammar.choices(choices)), tokenizer) == {text.encode() for text in choices}
    assert reachable(start(Grammar.choices(["", "a", "a"])), tokenizer) == {b"", b"a"}


def test_ten_thousand_choices(start, tokenizer):
    many = Grammar.choices(f"choice {i * 7919}" for i in range(CHOICES))
    assert matches(start(many), tokenizer, f"choice {9999 * 7919}")
    assert not matches(start(many), tokenizer, "choice 1")


def test_a_lark_grammar(start, tokenizer):
    grammar = Grammar.lark(
        'start: expr\nexpr: term (("+" | "-") term)*  // "temperature" is only a word here\n'
        'term: NUMBER | "(" expr ")" | "#" %json {"type": "boolean"}\nNUMBER: /[0-9]+/\n'
    )
    for text in ("1", "(1+22)-3", "1+#true"):
        assert matches(start(grammar), tokenizer, text)
    for text in ("", "1+", "(1", "1*2", "#null"):
        assert not matches(start(grammar), tokenizer, text)


def test_special_tokens_are_no_text(start, tokenizer):
    special = set(tokenizer.special_ids) - set(tokenizer.eos_ids)
    assert special
    assert not special & set(ids(start(Grammar.regex("(?s).*")).mask()))
    named = start(Grammar.lark('start: <|im_start|> "x"'))
    assert ids(named.mask()).tolist() == tokenizer.encode("<|im_start|>", special=True)


# --- states


WALKS = [
    Grammar.json_schema(PERSON),
    Grammar.json_schema(PERSON, compact=True),
    Grammar.json_schema(ALL["reference-3"]),
    Grammar.json_schema(ALL["document-1"]),
    Grammar.regex("(ab|[c-f]{2,5}){1,9}"),
    Grammar.choices(["alpha", "alphabet", "beta"]),
    Grammar.lark('start: ("a" | "b" start "c")+\n%ignore / +/'),
]


@pytest.mark.parametrize("grammar", WALKS, ids=lambda g: g.kind)
def test_rollback_and_copy_are_exact(grammar, start, tokenizer, closers):
    rng = np.random.default_rng(3)
    tokens, ended = draw(start(grammar), tokenizer, closers, rng, 1.0, 40, push=0.0)
    tokens += list(tokenizer.eos_ids) if ended else []
    constraint, states = start(grammar), []
    for token in tokens:
        states.append((constraint.mask().copy(), constraint.may_end, constraint.finished, constraint.forced()))
        constraint.accept(token)
    at = len(tokens)
    for _ in range(30):
        to = int(rng.integers(len(tokens)))
        other = constraint.copy()
        if to <= at:
            constraint.rollback(at - to)
        else:
            for token in tokens[at:to]:
                constraint.accept(token)
        mask, *rest = states[to]
        assert np.array_equal(constraint.mask(), mask)
        assert [constraint.may_end, constraint.finished, constraint.forced()] == rest
        if at < len(tokens):  # the copy stayed where it was
            assert np.array_equal(other.mask(), states[at][0])
            other.accept(tokens[at])
        at = to


def test_a_deep_copy_is_a_copy_and_a_pickle_is_refused(start, tokenizer):
    one = start(Grammar.regex("ab*c"))
    one.accept(tokenizer.encode("a")[0])
    for twin in (deepcopy(one), copy(one)):
        twin.accept(tokenizer.encode("c")[0])
        assert twin.may_end
        assert not one.may_end
    with pytest.raises(hw.Unsupported, match="pickle the Grammar"):
        pickle.dumps(one)
    for value in (tokenizer, TextStream(tokenizer)):
        for act in (pickle.dumps, deepcopy):
            with pytest.raises(hw.Unsupported, match="a tokenizer cannot be pickled"):
                act(value)


def test_forced_tokens_are_the_only_text_that_can_follow(start, tokenizer, closers):
    rng, seen = np.random.default_rng(1), 0
    for grammar in WALKS:
        constraint = start(grammar)
        for _ in range(40):
            forced = constraint.forced()
            text = b"".join(map(tokenizer.token_bytes, forced))
            allowed = ids(constraint.mask())
            if forced:
                seen += 1
                assert not constraint.may_end
                others = [tokenizer.token_bytes(int(id)) for id in allowed]
                assert all(text.startswith(o) or o.startswith(text) for o in others)
                ahead = constraint.copy()
                for token in forced:
                    ahead.accept(token)
            left = [id for id in allowed if id not in tokenizer.eos_ids]
            if not left:
                break
            constraint.accept(int(rng.choice(left)))
    assert seen > 10


def test_a_constant_is_forced_whole(start, tokenizer):
    constraint = start(Grammar.json_schema({"const": {"kind": "circle"}}, compact=True))
    tokens = []
    while not constraint.finished:
        forced = constraint.forced() or ids(constraint.mask())[-1:].tolist()
        for token in forced:
            constraint.accept(token)
        tokens += forced
    assert json.loads(tokenizer.decode(tokens)) == {"kind": "circle"}
    assert len(tokens) <= len(tokenizer.encode('{"kind":"circle"}')) + 2


def test_the_end_is_allowed_exactly_when_the_text_is_complete(start, tokenizer):
    (end,) = tokenizer.eos_ids
    constraint = start(Grammar.choices(["yes", "yesterday"]))
    with pytest.raises(InvalidInput, match="not allowed after the 0 tokens"):
        constraint.accept(end)
    for token in tokenizer.encode("yes"):
        constraint.accept(token)
    assert constraint.may_end
    assert not constraint.finished
    before = constraint.mask().copy()
    constraint.accept(end)
    assert constraint.finished
    assert ids(constraint.mask()).tolist() == [end]
    with pytest.raises(InvalidInput):
        constraint.accept(tokenizer.encode("t")[0])
    constraint.rollback(1)
    assert np.array_equal(constraint.mask(), before)
    assert end in ids(before)
    for token in tokenizer.encode("terday"):
        constraint.accept(token)
    assert constraint.finished
    assert ids(constraint.mask()).tolist() == [end]


def test_a_refused_token_changes_nothing(start, tokenizer):
    for looked in (False, True):
        constraint = start(Grammar.regex("[0-9]{3}"))
        before = constraint.copy().mask()
        if looked:
            constraint.mask()
        with pytest.raises(InvalidInput, match="not allowed"):
            constraint.accept(tokenizer.encode("x")[0])
        with pytest.raises(InvalidToken, match="0 to 49151"):
            constraint.accept(-1)
        assert np.array_equal(constraint.mask(), before)
        with pytest.raises(InvalidInput, match="0 were accepted"):
            constraint.rollback(1)


@pytest.mark.parametrize("vocab", [49152 + 128, 49152 + 1, 49152, 49151, 30001])
def test_ids_that_the_tokenizer_or_the_model_lacks_are_forbidden(vocab, tokenizer):
    constraint = compile(Grammar.regex("(?s).*"), tokenizer, vocab)
    mask = constraint.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab // 32),)
    allowed = np.flatnonzero(logit_mask(vocab, mask))
    assert allowed.tolist() == ids(mask).tolist()
    whole = ids(compile(Grammar.regex("(?s).*"), tokenizer, tokenizer.vocab_size).mask())
    assert allowed.tolist() == whole[whole < vocab].tolist()


def test_constraints_of_one_grammar_do_not_share_state(start, tokenizer, closers):
    def walk(seed):
        rng = np.random.default_rng(seed)
        constraint = start(Grammar.json_schema(ALL["document-1"]))
        tokens, _ = draw(constraint, tokenizer, closers, rng, 1.0, 60)
        return tokens

    alone = [walk(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(walk, range(6))) == alone


def test_a_text_can_be_followed_however_many_states_the_texts_of_others_took(start, monkeypatch):
    """Copies share a table of states, which has an end; a text that alone fits into one always does."""
    monkeypatch.setitem(grammar_cache.LIMITS, "max_lexer_states", 6500)
    grammar = Grammar.regex("(.*a.{12}b|[^c]*d.{11}e)Q")
    renewed = []

    def walk(seed):
        rng, constraint, seen = np.random.default_rng(seed), start(grammar), []
        table = constraint._matcher
        for turn in range(8):
            mask = constraint.mask()
            seen.append(mask.tobytes())
            constraint.accept(int(rng.choice(ids(mask))))
            if turn == 4:
                constraint.rollback(2)
        renewed.append(constraint._matcher is not table)
        return seen

    first = walk(0)
    for seed in range(1, 9):
        walk(seed)
    assert any(renewed)  # else the limit was never met
    assert walk(0) == first


def test_a_full_table_of_states_refuses_no_token_that_the_schema_allows(start, tokenizer):
    """Trying this schema out fills the table that its texts share; each gets one of its own, with masks or without."""
    words = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "minLength": 1, "maxLength": 500}
    text, constraint = '{"a": "This is a summary of it"}', start(Grammar.json_schema(obj({"a": words})))
    for token in tokenizer.encode(text):
        constraint.accept(token)
    assert constraint.may_end
    other = start(Grammar.json_schema(obj({"a": words})))
    with pytest.raises(InvalidInput, match=r"token \d+ is not allowed after the 0 tokens so far"):
        other.accept(tokenizer.encode("x")[0])


# --- other vocabularies


def spaces_tokenizer(eos):
    """A small SentencePiece-like vocabulary with byte tokens, so that some texts have two ids."""
    names = ["<unk>", *eos, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", *eos)])
    return Tokenizer(backend, eos_ids=tuple(range(1, 1 + len(eos)))), names


def test_every_spelling_of_a_text_is_allowed():
    tokenizer, names = spaces_tokenizer(["</s>", "<stop>"])
    constraint = compile(Grammar.choices(["ab", " a"]), tokenizer, len(names))
    assert {names[id] for id in ids(constraint.mask())} == {"<0x61>", "a", "ab", "<0x20>", "▁", "▁a"}
    constraint.accept(names.index("<0x61>"))
    assert ids(constraint.mask()).tolist() == [names.index("b")]  # only one text can follow: as it is usually spelt
    constraint.accept(names.index("<0x62>"))
    assert {names[id] for id in ids(constraint.mask())} == {"</s>", "<stop>"}
    assert constraint.finished


def test_a_vocabulary_without_end_tokens_finishes_all_the_same():
    tokenizer, names = spaces_tokenizer([])
    constraint = compile(Grammar.choices(["ab", "a"]), tokenizer, len(names))
    constraint.accept(names.index("a"))
    assert constraint.may_end
    assert not constraint.finished
    constraint.accept(names.index("b"))
    assert constraint.may_end
    assert constraint.finished
    assert not constraint.mask().any()


def test_a_forgotten_tokenizer_takes_its_grammars_along():
    tokenizer, names = spaces_tokenizer([])
    compile(Grammar.choices(["ab"]), tokenizer, len(names))
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_compiled_grammars_are_kept_up_to_a_limit():
    tokenizer, names = spaces_tokenizer([])
    for i in range(grammar_cache.MAX_GRAMMARS + 10):
        compile(Grammar.regex(f"a{{{i + 1}}}"), tokenizer, len(names))
    kept = grammar_cache.grammar_cache(tokenizer, len(names))._kept
    assert len(kept) == grammar_cache.MAX_GRAMMARS
    assert Grammar.regex("a{1}").key not in kept
    assert Grammar.regex("a{74}").key in kept


def test_large_grammars_are_kept_up_to_a_size(monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_SOURCE_BYTES", 1 << 16)
    tokenizer, names = spaces_tokenizer([])
    large = [Grammar.choices(["ab" * 3125 + "a" * i]) for i in range(12)]
    for grammar in large:
        compile(grammar, tokenizer, len(names))
    kept = grammar_cache.grammar_cache(tokenizer, len(names))._kept
    assert sum(map(len, kept)) <= grammar_cache.MAX_SOURCE_BYTES
    assert list(kept) == [grammar.key for grammar in large[-10:]]


# --- what is refused


def nest(depth):
    inside = {"type": "string"}
    for _ in range(depth):
        inside = obj({"a": inside})
    return inside


OVERLAP = [{"type": "number"}, {"type": "integer"}]
SELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DOUBLING = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "y"'
CROSS = {"allOf": [{"anyOf": [obj({f"p{i}": {"const": j}}) for j in range(6)]} for i in range(12)]}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (False, "allows nothing"),
        ({"enum": []}, "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "string", "pattern": "^[a-z]{3}$", "maxLength": 2}, "empty"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
        ({"$ref": "#"}, "without end"),
        (SELF, "without end"),
        ({"anyOf": [{"type": "null"}, SELF | {"properties": {"a": {"$ref": "#/anyOf/1"}}}]}, "without end"),
        (array({"$ref": "#"}, 1), "without end"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"propertyNames": {"maxLength": None}}, "propertyNames"),
        ({"propertyNames": {"minLength": 5, "maxLength": 3}}, "propertyNames"),
        ({"propertyNames": {"enum": ["ab", "c"], "maxLength": 1}}, "propertyNames"),
        ({"propertyNames": {"enum": 5}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "propertyNames"),
        ({"dependentRequired": {}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#"}, "dynamicRef"),
        ({"type": "string", "nullable": True}, r'nullable.*"type": \["string", "null"\]'),
        ({"type": "array", "uniqueItems": True, "maxItems": 2}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 3}}, "propertyNames"),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": [1.0, "b"]}]}, "oneOf"),
        ({"oneOf": [obj({"a": {"const": 1}}), obj({"a": {"const": 1.0}})]}, "oneOf"),
        ({"oneOf": [obj({"a": {}}, []), obj({"b": {}}, [])]}, "oneOf"),
        ({"type": "string", "minlength": 3}, "minlength"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        (obj({"a": {"$defs": {"b": {"propertys": 1}}}}), r"#/properties/a/\$defs/b.*write 'properties'"),
        ({"type": "string", "format": "date_time"}, "#/format"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf at the top.*use anyOf"),
        (obj({"oneOf": array({"oneOf": OVERLAP})}), "the oneOf at #/properties/oneOf/items may overlap: use anyOf"),
        (
            obj({"a": {"oneOf": OVERLAP}, "b/c": {"$ref": "#/$defs/d"}}) | {"$defs": {"d": {"oneOf": OVERLAP}}},
            r"one of the oneOf at #/properties/a, #/\$defs/d may overlap: use anyOf",
        ),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (
            obj({"a": obj({"b": {}}, []) | {"additionalProperties": {}, "maxProperties": 3}}),
            "out .* at #/properties/a, ",
        ),
        ({"type": "string", "format": "iri"}, "format"),
        ({"type": "text"}, "type"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "integer", "minimum": 2**60}, "minimum"),
        ({"const": 2**70}, "64 bits"),
        ({"const": "\x01"}, r"U\+0001"),
        ({"const": float("nan")}, "nan"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)a"}, "look-ahead"),
        ({"type": "string", "pattern": "a" * (PATTERN + 1)}, f"{PATTERN}"),
        ({"type": "string", "pattern": "[+--]"}, "--"),
        ({"type": "string", "pattern": "(?i)a"}, "flags"),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}, "oneOf"),
        ({"type": "string", "pattern": "a.{1,300}b.{1,300}c", "maxLength": 500}, "too many"),
        ({"$ref": "http://example.com/schema"}, "inside the schema"),
        ({"$ref": "#/$defs/missing"}, "no subschema"),
        ({"properties": {"a": {"$id": "b", "items": {"$ref": "#"}}}}, r"\$id"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, r"\$schema"),
        (nest(DEPTH), f"{DEPTH} levels"),
        ({"enum": [[i] for i in range(NODES)]}, f"{NODES} subschemas"),
        (obj({f"p{i}": {} for i in range(OPTIONAL + 1)}, []), f"at most {OPTIONAL}"),
        (CROSS, "too large"),
        ({"const": "x" * 300_000}, "bytes"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "levels"),
        ('{"type": "string", "type": "null"}', "twice"),
        ('{"minimum": NaN}', "NaN"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema, says, start):
    with pytest.raises(InvalidInput, match=says) as caught:
        start(Grammar.json_schema(schema))
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema", [None, 3, [], {"properties": []}, {"anyOf": {}}, {"const": {1: 2}}, {"const": {2}}, {1: 2}]
)
def test_what_is_no_schema_is_a_wrong_type(schema):
    with pytest.raises(WrongType):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.choices([]), "empty"),
        (lambda: Grammar.choices(["x"] + [str(i) for i in range(CHOICES)]), f"at most {CHOICES}"),
        (lambda: Grammar.choices(["\ud800"]), "surrogate"),
        (lambda: Grammar.regex("("), "unclosed group"),
        (lambda: Grammar.regex(r"a\b"), "lookarounds"),
        (lambda: Grammar.regex(r"(a)\1"), "backreference"),
        (lambda: Grammar.regex("a$b"), "lookarounds"),
        (lambda: Grammar.regex(r"[^\s\S]"), "no text"),
        (lambda: Grammar.regex("a" * (PATTERN + 1)), f"{PATTERN}"),
        (lambda: Grammar.regex("(" * 2000 + ")" * 2000), "nest"),
        (lambda: Grammar.regex("((a{1,100}){1,100}){1,100}"), "too many"),
        (lambda: Grammar.lark("start: ("), "Lark grammar"),
        (lambda: Grammar.lark('rule: "a"'), "no start rule"),
        (lambda: Grammar.lark('start: "a" other'), "unknown name"),
        (lambda: Grammar.lark('start: start "a"'), "Lark grammar"),
        (lambda: Grammar.lark('start: a\na: "x" a'), "Lark grammar"),
        (lambda: Grammar.lark('start: "a" <|im_end|>'), "end token"),
        (lambda: Grammar.lark('start: "a" <|no_such|>'), "no_such"),
        (lambda: Grammar.lark("start: a\na[temperature=0.5]: /x+/"), "temperature"),
        (lambda: Grammar.lark('start: a\na[stop="y"]: /x+/'), "stop"),
        (lambda: Grammar.lark('%llguidance {"allow_invalid_utf8": true}\nstart: "a"'), "allow_invalid_utf8"),
        (lambda: Grammar.lark('start: %json {"not": {}}'), "'not'"),
        (lambda: Grammar.lark("start: %json {"), "no JSON"),
        (
            lambda: Grammar.lark('start: a b\na: %json {}\nb: %json ' + json.dumps(obj({"c": {"oneOf": OVERLAP}}))),
            "the oneOf at #/properties/c of %json 2 may overlap",
        ),
        (lambda: Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (lambda: Grammar.lark('start: "' + "a" * 70_000 + '"'), "bytes"),
        (lambda: Grammar.lark("\n".join(f'r{i}: "x"' for i in range(LARK_NAMES + 1))), f"at most {LARK_NAMES}"),
        (lambda: Grammar.lark(DOUBLING), "too big"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_used_is_refused(make, says, start):
    with pytest.raises(InvalidInput, match=says):
        start(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.choices("yes"),
        lambda: Grammar.choices([1]),
        lambda: Grammar.regex(3),
        lambda: Grammar.lark(None),
    ],
)
def test_what_is_no_text_is_a_wrong_type(make):
    with pytest.raises(WrongType):
        make()


def test_the_largest_grammars_that_are_allowed_do_not_reach_the_end_of_the_stack(start):
    chain = {f"d{i}": obj({"a": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(NODES // 3 - 2)}
    deep = {"$defs": chain | {f"d{NODES // 3 - 2}": {"type": "null"}}, "$ref": "#/$defs/d0"}
    start(Grammar.json_schema(deep))
    rules = "".join(f't{i}: (t{i + 1} "x")*\n' for i in range(LARK_NAMES - 2))
    for text in (f'start: t0\n{rules}t{LARK_NAMES - 2}: "y"', f'start: T0\n{rules.upper()}T{LARK_NAMES - 2}: "y"'):
        with suppress(InvalidInput):  # refused or not: the process is still there
            start(Grammar.lark(text.replace('"X"', '"x"')))


def test_an_explosion_later_on_is_an_error_of_that_text_alone(start, tokenizer, closers):
    grammar = Grammar.lark("start: a{1,300}\na: b{1,300}\nb: c{1,300}\nc: /[xyz]/{1,300} | c c")
    fine = start(Grammar.json_schema(PERSON))
    rng = np.random.default_rng(0)
    with pytest.raises(InvalidInput, match=r"cannot be (followed|used)"):
        draw(start(grammar), tokenizer, closers, rng, 1.0, 400)
    tokens, ended = draw(fine, tokenizer, closers, rng, 1.0, 100)
    assert ended
    assert errors(PERSON, tokenizer.decode(tokens)) == []


@pytest.mark.slow
def test_the_benchmark_measures_every_grammar(tmp_path, smollm2_path):
    command = [sys.executable, "benchmarks/constraints.py", "--quick", "--threads", "1", "--out", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "constraints.json").read_text())["results"]
    assert len(found["alone"]) == 9
    assert all(row["mean µs"] > 0 for row in found["alone"])
    assert {row["rows"] for row in found["together"]} == {1, 8, 64}
    assert all(row["one by one µs"] > 0 and row["at once µs"] > 0 for row in found["together"])
    assert {row["grammar"] for row in found["generating"]} <= {row["grammar"] for row in found["alone"]}
    assert all(0 <= row["hidden %"] <= 100 for row in found["generating"])
    free = next(row for row in found["generating"] if row["grammar"] == "free text (regex)")
    assert free["beside µs"] > 0


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://a/b", "type": "null"}, "null", "1"),
        ({"type": "array", "items": {"id": "/items", "type": "null"}}, "[null]", "[1]"),
        ({"type": "string", "_format": "date", "_require": ["a"]}, '"x"', "1"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9}, "4", "3"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False, "maximum": 9}, "3", "2"),
        ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "integer", "format": "int32", "maximum": 9, "minimum": 0}, "7", "12"),
        ({"type": "string", "enum": ["a"], "errorMessage": "no", "propertyOrder": 3, "ui": {"x": 1}}, '"a"', '"b"'),
    ],
)
def test_older_drafts_and_annotations_of_others_are_taken(schema, good, bad, start, tokenizer):
    grammar = Grammar.json_schema(schema, compact=True)
    assert matches(start(grammar), tokenizer, good)
    assert not matches(start(grammar), tokenizer, bad)
