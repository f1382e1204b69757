"""Text to text with encoder-decoder models: summarization, translation and general text2text generation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel
from headway.base.text import short_repr
from headway.pipelines.generation.generate import cut_at_eos, generate
from headway.pipelines.generation.options import (
    NAMES,
    PROMPT,
    GenerationOptions,
    GenerationSettings,
    generation_settings,
    resolve_lengths,
)
from headway.pipelines.inputs.text import TextEncoder, TextOptions
from headway.pipelines.task import GENERATES, ModelInputs, OneResult, PreparedItem, Row, Task, check_text
from headway.pipelines.tasks.languages import LanguagePair, ModelLanguages, languages_in_name

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.factory import PipelineSpec
    from headway.pipelines.generation.encoder_decoder import Seq2SeqPipeline
    from headway.pipelines.task import Results

COUNTED_NEW_TOKENS = 64  # new tokens that count towards a row's cost: the real number is not known beforehand


@dataclass(frozen=True)
class Seq2SeqOptions(GenerationOptions):
    """Options of text-to-text tasks. `prefix` is prepended to each text (None: the model's own).

    A text longer than the model's limit (or `max_input_length`) is an error, unless `truncation=True` cuts it or
    `stride=n` splits it into chunks that share n tokens; the outputs of chunks are joined with spaces.
    `return_tensors=True` returns token ids instead of text.
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
            raise InvalidInput(f"prefix is {short_repr(self.prefix)}; it must be a string, or None for the model's own")
        if not isinstance(self.return_tensors, bool):
            raise InvalidInput(f"return_tensors is {short_repr(self.return_tensors)}; it must be True or False")
        if self.clean_up_tokenization_spaces not in (None, True, False):
            shown = f"{short_repr(self.clean_up_tokenization_spaces)}"
            raise InvalidInput(f"clean_up_tokenization_spaces is {shown}; it must be True, False or None")
        if self.return_tensors and self.stride is not None:
            raise InvalidInput("return_tensors=True with stride: chunks have several sequences of ids; leave one out")
        self.text_options()

    def text_options(self) -> TextOptions:
        """The options for tokenizing the source."""
        try:
            return TextOptions(self.truncation, self.max_input_length, self.stride)
        except InvalidInput as error:
            raise InvalidInput(str(error).replace("max_length", "max_input_length")) from None


class Text2TextGeneration(Task):
    """`{"generated_text": ...}` for a text; a list of them where `num_return_sequences` is more than one."""

    Options = Seq2SeqOptions
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    key: ClassVar[str] = "generated"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        if not getattr(self.config, "is_encoder_decoder", False) or not hasattr(loaded.module, "generate"):
            raise UnsupportedModel(
                f"{type(loaded.module).__name__} of {loaded.name} is not an encoder-decoder model, which this task "
                'needs (decoders run as pipeline("text-generation", ...))'
            )
        self._settings: dict[str, GenerationSettings] = {}

    @classmethod
    def open(cls, spec: PipelineSpec) -> Seq2SeqPipeline:
        from headway.pipelines.factory import open_pipeline
        from headway.pipelines.generation.encoder_decoder import Seq2SeqPipeline

        return open_pipeline(spec, Seq2SeqPipeline)  # type: ignore[return-value]

    # -- options -------------------------------------------------------------------------------------------------------

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: Seq2SeqOptions = super().options(base, resolve_lengths(base, given))
        self.keywords(merged)  # raises for meaningless combinations
        return merged

    def keywords(self, options: Any) -> dict[str, Any]:
        """The keywords of `model.generate`."""
        return self.settings(options).keywords(options)

    def settings(self, options: Any) -> GenerationSettings:
        """The model's generation settings for this task."""
        key = self.task_key(options)
        if key not in self._settings:
            self._settings[key] = generation_settings(self.loaded.module, key)
        return self._settings[key]

    def task_key(self, options: Any) -> str:
        """The task's name in the model's `task_specific_params`."""
        return self.name

    @property
    def start_token(self) -> int:
        """The decoder's start token."""
        known = self.loaded.module.generation_config
        start = known.decoder_start_token_id if known.decoder_start_token_id is not None else known.bos_token_id
        if not isinstance(start, int):
            raise InvalidInput("the model has no decoder start token; pass decoder_input_ids=...")
        return start

    def batch_key(self, options: Any) -> Hashable:
        return self.task_key(options), tuple(getattr(options, name) for name in sorted(NAMES))

    # -- the steps -----------------------------------------------------------------------------------------------------

    def encoder(self, options: Any) -> TextEncoder:
        """The tokenizer of the source."""
        assert self.loaded.text is not None
        return self.loaded.text

    def prefix(self, options: Any) -> str:
        """The text prepended to every source."""
        if options.prefix is not None:
            return options.prefix
        specific = (getattr(self.config, "task_specific_params", None) or {}).get(self.task_key(options)) or {}
        return str(specific.get("prefix") or getattr(self.config, "prefix", None) or "")

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return self.preprocess_many([item], options)[0]

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        prefix = self.prefix(options)
        new_tokens = min(COUNTED_NEW_TOKENS, self.settings(options).new_tokens(options))
        texts = [prefix + check_text(item) for item in items]
        parts = self.encoder(options).encode(texts, options.text_options())
        return [PreparedItem(tuple(_row(part.ids, new_tokens) for part in some)) for some in parts]

    def single(self, item: Any, result: Any, given: Mapping[str, Any]) -> Any:
        """As in transformers: a list of the text's sequences, even if there is one."""
        return OneResult([result]) if isinstance(result, dict) else result

    def padding(self) -> Mapping[str, int]:
        # encoders count positions from the first token: pad on the right, whatever the tokenizer's side
        return {**super().padding(), "side": 1}

    def multi_pass_reason(self) -> str | None:
        return GENERATES

    def sample_rows(self) -> list[Row]:
        rows = super().sample_rows()
        start = {"decoder_input_ids": [self.start_token]}
        return [Row({"input_ids": row.inputs["input_ids"], **start}, row.length) for row in rows]

    def forward(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor]:
        settings = self.settings(options)
        if not settings.depends_on_source_tokens(options):
            return {"sequences": self._generate(batch, options)}
        # padding counts as source: only rows of one length may share a call
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(batch.rows):
            alike.setdefault(len(row.inputs["input_ids"]), []).append(i)
        batches = [self.collate([batch.rows[i] for i in some]) for some in alike.values()]
        parts = [self._generate(one, options) for one in batches]
        return {"sequences": _merge(parts, list(alike.values()), settings.eos_ids(options))}

    def _generate(self, batch: ModelInputs, options: Any) -> Tensor:
        """Sequences of each row, [R, N, L]."""
        sampled = self.settings(options).samples(options)
        return generate(self.loaded.backend, batch, self.keywords(options), options, sampled=sampled)

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> Any:
        eos_ids = self.settings(options).eos_ids(options)
        chunks = [[cut_at_eos(ids, eos_ids, PROMPT) for ids in result["sequences"]] for result in results]
        if options.return_tensors:
            outputs = [{f"{self.key}_token_ids": torch.from_numpy(ids.copy())} for ids in chunks[0]]
        else:
            texts = [[self._text(ids, options) for ids in chunk] for chunk in chunks]
            outputs = [{f"{self.key}_text": " ".join(parts)} for parts in zip(*texts)]
        return outputs if len(outputs) > 1 else outputs[0]

    def _text(self, ids: np.ndarray, options: Any) -> str:
        clean = options.clean_up_tokenization_spaces
        more = {} if clean is None else {"clean_up_tokenization_spaces": clean}
        return self.loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=True, **more)


