"""Which languages a translation is from and to, and how each kind of model is told.

codes      mBART, NLLB, M2M100: the tokenizer marks the source, the first token written names the target
prefix     T5: "translate English to German: " goes ahead of the text
targets    Marian with several targets: ">>fra<<" goes ahead of the text
fixed      Marian with one pair, and any other model: it translates as it was trained, and takes no languages
"""

from __future__ import annotations

import copy
import difflib
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput
from headway.pipelines.inputs.text import TextEncoder

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded

NAMED = re.compile(r"translation_([A-Za-z0-9-]+)_to_([A-Za-z0-9-]+)")
PREFIXED = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # what T5 was trained on
T5 = ("t5", "mt5", "umt5", "longt5")
MARK = re.compile(r">>(.+)<<")


@dataclass(frozen=True)
class Pair:
    """From one language to another; None is what the model does by itself."""

    source: str | None = None
    target: str | None = None

    @property
    def task(self) -> str | None:
        """The name under which a model's files may have settings for it."""
        return f"translation_{self.source}_to_{self.target}" if self.source and self.target else None


def pair_named(task: str) -> Pair:
    """The languages in a task's name: translation_en_to_fr."""
    found = NAMED.fullmatch(task)
    return Pair(*found.groups()) if found else Pair()


class Languages:
    """The languages of one model."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._lock = loaded, threading.Lock()
        self._readers: dict[str, TextEncoder] = {}
        self.codes = _codes(loaded.tokenizer)
        self.targets = _targets(loaded.tokenizer)
        self._family = getattr(loaded.config, "model_type", "")

    def check(self, pair: Pair, *, asked: bool) -> None:
        """Refuse languages that the model cannot be told; `asked` by keyword rather than in the task's name."""
        for name, language in (("src_lang", pair.source), ("tgt_lang", pair.target)):
            if language is not None and not (isinstance(language, str) and language):
                raise InvalidInput(f"{name} is {language!r}; it takes the code of a language")
        if self.codes:
            for language in filter(None, (pair.source, pair.target)):
                self.code(language)
        elif self._family in T5:
            self._check_prefixed(pair, asked=asked)
        elif self.targets:
            if pair.target is not None:
                self._mark(pair.target)
        elif asked:
            name = "src_lang" if pair.source is not None else "tgt_lang"
            raise InvalidInput(
                f"{name} was given, and {self._loaded.name} translates as it was trained, between two languages only; "
                "leave it out, or take a model that knows several"
            )

    def reader(self, pair: Pair) -> TextEncoder | None:
        """The tokenizer set to the source language; None where the model's own will do."""
        if not self.codes or pair.source is None:
            return None
        code, text = self.code(pair.source), self._loaded.text
        assert text is not None
        with self._lock:
            if code not in self._readers:
                tokenizer = copy.deepcopy(self._loaded.tokenizer)
                tokenizer.src_lang = code
                self._readers[code] = TextEncoder(tokenizer, text.limit, types=text.types)
            return self._readers[code]

    def prefix(self, pair: Pair) -> str | None:
        """What goes ahead of a text for this pair; None where nothing does."""
        if self._family in T5 and pair.source in PREFIXED and pair.target in PREFIXED:
            return f"translate {PREFIXED[pair.source]} to {PREFIXED[pair.target]}: "
        return f"{self._mark(pair.target)} " if self.targets and pair.target is not None else None

    def first_token(self, pair: Pair) -> int | None:
        """The token that names the target language, where the model writes it first."""
        return self.codes[self.code(pair.target)] if self.codes and pair.target is not None else None

    def code(self, language: str) -> str:
        """The model's own code of a language: as given, or the only one that begins so (en for en_XX)."""
        if language in self.codes:
            return language
        begins = [code for code in self.codes if code.split("_")[0] == language]
        if len(begins) == 1:
            return begins[0]
        raise _unknown(language, self.codes)

    def _mark(self, language: str) -> str:
        if language in self.targets:
            return self.targets[language]
        raise _unknown(language, self.targets)

    def _check_prefixed(self, pair: Pair, *, asked: bool) -> None:
        if (pair.source is None) != (pair.target is None):
            raise InvalidInput(f"{pair} is half a pair; this model needs both src_lang and tgt_lang")
        said = getattr(self._loaded.config, "task_specific_params", None) or {}
        for language in filter(None, (pair.source, pair.target)):
            if pair.task not in said and language not in PREFIXED and asked:
                raise _unknown(language, PREFIXED)


def _codes(tokenizer: Any) -> dict[str, int]:
    """Codes of languages and their tokens, for tokenizers that mark the source."""
    if not hasattr(tokenizer, "src_lang"):
        return {}
    known = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "lang_token_to_id", None)
    if known:
        return {code.strip("_"): id for code, id in known.items()}
    special: Iterable[Any] = getattr(tokenizer, "all_special_tokens", ())
    codes = [str(token) for token in special if re.fullmatch(r"[a-z]{2,3}_[A-Z][A-Za-z]+", str(token))]
    return {code: tokenizer.convert_tokens_to_ids(code) for code in codes}


def _targets(tokenizer: Any) -> dict[str, str]:
    """Targets of a Marian model that has several: code → the mark that goes ahead of a text."""
    marks = getattr(tokenizer, "supported_language_codes", None) or ()
    found = {code[1]: code[0] for mark in marks if (code := MARK.fullmatch(str(mark)))}
    return found


def _unknown(language: str, known: Iterable[str]) -> InvalidInput:
    names = sorted(known)
    close = difflib.get_close_matches(language, names, n=3, cutoff=0.3) or names[:3]
    return InvalidInput(f"the model does not know the language {language!r}; it knows {len(names)}, such as {close}")
