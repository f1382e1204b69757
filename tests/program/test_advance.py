"""Grammars that move on together do what each would have done alone, whatever happens to the others."""

import gc
import weakref
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import headway as hw
from headway.base.errors import Closed, HeadwayError, InvalidInput, InvalidToken
from headway.program.constraints import cache as grammar_cache
from headway.program.constraints.async_mask import GrammarCursor, GrammarMask, compute, one_per_grammar
from headway.program.constraints.batched_masks import FEW, accept_all, masks_of
from headway.program.constraints.bitmask import MaskLayout
from headway.program.constraints.constraint import GrammarMatcher, compile
from headway.program.constraints.grammar import Grammar
from headway.text import Tokenizer

WORDS = ["ab", "abc", "aa", '{"', '":', "the", " a", "12", "true", "é", "}}", "aaaa"]
GRAMMARS = [
    Grammar.regex("[a-c ]{0,9}"),
    Grammar.regex("(a|ab|abc)+1?"),
    Grammar.json_object(),
    Grammar.json_schema({"type": "array", "items": {"enum": [True, 12, "the"]}, "maxItems": 3}),
    Grammar.choices(["the", "thin", "a the"]),
    Grammar.lark('start: t ("+" t)*\nt: /[0-9]+/ | "(" start ")"'),
    Grammar.regex("(?s).*"),
    Grammar.regex("a"),
]


@cache
def tokenizer(ends: int, spare: int) -> Tokenizer:
    """Every byte, some words, so many end tokens, and so many more words that nothing is made of."""
    names = [f"<end{i}>" for i in range(ends)] + sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word)[0][0] for word in WORDS]
    names = list(dict.fromkeys([*names, *(f"zq{i}" for i in range(spare))]))
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.decoder, backend.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([f"<end{i}>" for i in range(ends)])
    return Tokenizer(backend, eos_ids=tuple(range(ends)))


# tokenizers and widths of the model's logits beside theirs: alike, wider, narrower, at and across words of 32 bits
VOCABULARIES = [(2, 0, 0), (2, 0, 40), (1, 21, 0), (0, 3, -4), (1, 17, 5), (3, 0, -5)]


def started(which: int, grammar: int) -> GrammarMatcher:
    ends, spare, more = VOCABULARIES[which]
    words = tokenizer(ends, spare)
    return compile(GRAMMARS[grammar], words, words.vocab_size + more)


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def alone(grammar: GrammarMatcher, token: int) -> tuple[HeadwayError | None, np.ndarray | HeadwayError | None]:
    """What accept and then mask give."""
    try:
        grammar.accept(token)
    except HeadwayError as error:
        return error, None
    try:
        return None, grammar.mask()
    except HeadwayError as error:
        return None, error


def together(
    rows: list[tuple[GrammarMatcher, int]],
) -> list[tuple[HeadwayError | None, np.ndarray | HeadwayError | None]]:
    errors = accept_all(rows)
    masks = iter(masks_of([grammar for (grammar, _), error in zip(rows, errors, strict=True) if error is None]))
    return [(error, None if error is not None else next(masks)) for error in errors]


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and str(one) == str(other)


def check_alike(one: GrammarMatcher, other: GrammarMatcher) -> None:
    assert (one.may_end, one.finished, one.mask_density) == (other.may_end, other.finished, other.mask_density)
    assert same(one.mask(), other.mask())
    assert one.forced() == other.forced()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_together_is_the_same_as_one_by_one(data: st.DataObject) -> None:
    places = st.tuples(st.integers(0, len(VOCABULARIES) - 1) | st.just(0), st.integers(0, len(GRAMMARS) - 1))
    rows = data.draw(st.lists(places, min_size=1, max_size=12))
    ours, theirs = ([started(*row) for row in rows] for _ in range(2))
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = []
        for grammar in theirs:
            allowed = ids(grammar.mask())
            other = int(dice.integers(-1, grammar.layout.vocab + 1))  # any, allowed or not
            tokens.append(int(dice.choice(allowed)) if allowed and dice.random() < 0.85 else other)
        found = together(list(zip(ours, tokens, strict=True)))
        wanted = [alone(grammar, token) for grammar, token in zip(theirs, tokens, strict=True)]
        for (error, mask), (error_, mask_) in zip(found, wanted, strict=True):
            assert same(error, error_)
            assert same(mask, mask_)
        for one, other in zip(ours, theirs, strict=True):
            if dice.random() < 0.3:
                check_alike(one, other)
            back = int(dice.integers(0, 3))
            if dice.random() < 0.2 and back <= len(one._accepted):
                one.rollback(back)
                other.rollback(back)
    for one, other in zip(ours, theirs, strict=True):
        check_alike(one, other)


