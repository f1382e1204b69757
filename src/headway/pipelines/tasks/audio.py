"""Audio classification, and what every task over recordings shares."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio import EXPECTED, MAX_SECONDS, check_seconds, is_audio, load_audio
from headway.pipelines.inputs.audio_chunks import check_chunking
from headway.pipelines.inputs.same_shape import SameShapeTask
from headway.pipelines.task import ModelInputs, PreparedItem, Row, TaskOptions
from headway.pipelines.tasks.text_classification import LabelOptions, apply, labels_of, top_labels

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

# families whose results masked padding does not change, if they use layer norm
MASKED = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat")
SAMPLES_PER_FRAME = 320  # for the cost of a recording, if the model does not define it


@dataclass(frozen=True)
class AudioOptions(TaskOptions):
    """The options of every audio task: recordings longer than `max_seconds` are an error."""

    max_seconds: float = MAX_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("max_seconds", self.max_seconds)


@dataclass(frozen=True)
class ChunkOptions(AudioOptions):
    """Long recordings in chunks of `chunk_length_s` seconds that share `stride_length_s` with their neighbors."""

    chunk_length_s: float | None = None
    stride_length_s: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stride_length_s", check_chunking(self.chunk_length_s, self.stride_length_s))


class AudioTask(SameShapeTask):
    """A task whose items are recordings. Different lengths share a batch only if that does not change results."""

    Options: ClassVar[Any] = AudioOptions
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor",)
    lookahead: ClassVar[int] = 32

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.rate = int(loaded.feature_extractor.sampling_rate)
        layered = getattr(self.config, "feat_extract_norm", None) == "layer"
        self.masked = layered and getattr(self.config, "model_type", None) in MASKED

    def expected_input(self) -> str:
        return EXPECTED

    def is_item(self, value: Any) -> bool:
        return is_audio(value)

    def batch_key(self, options: Any) -> Hashable:
        return None

    def pads(self) -> bool:
        return self.masked

    def load(self, item: Any, options: Any) -> np.ndarray:
        """[samples] at the model's sampling rate."""
        return load_audio(item, self.rate, max_seconds=options.max_seconds)

    def row(self, wave: np.ndarray, **more: Any) -> Row:
        """The row of a waveform [samples]."""
        self.check_length(wave)
        features = self.loaded.feature_extractor(wave, sampling_rate=self.rate, return_tensors="np", **more)
        takes = self.loaded.backend.takes
        inputs = {name: np.asarray(value)[0] for name, value in features.items() if takes(name)}
        return Row(inputs, max(len(wave) // SAMPLES_PER_FRAME, 1))

    def check_length(self, wave: np.ndarray) -> None:
        """Raise InvalidInput for a recording too short for one frame."""
        least = self.min_samples()
        if len(wave) < least:
            raise InvalidInput(
                f"the recording has {len(wave)} samples at {self.rate} a second, but the model needs at least {least} "
                f"({least / self.rate:.3f} s); pass a longer one"
            )

    def min_samples(self) -> int:
        """The receptive field of the model's convolutions, in samples."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if not kernels or not strides:
            return 1
        field = 1
        for kernel, stride in zip(reversed(kernels), reversed(strides)):
            field = (field - 1) * stride + kernel
        return field

    def assemble(self, rows: Sequence[Row]) -> ModelInputs:
        return self.collate(rows) if self.masked else super().assemble(rows)

    def forward(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        return self.compute(batch, options) if self.masked else super().forward(batch, options)

    def collate(self, rows: Sequence[Row]) -> ModelInputs:
        if not self.masked:
            return super().collate(rows)
        lengths = [len(row.inputs["input_values"]) for row in rows]
        values = torch.zeros((len(rows), max(lengths)))
        mask = torch.zeros((len(rows), max(lengths)), dtype=torch.int64)
        for i, row in enumerate(rows):
            values[i, : lengths[i]] = torch.from_numpy(row.inputs["input_values"])
            mask[i, : lengths[i]] = 1
        return ModelInputs({"input_values": values, "attention_mask": mask}, tuple(rows))

    def sample_rows(self) -> list[Row]:
        t = np.arange(self.rate) / self.rate
        waves = [0.1 * np.sin(2 * np.pi * hertz * t) for hertz in (220.0, 1760.0)]
        return [self.row(wave.astype(np.float32)) for wave in waves]


@dataclass(frozen=True)
class AudioClassificationOptions(LabelOptions, AudioOptions):
    """The options of audio classification: all labels, unless `top_k` bounds them."""

    top_k: int | None = None


class AudioClassification(AudioTask):
    """Labels and scores of a recording, best first."""

    Options = AudioClassificationOptions
    auto_class: ClassVar[str] = "AutoModelForAudioClassification"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)

    def preprocess(self, item: Any, options: AudioClassificationOptions) -> PreparedItem:
        return PreparedItem((self.row(self.load(item, options)),))

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: AudioClassificationOptions
    ) -> list[dict[str, Any]]:
        scores = apply(results[0]["logits"], options.function_to_apply or "softmax")
        return top_labels(scores, self._labels, options.top_k)
