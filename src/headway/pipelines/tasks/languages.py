"""The languages of a translation, and how each kind of model takes them.

codes      mBART, NLLB, M2M100: the tokenizer marks the source; the first generated token is the target language
prefix     T5: "translate English to German: " is prepended to the text
targets    Marian with several targets: ">>fra<<" is prepended to the text
fixed      Marian with one pair, and any other model: it translates as it was trained, and takes no languages
"""

from __future__ import annotations

import copy
import difflib
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.pipelines.inputs.text import TextEncoder

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel

IN_NAME = re.compile(r"translation_([A-Za-z0-9-]+)_to_([A-Za-z0-9-]+)")
PREFIXED = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # what T5 was trained on
T5 = ("t5", "mt5", "umt5", "longt5")
MARK = re.compile(r">>(.+)<<")


@dataclass(frozen=True)
class LanguagePair:
    """Source and target language; None means the model's default."""

    source: str | None = None
    target: str | None = None

    @property
    def task(self) -> str | None:
        """The task's name in the model's `task_specific_params`."""
        return f"translation_{self.source}_to_{self.target}" if self.source and self.target else None


def languages_in_name(task: str) -> LanguagePair:
    """The languages in a task's name, such as translation_en_to_fr."""
    match = IN_NAME.fullmatch(task)
    return LanguagePair(*match.groups()) if match else LanguagePair()


class ModelLanguages:
    """The languages of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._lock = loaded, threading.Lock()
        self._encoders: dict[str, TextEncoder] = {}
        self.codes = _codes(loaded.tokenizer)
        self.targets = _targets(loaded.tokenizer)
        self._family = getattr(loaded.config, "model_type", "")

    def check(self, pair: LanguagePair, *, explicit: bool) -> None:
        """Raise InvalidInput for unknown languages; `explicit`: given by keyword, not in the task's name."""
        for name, language in (("src_lang", pair.source), ("tgt_lang", pair.target)):
            if language is not None and not (isinstance(language, str) and language):
                raise InvalidInput(f"{name} is {short_repr(language)}; it must be a language code")
        if self.codes:
            for language in filter(None, (pair.source, pair.target)):
                self.code(language)
        elif self._family in T5:
            self._check_prefixed(pair, explicit=explicit)
        elif self.targets:
            if pair.target is not None:
                self._mark(pair.target)
        elif explicit:
            name = "src_lang" if pair.source is not None else "tgt_lang"
            raise InvalidInput(
                f"{name} was given, but {self._loaded.name} translates between two fixed languages; "
                "leave it out, or use a multilingual model"
            )

    def encoder(self, pair: LanguagePair) -> TextEncoder | None:
        """A tokenizer set to the source language; None for the model's own."""
        if not self.codes or pair.source is None:
            return None
        code, text = self.code(pair.source), self._loaded.text
        assert text is not None
        with self._lock:
            if code not in self._encoders:
                tokenizer = copy.deepcopy(self._loaded.tokenizer)
                tokenizer.src_lang = code
                self._encoders[code] = TextEncoder(tokenizer, text.limit, types=text.types)
            return self._encoders[code]

    def prefix(self, pair: LanguagePair) -> str | None:
        """The text to prepend for this pair, if any."""
        if self._family in T5 and pair.source in PREFIXED and pair.target in PREFIXED:
            return f"translate {PREFIXED[pair.source]} to {PREFIXED[pair.target]}: "
        return f"{self._mark(pair.target)} " if self.targets and pair.target is not None else None

    def first_token(self, pair: LanguagePair) -> int | None:
        """The token of the target language, for models that generate it first."""
        return self.codes[self.code(pair.target)] if self.codes and pair.target is not None else None

    def code(self, language: str) -> str:
        """The model's own code for a language: as given, or the only one with that prefix (en for en_XX)."""
        if language in self.codes:
            return language
        matching = [code for code in self.codes if code.split("_")[0] == language]
        if len(matching) == 1:
            return matching[0]
        raise _unknown(language, self.codes)

    def _mark(self, language: str) -> str:
        if language in self.targets:
            return self.targets[language]
        raise _unknown(language, self.targets)

    def _check_prefixed(self, pair: LanguagePair, *, explicit: bool) -> None:
        if (pair.source is None) != (pair.target is None):
            raise InvalidInput(f"{pair} is incomplete; this model needs both src_lang and tgt_lang")
        known = getattr(self._loaded.config, "task_specific_params", None) or {}
        for language in filter(None, (pair.source, pair.target)):
            if pair.task not in known and language not in PREFIXED and explicit:
                raise _unknown(language, PREFIXED)


def _codes(tokenizer: Any) -> dict[str, int]:
    """Language codes and their token ids, for tokenizers that mark the source."""
    if not hasattr(tokenizer, "src_lang"):
        return {}
    known = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "lang_token_to_id", None)
    if known:
        return {code.strip("_"): id for code, id in known.items()}
    special: Iterable[Any] = getattr(tokenizer, "all_special_tokens", ())
    codes = [str(token) for token in special if re.fullmatch(r"[a-z]{2,3}_[A-Z][A-Za-z]+", str(token))]
    return {code: tokenizer.convert_tokens_to_ids(code) for code in codes}


def _targets(tokenizer: Any) -> dict[str, str]:
    """Targets of a multilingual Marian model: code → the mark to prepend."""
    marks = getattr(tokenizer, "supported_language_codes", None) or ()
    return {code[1]: code[0] for mark in marks if (code := MARK.fullmatch(str(mark)))}


def _unknown(language: str, known: Iterable[str]) -> InvalidInput:
    names = sorted(known)
    close = difflib.get_close_matches(language, names, n=3, cutoff=0.3) or names[:3]
    return InvalidInput(
        f"the model does not know the language {short_repr(language)}; it knows {len(names)}, such as {close}"
    )
