"""The grammar cache: compiled grammars, kept by tokenizer so that each is compiled once.

Owns the compiler (llguidance), its limits and messages, and the compiler's view of the tokenizer. It hands out copies,
matches no text itself, and never keeps a tokenizer alive.

Bounded are the size of a grammar (`constraints/grammar.py`), the compiler's fuel, states and items (LIMITS), and the
time a caller waits (DEADLINE). The compiler recurses, so it runs in its own thread with a deep stack.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.base.errors import GrammarTooSlow, InvalidInput, InvalidToken, Unsupported
from headway.base.text import shorten
from headway.program.constraints.bitmask import padded
from headway.program.constraints.grammar import WHITESPACE, Grammar, embedded_schemas
from headway.program.constraints.json_schema import places_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from headway.text.tokenizer import Tokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Items of the parser. Under an ambiguous grammar each takes up to 10 ns for every item of its row: with the first limit
# 20 ms at most for a mask, and a fifth of that for a token. A grammar that reached its limit quickly gets the next one.
# What such a grammar may take in one call is not known then, so it counts as slow from there on. A JSON document can be
# read in few ways, so its items are cheap.
STEP_ITEMS = (2000, 6000, 18_000, 50_000)
JSON_STEP_ITEMS = (10_000, 18_000, 50_000)
ROW_ITEMS, MORE_ROW_ITEMS = 1000, 2000  # of one row: with the first limit, and with the others and for JSON
MAX_GRAMMARS = 64  # compiled, for each tokenizer
REFUSED_SECONDS = 60.0  # that a refusal is remembered: compiling the same again would be refused again
MAX_SOURCE_BYTES = 1 << 20  # of their sources, a rough measure of their memory: large ones leave sooner
STACK = 64 << 20  # bytes; only what is used becomes real memory
FORCED = 1024  # bytes of a forced text that are encoded at once: a long one would hold Python's global lock
DEADLINE = 20.0  # seconds; what the limits let through takes a tenth of this
SHOWN = 200  # characters of the compiler's message


class GrammarCache:
    """The compiler's view of one tokenizer, and the grammars compiled for it, least recently used first."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = _compiler_tokenizer(tokenizer, size)
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, InvalidInput]] = OrderedDict()  # until when, and why
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[LLMatcher, int] | None:
        """A copy of a compiled grammar, if it is cached, and which limit of items it has."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept[0].deep_copy(), kept[1]

    def compile(self, grammar: Grammar, limit: int = 0) -> LLMatcher:
        """The grammar, compiled again, with one of the limits of items."""
        return _with_deep_stack(lambda: _matcher(grammar, self.tokenizer, limit), grammar)

    def drop(self, key: bytes) -> None:
        """Forget a grammar whose table of states is full."""
        with self._lock:
            self._kept.pop(key, None)

    def put(self, key: bytes, matcher: LLMatcher, limit: int = 0) -> None:
        with self._lock:
            self._kept[key] = (matcher, limit)
            while len(self._kept) > MAX_GRAMMARS or (
                len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_SOURCE_BYTES
            ):
                self._kept.popitem(last=False)

    def refuse(self, key: bytes, error: InvalidInput) -> None:
        """Remember why a grammar was refused, for a while."""
        with self._lock:
            self._refused[key] = (time.monotonic() + REFUSED_SECONDS, error)
            while len(self._refused) > MAX_GRAMMARS or sum(map(len, self._refused)) > MAX_SOURCE_BYTES:
                self._refused.popitem(last=False)

    def check_refused(self, key: bytes) -> None:
        """Raise if this grammar was refused a moment ago."""
        with self._lock:
            until, error = self._refused.get(key, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise type(error)(str(error))


_caches: weakref.WeakKeyDictionary[Tokenizer, dict[int, GrammarCache]] = weakref.WeakKeyDictionary()
_creating = threading.Lock()


def grammar_cache(tokenizer: Tokenizer, size: int) -> GrammarCache:
    """The cache for the first `size` ids of a vocabulary: those that the model has."""
    with _creating:
        caches = _caches.setdefault(tokenizer, {})
        if size not in caches:
            caches[size] = GrammarCache(tokenizer, size)
        return caches[size]


def ready_grammar_cache(tokenizer: Tokenizer, size: int) -> GrammarCache | None:
    """The same if it exists already; None also while any cache is being created, which takes long."""
    if not _creating.acquire(blocking=False):
        return None
    try:
        return _caches.get(tokenizer, {}).get(size)
    finally:
        _creating.release()


# --- compiling


def limits_of_items(grammar: Grammar) -> tuple[int, ...]:
    """How many items the parser may have in one call: at first, and where it has so many quickly."""
    return JSON_STEP_ITEMS if grammar.kind == "json" else STEP_ITEMS


def _matcher(grammar: Grammar, tokenizer: LLTokenizer, limit: int) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    row = ROW_ITEMS if limit == 0 and grammar.kind != "json" else MORE_ROW_ITEMS
    items: dict[str, Any] = {"max_items_in_row": row, "step_max_items": limits_of_items(grammar)[limit]}
    return LLMatcher(tokenizer, _source(grammar), log_level=0, limits=LLParserLimits(**LIMITS, **items))


def _source(grammar: Grammar) -> str:
    """The grammar in the compiler's own form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_json_options(grammar.compact))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choices":
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(_quoted(grammar.text)))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _json_options(compact: bool) -> Any:
    # Without \u no name in a document can be another spelling of a property's.
    escapes = {"json_allowed_escapes": 'nrbtf\\"', "json_allow_general_unicode_escapes": False}
    if compact:
        return {"whitespace_flexible": False, **escapes}
    return {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{WHITESPACE}}}", **escapes}


