"""Replies: what a family's template wrote is read back exactly, however it is split, and bad text never raises."""

import codecs
import functools
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import Closed, InvalidInput, WrongType
from headway.text import ChatTemplate
from headway.text.replies import (
    FORMATS,
    BadToolCall,
    Content,
    ParseLimits,
    Reasoning,
    Reply,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
    detect_format,
    reply_parser,
)
from support.properties import examples

TEMPLATES = Path(__file__).parent / "templates"
USER = {"role": "user", "content": "What is the weather?"}


@functools.cache
def read_template(file):
    return ChatTemplate((TEMPLATES / file).read_text(), bos_token="<s>", eos_token="</s>")


@dataclass(frozen=True)
class Family:
    """A template in a family's style, what it can write, and the variables that choose its variants."""

    format: str
    file: str
    reasons: bool = True
    ids: bool = False
    variables: dict[str, bool] = field(default_factory=dict)

    def template(self):
        return read_template(self.file)

    def prompt(self):
        return self.template().render([USER], add_generation_prompt=True, **self.variables)

    def write(self, reply):
        """The prompt, and the text of `reply` after it as the template writes it."""
        template, message = self.template(), message_of(reply)
        before = self.prompt()
        whole = template.render([USER, message], **self.variables)
        assert whole.startswith(before)
        return before, whole[len(before) :]

    def fit(self, reply):
        """`reply` without what this family has no place for."""
        calls = tuple(call if self.ids else ToolCall(call.name, call.arguments) for call in reply.calls)
        return Reply(reply.content, reply.reasoning if self.reasons else "", calls)


FAMILIES = {
    "qwen": Family("qwen", "qwen.jinja"),
    "hermes": Family("hermes", "hermes.jinja", reasons=False),
    "llama": Family("llama", "llama.jinja", reasons=False),
    "llama tagged": Family("llama", "llama.jinja", reasons=False, variables={"tagged": True}),
    "mistral list": Family("mistral", "mistral.jinja", ids=True),
    "mistral args": Family("mistral", "mistral_args.jinja"),
    "mistral ids": Family("mistral", "mistral_args.jinja", ids=True, variables={"with_ids": True}),
    "harmony": Family("harmony", "harmony.jinja"),
    "harmony last": Family("harmony", "harmony.jinja", variables={"recipient_last": True}),
}


def message_of(reply):
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        **({"tool_calls": calls} if calls else {}),
    }


def call(name, id="abc123xyz", **arguments):
    return ToolCall(name, arguments, id)


DEEP = {"list": [1, 2.5, -3e-7, True, None, [], {}, [[{"a": [{}]}]]], "object": {"x": {"y": {"z": "}]}\\"}}}, "": ""}
REPLIES = {
    "content": Reply("It is 21° and sunny ☀️ in Zürich."),
    "reasoning": Reply("Sunny.", "The user wants\n\nthe weather… 天気"),
    "one call": Reply("", "", (call("get_weather", city="Zürich"),)),
    "all": Reply("Let me look.", "I need the tool.", (call("get_weather", city="Zürich", days=3),)),
    "several": Reply("", "two", (call("a", "id1", x=1), call("b.c-d", "id2"), call("a", "id3", x={"y": []}))),
    "empty arguments": Reply("now", "", (call("now"),)),
    "quotes and braces": Reply("{", "}", (call("f", a='"}{][\\" {"name": "g"}\n\t\u2028', b="\\", c='"'),)),
    "unicode": Reply("é😀\u0301", "👩‍👩‍👧", (call("f", **{"ключ": "值😀", "\u00e9": "\x7f\x00"}),)),
    "nested": Reply("", "", (call("f", **DEEP),)),
    "newlines": Reply("\n\na\n\n", "\n\nb\n", (call("f", a="\n"),)),
    "markers in arguments": Reply(
        "", "", (call("f", a="</tool_call><tool_call>[TOOL_CALLS]<|call|><|end|><|eot_id|></s><think>"),)
    ),
    "look-alikes": Reply(
        "a <thin <tool_calls> < tool_call> </think <tool_call [TOOL_CALL] [THINK [ARG] <|channel <|python_tag| <|end|",
        "<think </thin [/THINK <|en",
        (call("f", a=1),),
    ),
    "a look-alike at the end": Reply("x <tool_cal", "y </thi", (call("f"),)),
}
EVERY = [(family, reply) for family in FAMILIES for reply in REPLIES]


