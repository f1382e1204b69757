"""Speech recognition with Whisper: windows, chunks of long recordings, timestamps and languages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.pipelines.generation.generate import per_item_sampling
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio_chunks import AudioChunker
from headway.pipelines.task import ModelInputs, PreparedItem, Row
from headway.pipelines.tasks.audio import ChunkOptions
from headway.pipelines.tasks.speech_recognition import SpeechOptions, SpeechSeq2Seq

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

GENERATION_OPTIONS = ("language", "task", "return_timestamps", "prompt")  # that the generation loop depends on


@dataclass(frozen=True)
class WhisperOptions(SpeechOptions, ChunkOptions):
    """A recording longer than the model's window is split into chunks of `chunk_length_s` seconds (None: the window).

    Chunks share `stride_length_s` (None: a sixth) with their neighbors and are computed together. With
    `return_timestamps=True` and no `chunk_length_s` the model itself moves through the windows one after the other.
    `return_timestamps` True or "word" adds `chunks`; `language` and `task` (transcribe, translate) go to the model.
    `prompt` is a text that the model takes for what was said before the recording: names, or a way of writing.
    """

    return_timestamps: bool | str | None = None
    return_language: bool = False
    language: str | None = None
    task: str | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.return_timestamps not in (None, True, False, "word"):
            raise InvalidInput(
                f"return_timestamps is {short_repr(self.return_timestamps)}; Whisper takes True, False or 'word'"
            )
        if self.task not in (None, "transcribe", "translate"):
            raise InvalidInput(f"task is {short_repr(self.task)}; it must be 'transcribe' or 'translate'")
        if not isinstance(self.prompt, str | None):
            raise WrongType(f"prompt is {short_repr(self.prompt)}; it must be a text")
        if self.return_language not in (True, False):
            raise InvalidInput(f"return_language is {short_repr(self.return_language)}; it must be True or False")


class WhisperRecognition(SpeechSeq2Seq):
    """`{"text": ...}`, with `chunks` of text and time on request."""

    Options = WhisperOptions
    speech: ClassVar[str] = "whisper"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.window = int(loaded.feature_extractor.n_samples)
        self._chunker = AudioChunker(self.rate, 1)
        self._second = loaded.feature_extractor.chunk_length / self.config.max_source_positions

    @property
    def has_timestamps(self) -> bool:
        """Whether the model says when things are said."""
        return getattr(self.loaded.module.generation_config, "no_timestamps_token_id", None) is not None

    @property
    def is_multilingual(self) -> bool:
        """Whether it takes a language and a task."""
        return bool(getattr(self.loaded.module.generation_config, "is_multilingual", True))

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: WhisperOptions = super().options(base, given)
        window = self.window / self.rate
        if merged.chunk_length_s and merged.chunk_length_s > window:
            raise InvalidInput(f"chunk_length_s is {merged.chunk_length_s} and the model's window is {window:g} s")
        known = self.loaded.module.generation_config
        if merged.return_timestamps and not self.has_timestamps:
            raise Unsupported(f"{self.loaded.name} has no timestamps (no_timestamps_token_id in its generation config)")
        if merged.return_timestamps == "word" and getattr(known, "alignment_heads", None) is None:
            raise Unsupported(
                f"{self.loaded.name} has no alignment_heads and thus no word timestamps; use return_timestamps=True"
            )
        if (merged.language or merged.task) and not self.is_multilingual:
            raise InvalidInput(f"{self.loaded.name} is English-only; leave language and task out")
        if merged.language is not None:
            self.check_language(merged.language)
        return merged

    def check_language(self, language: str) -> None:
        """Raise unless the model has a token of this language, named as transformers does: en, english or <|en|>."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        known = getattr(self.loaded.module.generation_config, "lang_to_id", None) or {}
        name = language.lower()
        if known and not {name, f"<|{name}|>", f"<|{TO_LANGUAGE_CODE.get(name)}|>"} & known.keys():
            codes = ", ".join(sorted(code.strip("<|>") for code in known))
            raise InvalidInput(f"language is {short_repr(language)}; {self.loaded.name} knows {codes}")

    def batch_key(self, options: WhisperOptions) -> Hashable:
        return tuple(getattr(options, name) for name in GENERATION_OPTIONS), super().batch_key(options)

    def preprocess(self, item: Any, options: WhisperOptions) -> PreparedItem:
        wave = self.load(item, options)
        chunk, long = options.chunk_length_s, len(wave) > self.window
        if chunk or (long and chunk is None and not options.return_timestamps):
            chunks = self._chunker.split(wave, chunk or self.window / self.rate, options.stride_length_s)
            strides = [(len(p.wave) / self.rate, p.left / self.rate, p.right / self.rate) for p in chunks]
            return PreparedItem(tuple(self._row(chunk.wave) for chunk in chunks), strides)
        if not long:
            return PreparedItem((self._row(wave),))
        if not options.return_timestamps:
            raise InvalidInput(
                f"the recording lasts {len(wave) / self.rate:.1f} s and the model's window is "
                f"{self.window / self.rate:g} s; pass return_timestamps=True, or chunk_length_s above 0"
            )
        return PreparedItem((self._row(wave, truncation=False, padding="longest"),))

    def _row(self, wave: np.ndarray, **more: Any) -> Row:
        row = self.row(wave, return_attention_mask=True, **more)
        return Row(row.inputs, int(row.inputs["input_features"].shape[-1]))

    def compute(self, batch: ModelInputs, options: WhisperOptions) -> Mapping[str, Tensor | Ragged]:
        sampled = self.generation.samples(options)
        if not sampled and options.return_timestamps != "word":
            return self._tokens(self._generate(batch, options))
        # one by one: the loop removes rows from a batch while it samples, and word timestamps are scaled by the longest
        # text of a batch
        segments: list[Any] = []
        for i, row in enumerate(batch.rows):
            one = ModelInputs({name: value[i : i + 1] for name, value in batch.inputs.items()}, (row,))
            with per_item_sampling(1, options, self.loaded.backend.device, enabled=sampled):
                segments += self._generate(one, options)
        return self._tokens(segments)

    def _generate(self, batch: ModelInputs, options: WhisperOptions) -> list[Any]:
        """The segments of each row."""
        keywords = self.keywords(options) | {"return_segments": True}
        more = {name: getattr(options, name) for name in ("language", "task")}
        keywords |= {name: value for name, value in more.items() if value is not None}
        if options.prompt is not None:
            keywords["prompt_ids"] = self._prompt_ids(options.prompt)
        if options.return_timestamps:
            keywords["return_timestamps"] = True
        if options.return_timestamps == "word":
            keywords["return_token_timestamps"] = True
        return self.loaded.backend(batch.inputs, method="generate", **keywords)["segments"]

    def _prompt_ids(self, text: str) -> Tensor:
        """The prompt's tokens; of a long one the last, half of what the decoder takes, as in OpenAI's Whisper."""
        begin, *ids = self.loaded.tokenizer.get_prompt_ids(text).tolist()
        most = self.config.max_target_positions // 2 - 2
        return torch.tensor([begin, *ids[-most:]], device=self.loaded.backend.device)

    def _tokens(self, rows: list[Any]) -> dict[str, Ragged]:
        """The tokens, their timestamps and the language of each row."""
        device, known = self.loaded.backend.device, self.loaded.module.generation_config
        columns = {"tokens": [_joined(segments, "tokens", torch.int64, device) for segments in rows]}
        if any("token_timestamps" in segment for segments in rows for segment in segments):
            columns["times"] = [_joined(segments, "token_timestamps", torch.float32, device) for segments in rows]
        languages = torch.tensor(sorted((getattr(known, "lang_to_id", None) or {}).values()), device=device)
        if len(languages):
            columns["language"] = [_language(segments, languages) for segments in rows]
        return {name: Ragged(torch.cat(parts), [len(part) for part in parts]) for name, parts in columns.items()}

    def postprocess(self, prepared: PreparedItem, results: Results, options: WhisperOptions) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        for i, result in enumerate(results):
            language = result["language"] if options.return_language else result["tokens"][:0]
            ids = np.concatenate([language, result["tokens"]])
            output: dict[str, Any] = {"tokens": torch.from_numpy(ids[None])}
            if "times" in result:
                times = np.concatenate([np.zeros(len(language), dtype=np.float32), result["times"]])
                output["token_timestamps"] = torch.from_numpy(times[None])
            if prepared.facts is not None:
                output["stride"] = prepared.facts[i]
            outputs.append(output)
        text, more = self.loaded.tokenizer._decode_asr(
            outputs,
            return_timestamps=options.return_timestamps,
            return_language=options.return_language,
            time_precision=self._second,
        )
        return {"text": text, **more}


def _joined(segments: Sequence[Mapping[str, Any]], name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [segment[name].to(device, dtype) for segment in segments]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)


def _language(segments: Sequence[Mapping[str, Any]], languages: Tensor) -> Tensor:
    """The language token of the first segment, [1], or empty."""
    if not segments:
        return languages[:0]
    result = segments[0]["result"]
    ids = result["sequences"] if isinstance(result, Mapping) else result
    return ids.flatten()[torch.isin(ids.flatten(), languages)][:1]
