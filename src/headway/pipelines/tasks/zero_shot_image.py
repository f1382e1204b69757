"""Zero-shot image classification: models such as CLIP score how well a text fits an image."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.inputs.arrays import Ragged, collate
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import ModelInputs, PreparedItem, Row, check_switch
from headway.pipelines.tasks.text_classification import apply
from headway.pipelines.tasks.vision import ImageOptions, ImageTask, features_of
from headway.pipelines.tasks.zero_shot import CandidateOptions

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

CACHED = 64  # sets of labels whose vectors are cached
TWO_TOWERS = (
    "clip",
    "siglip",
    "siglip2",
    "metaclip_2",
)  # images and texts interact only in the dot product of their vectors


@dataclass(frozen=True)
class ZeroShotImageOptions(CandidateOptions, ImageOptions):
    """A label that makes a text longer than the model's limit is an error unless `truncation=True`."""

    hypothesis_template: str = "This is a photo of {}."
    truncation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("truncation", self.truncation)


@dataclass(frozen=True, eq=False)
class LabelInputs:
    """Tokenized labels, the same for every image of a call."""

    inputs: Mapping[str, Tensor]
    shape: tuple[int, ...] = ()


class LruCache:
    """The most recently used values by key; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Any) -> Any:
        """The value of `key`, from `make()` if it is not cached."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > CACHED:
                self._values.popitem(last=False)
        return value


class ZeroShotImageClassification(ImageTask):
    """Candidate labels of an image, best first. The labels' vectors are computed once for all images."""

    Options = ZeroShotImageOptions
    auto_class: ClassVar[str] = "AutoModelForZeroShotImageClassification"
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")
    positional: ClassVar[tuple[str, ...]] = ("candidate_labels",)

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._family = str(getattr(self.config, "model_type", ""))
        self._texts, self._vectors = LruCache(), LruCache()

    def batch_key(self, options: ZeroShotImageOptions) -> Hashable:
        return options.candidate_labels, options.hypothesis_template, options.truncation

    def preprocess(self, item: Any, options: ZeroShotImageOptions) -> PreparedItem:
        if options.candidate_labels is None:
            raise InvalidInput("candidate_labels is missing; pass candidate_labels=[...]")
        texts = self._texts.get(self.batch_key(options), lambda: self._tokenize(options))
        return PreparedItem((self.image_row(item, options, texts=texts),))

    def _tokenize(self, options: ZeroShotImageOptions) -> LabelInputs:
        text, names = self.loaded.text, getattr(self.loaded.tokenizer, "model_input_names", ("input_ids",))
        assert text is not None
        assert options.candidate_labels is not None
        sentences = [options.hypothesis_template.format(label) for label in options.candidate_labels]
        rows = [row for some in text.rows(sentences, _text_options(options, text.limit)) for row in some]
        width = text.limit if "siglip" in self._family else None  # trained on texts padded to full length
        takes = lambda name: name in names and self.loaded.backend.takes(name)  # noqa: E731
        return LabelInputs(collate(rows, self.padding(), takes, width))

    def collate(self, rows: Sequence[Row]) -> ModelInputs:
        images = [
            Row({name: value for name, value in row.inputs.items() if name != "texts"}, row.length) for row in rows
        ]
        texts: LabelInputs = rows[0].inputs["texts"]
        return ModelInputs({**super().collate(images).inputs, **texts.inputs}, tuple(rows))

    def compute(self, batch: ModelInputs, options: ZeroShotImageOptions) -> Mapping[str, Tensor | Ragged]:
        if self._family not in TWO_TOWERS:
            return self.reduce(self.loaded.backend(batch.inputs), batch, options)
        backend, texts = self.loaded.backend, batch.rows[0].inputs["texts"].inputs
        words = self._vectors.get(self.batch_key(options), lambda: _unit(backend(texts, method="get_text_features")))
        images = {name: value for name, value in batch.inputs.items() if name not in texts}
        module: Any = backend.module
        scale = module.logit_scale.float().exp()
        logits = _unit(backend(images, method="get_image_features")) @ words.T * scale
        bias = getattr(module, "logit_bias", None)
        return {"logits": logits if bias is None else logits + bias.float()}

    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        return {"logits": output["logits_per_image"].float()}

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: ZeroShotImageOptions
    ) -> list[dict[str, Any]]:
        assert options.candidate_labels is not None
        scores = apply(results[0]["logits"], "sigmoid" if "siglip" in self._family else "softmax")
        order = np.argsort(-scores, kind="stable").tolist()
        return [{"score": float(scores[i]), "label": options.candidate_labels[i]} for i in order]

    def multi_pass_reason(self) -> str | None:
        return "images and labels use separate parts of its model"

    def sample_rows(self) -> list[Row]:
        return []


def _text_options(options: ZeroShotImageOptions, limit: int | None) -> TextOptions:
    return TextOptions(truncation=options.truncation and limit is not None)


def _unit(output: Any) -> Tensor:
    return torch.nn.functional.normalize(features_of(output).float(), dim=-1, eps=0)
