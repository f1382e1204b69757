"""Text classification and regression: one label a text, or all of them with their scores."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import Batch, PreparedItem, capturable, check_text
from headway.pipelines.tasks.texts import TextTask

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.task import Results

FUNCTIONS = ("softmax", "sigmoid", "none")
UNSET = "unset"


@dataclass(frozen=True)
class ClassificationOptions(TextOptions):
    """`top_k` labels as a list (None: all of them); left out, the best one as a dict. `function_to_apply` to logits."""

    top_k: int | str | None = UNSET
    function_to_apply: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k if self.top_k != UNSET else 1)
        check_function(self.function_to_apply)


def check_top_k(top_k: Any) -> None:
    """Refuse what is no number of results."""
    if top_k is not None:
        check_integer(top_k, "top_k", 1)


def check_function(name: Any) -> None:
    """Refuse what is no function over logits."""
    if name is not None and name not in FUNCTIONS:
        raise InvalidInput(f"function_to_apply is {name!r}; it takes {', '.join(FUNCTIONS)} or None")


class TextClassification(TextTask):
    """A label and a score for a text, or for a pair `{"text": ..., "text_pair": ...}`."""

    Options = ClassificationOptions
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[str | None] = "first"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._labels, self._function = labels_of(self.config), default_function(self.config)

    def wanted(self) -> str:
        return 'a string or {"text": ..., "text_pair": ...}'

    def batch_key(self, options: ClassificationOptions) -> Hashable:
        return (options.function_to_apply or self._function) if self._wants_best(options) else None

    def _wants_best(self, options: ClassificationOptions) -> bool:
        """Whether one label of one piece is asked for, which is then found on the device."""
        return options.top_k == UNSET and options.stride is None

    def text_of(self, item: Any) -> str | tuple[str, str]:
        return text_or_pair(item)

    @capturable
    def reduce(self, output: Any, batch: Batch, options: ClassificationOptions) -> Mapping[str, Any]:
        logits = output.logits.float()
        if not self._wants_best(options):
            return {"logits": logits}
        match options.function_to_apply or self._function:
            case "softmax":
                logits = logits.softmax(-1)
            case "sigmoid":
                logits = logits.sigmoid()
        score, best = logits.max(-1)
        return {"score": score, "best": best}

    def postprocess(self, prepared: PreparedItem, results: Results, options: ClassificationOptions) -> Any:
        if self._wants_best(options):
            return {"label": self._labels[results[0]["best"]], "score": float(results[0]["score"])}
        logits = weighted_mean([r["logits"] for r in results], [row.length for row in prepared.rows])
        scores = apply(logits, options.function_to_apply or self._function)
        if options.top_k == UNSET:
            best = int(scores.argmax())
            return {"label": self._labels[best], "score": float(scores[best])}
        return top_labels(scores, self._labels, options.top_k)


def text_or_pair(item: Any) -> str | tuple[str, str]:
    """A text, or the two of a dict; anything else is refused."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        unknown = set(item) - {"text", "text_pair"}
        if unknown or "text" not in item:
            raise InvalidInput(f'a pair has the keys "text" and "text_pair"; {sorted(map(str, item))} were given')
        text = check_text(item["text"])
        return (text, check_text(item["text_pair"])) if item.get("text_pair") is not None else text
    raise WrongType(
        f"{item!r:.60} of type {type(item).__name__} was given where a string "
        'or {"text": ..., "text_pair": ...} is wanted'
    )


def labels_of(config: Any) -> list[str]:
    """The names of a classifier's outputs in order."""
    names = getattr(config, "id2label", None) or {}
    count = max((int(key) for key in names), default=-1) + 1
    return [str(names.get(i, names.get(str(i), f"LABEL_{i}"))) for i in range(count)]


def default_function(config: Any) -> str:
    """What makes scores of a model's logits."""
    kind, labels = getattr(config, "problem_type", None), getattr(config, "num_labels", 2)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or labels == 1:
        return "sigmoid"
    return "softmax"


def apply(logits: np.ndarray, function: str) -> np.ndarray:
    """Scores of one row of logits."""
    match function:
        case "sigmoid":
            return 1.0 / (1.0 + np.exp(-logits))
        case "softmax":
            raised = np.exp(logits - logits.max(-1, keepdims=True))
            return raised / raised.sum(-1, keepdims=True)
    return logits


def weighted_mean(rows: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    """The mean of a text's pieces by their lengths; a text in one piece is as it is."""
    return rows[0] if len(rows) == 1 else np.average(np.stack(rows), axis=0, weights=weights).astype(np.float32)


def top_labels(scores: np.ndarray, labels: Sequence[str], top_k: Any) -> list[dict[str, Any]]:
    """Labels and scores, best first."""
    order = np.argsort(-scores, kind="stable")[: top_k if top_k is not None else len(scores)]
    return [{"label": labels[i], "score": float(scores[i])} for i in order.tolist()]
