"""The names of tasks and their classes. Built-in tasks are imported on first use."""

from __future__ import annotations

import difflib
import re
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr

if TYPE_CHECKING:
    from headway.pipelines.task import Task

# name → module under headway.pipelines.tasks and class
BUILT_IN: dict[str, tuple[str, str]] = {
    "text-classification": ("text_classification", "TextClassification"),
    "zero-shot-classification": ("zero_shot", "ZeroShotClassification"),
    "token-classification": ("token_classification", "TokenClassification"),
    "fill-mask": ("fill_mask", "FillMask"),
    "question-answering": ("question_answering", "QuestionAnswering"),
    "feature-extraction": ("embedding", "FeatureExtraction"),
    "sentence-embedding": ("embedding", "SentenceEmbedding"),
    "sentence-similarity": ("embedding", "SentenceSimilarity"),
    "rerank": ("embedding", "Rerank"),
    "text-generation": ("text_generation", "TextGeneration"),
    "image-classification": ("vision", "ImageClassification"),
    "image-feature-extraction": ("vision", "ImageFeatureExtraction"),
    "zero-shot-image-classification": ("zero_shot_image", "ZeroShotImageClassification"),
    "image-to-text": ("multimodal", "ImageToText"),
    "visual-question-answering": ("multimodal", "VisualQuestionAnswering"),
    "automatic-speech-recognition": ("speech_recognition", "SpeechRecognition"),
    "audio-classification": ("audio", "AudioClassification"),
    "text2text-generation": ("seq2seq", "Text2TextGeneration"),
    "summarization": ("seq2seq", "Summarization"),
    "translation": ("seq2seq", "Translation"),
}
ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "embedding": "sentence-embedding",
    "reranking": "rerank",
    "asr": "automatic-speech-recognition",
    "vqa": "visual-question-answering",
}
TRANSLATION = re.compile(r"translation_[A-Za-z0-9-]+_to_[A-Za-z0-9-]+")  # the languages are in the name
_added: dict[str, type[Task]] = {}
_lock = threading.Lock()


def register_task(name: str, task: type[Task], *, replace: bool = False) -> type[Task]:
    """Make `hw.pipeline(name, ...)` use the class `task`; a name that is taken needs `replace=True`."""
    from headway.pipelines.task import Task

    if not isinstance(name, str) or not name.strip():
        raise InvalidInput(f"the name of a task is {name!r}; it must be a string that is not empty")
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise WrongType(f"{task!r} is not a subclass of headway.Task")
    with _lock:
        if not replace and (name in _added or name in BUILT_IN or name in ALIASES):
            raise InvalidInput(f"the task {name!r} exists already; pass replace=True to use {task.__name__} instead")
        _added[name] = task
    return task


def task_named(name: str) -> tuple[str, type[Task]]:
    """The canonical name of a task and its class."""
    if not isinstance(name, str):
        raise WrongType(f"task is {short_repr(name)}; it must be a name such as 'text-classification'")
    canonical = name if name in _added else ALIASES.get(name, name)
    if canonical in _added:
        return canonical, _added[canonical]
    built_in = "translation" if TRANSLATION.fullmatch(canonical) else canonical
    if built_in not in BUILT_IN:
        close = difflib.get_close_matches(canonical, task_names(), n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise Unsupported(f"there is no task {short_repr(name)}{hint} Known tasks: {', '.join(task_names())}")
    module, kind = BUILT_IN[built_in]
    return canonical, getattr(import_module(f"headway.pipelines.tasks.{module}"), kind)


def task_names() -> list[str]:
    """All task names, sorted."""
    return sorted({*BUILT_IN, *_added})
