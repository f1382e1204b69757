"""Constraints: which tokens may come next. The compiled form of a `Grammar`, and the shape of any object that does it.

A constraint follows one text, token by token; `rollback` and `copy` let it follow truncates, drafts and forks. It owns
no text and knows nothing of passes. Grammars are compiled by llguidance, once per tokenizer, and kept in a small cache.

What is bounded: the size of a grammar (headway.program.grammar), the compiler's own fuel, states and items (LIMITS),
and the time a caller waits (DEADLINE). The compiler recurses, so it runs in a thread of its own with a deep stack.
Programs in an event loop wait for it in a few threads that are there for this alone: nothing else waits behind them.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from headway.base.errors import InvalidInput, InvalidToken, Unsupported, WrongType
from headway.program.grammar import WHITESPACE, Grammar
from headway.program.mask_words import MaskWords, padded

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from headway.text.tokenizer import Tokenizer

Result = TypeVar("Result")
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
KEPT = 64  # compiled grammars per tokenizer
KEPT_BYTES = 1 << 20  # of their sources, which say roughly what they take: large ones leave sooner
COMPILERS = 4  # grammars that are compiled at a time for programs in event loops
STACK = 64 << 20  # bytes; only what is used is ever real memory
DEADLINE = 20.0  # seconds; what the limits let through takes a tenth of this
REHEARSAL = 12  # tokens tried before a grammar is handed out
SHOWN = 200  # characters of the compiler's message


class Constraint(Protocol):
    """What `constrain=` takes: any object with `mask`, `accept` and `rollback`. It may have more, by these names:

    - `copy() -> Constraint`: one in the same state that goes its own way; without it forking in the middle raises.
    - `forced() -> list[int]`: tokens of the only text that can follow, as the tokenizer would write it, [] when there
      is a choice; without it nothing is fed ahead.
    - `may_end: bool`: the text so far is complete and end tokens are allowed; without it they are allowed where the
      mask allows them.
    - `finished: bool`: nothing but the end can follow, so the generation ends; without it, it never ends by itself.

    Its time is the program's own: a slow mask holds up no other program.
    """

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next: packed uint32 words over V, bit i % 32 of word i // 32; None for all."""
        ...

    def accept(self, token: int) -> None:
        """One more token; raises and changes nothing when it is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take the last n tokens back."""
        ...