def text(count: int) -> tuple[list[GrammarMatcher], int]:
    """Grammars of one vocabulary that allow the token `a`."""
    found = [compile(Grammar.regex(f"a[a-y]{{0,{9 + i}}}"), tokenizer(1, 0), 300) for i in range(count)]
    return found, tokenizer(1, 0).encode("a")[0]


def test_masks_of_many_are_rows_of_one_array_that_no_grammar_keeps() -> None:
    grammars, a = text(FEW + 3)
    assert accept_all([(grammar, a) for grammar in grammars]) == [None] * len(grammars)
    masks = masks_of(grammars)
    (array,) = {id(mask.base): mask.base for mask in masks if isinstance(mask, np.ndarray)}.values()
    assert array is not None
    assert len(array) == len(grammars)
    assert not any(mask.flags.writeable for mask in masks if isinstance(mask, np.ndarray))
    kept = weakref.ref(array)
    del masks, array
    gc.collect()
    assert kept() is None
    assert all(grammar.mask_density > 0 for grammar in grammars)  # known all the same


def test_a_refused_token_changes_nothing_for_its_row_and_for_the_others() -> None:
    grammars, a = text(FEW + 2)
    (z,) = tokenizer(1, 0).encode("z")
    others = [grammar.copy() for grammar in grammars]
    before = grammars[1].mask()
    tokens = [a, z, a, 300, a, a]
    errors = accept_all(list(zip(grammars, tokens, strict=True)))
    assert [error is None for error in errors] == [True, False, True, False, True, True]
    assert isinstance(errors[1], InvalidInput)
    assert str(errors[1]) == f"token {z} is not allowed after the 0 tokens so far"
    assert isinstance(errors[3], InvalidToken)
    assert same(grammars[1].mask(), before)
    for grammar, other, error in zip(grammars, others, errors, strict=True):
        if error is None:
            other.accept(a)
        check_alike(grammar, other)
    assert accept_all([(grammar, a) for grammar in grammars]) == [None] * len(grammars)


@pytest.mark.parametrize("end", ["z", "[yz]", "(z|é)", "<end>"])
def test_a_dead_end_is_an_error_of_its_row_alone(end: str) -> None:
    lacking = Backend(models.BPE(vocab={"a": 0, "b": 1, "<end>": 2}, merges=[]))
    lacking.decoder = decoders.ByteLevel()
    lacking.add_special_tokens(["<end>"])
    words = Tokenizer(lacking, eos_ids=(2,))
    texts = [Grammar.regex("[ab]*")] * FEW + [
        Grammar.lark(f"start: /[ab]{{20}}/ {end if end[0] == '<' else f'/{end}/'}")
    ]
    grammars = [compile(text, words, 3) for text in texts]
    other, wanted = compile(texts[-1], words, 3), None
    for _ in range(20):
        found = together([(grammar, 0) for grammar in grammars])
        error, wanted = alone(other, 0)
        assert same(found[-1][0], error)
        assert same(found[-1][1], wanted)
        assert all(
            error is None and isinstance(mask, np.ndarray) and ids(mask) == [0, 1, 2] for error, mask in found[:-1]
        )
    assert isinstance(wanted, InvalidInput)
    assert "after 20 tokens" in str(wanted)