def parse(format, pieces, prompt="", limits=None):
    stream = reply_parser(format, prompt=prompt, limits=limits)
    parts = [part for piece in pieces for part in stream.feed(piece)]
    return parts + stream.finish()


def merged(parts):
    """The parts with neighboring deltas put together."""
    out = []
    for part in parts:
        match out[-1:], part:
            case [Content(before)], Content(text):
                out[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                out[-1] = Reasoning(before + text)
            case [ToolCallArguments(index, before)], ToolCallArguments(_, delta):
                out[-1] = ToolCallArguments(index, before + delta)
            case _:
                out.append(part)
    return out


def check_order(parts):
    """Every start has one end or takes it back, arguments come between, and they say what the end says."""
    open_index, text, started = None, "", 0
    for part in parts:
        match part:
            case ToolCallStart(index, name):
                assert (open_index, index) == (None, started)
                assert name
                open_index, text, started = index, "", started + 1
            case ToolCallArguments(index, delta):
                assert index == open_index
                assert delta
                text += delta
            case ToolCallEnd(index, arguments):
                assert index == open_index
                assert json.loads(text) == arguments
                open_index = None
            case BadToolCall(_, why, index):
                assert index == open_index
                assert why
                open_index = None
            case Content(said) | Reasoning(said):
                assert open_index is None
                assert said
    assert open_index is None


# --- the round trip


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_what_a_template_wrote_is_read_back_from_any_two_pieces(family, name):
    family = FAMILIES[family]
    reply = family.fit(REPLIES[name])
    prompt, text = family.write(reply)
    for at in range(len(text) + 1):
        parts = parse(family.format, [text[:at], text[at:]], prompt)
        assert collect(parts) == reply, (text[:at], text[at:])
        check_order(parts)


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_what_a_template_wrote_is_read_back_from_bytes_split_anywhere(family, name):
    family = FAMILIES[family]
    reply = family.fit(REPLIES[name])
    prompt, text = family.write(reply)
    data = text.encode()
    for at in range(len(data) + 1):
        utf8 = codecs.getincrementaldecoder("utf-8")()
        pieces = [utf8.decode(data[:at]), utf8.decode(data[at:], final=True)]
        assert collect(parse(family.format, pieces, prompt)) == reply, at


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_the_parts_are_the_same_in_one_piece_by_characters_and_in_three_random_pieces(family, name):
    family = FAMILIES[family]
    prompt, text = family.write(family.fit(REPLIES[name]))
    whole = merged(parse(family.format, [text], prompt))
    assert merged(parse(family.format, list(text), prompt)) == whole
    generator = random.Random(text)
    for _ in range(100):
        a, b = sorted(generator.randint(0, len(text)) for _ in range(2))
        assert merged(parse(family.format, [text[:a], text[a:b], text[b:]], prompt)) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_found_from_the_template(family):
    assert detect_format(FAMILIES[family].template().source) == FAMILIES[family].format


@pytest.mark.parametrize("family", FAMILIES)
def test_content_and_arguments_come_as_they_are_written(family):
    """After every character, all that is certain has been given: at most one marker's length is held back."""
    family = FAMILIES[family]
    long = "word " * 40
    reply = family.fit(Reply(long, "", (call("f", a=long, b={"c": long}),)))
    prompt, text = family.write(reply)
    stream, parts = reply_parser(family.format, prompt=prompt), []
    for at, char in enumerate(text):
        parts += stream.feed(char)
        said = "".join(p.text for p in parts if isinstance(p, Content))
        written = "".join(p.delta for p in parts if isinstance(p, ToolCallArguments))
        shown, begin = text[: at + 1], text.find('{"a"')
        assert len(said) >= min(shown.count("word ") * 5, len(long)) - 20
        if family.file != "hermes.jinja":  # its names come after the arguments
            assert len(written) >= min(len(shown) - begin, text.rfind("}}") + 2 - begin) - 20


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["</tool_call>", "<|call|>", '"}', "\\", "[ARGS]", "{", "\\u"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text("ab<|[]/>{}\n ", max_size=30)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(st.text(max_size=6), JSON, max_size=3), NAMES)
SPLITS = st.lists(st.floats(0, 1), max_size=6)


def cut(text, splits):
    places = sorted({0, len(text), *(int(s * len(text)) for s in splits)})
    return [text[a:b] for a, b in itertools.pairwise(places)] or [""]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)), st.builds(Reply, TEXTS, TEXTS, st.lists(CALLS, max_size=3).map(tuple)), SPLITS
)
def test_random_replies_are_read_back(family, reply, splits):
    family = FAMILIES[family]
    reply = family.fit(reply)
    if family.format == "llama" and reply.content.lstrip().startswith("{") and reply.calls:
        reply = Reply("x" + reply.content, reply.reasoning, reply.calls)
    prompt, text = family.write(reply)
    assert collect(parse(family.format, cut(text, splits), prompt)) == reply


