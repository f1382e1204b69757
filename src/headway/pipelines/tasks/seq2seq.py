"""Texts from texts, by models that read the whole before they write: summaries, translations, anything else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, UnsupportedModel
from headway.pipelines.generation.sampling import (
    NAMES,
    PROMPT,
    Draws,
    GenerationOptions,
    Writer,
    without_rivals,
    writer_of,
)
from headway.pipelines.inputs.text import TextEncoder, TextOptions
from headway.pipelines.task import WRITES, Batch, PreparedItem, Row, Task, check_text
from headway.pipelines.tasks.languages import Languages, Pair, pair_named

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.generation.seq2seq import Seq2SeqPipeline
    from headway.pipelines.opening import Request
    from headway.pipelines.task import Results

SHARE = 64  # new tokens that count towards the size of a row: how many will be written is not known before


@dataclass(frozen=True)
class Seq2SeqOptions(GenerationOptions):
    """How a text is read and another written. `prefix` goes ahead of each text (None: as the model's files say).

    A text longer than the model's limit (or `max_input_length`) is an error, unless `truncation=True` cuts it or
    `stride=n` divides it into pieces that share n tokens; what is written of pieces is joined by blanks.
    `return_tensors=True` gives token ids instead of text.
    """

    prefix: str | None = None
    truncation: bool = False
    max_input_length: int | None = None
    stride: int | None = None
    return_tensors: bool = False
    clean_up_tokenization_spaces: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise InvalidInput(f"prefix is {self.prefix!r}; it takes a text, or None for the model's own")
        if not isinstance(self.return_tensors, bool):
            raise InvalidInput(f"return_tensors is {self.return_tensors!r}; it takes True or False")
        if self.clean_up_tokenization_spaces not in (None, True, False):
            shown = f"{self.clean_up_tokenization_spaces!r}"
            raise InvalidInput(f"clean_up_tokenization_spaces is {shown}; it takes True, False or None")
        if self.return_tensors and self.stride is not None:
            raise InvalidInput("return_tensors=True and stride: the ids of pieces are no sequence; leave one out")
        self.reading()

    def reading(self) -> TextOptions:
        """How a text becomes token ids."""
        try:
            return TextOptions(self.truncation, self.max_input_length, self.stride)
        except InvalidInput as error:
            raise InvalidInput(str(error).replace("max_length", "max_input_length")) from None


class Text2TextGeneration(Task):
    """`{"generated_text": ...}` for a text; a list of them where `num_return_sequences` is more than one."""

    Options = Seq2SeqOptions
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    key: ClassVar[str] = "generated"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        if not getattr(self.config, "is_encoder_decoder", False) or not hasattr(loaded.module, "generate"):
            raise UnsupportedModel(
                f"{type(loaded.module).__name__} of {loaded.name} does not read before it writes; this task needs an "
                'encoder and a decoder (decoders run as pipeline("text-generation", ...))'
            )
        self._writers: dict[str, Writer] = {}

    @classmethod
    def open(cls, request: Request) -> Seq2SeqPipeline:
        from headway.pipelines.generation.seq2seq import Seq2SeqPipeline
        from headway.pipelines.opening import open_here

        return open_here(request, Seq2SeqPipeline)  # type: ignore[return-value]

    # -- options -------------------------------------------------------------------------------------------------------

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        found: Seq2SeqOptions = super().options(base, without_rivals(base, given))
        self.settings(found)  # which says what cannot be, before anything is read
        return found

    def settings(self, options: Any) -> dict[str, Any]:
        """The keywords of `model.generate`."""
        return self.writer(options).settings(options)

    def writer(self, options: Any) -> Writer:
        """What the model's files say about this task."""
        key = self.task_key(options)
        if key not in self._writers:
            self._writers[key] = writer_of(self.loaded.module, key)
        return self._writers[key]

    def task_key(self, options: Any) -> str:
        """The name under which a model's files may have settings."""
        return self.name

    @property
    def start_token(self) -> int:
        """What the decoder starts from."""
        known = self.loaded.module.generation_config
        start = known.decoder_start_token_id if known.decoder_start_token_id is not None else known.bos_token_id
        if not isinstance(start, int):
            raise InvalidInput("the model names no token to start from; pass decoder_input_ids=...")
        return start

    def batch_key(self, options: Any) -> Hashable:
        return self.task_key(options), tuple(getattr(options, name) for name in sorted(NAMES))

    # -- the way of an item --------------------------------------------------------------------------------------------

    def encoder(self, options: Any) -> TextEncoder:
        """The tokenizer that reads the source."""
        assert self.loaded.text is not None
        return self.loaded.text

    def prefix(self, options: Any) -> str:
        """What goes ahead of every text."""
        if options.prefix is not None:
            return options.prefix
        said = (getattr(self.config, "task_specific_params", None) or {}).get(self.task_key(options)) or {}
        return str(said.get("prefix") or getattr(self.config, "prefix", None) or "")

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return self.preprocess_many([item], options)[0]

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        prefix, share = self.prefix(options), min(SHARE, self.writer(options).new_tokens(options))
        texts = [prefix + check_text(item) for item in items]
        parts = self.encoder(options).encode(texts, options.reading())
        return [PreparedItem(tuple(_row(part.ids, share) for part in some)) for some in parts]

    def padding(self) -> Mapping[str, int]:
        # encoders count positions from the first token: padding is behind, whatever side the tokenizer prefers
        return {**super().padding(), "side": 1}

    def several(self) -> str | None:
        return WRITES

    def samples(self) -> list[Row]:
        rows = super().samples()
        start = {"decoder_input_ids": [self.start_token]}
        return [Row({"input_ids": row.inputs["input_ids"], **start}, row.length) for row in rows]

    def forward(self, batch: Batch, options: Any) -> Mapping[str, Tensor]:
        settings = self.settings(options)
        if not self.writer(options).looks_at_source(options):
            return {"sequences": self._written(batch, settings, options)}
        # padding counts as source there: only rows of one length share a call
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(batch.rows):
            alike.setdefault(len(row.inputs["input_ids"]), []).append(i)
        batches = [self.collate([batch.rows[i] for i in some]) for some in alike.values()]
        parts = [self._written(one, settings, options) for one in batches]
        return {"sequences": _together(parts, list(alike.values()), self.writer(options).ends(options))}

    def _written(self, batch: Batch, settings: Mapping[str, Any], options: Any) -> Tensor:
        """Sequences of each row, [R, N, L]."""
        run, count = self.loaded.run, len(batch.rows)
        draws = Draws(count, options.seed, run.device) if self.writer(options).draws(options) else nullcontext()
        with draws:
            found = run(batch.inputs, method="generate", **settings)
        return found.view(count, -1, found.shape[-1])

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> Any:
        ends = self.writer(options).ends(options)
        pieces = [[_cut(ids, ends) for ids in result["sequences"]] for result in results]
        if options.return_tensors:
            found = [{f"{self.key}_token_ids": torch.from_numpy(ids)} for ids in pieces[0]]
        else:
            texts = [[self._text(ids, options) for ids in some] for some in pieces]
            found = [{f"{self.key}_text": " ".join(parts)} for parts in zip(*texts)]
        return found if len(found) > 1 else found[0]

    def _text(self, ids: np.ndarray, options: Any) -> str:
        clean = options.clean_up_tokenization_spaces
        more = {} if clean is None else {"clean_up_tokenization_spaces": clean}
        return self.loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=True, **more)


