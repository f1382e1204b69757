"""Zero-shot classification: an NLI model scores whether each label follows from the text."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel, WrongType
from headway.base.text import short_repr
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import PreparedItem, Row, Task, TaskOptions, check_text
from headway.pipelines.tasks.text_classification import apply, weighted_mean

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results


@dataclass(frozen=True)
class CandidateOptions(TaskOptions):
    """`candidate_labels` as a list or a comma-separated string; `hypothesis_template` has {} where a label goes."""

    candidate_labels: str | Sequence[str] | None = None
    hypothesis_template: str = "This example is {}."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidate_labels", checked_labels(self.candidate_labels))
        check_template(self.hypothesis_template)


@dataclass(frozen=True)
class ZeroShotOptions(CandidateOptions, TextOptions):
    """With `multi_label` each label is scored independently."""

    multi_label: bool = False


def checked_labels(labels: Any) -> tuple[str, ...] | None:
    """Labels as a tuple of strings."""
    if labels is None:
        return None
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not isinstance(labels, Iterable):
        raise WrongType(f"candidate_labels is {short_repr(labels)}; it must be a list of labels, or one string of them")
    checked = tuple(check_text(label, "a label") for label in labels)
    if not checked:
        raise InvalidInput("candidate_labels is empty; at least one label is needed")
    return checked


def check_template(template: Any) -> None:
    """Raise InvalidInput for a template without a place for the label."""
    try:
        if check_text(template, "a template").format("label") != template:
            return
    except (KeyError, IndexError, ValueError):
        pass
    raise InvalidInput(f"hypothesis_template is {short_repr(template)}; it needs one {{}} where the label goes")


class ZeroShotClassification(Task):
    """Labels sorted by score: `{"sequence": ..., "labels": [...], "scores": [...]}`."""

    Options = ZeroShotOptions
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[str | None] = "first"
    positional: ClassVar[tuple[str, ...]] = ("candidate_labels",)

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        names = {str(name).lower(): int(i) for name, i in (self.config.label2id or {}).items()}
        entails = [i for name, i in names.items() if name.startswith("entail")]
        if not entails:
            raise UnsupportedModel(
                f"{loaded.name} has no label 'entailment' (it has {', '.join(names)}); "
                "zero-shot classification needs a model trained on natural language inference"
            )
        self._entails = entails[0]

    def batch_key(self, options: ZeroShotOptions) -> Hashable:
        return None

    def preprocess(self, item: Any, options: ZeroShotOptions) -> PreparedItem:
        text, labels = check_text(item), options.candidate_labels
        if labels is None:
            raise InvalidInput("candidate_labels is missing; pass candidate_labels=[...]")
        if not text:
            raise InvalidInput("an empty text cannot be classified; pass a text with something in it")
        assert self.loaded.text is not None
        pairs = [(text, options.hypothesis_template.format(label)) for label in labels]
        encoded = self.loaded.text.encode(pairs, options, cut="only_first")
        rows: list[Row] = []
        counts = [len(parts) for parts in encoded]
        for parts in encoded:
            rows += [self.loaded.text.row(part) for part in parts]
        return PreparedItem(tuple(rows), (text, counts))

    def postprocess(self, prepared: PreparedItem, results: Results, options: ZeroShotOptions) -> dict[str, Any]:
        (text, counts), labels = prepared.facts, options.candidate_labels
        assert labels is not None
        logits, start = [], 0
        for count in counts:
            part = slice(start, start + count)
            logits.append(weighted_mean([r["logits"] for r in results[part]], [r.length for r in prepared.rows[part]]))
            start += count
        scores = self._scores(np.stack(logits), options.multi_label or len(labels) == 1)
        order = np.argsort(-scores, kind="stable").tolist()
        return {"sequence": text, "labels": [labels[i] for i in order], "scores": [float(scores[i]) for i in order]}

    def _scores(self, logits: np.ndarray, independent: bool) -> np.ndarray:
        """[labels] of logits [labels, outputs]."""
        if not independent:
            return apply(logits[:, self._entails], "softmax")
        against = -1 if self._entails == 0 else 0
        return apply(logits[:, [against, self._entails]], "softmax")[:, 1]