# --- text that no template wrote

SOUP = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|python_tag|>", "<|eot_id|>", "</s>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "assistant", "analysis", "commentary", "final", " to="),
    *("functions.f", "python", '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"a": [1'),
    *("{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\n\n", "\\", "1", "-", "tru", "e", "name", '"name"', "f"),
    *('"arguments":', "f.call(", 'a="b"', ")", "x", "é", '{"name": "f", ', '"arguments": "{}"', '"id": "1"', "<", "|>"),
]
SOUPS = st.lists(st.sampled_from(SOUP), max_size=14).map("".join)


@settings(max_examples=examples(1500), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), SOUPS, SPLITS, st.sampled_from([4, 30, 1 << 20]))
def test_no_text_raises_and_no_split_changes_the_parts(format, text, splits, call_chars):
    limits = ParseLimits(call_chars=call_chars, depth=2, calls=2, name_chars=5)
    whole = parse(format, [text], limits=limits)
    check_order(whole)
    assert merged(parse(format, cut(text, splits), limits=limits)) == merged(whole)
    assert merged(parse(format, list(text), limits=limits)) == merged(whole)


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from(EVERY), st.floats(0, 1), st.integers(0, 4), st.sampled_from(SOUP), SPLITS)
def test_a_damaged_reply_does_not_raise_and_no_split_changes_its_parts(which, at, lost, extra, splits):
    family = FAMILIES[which[0]]
    prompt, text = family.write(family.fit(REPLIES[which[1]]))
    place = int(at * len(text))
    text = text[:place] + extra + text[place + lost :]
    whole = parse(family.format, [text], prompt)
    check_order(whole)
    assert merged(parse(family.format, cut(text, splits), prompt)) == merged(whole)
    assert merged(parse(family.format, list(text), prompt)) == merged(whole)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), SOUPS, st.floats(0, 1))
def test_a_copy_goes_its_own_way(format, text, at):
    at = int(at * len(text))
    stream = reply_parser(format)
    first = stream.feed(text[:at])
    twin = stream.copy()
    twin_parts = twin.feed("<other>{") + twin.finish()
    rest = stream.feed(text[at:]) + stream.finish()
    assert merged(first + rest) == merged(parse(format, [text]))
    assert merged(first + twin_parts) == merged(parse(format, [text[:at], "<other>{"]))


MARKERS = ["<think>", "<tool_call>", "[TOOL_CALLS]", "[THINK]", "<|python_tag|>", "<|channel|>", "<|start|>", "<|end|>"]


@pytest.mark.parametrize("format", FORMATS)
def test_the_beginning_of_a_marker_is_text_when_it_does_not_go_on(format):
    opening = "<|channel|>final<|message|>" if format == "harmony" else ""
    for marker in MARKERS:
        for size in range(1, len(marker)):
            for text in (
                f"a{marker[:size]}b",
                f"{marker[:size]}{marker[:size]}!",
                f"\n{marker[:size]}\n",
                marker[:size],
            ):
                assert collect(parse(format, list(opening + text))) == Reply(text)


def test_a_look_alike_is_held_back_only_until_it_shows():
    stream = reply_parser("qwen")
    assert stream.feed("a <tool") == [Content("a ")]
    assert stream.feed("_ca") == []
    assert stream.feed("b") == [Content("<tool_cab")]


