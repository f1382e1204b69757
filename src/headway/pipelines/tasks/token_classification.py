"""Token classification: a label for each token, or entities aggregated from them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.pipelines.inputs.arrays import by_token
from headway.pipelines.inputs.text import TextOptions, TextTask
from headway.pipelines.task import ModelInputs, PreparedItem, capturable
from headway.pipelines.tasks.text_classification import apply, labels_of

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

STRATEGIES = ("none", "simple", "first", "average", "max")


@dataclass(frozen=True)
class TokenClassificationOptions(TextOptions):
    """`aggregation_strategy` is none, simple, first, average or max; entities with `ignore_labels` are left out."""

    aggregation_strategy: str = "none"
    ignore_labels: Sequence[str] = ("O",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation_strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise InvalidInput(
                f"aggregation_strategy is {short_repr(self.aggregation_strategy)}; it must be one of {known}"
            )
        if isinstance(self.ignore_labels, str) or not isinstance(self.ignore_labels, Iterable):
            raise InvalidInput(f"ignore_labels is {short_repr(self.ignore_labels)}; it must be a list of labels")
        if self.stride is not None and self.aggregation_strategy == "none":
            raise InvalidInput(
                "stride needs an aggregation_strategy other than none, to merge the entities of overlapping chunks"
            )
        object.__setattr__(self, "ignore_labels", tuple(self.ignore_labels))


@dataclass(frozen=True, slots=True)
class TaggedToken:
    """One token of a text: its characters and position, whether it continues a word, and its score for each label."""

    word: str
    start: int
    end: int
    index: int
    continues: bool
    scores: np.ndarray


class TokenClassification(TextTask):
    """A list of entities for a text: `entity` or `entity_group`, `score`, `word`, `start`, `end`."""

    Options = TokenClassificationOptions
    reads: ClassVar[str | None] = "all"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)
        backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
        self._marks_words = bool(getattr(getattr(backend, "model", None), "continuing_subword_prefix", None))

    def batch_key(self, options: TokenClassificationOptions) -> Hashable:
        return None

    def preprocess_many(self, items: Sequence[Any], options: TokenClassificationOptions) -> list[PreparedItem]:
        text = self.loaded.text
        assert text is not None
        encoded = text.encode([self.text_of(item) for item in items], options, offsets=True)
        return [
            PreparedItem(tuple(text.row(part) for part in parts), (item, parts)) for item, parts in zip(items, encoded)
        ]

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Any]:
        return {"logits": by_token(output.logits, batch)}

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: TokenClassificationOptions
    ) -> list[dict[str, Any]]:
        text, parts = prepared.facts
        entities: list[dict[str, Any]] = []
        for encoding, result in zip(parts, results):
            tokens = list(self._tokens(text, encoding, apply(result["logits"], "softmax")))
            entities += self._entities(tokens, options.aggregation_strategy)
        ignored = options.ignore_labels
        entities = [e for e in entities if e.get("entity") not in ignored and e.get("entity_group") not in ignored]
        return _joined(entities) if len(parts) > 1 else entities

    def _tokens(self, text: str, encoding: Any, scores: np.ndarray) -> Iterator[TaggedToken]:
        unknown = self.loaded.tokenizer.unk_token_id
        columns = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask)
        for index, (token_id, word, (start, end), special) in enumerate(columns):
            if special:
                continue
            if self._marks_words:
                continues = len(word) != end - start
            else:  # this tokenizer does not mark words; look for a space before the token
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            if token_id == unknown:
                word, continues = text[start:end], False  # noqa: PLW2901
            yield TaggedToken(word, start, end, index, continues, scores[index])

    def _entities(self, tokens: Sequence[TaggedToken], strategy: str) -> list[dict[str, Any]]:
        if strategy in ("none", "simple"):
            entities = [self._entity(token) for token in tokens]
        else:
            entities = [self._word(word, strategy) for word in _words(tokens)]
        return entities if strategy == "none" else self._grouped(entities)

    def _entity(self, token: TaggedToken) -> dict[str, Any]:
        best = int(token.scores.argmax())
        return {
            "entity": self._labels[best],
            "score": float(token.scores[best]),
            "index": token.index,
            "word": token.word,
            "start": token.start,
            "end": token.end,
        }

    def _word(self, tokens: Sequence[TaggedToken], strategy: str) -> dict[str, Any]:
        """The tokens of one word as one entity."""
        match strategy:
            case "first":
                scores = tokens[0].scores
            case "max":
                scores = max(tokens, key=lambda token: token.scores.max()).scores
            case _:
                scores = np.mean([token.scores for token in tokens], axis=0)
        best = int(scores.argmax())
        return {
            "entity": self._labels[best],
            "score": float(scores[best]),
            "word": self._joined_words([token.word for token in tokens]),
            "start": tokens[0].start,
            "end": tokens[-1].end,
        }

    def _grouped(self, entities: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Merges neighbors of one kind; B- begins a new entity."""
        groups: list[list[dict[str, Any]]] = []
        for entity in entities:
            begins, kind = _kind(entity["entity"])
            if groups and kind == _kind(groups[-1][-1]["entity"])[1] and not begins:
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [self._group(group) for group in groups]

    def _group(self, entities: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "entity_group": entities[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([np.float32(entity["score"]) for entity in entities])),
            "word": self._joined_words([entity["word"] for entity in entities]),
            "start": entities[0]["start"],
            "end": entities[-1]["end"],
        }

    def _joined_words(self, words: list[str]) -> str:
        return self.loaded.tokenizer.convert_tokens_to_string(words)


def _words(tokens: Sequence[TaggedToken]) -> list[list[TaggedToken]]:
    words: list[list[TaggedToken]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _kind(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and of which kind."""
    return (label.startswith("B-"), label[2:]) if label.startswith(("B-", "I-")) else (False, label)


def _joined(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entities of overlapping chunks: of two that overlap the longer stays, or the more likely."""
    kept: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda e: e["start"]):
        if kept and kept[-1]["start"] <= entity["start"] < kept[-1]["end"]:
            if _weight(entity) > _weight(kept[-1]):
                kept[-1] = entity
        else:
            kept.append(entity)
    return kept


def _weight(entity: Mapping[str, Any]) -> tuple[int, float]:
    return entity["end"] - entity["start"], entity["score"]
