"""`bad_words_ids` and `sequence_bias`: sequences of tokens that must not come, or come more or less often.

As in `transformers`: a bias is added to the last token of a sequence wherever the tokens before it have just come; a
sequence of one token always counts. A bad word is a sequence with a bias of -inf.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.base.checks import check_list, check_number, check_token_id
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidToken, WrongType
from headway.base.specs.bias import DenseBias
from headway.base.specs.samplers import Sampling, bias_array
from headway.base.text import short_repr

Words = tuple[tuple[int, ...], ...]
Biases = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True)
class WordBias:
    """Sequences of tokens, each with its bias."""

    biases: Biases

    @classmethod
    def of(cls, words: Words | None, biases: Biases | None, vocab: int) -> WordBias | None:
        """From checked values; None where there are none. Ids outside the vocabulary are refused."""
        both = (*(biases or ()), *((word, -math.inf) for word in words or ()))
        for word, _ in both:
            if max(word) >= vocab:
                name = "bad_words_ids" if word in (words or ()) else "sequence_bias"
                raise InvalidToken(f"{name} has token {max(word)}; this model's token ids are 0 to {vocab - 1}")
        return cls(both) if both else None

    def after(self, tokens: Sequence[int]) -> dict[int, float]:
        """The bias of each token that may follow these, where it has one."""
        biases: dict[int, float] = defaultdict(float)
        for word, bias in self.biases:
            before = word[:-1]
            if len(before) <= len(tokens) and tuple(tokens[len(tokens) - len(before) :]) == before:
                biases[word[-1]] += bias
        return dict(biases)

    def sampler(self, sampler: Sampling, tokens: Sequence[int]) -> tuple[Sampling, list[int]]:
        """How the token after these is sampled, and those that are forbidden."""
        biases = self.after(tokens)
        forbidden = sorted(token for token, bias in biases.items() if bias == -math.inf)
        added = {token: bias for token, bias in biases.items() if bias not in (0.0, -math.inf)}
        if not added:
            return sampler, forbidden
        if sampler.dense_bias is not None:
            array = sampler.dense_bias.copy()
            for token, bias in added.items():
                array[token] += bias
            return replace(sampler, logit_bias=DenseBias(bias_array(array, "logit_bias"))), forbidden
        own = dict(sampler.bias)
        return replace(sampler, logit_bias=own | {t: own.get(t, 0.0) + b for t, b in added.items()}), forbidden


def check_bad_words(value: Any, name: str = "bad_words_ids") -> Words:
    """A list of lists of token ids, none of them empty."""
    return tuple(
        _word(word, f"{name}[{i}]") for i, word in enumerate(check_list(value, name, "a list of lists of ids"))
    )


def check_sequence_bias(value: Any, name: str = "sequence_bias") -> Biases:
    """A mapping from sequences of token ids to numbers, or a list of such pairs, as JSON has it."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [_pair(pair, name) for pair in check_list(value, name, "a mapping from tuples of token ids to numbers")]
    biases = {}
    for word, bias in pairs:
        key = _word(word, f"a sequence of {name}")
        if key in biases:
            raise InvalidInput(f"{name} has the sequence {short_repr(key)} twice; give each one number")
        biases[key] = check_number(bias, f"{name} of {short_repr(key)}")
    return tuple(biases.items())


def _pair(pair: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise WrongType(f"{name} has {short_repr(pair)}; it must be pairs of a list of token ids and a number")
    return pair[0], pair[1]


def _word(word: Any, name: str) -> tuple[int, ...]:
    ids = tuple(check_token_id(token, name) for token in check_list(word, name, "a list of token ids"))
    if not ids:
        raise InvalidInput(f"{name} is empty; it must have at least one token id")
    return ids