# --- each format's own ways


def one(format, text, **options):
    return merged(parse(format, [text], **options))


def bad(format, text, **options):
    """The only BadToolCall of a text."""
    parts = parse(format, [text], **options)
    check_order(parts)
    (found,) = collect(parts).bad
    return found


def test_qwen_reads_a_call_in_pieces():
    stream = reply_parser("qwen")
    assert stream.feed('Hm.\n<tool_call>\n{"name": "f", "argu') == [Content("Hm."), ToolCallStart(0, "f")]
    assert stream.feed('ments": {"a": ') == [ToolCallArguments(0, '{"a": ')]
    assert stream.feed("1}}\n</tool") == [ToolCallArguments(0, "1}")]
    assert stream.feed("_call>") == [ToolCallEnd(0, {"a": 1})]
    assert stream.finish() == []


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>"])
def test_a_prompt_may_open_the_reasoning(prompt):
    text = "hm\n</think>\n\nyes" if prompt.endswith("\n") else "\nhm\n</think>\n\nyes"
    assert collect(parse("qwen", list(text), prompt)) == Reply("yes", "hm")
    family = Family("qwen", "qwen.jinja", variables={"open_reasoning": True})
    assert collect(parse("qwen", ["hm\n</think>\n\nyes"], family.prompt())) == Reply("yes", "hm")


def test_a_prompt_may_have_closed_the_reasoning():
    assert collect(parse("qwen", ["yes"], "<think>\n\n</think>\n\n")) == Reply("yes")


def test_mistral_may_open_the_reasoning_in_the_prompt():
    assert collect(parse("mistral", list("hm[/THINK]yes"), "[/INST][THINK]")) == Reply("yes", "hm")


def test_think_after_content_is_text():
    assert one("qwen", "The <think> tag</think>") == [Content("The <think> tag</think>")]


def test_a_call_inside_reasoning_is_reasoning():
    assert one("qwen", "<think>\n<tool_call>{}</tool_call>\n</think>\n\n") == [Reasoning("<tool_call>{}</tool_call>")]


def test_text_goes_on_after_a_call():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> done'
    assert collect(parse("hermes", list(text))) == Reply(" done", "", (ToolCall("f", {}),))


def test_arguments_may_be_a_string_with_json():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>'
    assert one("hermes", text) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": "é"}'),
        ToolCallEnd(0, {"a": "é"}),
    ]


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_", "</tool_call>"])
def test_a_complete_call_needs_no_end_marker_at_the_end(end):
    text = '<tool_call>\n{"name": "f", "arguments": {}}' + end
    assert collect(parse("qwen", list(text))) == Reply(calls=(ToolCall("f", {}),))


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("", "'<' is where a {"),
        ("hello", "'h' is where a {"),
        ("[]", "'[' is where a {"),
        ("{}", "has no name"),
        ('{"name": "f"}', "'f' has no arguments"),
        ('{"arguments": {}}', "has no name"),
        ('{"name": "f", "arguments": {"a": 1}', "'<' is where a comma"),
        ('{"name": "f", "arguments": {"a": 1}}}', "between the end of the call"),
        ('{"name": "f", "arguments": {"a": 1}} and', "between the end of the call"),
        ('{"name": "f", "arguments": {"a" 1}}', "'1' is where a colon"),
        ('{"name": "f", "arguments": {"a": 1,}}', "'}' is where a key"),
        ('{"name": "f", "arguments": {"a": [1,]}}', "']' is where a value"),
        ('{"name": "f", "arguments": {"a": [1}}', "'}' is where a comma"),
        ('{"name": "f", "arguments": {\'a\': 1}}', "is where a key"),
        ('{"name": "f", "arguments": {"a": 01}}', "'01' is not a JSON value"),
        ('{"name": "f", "arguments": {"a": NaN}}', "'NaN' is not a JSON value"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "1e999 is too large"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "5,000 digits"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', "control character '\\n'"),
        ('{"name": "f", "arguments": {"a": "\\x"}}', "wrong escape"),
        ('{"name": "f", "arguments": {"a": "\\ud83d"}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' appears twice"),
        ('{"name": "f", "arguments": []}', "begins with '['"),
        ('{"name": "f", "arguments": "[]"}', "must be an object"),
        ('{"name": "f", "arguments": "{} {}"}', "not one JSON object"),
        ('{"name": "f", "arguments": "' + "[" * 100 + '"}', "deeper than 64"),
        ('{"name": 3, "arguments": {}}', "name begins with '3'"),
        ('{"name": "", "arguments": {}}', "the name ''"),
        ('{"name": "f", "name": "g", "arguments": {}}', "name twice"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "arguments twice"),
        ('{"name": "f", "argument": {}}', "the key 'argument'"),
        ('{"type": "code", "name": "f", "arguments": {}}', "the type 'code'"),
        ('{"name": "f", "arguments": ' + '{"a":' * 65 + "1" + "}" * 65 + "}", "deeper than 64"),
        ('{"name": "' + "f" * 257 + '", "arguments": {}}', "1 to 256 printable"),
    ],
)
def test_a_malformed_call_is_reported_and_reading_goes_on(inside, why):
    good = '<tool_call>{"name": "ok", "arguments": {}}</tool_call>'
    text = f"a<tool_call>{inside}</tool_call>b{good}"
    reply = collect(parts := parse("hermes", [text]))
    check_order(parts)
    assert reply.content == "ab"
    assert reply.calls == (ToolCall("ok", {}),)
    assert reply.bad[0].text == inside
    assert why in reply.bad[0].why
    assert merged(parse("hermes", list(text))) == merged(parts)


