"""Labels for pictures without training: models such as CLIP say how well a text fits a picture."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput
from headway.pipelines.inputs.arrays import Ragged, collate
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import Batch, PreparedItem, Row
from headway.pipelines.tasks.classification import apply
from headway.pipelines.tasks.vision import ImageOptions, ImageTask, features_of
from headway.pipelines.tasks.zero_shot import check_template, checked_labels

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.task import Results

KEPT = 64  # sets of labels whose vectors are remembered
TWO_TOWERS = ("clip", "siglip", "siglip2", "metaclip_2")  # pictures and texts meet only in a product of their vectors


@dataclass(frozen=True)
class ZeroShotImageOptions(ImageOptions):
    """`candidate_labels` as a list or one text with commas; `hypothesis_template` has {} where a label goes.

    A label that makes a text longer than the model's limit is an error unless `truncation=True`.
    """

    candidate_labels: str | Sequence[str] | None = None
    hypothesis_template: str = "This is a photo of {}."
    truncation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidate_labels", checked_labels(self.candidate_labels))
        check_template(self.hypothesis_template)


@dataclass(frozen=True, eq=False)
class Texts:
    """Labels as the model reads them, the same for every picture of a call."""

    inputs: Mapping[str, Tensor]
    shape: tuple[int, ...] = ()


class Remembered:
    """The last few values that were made, by key; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Any) -> Any:
        """The value of `key`, made now if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > KEPT:
                self._values.popitem(last=False)
        return value


class ZeroShotImageClassification(ImageTask):
    """Any labels for a picture, best first. The labels' vectors are computed once for all pictures."""

    Options = ZeroShotImageOptions
    auto_class: ClassVar[str] = "AutoModelForZeroShotImageClassification"
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._family = str(getattr(self.config, "model_type", ""))
        self._texts, self._vectors = Remembered(), Remembered()

    def batch_key(self, options: ZeroShotImageOptions) -> Hashable:
        return options.candidate_labels, options.hypothesis_template, options.truncation

    def preprocess(self, item: Any, options: ZeroShotImageOptions) -> PreparedItem:
        if options.candidate_labels is None:
            raise InvalidInput("no candidate_labels were given; pass candidate_labels=[...]")
        texts = self._texts.get(self.batch_key(options), lambda: self._read(options))
        return PreparedItem((self.image_row(item, options, texts=texts),))

    def _read(self, options: ZeroShotImageOptions) -> Texts:
        text, names = self.loaded.text, getattr(self.loaded.tokenizer, "model_input_names", ("input_ids",))
        assert text is not None
        assert options.candidate_labels is not None
        sentences = [options.hypothesis_template.format(label) for label in options.candidate_labels]
        rows = [row for some in text.rows(sentences, _reading(options, text.limit)) for row in some]
        width = text.limit if "siglip" in self._family else None  # trained on texts of full length
        takes = lambda name: name in names and self.loaded.run.takes(name)  # noqa: E731
        return Texts(collate(rows, self.padding(), takes, width))

    def collate(self, rows: Sequence[Row]) -> Batch:
        pictures = [
            Row({name: value for name, value in row.inputs.items() if name != "texts"}, row.length) for row in rows
        ]
        texts: Texts = rows[0].inputs["texts"]
        return Batch({**super().collate(pictures).inputs, **texts.inputs}, tuple(rows))

    def compute(self, batch: Batch, options: ZeroShotImageOptions) -> Mapping[str, Tensor | Ragged]:
        if self._family not in TWO_TOWERS:
            return self.reduce(self.loaded.run(batch.inputs), batch, options)
        run, texts = self.loaded.run, batch.rows[0].inputs["texts"].inputs
        words = self._vectors.get(self.batch_key(options), lambda: _unit(run(texts, method="get_text_features")))
        pictures = {name: value for name, value in batch.inputs.items() if name not in texts}
        module: Any = run.module
        scale = module.logit_scale.float().exp()
        logits = _unit(run(pictures, method="get_image_features")) @ words.T * scale
        bias = getattr(module, "logit_bias", None)
        return {"logits": logits if bias is None else logits + bias.float()}

    def reduce(self, output: Any, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        return {"logits": output["logits_per_image"].float()}

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: ZeroShotImageOptions
    ) -> list[dict[str, Any]]:
        assert options.candidate_labels is not None
        scores = apply(results[0]["logits"], "sigmoid" if "siglip" in self._family else "softmax")
        order = np.argsort(-scores, kind="stable").tolist()
        return [{"score": float(scores[i]), "label": options.candidate_labels[i]} for i in order]

    def several(self) -> str | None:
        return "pictures and labels go through parts of its model by themselves"

    def samples(self) -> list[Row]:
        return []


def _reading(options: ZeroShotImageOptions, limit: int | None) -> TextOptions:
    return TextOptions(truncation=options.truncation and limit is not None)


def _unit(found: Any) -> Tensor:
    return torch.nn.functional.normalize(features_of(found).float(), dim=-1, eps=0)
