"""The tokenizer and the chat template of a model, from the folder of its weights or from its GGUF file.

They are read on first use. A model that has neither is valid: callers that need one raise.
"""

from __future__ import annotations

import threading
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.system.gc_paused import gc_paused
from headway.models.files.gguf import GgufFile, read_header

TEMPLATES = "headway.text.templates.sandbox"  # with jinja2, whose import takes as long as a vocabulary

if TYPE_CHECKING:
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer


class ModelText:
    """The tokenizer and template of the model at `path`; None for a model in memory, which has neither."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._header = read_header(path) if path is not None and path.is_file() else None  # until text is read

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._loaded[0]

    @property
    def template(self) -> ChatTemplate | None:
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[Tokenizer | None, ChatTemplate | None]:
        with gc_paused():
            loaded = _read(self._path)
        self._header = None
        return loaded


def _read(path: Path | None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    if path is None:
        return None, None
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer

    if path.is_dir():
        tokenizer = Tokenizer.from_folder(path)
        return tokenizer, None if tokenizer is None else ChatTemplate.from_folder(path, tokenizer)
    with GgufFile.open(path) as file:
        metadata = dict(file.metadata)
    if "tokenizer.chat_template" in metadata:  # while the native library builds the vocabulary, the interpreter is free
        threading.Thread(target=import_module, args=(TEMPLATES,), name="headway-templates").start()
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, None if tokenizer is None else ChatTemplate.from_gguf(metadata, tokenizer)
