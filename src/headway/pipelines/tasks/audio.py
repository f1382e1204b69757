"""Recordings: their labels. What every task over recordings shares is here too."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.audio import MAX_SECONDS, WANTED, check_seconds, is_sound, load_sound
from headway.pipelines.inputs.same_shape import ShapedTask
from headway.pipelines.task import Batch, PreparedItem, Row, TaskOptions
from headway.pipelines.tasks.classification import apply, check_function, check_top_k, labels_of, top_labels

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.task import Results

# families whose models, if they normalise by layers, are not changed by padding that is masked
MASKED = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat")
SAMPLES_A_FRAME = 320  # what a recording costs where the model does not say


@dataclass(frozen=True)
class SoundOptions(TaskOptions):
    """What every task over recordings takes: those longer than `max_seconds` are refused."""

    max_seconds: float = MAX_SECONDS

    def __post_init__(self) -> None:
        check_seconds("max_seconds", self.max_seconds)


class SoundTask(ShapedTask):
    """A task whose items are recordings. Rows of different lengths share a batch only where that changes nothing."""

    Options: ClassVar[Any] = SoundOptions
    needs: ClassVar[tuple[str, ...]] = ("feature_extractor",)
    lookahead: ClassVar[int] = 32

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.rate = int(loaded.feature_extractor.sampling_rate)
        layered = getattr(self.config, "feat_extract_norm", None) == "layer"
        self.masked = layered and getattr(self.config, "model_type", None) in MASKED

    def wanted(self) -> str:
        return WANTED

    def is_item(self, value: Any) -> bool:
        return is_sound(value)

    def batch_key(self, options: Any) -> Hashable:
        return None

    def pads(self) -> bool:
        return self.masked

    def load(self, item: Any, options: Any) -> np.ndarray:
        """[samples] at the model's rate."""
        return load_sound(item, self.rate, max_seconds=options.max_seconds)

    def row(self, wave: np.ndarray, **more: Any) -> Row:
        """What the model is given of [samples]."""
        self.check_length(wave)
        made = self.loaded.feature_extractor(wave, sampling_rate=self.rate, return_tensors="np", **more)
        takes = self.loaded.run.takes
        inputs = {name: np.asarray(value)[0] for name, value in made.items() if takes(name)}
        return Row(inputs, max(len(wave) // SAMPLES_A_FRAME, 1))

    def check_length(self, wave: np.ndarray) -> None:
        """Refuse a recording that is too short for one frame."""
        least = self.least_samples()
        if len(wave) < least:
            raise InvalidInput(
                f"the recording has {len(wave)} samples at {self.rate} a second, and the model needs at least {least} "
                f"({least / self.rate:.3f} s); pass a longer one"
            )

    def least_samples(self) -> int:
        """How many samples the model's convolutions see at once."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if not kernels or not strides:
            return 1
        seen = 1
        for kernel, stride in zip(reversed(kernels), reversed(strides)):
            seen = (seen - 1) * stride + kernel
        return seen

    def assemble(self, rows: Sequence[Row]) -> Batch:
        return self.collate(rows) if self.masked else super().assemble(rows)

    def forward(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        return self.compute(batch, options) if self.masked else super().forward(batch, options)

    def collate(self, rows: Sequence[Row]) -> Batch:
        if not self.masked:
            return super().collate(rows)
        lengths = [len(row.inputs["input_values"]) for row in rows]
        values = torch.zeros((len(rows), max(lengths)))
        mask = torch.zeros((len(rows), max(lengths)), dtype=torch.int64)
        for i, row in enumerate(rows):
            values[i, : lengths[i]] = torch.from_numpy(row.inputs["input_values"])
            mask[i, : lengths[i]] = 1
        return Batch({"input_values": values, "attention_mask": mask}, tuple(rows))

    def samples(self) -> list[Row]:
        t = np.arange(self.rate) / self.rate
        waves = [0.1 * np.sin(2 * np.pi * hertz * t) for hertz in (220.0, 1760.0)]
        return [self.row(wave.astype(np.float32)) for wave in waves]


@dataclass(frozen=True)
class AudioClassificationOptions(SoundOptions):
    """The best `top_k` labels (None: all of them). `function_to_apply` to logits: softmax, sigmoid or none."""

    top_k: int | None = 5
    function_to_apply: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k)
        check_function(self.function_to_apply)


class AudioClassification(SoundTask):
    """Labels and scores of a recording, best first."""

    Options = AudioClassificationOptions
    auto_class: ClassVar[str] = "AutoModelForAudioClassification"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)

    def preprocess(self, item: Any, options: AudioClassificationOptions) -> PreparedItem:
        return PreparedItem((self.row(self.load(item, options)),))

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: AudioClassificationOptions
    ) -> list[dict[str, Any]]:
        scores = apply(results[0]["logits"], options.function_to_apply or "softmax")
        return top_labels(scores, self._labels, options.top_k)
