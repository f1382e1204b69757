"""Speech recognition: CTC models, speech encoder-decoders, and the choice between them and Whisper."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, UnsupportedModel
from headway.base.text import short_repr
from headway.pipelines.backends.loading import config_of
from headway.pipelines.generation.generate import cut_at_eos, generate, merge_generate_kwargs
from headway.pipelines.generation.options import NAMES, GenerationOptions, GenerationSettings, resolve_lengths
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio_chunks import AudioChunk, AudioChunker
from headway.pipelines.task import GENERATES, ModelInputs, PreparedItem, Row
from headway.pipelines.tasks.audio import AudioOptions, AudioTask, ChunkOptions

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.factory import PipelineSpec
    from headway.pipelines.task import Results

BEAMS = 5  # if neither the call nor the model's files set it; the default of Hugging Face's pipeline


class SpeechRecognition(AudioTask):
    """The text of a recording; the model decides which class computes it."""

    @classmethod
    def open(cls, spec: PipelineSpec) -> Any:
        kind = class_for(config_of(spec.model))
        return kind.open(replace(spec, kind=kind))


def class_for(config: Mapping[str, Any]) -> type[AudioTask]:
    """The task class for a model with this config."""
    from headway.pipelines.tasks.whisper import WhisperRecognition

    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("model_type") == "whisper":
        return WhisperRecognition
    if any(name.endswith("ForCTC") for name in names):
        return CtcRecognition
    if any(name.endswith(("ForConditionalGeneration", "ForSpeechToText", "EncoderDecoderModel")) for name in names):
        return SpeechSeq2Seq
    raise UnsupportedModel(
        f"a {config.get('model_type')} model ({', '.join(names) or 'unknown architecture'}) does not recognize speech; "
        "use Whisper, a CTC model such as wav2vec2, or a speech encoder-decoder"
    )


# -- CTC ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CtcOptions(ChunkOptions):
    """`chunk_length_s=None` computes a recording at once. `return_timestamps="char"` or "word" adds `chunks`."""

    return_timestamps: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.return_timestamps not in (None, False, "char", "word"):
            raise InvalidInput(
                f"return_timestamps is {short_repr(self.return_timestamps)}; CTC models take 'char', 'word' or None"
            )


class CtcRecognition(AudioTask):
    """`{"text": ...}`: wav2vec2, HuBERT, WavLM and their kin."""

    Options = CtcOptions
    speech: ClassVar[str] = "ctc"
    auto_class: ClassVar[str] = "AutoModelForCTC"
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor", "tokenizer")

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._align = int(getattr(self.config, "inputs_to_logits_ratio", 1))
        self._chunker = AudioChunker(self.rate, self._align)

    def preprocess(self, item: Any, options: CtcOptions) -> PreparedItem:
        wave = self.load(item, options)
        if not options.chunk_length_s:
            return PreparedItem((self.row(wave),))
        chunks = self._chunker.split(wave, options.chunk_length_s, options.stride_length_s)
        # drop a last chunk that is shorter than a frame
        chunks = chunks[:1] + [chunk for chunk in chunks[1:] if len(chunk.wave) >= self.min_samples()]
        strides = [self._frames(chunk) for chunk in chunks]
        return PreparedItem(tuple(self.row(chunk.wave) for chunk in chunks), strides)

    def _frames(self, chunk: AudioChunk) -> tuple[int, int]:
        """The range of frames of a chunk that no neighbor covers."""
        samples = len(chunk.wave)
        frames = round(samples / self._align)
        return round(chunk.left / samples * frames), frames - round(chunk.right / samples * frames)

    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        ids = output.logits.argmax(-1)  # [R, frames]
        if not self.masked:
            return {"tokens": Ragged(ids.flatten(), [ids.shape[1]] * len(ids))}
        lengths = torch.tensor([len(row.inputs["input_values"]) for row in batch.rows])
        counts: list[int] = self.loaded.module._get_feat_extract_output_lengths(lengths).tolist()
        return {"tokens": Ragged(torch.cat([ids[i, :n] for i, n in enumerate(counts)]), counts)}

    def postprocess(self, prepared: PreparedItem, results: Results, options: CtcOptions) -> dict[str, Any]:
        strides = prepared.facts or [(0, None)]
        ids = np.concatenate([result["tokens"][start:end] for result, (start, end) in zip(results, strides)])
        output: dict[str, Any] = {"text": self.loaded.tokenizer.decode(ids, skip_special_tokens=False)}
        if options.return_timestamps:
            output["chunks"] = self._times(ids, options.return_timestamps)
        return output

    def _times(self, ids: np.ndarray, unit: str) -> list[dict[str, Any]]:
        tokenizer = self.loaded.tokenizer
        try:
            offsets = tokenizer.decode(ids, skip_special_tokens=False, output_char_offsets=True)["char_offsets"]
            if unit == "word":
                offsets = tokenizer._get_word_offsets(offsets, tokenizer.replace_word_delimiter_char)
        except (TypeError, AttributeError) as error:
            raise Unsupported(
                f"{type(tokenizer).__name__} has no character offsets; leave return_timestamps out"
            ) from error
        return [
            {"text": offset[unit], "timestamp": (self._time(offset["start_offset"]), self._time(offset["end_offset"]))}
            for offset in offsets
        ]

    def _time(self, frame: Any) -> float:
        return int(frame) * self._align / self.rate


# -- encoder-decoders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeechOptions(GenerationOptions, AudioOptions):
    """Generation parameters of the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_return_sequences not in (None, 1):
            raise InvalidInput(f"num_return_sequences is {self.num_return_sequences}; a recording has one text")


class SpeechSeq2Seq(AudioTask):
    """`{"text": ...}`: speech encoder-decoders."""

    Options: ClassVar[Any] = SpeechOptions
    speech: ClassVar[str] = "seq2seq"
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor", "tokenizer")

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        own = dict(loaded.module.generation_config.to_diff_dict())
        extra: dict[str, Any] = {} if "num_beams" in own else {"num_beams": BEAMS}
        if own.get("pad_token_id") is None and loaded.tokenizer.pad_token_id is not None:
            extra["pad_token_id"] = loaded.tokenizer.pad_token_id
        positions = getattr(self.config, "max_target_positions", None)
        vocab = getattr(self.config, "vocab_size", None) or len(loaded.tokenizer)
        self.generation = GenerationSettings(own, extra, positions, vocab)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged = super().options(base, resolve_lengths(base, merge_generate_kwargs(given)))
        self.keywords(merged)  # raises for meaningless combinations
        return merged

    def keywords(self, options: Any) -> dict[str, Any]:
        """The keywords of `model.generate` that differ from the model's own settings."""
        keywords, own = self.generation.keywords(options), self.generation.own
        return {name: value for name, value in keywords.items() if value is not None and own.get(name) != value}

    def batch_key(self, options: Any) -> Hashable:
        return tuple(getattr(options, name) for name in sorted(NAMES))

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return PreparedItem((self.row(self.load(item, options), return_attention_mask=True),))

    def compute(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        keywords = {name: value for name, value in self.generation.keywords(options).items() if value is not None}
        sampled = self.generation.samples(options)
        sequences = generate(self.loaded.backend, batch, keywords, options, sampled=sampled)
        return {"tokens": Ragged(sequences.flatten(), [sequences.shape[-1]] * len(sequences))}

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> dict[str, Any]:
        ids = cut_at_eos(results[0]["tokens"], self.generation.eos_ids(options), 1)
        return {"text": self.loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=True)}

    def multi_pass_reason(self) -> str | None:
        return GENERATES

    def sample_rows(self) -> list[Row]:
        return []