def test_a_call_that_was_announced_is_taken_back():
    parts = one("qwen", '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>')
    assert parts[:2] == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": x')]
    assert isinstance(parts[2], BadToolCall)
    assert parts[2].index == 0


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "b'),
        ("qwen", "<tool_call>"),
        ("llama", '{"name": "f", "parameters": {"a": "b'),
        ("llama", '<|python_tag|>{"name"'),
        ("llama", '<|python_tag|>search.call(query="a'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] ["),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}},'),
        ("mistral", "[TOOL_CALLS]name"),
        ("mistral", "[TOOL_CALLS]name[ARGS]"),
        ("mistral", '[TOOL_CALLS]name[ARGS]{"a": '),
        ("harmony", "<|channel|>comm"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{"),
    ],
)
def test_text_that_ends_inside_a_call_is_a_bad_call(format, text):
    found = bad(format, text)
    assert "ends inside" in found.why or "should be name.call" in found.why


def test_reasoning_and_content_may_simply_end():
    assert one("qwen", "<think>\nhm") == [Reasoning("hm")]
    assert one("harmony", "<|channel|>analysis<|message|>hm") == [Reasoning("hm")]
    assert one("mistral", "[THINK]hm") == [Reasoning("hm")]


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Paris", "name": "x"}',
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "parameters": 3}',
        '{"name": "Bob", "parameters": "{}"}',
        '{"name": ["Bob"], "parameters": {}}',
        '{"parameters": {"a": 1}, "age": 3}',
        '{"name": "Bob"',
        "{",
        "  {}",
        "{not json}",
        'See {"name": "f", "parameters": {}}',
        '\n\n```json\n{"name": "f", "parameters": {}}\n```',
    ],
)
def test_llama_objects_that_are_no_calls_are_content(text):
    assert collect(parse("llama", list(text + "<|eot_id|>"))) == Reply(text)
    assert one("llama", text) == [Content(text)]


def test_llama_after_a_bad_bare_object_goes_on_as_content():
    text = '{"name": "f", "parameters": {}};  {"name": "Bob"} and more'
    assert collect(parse("llama", list(text))) == Reply(';  {"name": "Bob"} and more', "", (ToolCall("f", {}),))


@pytest.mark.parametrize("gap", ["; ", ";", "\n", "", " \n; "])
def test_llama_separates_calls_in_several_ways(gap):
    text = '\n{"name": "f", "parameters": {"a": 1}}' + gap + '{"type": "function", "parameters": {}, "name": "g"}' + gap
    assert collect(parse("llama", list(text))) == Reply(calls=(ToolCall("f", {"a": 1}), ToolCall("g", {})))


