"""The task of a model, for `hw.pipeline(model=...)` without one: read from its config, nothing is loaded.

The architecture in config.json is looked up in transformers' own tables of models with a head for a task. A GGUF file
and an Engine generate text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.base.errors import InvalidInput, UnsupportedModel
from headway.models.hub.store import resolve
from headway.pipelines.backends.loading import config_of, transformers
from headway.program.engine import Engine

# transformers' tables, in order: the first that has a model's architecture decides
TABLES: tuple[tuple[str, str], ...] = (
    ("CAUSAL_LM", "text-generation"),
    ("AUDIO_CLASSIFICATION", "audio-classification"),
    ("SEQUENCE_CLASSIFICATION", "text-classification"),
    ("TOKEN_CLASSIFICATION", "token-classification"),
    ("QUESTION_ANSWERING", "question-answering"),
    ("CTC", "automatic-speech-recognition"),
    ("SPEECH_SEQ_2_SEQ", "automatic-speech-recognition"),
    ("VISUAL_QUESTION_ANSWERING", "visual-question-answering"),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "zero-shot-image-classification"),
    ("IMAGE_CLASSIFICATION", "image-classification"),
    ("MASKED_LM", "fill-mask"),
    ("SEQ_TO_SEQ_CAUSAL_LM", "text2text-generation"),
    ("IMAGE_TEXT_TO_TEXT", "image-to-text"),
    ("VISION_2_SEQ", "image-to-text"),
)
BODIES = (("IMAGE", "image-feature-extraction"), ("", "feature-extraction"))


def task_of(model: Any) -> str:
    """The name of the task that `model` was trained for."""
    if model is None:
        raise InvalidInput("neither a task nor a model was given; pass one of them, such as 'text-classification'")
    if isinstance(model, Engine) or (isinstance(model, (str, Path)) and resolve(model).is_file()):
        return "text-generation"
    config = config_of(model)
    family, names = str(config.get("model_type", "")), [str(name) for name in config.get("architectures") or ()]
    for name in names:
        if (task := _in_tables(family, name)) is not None:
            return task
    raise UnsupportedModel(
        f"the task of a {family or 'unknown'} model ({', '.join(names) or 'unknown architecture'}) cannot be told from "
        "its config; pass the task too, as in pipeline('text-classification', model=...)"
    )


def _in_tables(family: str, name: str) -> str | None:
    transformers()
    from transformers.models.auto import modeling_auto

    tables = [(f"MODEL_FOR_{table}_MAPPING_NAMES", task) for table, task in TABLES]
    tables += [(f"MODEL_{'FOR_' + kind + '_' if kind else ''}MAPPING_NAMES", task) for kind, task in BODIES]
    for table, task in tables:
        known = getattr(modeling_auto, table, {}).get(family, ())
        if name == known or (not isinstance(known, str) and name in known):
            return task
    return None
