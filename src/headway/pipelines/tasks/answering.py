"""Question answering: the stretch of a context that answers a question, long contexts in overlapping windows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.inputs.arrays import by_token
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import MISSING, Batch, PreparedItem, Task, capturable, check_text
from headway.pipelines.tasks.classification import check_top_k

if TYPE_CHECKING:
    from headway.pipelines.task import Results

WINDOW = 384  # tokens of a window unless told otherwise
STRIDE = 128


@dataclass(frozen=True)
class AnsweringOptions(TextOptions):
    """The best answer as a dict, or `top_k` as a list.

    Windows have `max_seq_len` tokens and share `doc_stride` with their neighbours, answers at most `max_answer_len`;
    `handle_impossible_answer` lets an empty answer win; `align_to_words` widens answers to whole words.
    """

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k if self.top_k is not None else 0)
        if self.truncation or self.stride is not None or self.max_length is not None:
            raise InvalidInput("contexts are divided into windows always; set max_seq_len and doc_stride instead")
        for name in ("doc_stride", "max_answer_len", "max_seq_len"):
            value = getattr(self, name)
            if value is not None:
                check_integer(value, name, 1)


class QuestionAnswering(Task):
    """`{"score": ..., "start": ..., "end": ..., "answer": ...}` for `{"question": ..., "context": ...}`."""

    Options = AnsweringOptions
    reads: ClassVar[str | None] = "all"
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"

    def wanted(self) -> str:
        return '{"question": ..., "context": ...}, or question=... and context=...'

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if item is MISSING and {"question", "context"} <= set(given):
            rest = {name: value for name, value in given.items() if name not in ("question", "context")}
            return self._items(given["question"], given["context"]), rest
        return super().gather(item, given)

    def _items(self, questions: Any, contexts: Any) -> Any:
        if isinstance(questions, str) and isinstance(contexts, str):
            return {"question": questions, "context": contexts}
        questions = [questions] * len(contexts) if isinstance(questions, str) else questions
        contexts = [contexts] * len(questions) if isinstance(contexts, str) else contexts
        if len(questions) != len(contexts):
            raise InvalidInput(
                f"{len(questions)} questions and {len(contexts)} contexts were given; give as many of each"
            )
        return [{"question": q, "context": c} for q, c in zip(questions, contexts)]

    def batch_key(self, options: AnsweringOptions) -> Hashable:
        return None

    def preprocess(self, item: Any, options: AnsweringOptions) -> PreparedItem:
        text = self.loaded.text
        assert text is not None
        question, context = self._pair(item)
        window = min(options.max_seq_len or WINDOW, text.limit or WINDOW)
        stride = options.doc_stride if options.doc_stride is not None else min(window // 2, STRIDE)
        divided = TextOptions(max_length=window, stride=stride)
        parts = text.encode([(question, context)], divided, offsets=True, cut="only_second")[0]
        return PreparedItem(tuple(text.row(part) for part in parts), (context, parts))

    def _pair(self, item: Any) -> tuple[str, str]:
        if not isinstance(item, Mapping):
            raise WrongType(f"{item!r:.60} of type {type(item).__name__} was given where {self.wanted()} is wanted")
        if set(item) != {"question", "context"}:
            raise InvalidInput(f"an item has a question and a context; {sorted(map(str, item))} were given")
        question, context = check_text(item["question"], "a question"), check_text(item["context"], "a context")
        if not question.strip() or not context.strip():
            raise InvalidInput("the question or the context is empty; both need text")
        return question, context

    @capturable
    def reduce(self, output: Any, batch: Batch, options: Any) -> Mapping[str, Any]:
        return {"start": by_token(output.start_logits, batch), "end": by_token(output.end_logits, batch)}

    def postprocess(self, prepared: PreparedItem, results: Results, options: AnsweringOptions) -> Any:
        context, parts = prepared.facts
        found: dict[tuple[int, int], float] = {}
        nothing = 1.0
        for encoding, result in zip(parts, results):
            spans, empty = best_spans(encoding, result["start"], result["end"], options)
            nothing = min(nothing, empty)
            for first, last, score in spans:
                place = self._characters(encoding, first, last, options.align_to_words)
                found[place] = max(score, found.get(place, 0.0))
        answers = [
            {"score": score, "start": start, "end": end, "answer": context[start:end]}
            for (start, end), score in found.items()
        ]
        if options.handle_impossible_answer:
            answers.append({"score": nothing, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda answer: -answer["score"])[: options.top_k]
        return answers[0] if options.top_k == 1 and answers else answers

    def _characters(self, encoding: Any, first: int, last: int, words: bool) -> tuple[int, int]:
        start, end = encoding.offsets[first][0], encoding.offsets[last][1]
        if not words:
            return start, end
        first_word, last_word = encoding.token_to_word(first), encoding.token_to_word(last)
        if first_word is None or last_word is None:
            return start, end
        context = encoding.token_to_sequence(first)
        begins, ends = encoding.word_to_chars(first_word, context), encoding.word_to_chars(last_word, context)
        return (begins[0] if begins else start), (ends[1] if ends else end)


def best_spans(
    encoding: Any, start: np.ndarray, end: np.ndarray, options: AnsweringOptions
) -> tuple[list[tuple[int, int, float]], float]:
    """The likeliest (first, last, score) spans inside the context of one window, and the score of no answer."""
    inside = np.array([sequence == 1 for sequence in encoding.sequence_ids])
    allowed = inside.copy()
    if options.handle_impossible_answer:
        allowed[0] = True  # the first token stands for no answer
    firsts, lasts = _chances(start, allowed), _chances(end, allowed)
    empty = float(firsts[0] * lasts[0]) if options.handle_impossible_answer else 1.0
    firsts[0] = lasts[0] = 0.0
    pairs = np.tril(np.triu(np.outer(firsts, lasts)), options.max_answer_len - 1)
    flat = pairs.ravel()
    order = np.argsort(-flat, kind="stable")[: options.top_k] if options.top_k > 1 else [int(flat.argmax())]
    found = [(*divmod(int(i), len(lasts)), float(flat[i])) for i in order]
    return [span for span in found if inside[span[0]] and inside[span[1]]], empty


def _chances(logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    kept = np.where(allowed, logits, -10000.0)
    raised = np.exp(kept - kept.max())
    return raised / raised.sum()