def test_llama_code_after_the_tag_is_a_call_of_the_interpreter():
    code = 'print("é\\n")\nx = {1: 2}\t# done'
    parts = one("llama", f"Running.<|python_tag|>{code}<|eom_id|>")
    assert parts[:2] == [Content("Running."), ToolCallStart(0, "code_interpreter")]
    assert json.loads(parts[2].delta) == {"code": code}
    assert parts[3] == ToolCallEnd(0, {"code": code})


def test_llama_built_in_tools_are_calls():
    text = '<|python_tag|>brave_search.call(query="Zürich, today", lang="de")<|eom_id|>'
    assert collect(parse("llama", list(text))).calls == (
        ToolCall("brave_search", {"query": "Zürich, today", "lang": "de"}),
    )
    assert collect(parse("llama", ["<|python_tag|>now.call()"])).calls == (ToolCall("now", {}),)
    for wrong in ('f.call(a="1", a="2")', "f.call(1)", 'f.call(a="1"', 'f.call(a="1" b="2")', 'f.call(a="b") + 1'):
        assert "name.call" in bad("llama", f"<|python_tag|>{wrong}<|eom_id|>").why


def test_mistral_reads_the_forms_in_between():
    calls = (ToolCall("f", {"a": 1}),)
    assert collect(parse("mistral", list('[TOOL_CALLS]f{"a": 1}</s>'))).calls == calls
    assert collect(parse("mistral", list('[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}'))).calls == calls
    assert collect(parse("mistral", list('[TOOL_CALLS]f [ARGS] {"a": 1} then'))) == Reply(" then", "", calls)
    assert collect(parse("mistral", list('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}'))).calls == calls
    assert parse("mistral", ["[TOOL_CALLS] []</s>"]) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[TOOL_CALLS][ARGS]{}", "'A' in the list of calls should be an object"),
        ("[TOOL_CALLS] [1]", "'1' in the list"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}} 1]', "should be a comma or ]"),
        ("[TOOL_CALLS]{}", "no name"),
        ("[TOOL_CALLS]f</s>", "has no arguments"),
        ("[TOOL_CALLS]f[TOOL_CALLS]g[ARGS]{}", "has no arguments"),
        ("[TOOL_CALLS]f[ARGS][]", "begins with '['"),
        ("[TOOL_CALLS]f\tg[ARGS]{}", "printable"),
        (f"[TOOL_CALLS]{'f' * 2000}[ARGS]{{}}", "longer than 256"),
        (f"[TOOL_CALLS]{'f' * 300}[ARGS]{{}}", "1 to 256"),
        (f"[TOOL_CALLS]f[CALL_ID]{'f' * 300}[ARGS]{{}}", "the id"),
    ],
)
def test_mistral_calls_that_cannot_be_read(text, why):
    assert why in bad("mistral", text).why


def test_harmony_without_markers_is_content():
    assert one("harmony", "Hello") == [Content("Hello")]
    assert one("harmony", " to be or not") == [Content(" to be or not")]


def test_harmony_reads_on_from_a_prompt_that_chose_the_channel():
    assert collect(parse("harmony", ["yes<|return|>"], "<|start|>assistant<|channel|>final<|message|>")) == Reply("yes")
    forced = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    assert one("harmony", '{"a": 1}<|call|>', prompt=forced) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": 1}'),
        ToolCallEnd(0, {"a": 1}),
    ]


def test_harmony_tools_of_other_kinds():
    text = (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
        '<|start|>assistant<|channel|>analysis to=browser.search<|constrain|>json<|message|>{"q": "x"}<|call|>'
    )
    assert collect(parse("harmony", list(text))).calls == (
        ToolCall("python", {"code": "print(1)"}),
        ToolCall("browser.search", {"q": "x"}),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<|channel|>thoughts<|message|>x<|end|>", "the channel 'thoughts'; harmony has analysis, commentary, final"),
        ("<|channel|><|message|>x<|end|>", "the channel ''"),
        ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>x<|end|>", "the role 'user'"),
        ("<|channel|>commentary to=functions.f to=functions.g<|message|>{}<|call|>", "functions.f, functions.g"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "the name ''"),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "begins with '<'"),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "begins with '['"),
        ("<|channel|>commentary to=functions.f<|message|>{} x<|call|>", "between the arguments and"),
        ("<|channel|>final<|end|>", "header ends early"),
        (f"<|channel|>{'x' * 2000}<|message|>x<|end|>", "longer than 1024"),
    ],
)
def test_harmony_messages_that_cannot_be_read(text, why):
    good = "<|start|>assistant<|channel|>final<|message|>ok<|return|>"
    reply = collect(parse("harmony", [text + good]))
    assert reply.content in ("ok", "aok")
    assert [why in found.why for found in reply.bad] == [True]