class Summarization(Text2TextGeneration):
    """`{"summary_text": ...}` for a text."""

    key: ClassVar[str] = "summary"


@dataclass(frozen=True)
class TranslationOptions(Seq2SeqOptions):
    """`src_lang` and `tgt_lang` for multilingual models; the task's name may contain them instead."""

    src_lang: str | None = None
    tgt_lang: str | None = None


class Translation(Text2TextGeneration):
    """`{"translation_text": ...}` for a text. The task's name may contain the languages: `translation_en_to_fr`."""

    Options = TranslationOptions
    key: ClassVar[str] = "translation"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._languages = ModelLanguages(loaded)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: TranslationOptions = super().options(base, given)
        explicit = merged.src_lang is not None or merged.tgt_lang is not None
        self._languages.check(self._pair(merged), explicit=explicit)
        return merged

    def keywords(self, options: Any) -> dict[str, Any]:
        first = self._languages.first_token(self._pair(options))
        keywords = super().keywords(options)
        return keywords if first is None else {"forced_bos_token_id": first, **keywords}

    def batch_key(self, options: Any) -> Hashable:
        return self._pair(options).target, super().batch_key(options)

    def encoder(self, options: Any) -> TextEncoder:
        return self._languages.encoder(self._pair(options)) or super().encoder(options)

    def prefix(self, options: Any) -> str:
        if options.prefix is not None:
            return options.prefix
        return super().prefix(options) or self._languages.prefix(self._pair(options)) or ""

    def task_key(self, options: Any) -> str:
        return self._pair(options).task or self.name

    def _pair(self, options: Any) -> LanguagePair:
        named = languages_in_name(self.name)
        return LanguagePair(options.src_lang or named.source, options.tgt_lang or named.target)


# -- ids ---------------------------------------------------------------------------------------------------------------


def _row(ids: list[int], new_tokens: int) -> Row:
    return Row({"input_ids": ids}, len(ids) + new_tokens)


def _merge(parts: Sequence[Tensor], places: Sequence[Sequence[int]], eos_ids: tuple[int, ...]) -> Tensor:
    """Sequences [R, N, L] of parts of a batch, in the order of its rows."""
    longest = max(part.shape[-1] for part in parts)
    fill = eos_ids[0] if eos_ids else 0
    padded = [torch.nn.functional.pad(part, (0, longest - part.shape[-1]), value=fill) for part in parts]
    order = torch.tensor([i for some in places for i in some], device=parts[0].device)
    return torch.cat(padded)[order.argsort()]
