"""The names of tasks, and which class computes each. Built-in tasks are imported when they are first asked for."""

from __future__ import annotations

import difflib
import re
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from headway.base.errors import InvalidInput, Unsupported, WrongType

if TYPE_CHECKING:
    from headway.pipelines.task import Task

# name → module under headway.pipelines.tasks and class
BUILT_IN: dict[str, tuple[str, str]] = {
    "text-classification": ("classification", "TextClassification"),
    "zero-shot-classification": ("zero_shot", "ZeroShotClassification"),
    "token-classification": ("tagging", "TokenClassification"),
    "fill-mask": ("filling", "FillMask"),
    "question-answering": ("answering", "QuestionAnswering"),
    "feature-extraction": ("embedding", "FeatureExtraction"),
    "sentence-embedding": ("embedding", "SentenceEmbedding"),
    "sentence-similarity": ("embedding", "SentenceSimilarity"),
    "rerank": ("embedding", "Rerank"),
    "text-generation": ("decoding", "TextGeneration"),
    "image-classification": ("vision", "ImageClassification"),
    "image-feature-extraction": ("vision", "ImageFeatureExtraction"),
    "zero-shot-image-classification": ("zero_shot_image", "ZeroShotImageClassification"),
    "image-to-text": ("multimodal", "ImageToText"),
    "visual-question-answering": ("multimodal", "VisualQuestionAnswering"),
    "automatic-speech-recognition": ("speech", "SpeechRecognition"),
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
TRANSLATION = re.compile(r"translation_[A-Za-z0-9-]+_to_[A-Za-z0-9-]+")  # languages in the name
_added: dict[str, type[Task]] = {}
_lock = threading.Lock()


def register_task(name: str, task: type[Task], *, replace: bool = False) -> type[Task]:
    """Make `hw.pipeline(name, ...)` use the class `task`; a name that is taken needs `replace=True`."""
    from headway.pipelines.task import Task

    if not isinstance(name, str) or not name.strip():
        raise InvalidInput(f"a task's name is {name!r}; it takes a text that is not empty")
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise WrongType(f"{task!r} is no class derived from headway.Task")
    with _lock:
        if not replace and (name in _added or name in BUILT_IN or name in ALIASES):
            raise InvalidInput(
                f"there is a task {name!r} already; pass replace=True to put {task.__name__} in its place"
            )
        _added[name] = task
    return task


def task_named(name: str) -> tuple[str, type[Task]]:
    """The task's own name and its class."""
    if not isinstance(name, str):
        raise WrongType(f"the task is {name!r}; it takes a name such as 'text-classification'")
    own = name if name in _added else ALIASES.get(name, name)
    if own in _added:
        return own, _added[own]
    built_in = "translation" if TRANSLATION.fullmatch(own) else own
    if built_in not in BUILT_IN:
        close = difflib.get_close_matches(own, task_names(), n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise Unsupported(f"there is no task {name!r}{hint} Known tasks: {', '.join(task_names())}")
    module, kind = BUILT_IN[built_in]
    return own, getattr(import_module(f"headway.pipelines.tasks.{module}"), kind)


def task_names() -> list[str]:
    """Every task that can be asked for."""
    return sorted({*BUILT_IN, *_added})