def compile(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched:
    """A constraint at the beginning of its text, for logits of width `vocab_size`. Compiled once per tokenizer.

    It may take up to about a second for the largest grammars that are allowed, without holding the interpreter's lock.
    """
    if not isinstance(grammar, Grammar):
        raise WrongType(f"a Grammar is needed, not {type(grammar).__name__}; see Grammar.json_schema, .regex, .choices")
    shelf = _shelf(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = shelf.taken(grammar.key)
    if matcher is None:
        matcher = shelf.made(grammar)
        _rehearse(grammar, Matched(matcher.deep_copy(), grammar, shelf, tokenizer, vocab_size))
        shelf.put(grammar.key, matcher.deep_copy())
    return Matched(matcher, grammar, shelf, tokenizer, vocab_size)


async def compiled(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched:
    """The same for a program in an event loop: one that is kept comes at once, another is compiled in a thread."""
    found = _kept(grammar, tokenizer, vocab_size)
    if found is not None:
        return found
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_compilers(), compile, grammar, tokenizer, vocab_size)


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COMPILERS, thread_name_prefix="headway-compile")


def _kept(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> Matched | None:
    """A grammar that was compiled before; None also while a shelf is being made, which takes long."""
    if not _shelving.acquire(blocking=False):
        return None
    try:
        shelf = _shelves.get(tokenizer, {}).get(min(vocab_size, tokenizer.vocab_size))
    finally:
        _shelving.release()
    matcher = None if shelf is None else shelf.taken(grammar.key)
    return None if matcher is None or shelf is None else Matched(matcher, grammar, shelf, tokenizer, vocab_size)


class Matched:
    """A compiled grammar that follows one text. End tokens are ours: the compiler never sees them.

    Where only one text can follow, the mask allows it as the tokenizer spells it, and `accept` takes every spelling.
    Copies share a table of states that grows as they are followed. When it is full, one compiled anew takes its place,
    so that what a text may be never depends on the texts that others write.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        shelf: _Shelf,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._matcher, self._grammar, self._shelf = matcher, grammar, shelf
        self._tokenizer, self._vocab = tokenizer, vocab_size
        self._shares = True  # its table may have the states of other texts
        self._known = min(vocab_size, tokenizer.vocab_size)
        self._ends = tuple(id for id in tokenizer.eos_ids if id < vocab_size)
        self.words = MaskWords(self._known, vocab_size, self._ends)
        self._accepted: list[int] = []
        self._mask: np.ndarray | None = None  # of the state as it is
        self._open: int | None = None  # how many tokens of text it allows

    @property
    def may_end(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._allowed() == 0

    @property
    def breadth(self) -> float:
        """The share of the vocabulary that may come next, end tokens aside."""
        return self._allowed() / self._vocab

    def mask(self) -> np.ndarray:
        if self._ended:
            return self.words.only_ends()
        if self._mask is None:
            self._mask = self._computed()
        return self._mask

    def accept(self, token: int) -> None:
        if not 0 <= token < self._vocab:
            raise InvalidToken(f"token id {token} is outside the vocabulary; ids are 0 to {self._vocab - 1}")
        if token in self._ends:
            allowed = self.may_end
        else:
            allowed = not self._ended and token < self._known and self._do(lambda m: m.validate_tokens([token])) == 1
        if not allowed:
            raise InvalidInput(f"token {token} is not allowed after the {len(self._accepted)} tokens so far")
        if token not in self._ends:
            self._do(lambda m: m.consume_token(token))
        self.took(token)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._accepted):
            raise InvalidInput(f"{n} tokens cannot be taken back; {len(self._accepted)} were accepted")
        text = sum(token not in self._ends for token in self._accepted[len(self._accepted) - n :])
        if text:
            self._do(lambda m: m.rollback(text))
        self._mask = self._open = None
        del self._accepted[len(self._accepted) - n :]

    def copy(self) -> Matched:
        twin = copy(self)
        twin._matcher, twin._accepted = self._matcher.deep_copy(), self._accepted[:]
        self._shares = twin._shares = True
        return twin

    def forced(self) -> list[int]:
        if self.may_end:
            return []  # the end is another way on
        tokens = self._do(lambda m: m.compute_ff_tokens())
        return tokens[: self._do(lambda m: m.validate_tokens(tokens))] if tokens else []

    # -- as one of many (headway.program.advance) --

    def taker(self, token: int) -> LLMatcher | None:
        """What can be given a token without asking first, and `took` follows if it takes it; None: `accept` must ask.

        A token is drawn under the mask of the grammar that then takes it, so asking is nearly always in vain. What has
        failed stays so, but `accept` makes it anew once, as it does when the table is full, and can then tell a token
        that is not allowed from a text that cannot be followed. Once it has a table of its own it can do so no more.
        """
        asks = self._ended or not self._shares or not 0 <= token < self._known or token in self._ends
        return None if asks else self._matcher

    def took(self, token: int) -> None:
        """The taker has taken the token."""
        self._accepted.append(token)
        self._mask = self._open = None

    @property
    def masker(self) -> LLMatcher | None:
        """What computes the mask; None where that is done."""
        return None if self._ended or self._mask is not None else self._matcher

    @property
    def _ended(self) -> bool:
        return bool(self._accepted) and self._accepted[-1] in self._ends

    def _text(self) -> list[int]:
        return [token for token in self._accepted if token not in self._ends]

    def _allowed(self) -> int:
        """How many tokens of text may come next."""
        if self._ended:
            return 0
        if self._open is None:
            self._mask = self._computed()
            assert self._open is not None
        return self._open

    def _computed(self) -> np.ndarray:
        found = self.words.room(1)
        self._do(lambda m: m.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes))
        (mask,) = settle([self], found)
        if isinstance(mask, InvalidInput):
            raise mask
        return mask

    def _do(self, work: Callable[[LLMatcher], Result]) -> Result:
        """What work gives, once more on a table of its own where the shared one is full."""
        result = work(self._matcher)
        if self._matcher.is_error() and self._shares:
            self._shelf.drop(self._grammar.key)
            self._matcher, self._shares = self._shelf.made(self._grammar), False
            self._matcher.consume_tokens(self._text())
            result = work(self._matcher)
        if self._matcher.is_error():
            why = _brief(self._matcher.get_error())
            raise InvalidInput(f"the grammar cannot be followed after {len(self._accepted)} tokens: {why}")
        return result


def settle(grammars: Sequence[Matched], found: np.ndarray) -> list[np.ndarray | InvalidInput]:
    """The masks of grammars that are laid out alike, from what their matchers wrote; an error where there is none."""
    layout = grammars[0].words
    masks, counts = layout.text(found)
    complete = [i for i, grammar in enumerate(grammars) if grammar._matcher.is_accepting()]
    layout.allow_ends(masks, complete)
    masks.flags.writeable = False
    rows: list[np.ndarray | InvalidInput] = list(masks)
    for i in {i for i, count in enumerate(counts) if not count}.difference(complete):
        rows[i] = InvalidInput(
            f"the grammar allows nothing after {len(grammars[i]._accepted)} tokens and the text is not complete: "
            "it has a dead end, or asks for an end token or a text that the vocabulary cannot write"
        )
    for grammar, row, count in zip(grammars, rows, counts, strict=True):
        grammar._open = None if isinstance(row, InvalidInput) else count
    return rows


# --- compiling


def _matcher(grammar: Grammar, words: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(words, _source(grammar), log_level=0, limits=LLParserLimits(**LIMITS))


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
    """Run the compiler where its recursion cannot reach the end of the stack; refuse what it refuses."""
    done: list[LLMatcher | BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # a panic inside the compiler is no Exception
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
        raise InvalidInput(f"{_named(grammar)} was not compiled in {DEADLINE:.0f} seconds; simplify it")
    if isinstance(done[0], BaseException):
        raise InvalidInput(f"{_named(grammar)} cannot be used: {_brief(str(done[0]))}") from done[0]
    if done[0].is_error():
        raise InvalidInput(f"{_named(grammar)} cannot be used: {_brief(done[0].get_error())}")
    return done[0]


_starting = threading.Lock()  # the stack size is one setting for the whole process


def _rehearse(grammar: Grammar, trial: Matched) -> None:
    """Try the first tokens: a grammar that allows nothing or explodes at once is refused before it is used."""
    try:
        for turn in range(REHEARSAL):
            if trial.finished:
                return
            allowed = np.flatnonzero(np.unpackbits(trial.mask().view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, trial.words.ends)]
            trial.accept(int(allowed[(turn * 7919) % len(allowed)]))
    except InvalidInput as error:
        raise InvalidInput(f"{_named(grammar)} cannot be used: {error}") from None


def _named(grammar: Grammar) -> str:
    names = {
        "json": "the JSON schema",
        "regex": f"the regular expression {grammar.text!r:.60}",
        "lark": "the Lark grammar",
        "choices": "the list of choices",
    }
    return names[grammar.kind]


def _brief(message: str) -> str:
    """The compiler's message on one line, without state dumps, the grammar's text and advice about its own options."""
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    text = message.partition("<backtrace>")[0].partition(" Enable '")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(r"\s*(\d+ \||<|\^)", line)]
    reasons = [line for line in lines if line.startswith("error: ")]
    text = "; ".join(reasons or lines)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


# --- what is kept per tokenizer


class _Shelf:
    """The compiler's view of one tokenizer, and the grammars compiled for it, least recently used first."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.words = _words(tokenizer, size)
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def taken(self, key: bytes) -> LLMatcher | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept.deep_copy()

    def made(self, grammar: Grammar) -> LLMatcher:
        """The grammar compiled anew."""
        return _with_deep_stack(lambda: _matcher(grammar, self.words), grammar)

    def drop(self, key: bytes) -> None:
        """Keep it no longer: its table is full."""
        with self._lock:
            self._kept.pop(key, None)

    def put(self, key: bytes, matcher: LLMatcher) -> None:
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > KEPT or (len(self._kept) > 1 and sum(map(len, self._kept)) > KEPT_BYTES):
                self._kept.popitem(last=False)


_shelves: weakref.WeakKeyDictionary[Tokenizer, dict[int, _Shelf]] = weakref.WeakKeyDictionary()
_shelving = threading.Lock()


def _shelf(tokenizer: Tokenizer, size: int) -> _Shelf:
    """The shelf for the first `size` ids of a vocabulary: those that the model has."""
    with _shelving:
        shelves = _shelves.setdefault(tokenizer, {})
        if size not in shelves:
            shelves[size] = _Shelf(tokenizer, size)
        return shelves[size]


class _Wrapper:
    """A tokenizer as llguidance asks for it. It holds ours weakly: the shelf must not keep its own key alive."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = weakref.ref(tokenizer), size
        self.tokens = [*(_bytes(tokenizer, id) for id in range(size)), b"<end>"]
        self.tokens += [b""] * (padded(size + 1) - size - 1)
        self.eos_token_id = size  # an end of its own, so that ours are never part of a grammar
        self.special_token_ids = sorted(id for id in {*tokenizer.special_ids, *tokenizer.eos_ids, size} if id <= size)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a forced text as the tokenizer writes it, or [] when they are not exactly that text."""
        tokenizer = self._tokenizer()
        wanted = text.encode() if isinstance(text, str) else bytes(text)
        if tokenizer is None:
            return []
        ids = tokenizer.encode(wanted.decode("utf-8", "replace"))
        exact = all(id < self._size for id in ids) and b"".join(map(tokenizer.token_bytes, ids)) == wanted
        return ids if exact else []


def _words(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    if tokenizer.pieces.kind == "opaque":
        raise Unsupported("this tokenizer decodes only whole sequences, so its tokens have no bytes to constrain")
    tokenizer.encode("a")  # what it builds on first use is built here, not in the first mask
    wrapper: Any = _Wrapper(tokenizer, size)
    return LLTokenizer(wrapper, n_vocab=padded(size + 1), eos_token=[size])


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    try:
        return tokenizer.token_bytes(id)
    except InvalidToken:
        return b""  # a hole in the vocabulary