def _quoted(choices: str) -> list[str]:
    return [json.dumps(choice, ensure_ascii=False) for choice in json.loads(choices)]


def _with_deep_stack(work: Callable[[], LLMatcher], grammar: Grammar) -> LLMatcher:
    """Run the compiler where its recursion cannot overflow the stack; raise what it refuses."""
    done: list[LLMatcher | BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # a panic inside the compiler is not an Exception
            done.append(error)

    thread = threading.Thread(target=run, name="headway-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(DEADLINE)
    if not done:
        raise GrammarTooSlow(f"{named(grammar)} was not compiled in {DEADLINE:.0f} seconds; simplify it")
    if isinstance(done[0], BaseException):
        raise InvalidInput(f"{named(grammar)} cannot be used: {_reason(grammar, str(done[0]))}") from done[0]
    if done[0].is_error():
        raise InvalidInput(f"{named(grammar)} cannot be used: {_reason(grammar, done[0].get_error())}")
    return done[0]


_starting = threading.Lock()  # the stack size is one setting for the whole process


def named(grammar: Grammar) -> str:
    """The grammar's name in messages."""
    names = {
        "json": "the JSON schema",
        "regex": f"the regular expression {grammar.text!r:.60}",
        "lark": "the Lark grammar",
        "choices": "the list of choices",
    }
    return names[grammar.kind]


def brief(message: str) -> str:
    """The compiler's message on one line, without state dumps, the grammar's text and advice about its own options."""
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    text = message.partition("<backtrace>")[0].partition(" Enable '")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(r"\s*(\d+ \||<|\^)", line)]
    reasons = [line for line in lines if line.startswith("error: ")]
    summary = shorten("; ".join(reasons or lines), SHOWN)
    return summary


def _reason(grammar: Grammar, message: str) -> str:
    """Why the compiler refuses the grammar. It does not say where a keyword is, nor what to write instead."""
    summary = brief(message)
    if "oneOf" in summary:
        which = _where("oneOf", _places({"oneOf"}, grammar))
        more = f"the choices of {which} may overlap: use anyOf, or require a property with its own const in each choice"
    elif "maxProperties" in summary:
        which = _where("minProperties or maxProperties", _places({"minProperties", "maxProperties"}, grammar))
        more = f"take out {which}, or require every property beside it"
    else:
        return summary
    return f"{summary}; {more}"


def _where(what: str, places: list[str]) -> str:
    """A keyword with the places where it is."""
    where = ", ".join(places[:3]) + ", …" * (len(places) > 3)
    return (
        f"a {what}" if not places else f"the {what} at {where}" if len(places) == 1 else f"one of the {what} at {where}"
    )


def _places(keywords: set[str], grammar: Grammar) -> list[str]:
    """The places of a keyword in a grammar's schemas."""
    if grammar.kind == "json":
        return places_of(keywords, grammar.text)
    schemas = embedded_schemas(grammar.text) if grammar.kind == "lark" else []
    return [f"{place} of %json {i}" for i, schema in enumerate(schemas, 1) for place in places_of(keywords, schema)]


# --- the tokenizer as the compiler sees it


class _Wrapper:
    """A tokenizer as llguidance expects it. It holds ours weakly: the cache must not keep its key alive."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = weakref.ref(tokenizer), size
        self.tokens = [*(_bytes(tokenizer, id) for id in range(size)), b"<end>"]
        self.tokens += [b""] * (padded(size + 1) - size - 1)
        self.eos_token_id = size  # its own end token, so that ours are never part of a grammar
        self.special_token_ids = sorted(id for id in {*tokenizer.special_ids, *tokenizer.eos_ids, size} if id <= size)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a forced text as the tokenizer encodes it, or [] when they are not exactly that text.

        Of a long text they are those of its beginning: the compiler asks again when they are there.
        """
        tokenizer = self._tokenizer()
        wanted = text.encode() if isinstance(text, str) else bytes(text)
        if tokenizer is None:
            return []
        ids = tokenizer.encode(wanted[:FORCED].decode("utf-8", "replace"))
        if len(wanted) > FORCED:
            ids = ids[: len(ids) * 3 // 4]  # what follows the cut may change the last ones
        exact = all(id < self._size for id in ids)
        written = b"".join(map(tokenizer.token_bytes, ids)) if exact else b""
        return ids if written == wanted[: len(written)] and (written == wanted or len(wanted) > FORCED) else []


def _compiler_tokenizer(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    if tokenizer.decoding.kind == "opaque":
        raise Unsupported("this tokenizer decodes only whole sequences, so its tokens have no bytes to constrain")
    tokenizer.encode("a")  # whatever it builds on first use is built here, not in the first mask
    wrapper: Any = _Wrapper(tokenizer, size)
    return LLTokenizer(wrapper, n_vocab=padded(size + 1), eos_token=[size])


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    try:
        return tokenizer.token_bytes(id)
    except InvalidToken:
        return b""  # a hole in the vocabulary
