"""Text classification and regression: the best label of a text, or several with their scores."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.pipelines.inputs.text import TextOptions, TextTask
from headway.pipelines.task import (
    ModelInputs,
    OneResult,
    PreparedItem,
    TaskOptions,
    capturable,
    check_count,
    check_text,
    wrong_type,
)

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results

FUNCTIONS = ("softmax", "sigmoid", "none")
UNSET = "unset"


@dataclass(frozen=True)
class ClassificationOptions(TextOptions):
    """`top_k` labels as a list (None: all); by default the best one as a dict. `function_to_apply` to logits."""

    top_k: int | str | None = UNSET
    function_to_apply: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k if self.top_k != UNSET else 1)
        check_function(self.function_to_apply)


@dataclass(frozen=True)
class LabelOptions(TaskOptions):
    """The best `top_k` labels (None: all). `function_to_apply` to logits: softmax, sigmoid or none."""

    top_k: int | None = 5
    function_to_apply: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k)
        check_function(self.function_to_apply)


def check_function(name: Any) -> None:
    """Raise InvalidInput unless `name` is a function over logits, or None."""
    if name is not None and name not in FUNCTIONS:
        raise InvalidInput(f"function_to_apply is {short_repr(name)}; it must be {', '.join(FUNCTIONS)} or None")


class TextClassification(TextTask):
    """A label and a score for a text, or for a pair `{"text": ..., "text_pair": ...}`."""

    Options = ClassificationOptions
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[str | None] = "first"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._labels, self._function = labels_of(self.config), default_function(self.config)

    def expected_input(self) -> str:
        return 'a string or {"text": ..., "text_pair": ...}'

    def single(self, item: Any, result: Any, given: Mapping[str, Any]) -> Any:
        """As in transformers: a list of one for a text, unless the call has a `top_k`."""
        return OneResult([result]) if isinstance(item, str) and "top_k" not in given else result

    def batch_key(self, options: ClassificationOptions) -> Hashable:
        return (options.function_to_apply or self._function) if self._wants_best(options) else None

    def _wants_best(self, options: ClassificationOptions) -> bool:
        """Whether only the best label of a single row is needed; the device computes that."""
        return options.top_k == UNSET and options.stride is None

    def text_of(self, item: Any) -> str | tuple[str, str]:
        return text_or_pair(item)

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: ClassificationOptions) -> Mapping[str, Any]:
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
    """A text, or the two texts of a dict."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        unknown = set(item) - {"text", "text_pair"}
        if unknown or "text" not in item:
            raise InvalidInput(f'a pair has the keys "text" and "text_pair"; {sorted(map(str, item))} were given')
        text = check_text(item["text"])
        return (text, check_text(item["text_pair"])) if item.get("text_pair") is not None else text
    raise wrong_type(item, 'a string or {"text": ..., "text_pair": ...}')


def labels_of(config: Any) -> list[str]:
    """The names of a classifier's labels in order."""
    names = getattr(config, "id2label", None) or {}
    count = max((int(key) for key in names), default=-1) + 1
    return [str(names.get(i, names.get(str(i), f"LABEL_{i}"))) for i in range(count)]


def default_function(config: Any) -> str:
    """The function from a model's logits to scores."""
    kind, labels = getattr(config, "problem_type", None), getattr(config, "num_labels", 2)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or labels == 1:
        return "sigmoid"
    return "softmax"


def apply(logits: np.ndarray, function: str) -> np.ndarray:
    """The scores of a row of logits."""
    match function:
        case "sigmoid":
            return 1.0 / (1.0 + np.exp(-logits))
        case "softmax":
            exponentials = np.exp(logits - logits.max(-1, keepdims=True))
            return exponentials / exponentials.sum(-1, keepdims=True)
    return logits


def weighted_mean(rows: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    """The mean of a text's chunks weighted by length; a single chunk is returned as is."""
    return rows[0] if len(rows) == 1 else np.average(np.stack(rows), axis=0, weights=weights).astype(np.float32)


def top_labels(scores: np.ndarray, labels: Sequence[str], top_k: Any) -> list[dict[str, Any]]:
    """Labels and scores, best first."""
    order = np.argsort(-scores, kind="stable")[: top_k if top_k is not None else len(scores)]
    return [{"label": labels[i], "score": float(scores[i])} for i in order.tolist()]
