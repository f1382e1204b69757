"""The pipelines' tasks as a server uses them: items are rows that were tokenized already, results are arrays.

A request's tokens must be counted before it is let in, so its texts are tokenized first (`rows`), outside the pipeline;
what goes through the batcher, together with everybody else's, are the rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headway.pipelines.arrays import by_token
from headway.pipelines.task import Batch, PreparedItem, Row, Task
from headway.pipelines.tasks.classification import TextClassification, apply, default_function
from headway.pipelines.tasks.embedding import EmbeddingOptions, SentenceEmbedding
from headway.pipelines.text import Plain, TextOptions


@dataclass(frozen=True)
class ServedOptions(EmbeddingOptions):
    """`level` is text (one vector) or token (the states of all tokens)."""

    level: str = "text"


class Served(Task):
    """What the tasks of a server have in common."""

    def rows(self, inputs: Sequence[Any], *, truncate: bool, special: bool = True) -> list[Row]:
        """The row of each text, pair of texts or list of token ids. Ids stand as they are."""
        text = self.loaded.text
        assert text is not None
        if isinstance(inputs[0], (str, tuple)):
            cut = "only_second" if isinstance(inputs[0], tuple) else "longest_first"
            options = TextOptions(truncation=truncate)
            return [text.row(one[0]) for one in text.encode(inputs, options, cut=cut, special=special)]
        return [text.row(Plain(list(ids), [0] * len(ids))) for ids in inputs]

    @property
    def limit(self) -> int | None:
        """The longest row the model takes."""
        return self.loaded.text.limit if self.loaded.text is not None else None

    @property
    def vocab(self) -> int:
        return self.config.vocab_size


class ServedEmbedding(Served, SentenceEmbedding):
    """Vectors of rows."""

    Options = ServedOptions

    def batch_key(self, options: ServedOptions) -> Hashable:  # type: ignore[override]
        return options.level, self.pooling(options)

    def preprocess_many(self, items: Sequence[Row], options: Any) -> list[PreparedItem]:
        return [PreparedItem((row,)) for row in items]

    def reduce(self, output: Any, batch: Batch, options: ServedOptions) -> Mapping[str, Any]:  # type: ignore[override]
        if options.level == "token":
            return {"states": by_token(output.last_hidden_state, batch)}
        return super().reduce(output, batch, options)

    def postprocess(self, prepared: PreparedItem, results: Any, options: ServedOptions) -> np.ndarray:  # type: ignore[override]
        if options.level == "token":
            return results[0]["states"]
        return super().postprocess(prepared, results, options)

    @property
    def width(self) -> int:
        """How long vectors are."""
        return getattr(self.config, "hidden_size", None) or self.config.dim

    def shortens(self, dimensions: int) -> bool:
        """Whether the model was trained so that the first `dimensions` of a vector are a vector."""
        if dimensions == self.width:
            return True
        known = getattr(self.config, "matryoshka_dimensions", None)
        if known:
            return dimensions in known
        return bool(getattr(self.config, "is_matryoshka", False)) and dimensions < self.width


class ServedClassifier(Served, TextClassification):
    """Scores of rows: one for each label."""

    reads: ClassVar[str | None] = "first"

    def preprocess_many(self, items: Sequence[Row], options: Any) -> list[PreparedItem]:
        return [PreparedItem((row,)) for row in items]

    def postprocess(self, prepared: PreparedItem, results: Any, options: Any) -> np.ndarray:
        return apply(results[0]["logits"], default_function(self.config))

    @property
    def labels(self) -> list[str]:
        return self._labels
