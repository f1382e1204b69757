"""Speech to text with Whisper: windows, pieces of long recordings, times and languages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput, Unsupported
from headway.pipelines.generation.sampling import Draws
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio_pieces import Pieces, check_pieces
from headway.pipelines.task import Batch, PreparedItem, Row
from headway.pipelines.tasks.speech import SpeechOptions, WrittenSpeech

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.task import Results

READ = ("language", "task", "return_timestamps")  # options that the model's loop looks at


@dataclass(frozen=True)
class WhisperOptions(SpeechOptions):
    """A recording longer than the model's window is computed in pieces of `chunk_length_s` seconds (None: the window).

    Pieces share `stride_length_s` (None: a sixth) with their neighbours and are computed together. With
    `return_timestamps=True` and no `chunk_length_s` the model walks through it by itself, one window after the other.
    `return_timestamps` True or "word" adds `chunks`; `language` and `task` (transcribe, translate) go to the model.
    """

    chunk_length_s: float | None = None
    stride_length_s: float | Sequence[float] | None = None
    return_timestamps: bool | str | None = None
    return_language: bool = False
    language: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stride_length_s", check_pieces(self.chunk_length_s, self.stride_length_s))
        if self.return_timestamps not in (None, True, False, "word"):
            raise InvalidInput(f"return_timestamps is {self.return_timestamps!r}; Whisper takes True, False or 'word'")
        if self.task not in (None, "transcribe", "translate"):
            raise InvalidInput(f"task is {self.task!r}; it takes 'transcribe' or 'translate'")
        if self.return_language not in (True, False):
            raise InvalidInput(f"return_language is {self.return_language!r}; it takes True or False")


class WhisperRecognition(WrittenSpeech):
    """`{"text": ...}`, with `chunks` of text and time where they are asked for."""

    Options = WhisperOptions

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._window = int(loaded.feature_extractor.n_samples)
        self._pieces = Pieces(self.rate, 1)
        self._second = loaded.feature_extractor.chunk_length / self.config.max_source_positions

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        found: WhisperOptions = super().options(base, given)
        window = self._window / self.rate
        if found.chunk_length_s and found.chunk_length_s > window:
            raise InvalidInput(f"chunk_length_s is {found.chunk_length_s} and the model's window is {window:g} s")
        known = self.loaded.module.generation_config
        if found.return_timestamps and getattr(known, "no_timestamps_token_id", None) is None:
            raise Unsupported(f"{self.loaded.name} has no timestamps (no_timestamps_token_id in its generation config)")
        if found.return_timestamps == "word" and getattr(known, "alignment_heads", None) is None:
            raise Unsupported(f"{self.loaded.name} has no alignment_heads, so no times of words; take True")
        if (found.language or found.task) and not getattr(known, "is_multilingual", True):
            raise InvalidInput(f"{self.loaded.name} knows English only; leave language and task out")
        return found

    def batch_key(self, options: WhisperOptions) -> Hashable:
        return tuple(getattr(options, name) for name in READ), super().batch_key(options)

    def preprocess(self, item: Any, options: WhisperOptions) -> PreparedItem:
        wave = self.load(item, options)
        chunk, long = options.chunk_length_s, len(wave) > self._window
        if chunk or (long and chunk is None and not options.return_timestamps):
            found = self._pieces.divide(wave, chunk or self._window / self.rate, options.stride_length_s)
            strides = [(len(p.wave) / self.rate, p.left / self.rate, p.right / self.rate) for p in found]
            return PreparedItem(tuple(self._row(piece.wave) for piece in found), strides)
        if not long:
            return PreparedItem((self._row(wave),))
        if not options.return_timestamps:
            raise InvalidInput(
                f"the recording lasts {len(wave) / self.rate:.1f} s and the model's window is "
                f"{self._window / self.rate:g} s; pass return_timestamps=True, or chunk_length_s above 0"
            )
        return PreparedItem((self._row(wave, truncation=False, padding="longest"),))

    def _row(self, wave: np.ndarray, **more: Any) -> Row:
        row = self.row(wave, return_attention_mask=True, **more)
        return Row(row.inputs, int(row.inputs["input_features"].shape[-1]))

    def compute(self, batch: Batch, options: WhisperOptions) -> Mapping[str, Tensor | Ragged]:
        draws = self.writer.draws(options)
        if not draws and options.return_timestamps != "word":
            return self._heard(self._generated(batch, options))
        # one by one: the loop takes rows out of a batch while they draw, and times of words are scaled by the tokens of
        # the longest text in it
        found: list[Any] = []
        for i, row in enumerate(batch.rows):
            one = Batch({name: value[i : i + 1] for name, value in batch.inputs.items()}, (row,))
            with Draws(1, options.seed, self.loaded.run.device) if draws else nullcontext():
                found += self._generated(one, options)
        return self._heard(found)

    def _generated(self, batch: Batch, options: WhisperOptions) -> list[Any]:
        """The segments of each row."""
        settings = self.settings(options) | {"return_segments": True}
        more = {name: getattr(options, name) for name in ("language", "task")}
        settings |= {name: value for name, value in more.items() if value is not None}
        if options.return_timestamps:
            settings["return_timestamps"] = True
        if options.return_timestamps == "word":
            settings["return_token_timestamps"] = True
        return self.loaded.run(batch.inputs, method="generate", **settings)["segments"]

    def _heard(self, rows: list[Any]) -> dict[str, Ragged]:
        """Tokens, their times and the language of each row."""
        device, known = self.loaded.run.device, self.loaded.module.generation_config
        found = {"tokens": [_joined(segments, "tokens", torch.int64, device) for segments in rows]}
        if any("token_timestamps" in segment for segments in rows for segment in segments):
            found["times"] = [_joined(segments, "token_timestamps", torch.float32, device) for segments in rows]
        languages = torch.tensor(sorted((getattr(known, "lang_to_id", None) or {}).values()), device=device)
        if len(languages):
            found["language"] = [_language(segments, languages) for segments in rows]
        return {name: Ragged(torch.cat(parts), [len(part) for part in parts]) for name, parts in found.items()}

    def postprocess(self, prepared: PreparedItem, results: Results, options: WhisperOptions) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        for i, result in enumerate(results):
            spoken = result["language"] if options.return_language else result["tokens"][:0]
            ids = np.concatenate([spoken, result["tokens"]])
            output: dict[str, Any] = {"tokens": torch.from_numpy(ids[None])}
            if "times" in result:
                times = np.concatenate([np.zeros(len(spoken), dtype=np.float32), result["times"]])
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
    """The token of the language that the first segment was read in, [1], or nothing."""
    if not segments:
        return languages[:0]
    result = segments[0]["result"]
    ids = result["sequences"] if isinstance(result, Mapping) else result
    found = ids.flatten()[torch.isin(ids.flatten(), languages)]
    return found[:1]