def test_a_full_table_is_renewed_among_others(smollm2: hw.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    words = smollm2.tokenizer
    monkeypatch.setitem(grammar_cache.LIMITS, "max_lexer_states", 6500)
    grammar = Grammar.regex("(.*a.{12}b|[^c]*d.{10}e)Q")
    rows = [compile(grammar, words, words.vocab_size) for _ in range(9)]
    easy = [compile(Grammar.regex(f"[^{c}]*"), words, words.vocab_size) for c in "xyz"]
    tables = [row._matcher for row in rows]
    dice, texts, seen = np.random.default_rng(0), [[] for _ in rows], [[] for _ in rows]
    masks = masks_of([*rows, *easy])
    for _ in range(8):
        tokens = [int(dice.choice(ids(mask))) for mask in masks if isinstance(mask, np.ndarray)]
        found = together(list(zip([*rows, *easy], tokens, strict=True)))
        assert [error for error, _ in found] == [None] * len(found)
        masks = [mask for _, mask in found]
        for text, line, token, mask in zip(texts, seen, tokens, masks, strict=False):
            text.append(token)
            line.append(mask)
    assert any(row._matcher is not table for row, table in zip(rows, tables, strict=True))  # else it was never full
    for text, line in zip(texts, seen, strict=True):
        other = compile(grammar, words, words.vocab_size)
        for token, mask in zip(text, line, strict=True):
            error, wanted = alone(other, token)
            assert error is None
            assert same(mask, wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(0, 90), st.lists(st.integers(0, 289), max_size=3), st.integers(0, 2**32))
def test_masks_are_laid_out_for_the_model(known: int, more: int, ends: list[int], seed: int) -> None:
    """Against booleans: the compiler's own end token and what fills its vocabulary up are no tokens of the model."""
    dice, vocab = np.random.default_rng(seed), known + more
    words = MaskLayout(known, vocab, tuple(id for id in sorted(set(ends)) if id < vocab))
    found = words.buffer(5)
    found[:] = dice.integers(0, 2**32, found.shape, np.uint32)
    allowed = np.zeros((5, -(-vocab // 32) * 32), bool)
    allowed[:, :known] = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")[:, :known]
    allowed[:, list(words.ends)] = False
    masks, counts = words.without_ends(found)
    assert counts == allowed.sum(1).tolist()
    words.allow_ends(masks, [1, 4])
    allowed[np.ix_([1, 4], words.ends)] = True
    assert np.array_equal(np.packbits(allowed, axis=1, bitorder="little").view(np.uint32), masks)
    assert ids(words.only_ends()) == list(words.ends)


# --- the thread


def test_masks_of_one_grammar_are_computed_in_their_order() -> None:
    (one, other), a = text(2)
    masks = [GrammarMask(grammar, frozenset(), 300) for grammar in (one, other, one, one, other)]
    now, rest = one_per_grammar(masks)
    assert (now, rest) == (masks[:2], masks[2:])
    assert one_per_grammar(rest) == ([masks[2], masks[4]], [masks[3]])
    twin, (b, c) = one.copy(), tokenizer(1, 0).encode("b") + tokenizer(1, 0).encode("c")
    first = GrammarMask(one, frozenset(), 300)
    first.start((a,))
    following = GrammarCursor(first, one, frozenset(), 300)
    later = [first, *(following.advance(token) for token in (b, c, a, a))]
    for mask, token in zip(later, (a, b, c, a, a), strict=True):
        assert same(alone(twin, token)[1], mask.words())
    following.cut(2)
    twin.rollback(3)
    check_alike(one, twin)


def test_a_token_that_ends_the_text_moves_no_grammar() -> None:
    grammars, a = text(FEW + 1)
    masks = [GrammarMask(grammar, frozenset({0}), 300) for grammar in grammars]
    for i, mask in enumerate(masks):
        mask.start((0 if i == 1 else a,))
    assert [mask.wait() for mask in masks] == [i != 1 for i in range(len(masks))]
    with pytest.raises(Closed, match="ended the text"):
        masks[1].words()
    assert grammars[1].mask().tolist() == text(2)[0][1].mask().tolist()
    assert all(same(mask.words(), grammar.mask()) for i, (mask, grammar) in enumerate(zip(masks, grammars)) if i != 1)


def test_nobody_is_left_waiting_after_a_fault_of_ours() -> None:
    grammars, a = text(FEW)
    masks = [GrammarMask(grammar, frozenset(), 300) for grammar in [*grammars, grammars[0]]]  # one twice: not allowed
    for mask in masks:
        mask.token = a
    compute(masks)
    for mask in masks:
        assert not mask.wait()
        with pytest.raises(Closed, match="internal error"):
            mask.words()