# --- limits, misuse, names


@pytest.mark.parametrize(
    ("format", "opening", "closing"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("llama", '{"name": "f", "parameters": ', "}<|eom_id|>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": ', "}]</s>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "</s>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
    ],
)
def test_the_size_of_a_call_is_bounded(format, opening, closing):
    limits = ParseLimits(call_chars=1000)
    fits = json.dumps({"a": "x" * 900})
    assert collect(parse(format, [opening + fits + closing], limits=limits)).calls == (ToolCall("f", json.loads(fits)),)
    found = bad(format, opening + json.dumps({"a": "x" * 100_000}) + closing, limits=limits)
    assert found.why == "the call is longer than 1,000 characters"
    assert len(found.text) <= 1000


def test_the_size_of_code_is_bounded():
    limits = ParseLimits(call_chars=100)
    for format, opening in (("llama", "<|python_tag|>"), ("harmony", "<|channel|>analysis to=python<|message|>")):
        assert "longer than 100" in bad(format, opening + "x = 1\n" * 100, limits=limits).why
        assert collect(parse(format, [opening + "x" * 100], limits=limits)).calls[0].arguments == {"code": "x" * 100}


def test_the_number_of_calls_is_bounded():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 5
    reply = collect(parse("hermes", [text], limits=ParseLimits(calls=3)))
    assert len(reply.calls) == 3
    assert [found.why for found in reply.bad] == ["the message has more than 3 calls"] * 2


@pytest.mark.slow
def test_long_text_takes_time_in_proportion():
    start = time.thread_time()
    for format in FORMATS:
        stream = reply_parser(format)
        for _ in range(20_000):
            stream.feed("\n <tool [TOOL <|")
        stream.finish()
        parse(format, ['<tool_call>{"name": "f", "arguments": {"a": [' + "1, " * 100_000 + "2]}}</tool_call>"])
        parse(format, ["<tool_call>" * 20_000, "[TOOL_CALLS]" * 20_000, "<|start|>" * 20_000])
    assert time.thread_time() - start < 30


def test_a_finished_parser_takes_no_more():
    stream = reply_parser("qwen")
    assert stream.finish() == []
    assert stream.finish() == []
    with pytest.raises(Closed, match="create a new one"):
        stream.feed("a")


def test_only_text_can_be_fed():
    with pytest.raises(WrongType, match="a bytes"):
        reply_parser("qwen").feed(b"a")  # pyright: ignore[reportArgumentType]


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidInput, match="'pig latin' is not known; it must be one of qwen, hermes, llama, mistral, harmony"
    ):
        reply_parser("pig latin")


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("{{ messages[0].content }}", None),
        ("<|im_start|>", None),
        ("<think></think>", "qwen"),
        ("<tool_call><think></think>", "qwen"),
        ("<tool_call>", "hermes"),
        ("<tool_call><function=f><parameter=a>", None),
        ("<think></think><tool_call>f<arg_key>a</arg_key>", None),
        ("<think></think><｜tool▁calls▁begin｜>", None),
        ("<|start_header_id|>", None),
        ('<|start_header_id|>{% if message.tool_calls %}{"name": , "parameters": ', "llama"),
        ("<|python_tag|>", "llama"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>final<|message|>", "harmony"),
    ],
)
def test_detect_knows_formats_by_their_markers(source, format):
    assert detect_format(source) == format


def test_detect_takes_source():
    with pytest.raises(WrongType, match="NoneType"):
        detect_format(None)  # pyright: ignore[reportArgumentType]
