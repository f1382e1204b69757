"""Speech to text: models that name a letter for every frame (CTC), Whisper, and others that read, then write."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, Unsupported, UnsupportedModel
from headway.pipelines.backends.peek import config_of
from headway.pipelines.generation.sampling import NAMES, GenerationOptions, Writer, without_rivals
from headway.pipelines.generation.writing import cut, flattened, written
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio import MAX_SECONDS, check_seconds
from headway.pipelines.inputs.audio_pieces import Piece, Pieces, check_pieces
from headway.pipelines.task import WRITES, Batch, PreparedItem, Row
from headway.pipelines.tasks.audio import SoundOptions, SoundTask

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.opening import Request
    from headway.pipelines.task import Results

BEAMS = 5  # where neither the call nor the model's files say; what Hugging Face takes


class SpeechRecognition(SoundTask):
    """The text of a recording; how depends on the model."""

    @classmethod
    def open(cls, request: Request) -> Any:
        way = way_of(config_of(request.model))
        return way.open(replace(request, kind=way))


def way_of(config: Mapping[str, Any]) -> type[SoundTask]:
    """The class that computes with a model of this config."""
    from headway.pipelines.tasks.whisper import WhisperRecognition

    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("model_type") == "whisper":
        return WhisperRecognition
    if any(name.endswith("ForCTC") for name in names):
        return CtcRecognition
    if any(name.endswith(("ForConditionalGeneration", "ForSpeechToText", "EncoderDecoderModel")) for name in names):
        return WrittenSpeech
    raise UnsupportedModel(
        f"a {config.get('model_type')} model ({', '.join(names) or 'of no known class'}) does not recognise speech; "
        "Whisper, models for CTC such as wav2vec2 and speech encoder-decoders do"
    )


# -- a letter for every frame ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CtcOptions(SoundOptions):
    """Pieces of `chunk_length_s` seconds (None: all at once) that share `stride_length_s` with their neighbours.

    `return_timestamps="char"` or "word" adds `chunks` with the time of each.
    """

    chunk_length_s: float | None = None
    stride_length_s: float | Sequence[float] | None = None
    return_timestamps: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stride_length_s", check_pieces(self.chunk_length_s, self.stride_length_s))
        if self.return_timestamps not in (None, False, "char", "word"):
            raise InvalidInput(
                f"return_timestamps is {self.return_timestamps!r}; models for CTC take 'char', 'word' or None"
            )


class CtcRecognition(SoundTask):
    """`{"text": ...}`: wav2vec2, HuBERT, WavLM and their kin."""

    Options = CtcOptions
    auto_class: ClassVar[str] = "AutoModelForCTC"
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor", "tokenizer")

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._align = int(getattr(self.config, "inputs_to_logits_ratio", 1))
        self._pieces = Pieces(self.rate, self._align)

    def preprocess(self, item: Any, options: CtcOptions) -> PreparedItem:
        wave = self.load(item, options)
        if not options.chunk_length_s:
            return PreparedItem((self.row(wave),))
        found = self._pieces.divide(wave, options.chunk_length_s, options.stride_length_s)
        # a last piece that is shorter than a frame says nothing
        found = found[:1] + [piece for piece in found[1:] if len(piece.wave) >= self.least_samples()]
        strides = [self._frames(piece) for piece in found]
        return PreparedItem(tuple(self.row(piece.wave) for piece in found), strides)

    def _frames(self, piece: Piece) -> tuple[int, int]:
        """Which frames of a piece are its own: from, to."""
        samples = len(piece.wave)
        frames = round(samples / self._align)
        return round(piece.left / samples * frames), frames - round(piece.right / samples * frames)

    def reduce(self, output: Any, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        ids = output.logits.argmax(-1)  # [R, frames]
        if not self.masked:
            return {"tokens": Ragged(ids.flatten(), [ids.shape[1]] * len(ids))}
        lengths = torch.tensor([len(row.inputs["input_values"]) for row in batch.rows])
        counts: list[int] = self.loaded.module._get_feat_extract_output_lengths(lengths).tolist()
        return {"tokens": Ragged(torch.cat([ids[i, :n] for i, n in enumerate(counts)]), counts)}

    def postprocess(self, prepared: PreparedItem, results: Results, options: CtcOptions) -> dict[str, Any]:
        strides = prepared.facts or [(0, None)]
        ids = np.concatenate([result["tokens"][start:end] for result, (start, end) in zip(results, strides)])
        found: dict[str, Any] = {"text": self.loaded.tokenizer.decode(ids, skip_special_tokens=False)}
        if options.return_timestamps:
            found["chunks"] = self._times(ids, options.return_timestamps)
        return found

    def _times(self, ids: np.ndarray, unit: str) -> list[dict[str, Any]]:
        words = self.loaded.tokenizer
        try:
            places = words.decode(ids, skip_special_tokens=False, output_char_offsets=True)["char_offsets"]
            if unit == "word":
                places = words._get_word_offsets(places, words.replace_word_delimiter_char)
        except (TypeError, AttributeError) as error:
            raise Unsupported(f"{type(words).__name__} does not say where letters lie; leave timestamps out") from error
        return [
            {"text": place[unit], "timestamp": (self._time(place["start_offset"]), self._time(place["end_offset"]))}
            for place in places
        ]

    def _time(self, frame: Any) -> float:
        return int(frame) * self._align / self.rate


# -- models that write -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeechOptions(GenerationOptions):
    """How the text is generated."""

    max_seconds: float = MAX_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("max_seconds", self.max_seconds)
        if self.num_return_sequences not in (None, 1):
            raise InvalidInput(f"num_return_sequences is {self.num_return_sequences}; a recording has one text")


class WrittenSpeech(SoundTask):
    """`{"text": ...}`: speech encoder-decoders."""

    Options: ClassVar[Any] = SpeechOptions
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor", "tokenizer")

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        own = dict(loaded.module.generation_config.to_diff_dict())
        extra: dict[str, Any] = {} if "num_beams" in own else {"num_beams": BEAMS}
        if own.get("pad_token_id") is None and loaded.tokenizer.pad_token_id is not None:
            extra["pad_token_id"] = loaded.tokenizer.pad_token_id
        positions = getattr(self.config, "max_target_positions", None)
        vocab = getattr(self.config, "vocab_size", None) or len(loaded.tokenizer)
        self.writer = Writer(own, extra, positions, vocab)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        found = super().options(base, without_rivals(base, flattened(given)))
        self.settings(found)  # refuses what cannot be, before anything is read
        return found

    def settings(self, options: Any) -> dict[str, Any]:
        """The keywords of `model.generate`, those left out that the model's own settings have."""
        found, own = self.writer.settings(options), self.writer.own
        return {name: value for name, value in found.items() if value is not None and own.get(name) != value}

    def batch_key(self, options: Any) -> Hashable:
        return tuple(getattr(options, name) for name in sorted(NAMES))

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return PreparedItem((self.row(self.load(item, options), return_attention_mask=True),))

    def compute(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        sequences = written(self.loaded.run, self.writer, batch, options)
        return {"tokens": Ragged(sequences.flatten(), [sequences.shape[-1]] * len(sequences))}

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> dict[str, Any]:
        ids = cut(results[0]["tokens"], self.writer.ends(options), 1)
        return {"text": self.loaded.tokenizer.decode(ids, skip_special_tokens=True)}

    def several(self) -> str | None:
        return WRITES

    def samples(self) -> list[Row]:
        return []
