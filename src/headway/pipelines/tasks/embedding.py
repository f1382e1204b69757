"""Text vectors: the states of all tokens, sentence embeddings, similarities and reranking."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, UnsupportedModel, WrongType
from headway.base.files import read_json
from headway.base.text import short_repr
from headway.pipelines.inputs.arrays import by_token, pooled
from headway.pipelines.inputs.text import TextOptions, TextTask
from headway.pipelines.task import (
    MISSING,
    ModelInputs,
    PreparedItem,
    Row,
    Task,
    capturable,
    check_count,
    check_text,
    wrong_type,
)
from headway.pipelines.tasks.text_classification import apply, check_function

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

POOLING = ("auto", "mean", "cls", "last", "max")
POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class FeatureOptions(TextOptions):
    """Nested lists [1, tokens, width], or a torch tensor with `return_tensors=True`."""

    return_tensors: bool = False


class FeatureExtraction(TextTask):
    """The final states of all tokens of a text."""

    Options = FeatureOptions
    reads: ClassVar[str | None] = "all"

    def batch_key(self, options: FeatureOptions) -> Hashable:
        return None

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Any]:
        return {"states": by_token(output.last_hidden_state, batch)}

    def postprocess(self, prepared: PreparedItem, results: Results, options: FeatureOptions) -> Any:
        states = np.concatenate([result["states"] for result in results])[None]
        return torch.from_numpy(states.copy()) if options.return_tensors else states.tolist()


@dataclass(frozen=True)
class EmbeddingOptions(TextOptions):
    """`pooling` is auto (the model's own, else mean), mean, cls, last or max.

    `normalize` scales to unit length (None: the model's own, else True); `dimensions` keeps only the first ones.
    """

    pooling: str = "auto"
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in POOLING:
            raise InvalidInput(f"pooling is {short_repr(self.pooling)}; it must be one of {', '.join(POOLING)}")
        if self.normalize not in (None, True, False):
            raise InvalidInput(f"normalize is {short_repr(self.normalize)}; it must be True, False or None")
        check_count("dimensions", self.dimensions)


class SentenceEmbedding(TextTask):
    """One float32 vector per text. The chunks of a text split by `stride` are weighted by length."""

    Options = EmbeddingOptions
    reads: ClassVar[str | None] = "all"
    default_model: ClassVar[str | None] = "minilm"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._pooling, self._normalize = declared_pooling(loaded)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: EmbeddingOptions = super().options(base, given)
        width = getattr(self.config, "hidden_size", getattr(self.config, "dim", None))
        if merged.dimensions is not None and width is not None and merged.dimensions > width:
            raise InvalidInput(f"dimensions is {merged.dimensions} and the model's vectors have {width}")
        return merged

    def batch_key(self, options: EmbeddingOptions) -> Hashable:
        whole = options.stride is None
        return self.pooling(options), whole, whole and self._normal(options), whole and options.dimensions

    def pooling(self, options: EmbeddingOptions) -> str:
        return self._pooling if options.pooling == "auto" else options.pooling

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: EmbeddingOptions) -> Mapping[str, Any]:
        vectors = pooled(output.last_hidden_state, batch, self.pooling(options))
        return {"vector": self._cut(vectors, options) if options.stride is None else vectors}

    def _cut(self, vectors: Tensor, options: EmbeddingOptions) -> Tensor:
        """Vectors [R, H] cut to `dimensions` and normalized as the options say."""
        vectors = vectors[:, : options.dimensions]
        return F.normalize(vectors, dim=-1) if self._normal(options) else vectors

    def _normal(self, options: EmbeddingOptions) -> bool:
        return self._normalize if options.normalize is None else options.normalize

    def postprocess(self, prepared: PreparedItem, results: Results, options: EmbeddingOptions) -> Any:
        return self.combine([result["vector"] for result in results], prepared.rows, options)

    def combine(self, vectors: Sequence[np.ndarray], rows: Sequence[Row], options: EmbeddingOptions) -> np.ndarray:
        """The vector of one text from those of its chunks."""
        if options.stride is None:
            return vectors[0].copy()  # not a view, which would keep the whole batch alive
        mean = np.average(np.stack(vectors), axis=0, weights=[row.length for row in rows]).astype(np.float32)
        return self._cut(torch.from_numpy(mean)[None], options)[0].numpy()


def declared_pooling(loaded: LoadedModel) -> tuple[str, bool]:
    """Pooling and normalization of a sentence-transformers folder; ("mean", True) for other models."""
    modules = read_json(loaded.path / "modules.json", kind=list) if loaded.path is not None else []
    if not modules:
        return "mean", True
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if unknown := [kind for kind in kinds if kind not in KNOWN_MODULES]:
        raise Unsupported(
            f"{loaded.name} has modules that are not supported: {', '.join(unknown)}; "
            f"only {', '.join(KNOWN_MODULES)} are"
        )
    how = "mean"
    for module, kind in zip(modules, kinds):
        if kind == "Pooling" and loaded.path is not None:
            config = read_json(loaded.path / str(module.get("path", "")) / "config.json")
            how = _pooling_named(config, loaded.name)
    return how, "Normalize" in kinds


def _pooling_named(config: Mapping[str, Any], name: str) -> str:
    if config.get("pooling_mode") in POOLING_KEYS.values():
        return str(config["pooling_mode"])
    enabled = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if len(enabled) == 1 and enabled[0] in POOLING_KEYS:
        return POOLING_KEYS[enabled[0]]
    raise Unsupported(f"{name} uses the pooling {enabled or config}; {', '.join(POOLING_KEYS.values())} are supported")


class SentenceSimilarity(SentenceEmbedding):
    """Cosines between a sentence and others: a list of floats for `{"source_sentence": ..., "sentences": [...]}`."""

    def expected_input(self) -> str:
        return '{"source_sentence": ..., "sentences": [...]}, or source_sentence=... and sentences=...'

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return gathered(self, item, given, ("source_sentence", "sentences"), super().gather)

    def preprocess(self, item: Any, options: EmbeddingOptions) -> PreparedItem:
        source, others = pair_of(item, "source_sentence", "sentences", self.expected_input())
        assert self.loaded.text is not None
        parts = self.loaded.text.rows([source, *others], options)
        return PreparedItem(tuple(row for some in parts for row in some), [len(some) for some in parts])

    def preprocess_many(self, items: Sequence[Any], options: EmbeddingOptions) -> list[PreparedItem]:
        return [self.preprocess(item, options) for item in items]

    def postprocess(self, prepared: PreparedItem, results: Results, options: EmbeddingOptions) -> list[float]:
        vectors, start = [], 0
        for count in prepared.facts:
            part = slice(start, start + count)
            vectors.append(self.combine([r["vector"] for r in results[part]], prepared.rows[part], options))
            start += count
        table = F.normalize(torch.from_numpy(np.stack(vectors)), dim=-1).numpy()
        return [float(cosine) for cosine in table[1:] @ table[0]]


@dataclass(frozen=True)
class RerankOptions(TextOptions):
    """The best `top_n` (None: all). `function_to_apply` to the model's score: sigmoid, none, or None for sigmoid."""

    top_n: int | None = None
    function_to_apply: str | None = None
    return_documents: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function(self.function_to_apply)
        if self.function_to_apply == "softmax":
            raise InvalidInput(
                "function_to_apply is 'softmax', which is always 1 for a single score; use sigmoid or none"
            )
        check_count("top_n", self.top_n)


class Rerank(Task):
    """Documents by how well they answer a query: a list of `index`, `score`, `text`, best first.

    A document split by `stride` gets the score of its best chunk.
    """

    Options = RerankOptions
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[str | None] = "first"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        if self.config.num_labels != 1:
            raise UnsupportedModel(f"{loaded.name} has {self.config.num_labels} outputs; a reranker has one score")

    def expected_input(self) -> str:
        return '{"query": ..., "documents": [...]}, or query=... and documents=...'

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return gathered(self, item, given, ("query", "documents"), super().gather)

    def batch_key(self, options: RerankOptions) -> Hashable:
        return None

    def preprocess(self, item: Any, options: RerankOptions) -> PreparedItem:
        query, documents = pair_of(item, "query", "documents", self.expected_input())
        text = self.loaded.text
        assert text is not None
        parts = text.encode([(query, document) for document in documents], options, cut="only_second")
        rows = tuple(text.row(part) for some in parts for part in some)
        return PreparedItem(rows, (documents, [len(some) for some in parts]))

    def postprocess(self, prepared: PreparedItem, results: Results, options: RerankOptions) -> list[dict[str, Any]]:
        documents, counts = prepared.facts
        logits = np.array([result["logits"][0] for result in results])
        ends = np.cumsum(counts)
        best = np.array([logits[end - count : end].max() for count, end in zip(counts, ends)])
        scores = apply(best, options.function_to_apply or "sigmoid")
        order = np.argsort(-best, kind="stable")[: options.top_n].tolist()
        ranking = [{"index": i, "score": float(scores[i])} for i in order]
        return [one | {"text": documents[one["index"]]} for one in ranking] if options.return_documents else ranking


def pair_of(item: Any, one: str, many: str, expected: str) -> tuple[str, list[str]]:
    """The text and the list of texts of an item."""
    if not isinstance(item, Mapping):
        raise wrong_type(item, expected)
    if set(item) != {one, many}:
        raise InvalidInput(f"an item has {one} and {many}; {sorted(map(str, item))} were given")
    texts = item[many]
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise WrongType(f"{many} is a {type(texts).__name__}; it must be a list of strings")
    if not texts:
        raise InvalidInput(f"{many} is empty; at least one is needed")
    return check_text(item[one]), [check_text(text) for text in texts]


def gathered(task: Task, item: Any, given: dict[str, Any], names: tuple[str, str], otherwise: Any) -> Any:
    """An item built from keywords, if it was given that way."""
    if item is MISSING and set(names) <= set(given):
        rest = {name: value for name, value in given.items() if name not in names}
        return {name: given[name] for name in names}, rest
    return otherwise(item, given)
