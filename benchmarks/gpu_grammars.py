"""A grammar for each sequence, over a vocabulary that is made up: bytes and words of random letters."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from headway.base.errors import Unsupported
from headway.program.constraints.constraint import GrammarMatcher
from headway.program.constraints.constraint import compile as compile_grammar
from headway.program.constraints.grammar import Grammar
from headway.text.tokenizer import Tokenizer


def grammars(vocab: int) -> Callable[[int], GrammarMatcher]:
    """What gives the i-th sequence a grammar: words without one of the letters. Raises where it cannot be."""
    try:
        import llguidance  # noqa: F401
    except ImportError as e:
        raise Unsupported(f"grammars need llguidance: {e}") from e
    tokenizer = _tokenizer(vocab)

    def grammar(i: int) -> GrammarMatcher:
        letters = string.ascii_lowercase.replace(string.ascii_lowercase[i % 26], "")
        text = Grammar.regex(f"[{letters}{' ' * (i // 26 % 2)}]+")
        found = compile_grammar(text, tokenizer, vocab)
        assert isinstance(found, GrammarMatcher)
        return found

    return grammar


def _tokenizer(vocab: int) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    dice, bytes_ = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < 2 * len(bytes_):
        raise Unsupported(f"a vocabulary of {vocab} has no room for words beside all bytes")
    words: set[str] = set()
    while len(words) < vocab - len(bytes_):
        words.add("".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 7))))
    ids = {word: i for i, word in enumerate([*bytes_, *sorted(words)])}
    backend = Backend(models.BPE(vocab=ids, merges=[]))
    backend.decoder, backend.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend)
