"""The pipelines' tasks as the server uses them: items are rows that are already tokenized, results are arrays.

A request's tokens must be counted before it is admitted, so its texts are tokenized first (`rows`), outside the
pipeline. Only the rows go through the batcher, together with those of other requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.dataclass import dataclass
from headway.pipelines.inputs.arrays import by_token, pooled
from headway.pipelines.inputs.text import PlainEncoding, TextOptions
from headway.pipelines.task import ModelInputs, PreparedItem, Row, Task, TaskOptions
from headway.pipelines.tasks.embedding import declared_pooling
from headway.pipelines.tasks.text_classification import apply, default_function, labels_of

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel


SLICE = 64  # texts that are encoded in one call: what it returns is freed at once


class ServedTask(Task):
    """What all tasks of the server share."""

    def rows(self, inputs: Sequence[Any], *, truncate: bool, special: bool = True) -> list[Row]:
        """The row of each text, pair of texts or list of token ids. Token ids are used as they are."""
        text = self.loaded.text
        assert text is not None
        if isinstance(inputs[0], (str, tuple)):
            cut = "only_second" if isinstance(inputs[0], tuple) else "longest_first"
            options = TextOptions(truncation=truncate)
            slices = (inputs[at : at + SLICE] for at in range(0, len(inputs), SLICE))
            encoded = (text.encode(slice, options, cut=cut, special=special) for slice in slices)
            return [text.row(one[0]) for some in encoded for one in some]
        return [text.row(PlainEncoding(list(ids), [0] * len(ids))) for ids in inputs]

    def preprocess(self, item: Row, options: Any) -> PreparedItem:
        return PreparedItem((item,))

    @property
    def limit(self) -> int | None:
        """The longest row the model takes."""
        return self.loaded.text.limit if self.loaded.text is not None else None

    @property
    def vocab(self) -> int:
        return self.config.vocab_size


@dataclass(frozen=True)
class ServedEmbeddingOptions(TaskOptions):
    """`level` is "text" (one vector, its first `dimensions`) or "token" (the hidden states of all tokens)."""

    level: str = "text"
    dimensions: int | None = None


class ServedEmbedding(ServedTask):
    """Embeddings of rows, pooled and normalized as the model's files say."""

    Options = ServedEmbeddingOptions
    reads: ClassVar[str | None] = "all"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._pooling, self._normalize = declared_pooling(loaded)

    def batch_key(self, options: ServedEmbeddingOptions) -> Hashable:
        return options.level

    def reduce(self, output: Any, batch: ModelInputs, options: ServedEmbeddingOptions) -> Mapping[str, Any]:
        if options.level == "token":
            return {"states": by_token(output.last_hidden_state, batch)}
        return {"vector": pooled(output.last_hidden_state, batch, self._pooling)}

    def postprocess(self, prepared: PreparedItem, results: Any, options: ServedEmbeddingOptions) -> np.ndarray:
        if options.level == "token":
            return results[0]["states"]
        vector = results[0]["vector"][: options.dimensions]
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if self._normalize else vector

    @property
    def width(self) -> int:
        """The length of the vectors."""
        return getattr(self.config, "hidden_size", None) or self.config.dim

    def shortens(self, dimensions: int) -> bool:
        """Whether the model was trained (Matryoshka) so that vectors can be cut to their first `dimensions`."""
        if dimensions == self.width:
            return True
        known = getattr(self.config, "matryoshka_dimensions", None)
        if known:
            return dimensions in known
        return bool(getattr(self.config, "is_matryoshka", False)) and dimensions < self.width


class ServedClassifier(ServedTask):
    """Scores of rows, one for each label."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[str | None] = "first"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.labels = labels_of(self.config)

    def postprocess(self, prepared: PreparedItem, results: Any, options: Any) -> np.ndarray:
        return apply(results[0]["logits"], default_function(self.config))
