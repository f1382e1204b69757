"""Question answering: the span of a context that answers a question; long contexts in overlapping windows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.inputs.arrays import by_token
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import (
    MISSING,
    ModelInputs,
    PreparedItem,
    Task,
    capturable,
    check_count,
    check_switch,
    check_text,
    wrong_type,
)

if TYPE_CHECKING:
    from headway.pipelines.task import Results

WINDOW = 384  # tokens of a window by default
STRIDE = 128


@dataclass(frozen=True)
class QuestionAnsweringOptions(TextOptions):
    """The best answer as a dict, or `top_k` as a list.

    Windows have `max_seq_len` tokens and share `doc_stride` with their neighbors, answers at most `max_answer_len`;
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
        check_count("top_k", self.top_k, optional=False)
        if self.truncation or self.stride is not None or self.max_length is not None:
            raise InvalidInput("contexts are always split into windows; use max_seq_len and doc_stride instead")
        check_count("doc_stride", self.doc_stride)
        check_count("max_answer_len", self.max_answer_len)
        check_count("max_seq_len", self.max_seq_len)
        check_switch("handle_impossible_answer", self.handle_impossible_answer)
        check_switch("align_to_words", self.align_to_words)


class QuestionAnswering(Task):
    """`{"score": ..., "start": ..., "end": ..., "answer": ...}` for `{"question": ..., "context": ...}`."""

    Options = QuestionAnsweringOptions
    reads: ClassVar[str | None] = "all"
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"

    def expected_input(self) -> str:
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
                f"{len(questions)} questions and {len(contexts)} contexts were given; pass as many of each"
            )
        return [{"question": q, "context": c} for q, c in zip(questions, contexts)]

    def batch_key(self, options: QuestionAnsweringOptions) -> Hashable:
        return None

    def preprocess(self, item: Any, options: QuestionAnsweringOptions) -> PreparedItem:
        text = self.loaded.text
        assert text is not None
        question, context = self._pair(item)
        window = min(options.max_seq_len or WINDOW, text.limit or WINDOW)
        stride = options.doc_stride if options.doc_stride is not None else min(window // 2, STRIDE)
        windows = TextOptions(max_length=window, stride=stride)
        parts = text.encode([(question, context)], windows, offsets=True, cut="only_second")[0]
        return PreparedItem(tuple(text.row(part) for part in parts), (context, parts))

    def _pair(self, item: Any) -> tuple[str, str]:
        if not isinstance(item, Mapping):
            raise wrong_type(item, self.expected_input())
        if set(item) != {"question", "context"}:
            raise InvalidInput(f"an item has a question and a context; {sorted(map(str, item))} were given")
        question, context = check_text(item["question"], "a question"), check_text(item["context"], "a context")
        if not question.strip() or not context.strip():
            raise InvalidInput("the question or the context is empty; both need text")
        return question, context

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Any]:
        return {"start": by_token(output.start_logits, batch), "end": by_token(output.end_logits, batch)}

    def postprocess(self, prepared: PreparedItem, results: Results, options: QuestionAnsweringOptions) -> Any:
        context, parts = prepared.facts
        scores: dict[tuple[int, int], float] = {}
        nothing = 1.0
        for encoding, result in zip(parts, results):
            spans, empty = best_spans(encoding, result["start"], result["end"], options)
            nothing = min(nothing, empty)
            for first, last, score in spans:
                span = self._characters(encoding, first, last, options.align_to_words)
                scores[span] = max(score, scores.get(span, 0.0))
        answers = [
            {"score": score, "start": start, "end": end, "answer": context[start:end]}
            for (start, end), score in scores.items()
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
    encoding: Any, start: np.ndarray, end: np.ndarray, options: QuestionAnsweringOptions
) -> tuple[list[tuple[int, int, float]], float]:
    """The most likely (first, last, score) spans within the context of a window, and the score of no answer."""
    inside = np.array([sequence == 1 for sequence in encoding.sequence_ids])
    allowed = inside.copy()
    if options.handle_impossible_answer:
        allowed[0] = True  # the first token stands for no answer
    firsts, lasts = _probabilities(start, allowed), _probabilities(end, allowed)
    empty = float(firsts[0] * lasts[0]) if options.handle_impossible_answer else 1.0
    firsts[0] = lasts[0] = 0.0
    pairs = np.tril(np.triu(np.outer(firsts, lasts)), options.max_answer_len - 1)
    flat = pairs.ravel()
    order = np.argsort(-flat, kind="stable")[: options.top_k] if options.top_k > 1 else [int(flat.argmax())]
    best = [(*divmod(int(i), len(lasts)), float(flat[i])) for i in order]
    return [span for span in best if inside[span[0]] and inside[span[1]]], empty


def _probabilities(logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    kept = np.where(allowed, logits, -10000.0)
    exponentials = np.exp(kept - kept.max())
    return exponentials / exponentials.sum()
