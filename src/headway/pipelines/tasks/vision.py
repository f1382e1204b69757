"""Images alone: classification and feature extraction, and what every task over images shares."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel
from headway.base.text import short_repr
from headway.pipelines.backends.torch import to_device
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.image_transforms import ImagePreprocessor
from headway.pipelines.inputs.images import EXPECTED, MAX_PIXELS, is_image
from headway.pipelines.inputs.same_shape import SameShapeTask
from headway.pipelines.task import ModelInputs, PreparedItem, Row, TaskOptions, check_count
from headway.pipelines.tasks.text_classification import LabelOptions, apply, labels_of, top_labels

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

POOLS = (True, False, "cls", "mean")


@dataclass(frozen=True)
class ImageOptions(TaskOptions):
    """The options of every image task: an image of more than `max_pixels` is an error, before it is decoded."""

    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_pixels", self.max_pixels, optional=False)


class ImageTask(SameShapeTask):
    """A task whose items are images."""

    Options = ImageOptions
    needs: ClassVar[tuple[str, ...]] = ("image_processor",)
    lookahead: ClassVar[int] = 64

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.preparer = ImagePreprocessor(loaded.image_processor, _from_vision(self.config, "num_channels", 3))

    def expected_input(self) -> str:
        return EXPECTED

    def is_item(self, value: Any) -> bool:
        return is_image(value)

    def batch_key(self, options: Any) -> Hashable:
        return None

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return PreparedItem((self.image_row(item, options),))

    def image_row(self, item: Any, options: Any, **more: Any) -> Row:
        """The row of one image, with `more` inputs of the model."""
        inputs = self.preparer.prepare(item, options.max_pixels)
        takes = self.loaded.backend.takes
        kept = {name: value for name, value in inputs.items() if name == "pixel_values" or takes(name)}
        return Row(kept | more, self.cost(inputs["pixel_values"]))

    def cost(self, pixels: np.ndarray) -> int:
        """The number of patches of an image; 16×16 pixels count as one if the model has no patches."""
        patch = _from_vision(self.config, "patch_size", 16)
        patch = patch if isinstance(patch, int) and patch > 0 else 16
        return max(int(pixels.shape[-1]) * int(pixels.shape[-2]) // (patch * patch), 1)

    def sample_rows(self) -> list[Row]:
        draw = np.random.default_rng(0)
        images = [draw.integers(0, 256, (8 * n, 8 * n, 3), dtype=np.uint8) for n in (2, 5, 9)]
        return [row for one in images for row in self.preprocess(one, self.Options()).rows]


def _from_vision(config: Any, name: str, otherwise: Any) -> Any:
    """A value of the config of the model's vision part."""
    for part in (config, getattr(config, "vision_config", None), getattr(config, "encoder", None)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return otherwise


@dataclass(frozen=True)
class ImageClassificationOptions(LabelOptions, ImageOptions):
    """The options of image classification."""


class ImageClassification(ImageTask):
    """Labels and scores of an image, best first."""

    Options = ImageClassificationOptions
    auto_class: ClassVar[str] = "AutoModelForImageClassification"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: ImageClassificationOptions
    ) -> list[dict[str, Any]]:
        scores = apply(results[0]["logits"], options.function_to_apply or self._function())
        return top_labels(scores, self._labels, options.top_k)

    def _function(self) -> str:
        many = getattr(self.config, "problem_type", None) == "multi_label_classification"
        return "sigmoid" if many or self.config.num_labels == 1 else "softmax"


@dataclass(frozen=True)
class ImageFeatureOptions(ImageOptions):
    """All final states as nested lists [1, positions, width]; with `pool` one vector, [1, width].

    `pool=True` is the model's own vector (CLIP-like models: `image_embeds`), "cls" the first state, "mean" the mean.
    `normalize` scales pooled vectors to unit length; `return_tensors` returns a torch tensor.
    """

    pool: bool | str = False
    normalize: bool = False
    return_tensors: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool not in POOLS:
            raise InvalidInput(f"pool is {short_repr(self.pool)}; it must be True, False, 'cls' or 'mean'")
        if self.normalize and not self.pool:
            raise InvalidInput("normalize=True is for pooled vectors; pass pool=True, 'cls' or 'mean' too")


class ImageFeatureExtraction(ImageTask):
    """The final states of an image's patches, or one vector per image."""

    Options = ImageFeatureOptions

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._dual = hasattr(loaded.module, "get_image_features")
        self._pooler = self._dual or has_pooler(loaded)

    def batch_key(self, options: ImageFeatureOptions) -> Hashable:
        return options.pool, options.normalize

    def multi_pass_reason(self) -> str | None:
        return "images use only a part of its model" if self._dual else None

    def sample_rows(self) -> list[Row]:
        return [] if self._dual else super().sample_rows()

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: ImageFeatureOptions = super().options(base, given)
        if merged.pool is True and not self._pooler:
            raise UnsupportedModel(f"{self.loaded.name} has no trained pooler; use pool='cls' or pool='mean'")
        return merged

    def compute(self, batch: ModelInputs, options: ImageFeatureOptions) -> Mapping[str, Tensor | Ragged]:
        if not self._dual:
            return self.reduce(self.loaded.backend(batch.inputs), batch, options)
        if options.pool is True:
            output = self.loaded.backend(batch.inputs, method="get_image_features")
            return {"features": _pooled(features_of(output), options)}
        backend = self.loaded.backend
        inputs = to_device(batch.inputs, backend.device, backend.placement.dtype)
        return self.reduce(self.loaded.module.vision_model(**inputs), batch, options)

    def reduce(self, output: Any, batch: ModelInputs, options: ImageFeatureOptions) -> Mapping[str, Tensor | Ragged]:
        states = output.get("vision_model_output", output)
        if options.pool is True:
            vector = output["image_embeds"] if "image_embeds" in output else states.get("pooler_output")
            if vector is None:
                raise UnsupportedModel(f"{self.loaded.name} has no pooled output; use pool='cls' or pool='mean'")
            return {"features": _pooled(vector.flatten(1), options)}
        last = states["last_hidden_state"].float()
        if options.pool:
            return {"features": _pooled(last[:, 0] if options.pool == "cls" else last.flatten(2).mean(1), options)}
        return {"features": Ragged(last.flatten(0, 1), [last.shape[1]] * len(last))}

    def postprocess(self, prepared: PreparedItem, results: Results, options: ImageFeatureOptions) -> Any:
        features = results[0]["features"][None]
        return torch.from_numpy(features.copy()) if options.return_tensors else features.tolist()


def features_of(output: Any) -> Tensor:
    """The vectors of get_image_features or get_text_features, whose type depends on the transformers version."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _pooled(vectors: Tensor, options: ImageFeatureOptions) -> Tensor:
    vectors = vectors.float()
    return torch.nn.functional.normalize(vectors, dim=-1) if options.normalize else vectors


def has_pooler(loaded: LoadedModel) -> bool:
    """Whether the weights of the model's pooler, if any, came from its files, not from random initialization."""
    if loaded.path is None or not any("pooler" in name for name, _ in loaded.module.named_parameters()):
        return True
    from safetensors import safe_open

    for file in loaded.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if any("pooler" in key for key in opened.keys()):  # noqa: SIM118
                return True
    return False