class Summarization(Text2TextGeneration):
    """`{"summary_text": ...}` for a text."""

    key: ClassVar[str] = "summary"


@dataclass(frozen=True)
class TranslationOptions(Seq2SeqOptions):
    """`src_lang` and `tgt_lang` for models that know several languages; the task's name may have them too."""

    src_lang: str | None = None
    tgt_lang: str | None = None


class Translation(Text2TextGeneration):
    """`{"translation_text": ...}` for a text. `translation_en_to_fr` names the languages in the task."""

    Options = TranslationOptions
    key: ClassVar[str] = "translation"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._languages = Languages(loaded)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        found: TranslationOptions = super().options(base, given)
        asked = found.src_lang is not None or found.tgt_lang is not None
        self._languages.check(self._pair(found), asked=asked)
        return found

    def settings(self, options: Any) -> dict[str, Any]:
        first = self._languages.first_token(self._pair(options))
        settings = super().settings(options)
        return settings if first is None else {"forced_bos_token_id": first, **settings}

    def batch_key(self, options: Any) -> Hashable:
        return self._pair(options).target, super().batch_key(options)

    def encoder(self, options: Any) -> TextEncoder:
        return self._languages.reader(self._pair(options)) or super().encoder(options)

    def prefix(self, options: Any) -> str:
        if options.prefix is not None:
            return options.prefix
        return super().prefix(options) or self._languages.prefix(self._pair(options)) or ""

    def task_key(self, options: Any) -> str:
        return self._pair(options).task or self.name

    def _pair(self, options: Any) -> Pair:
        named = pair_named(self.name)
        return Pair(options.src_lang or named.source, options.tgt_lang or named.target)


# -- ids ---------------------------------------------------------------------------------------------------------------


def _row(ids: list[int], share: int) -> Row:
    return Row({"input_ids": ids}, len(ids) + share)


def _cut(ids: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """A sequence as it would be alone: what is behind its end is there because others went on."""
    found = np.flatnonzero(np.isin(ids[PROMPT:], ends))
    return ids[: PROMPT + found[0] + 1].copy() if len(found) else ids.copy()


def _together(parts: Sequence[Tensor], places: Sequence[Sequence[int]], ends: tuple[int, ...]) -> Tensor:
    """Sequences [R, N, L] of parts of a batch, in the order of its rows."""
    longest = max(part.shape[-1] for part in parts)
    fill = ends[0] if ends else 0
    padded = [torch.nn.functional.pad(part, (0, longest - part.shape[-1]), value=fill) for part in parts]
    order = torch.tensor([i for some in places for i in some], device=parts[0].device)
    return torch.cat(padded)[order.argsort()]
