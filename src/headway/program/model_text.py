"""The text side of a model: the tokenizer and the chat template that lie beside its weights, or in the same file.

Owns where they are found and when they are read, which is when somebody first asks. It never encodes or renders
anything, and a model that has neither is no error here: whoever needs one says so.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.gc_paused import gc_paused
from headway.models.files.gguf import GgufFile, read_header

if TYPE_CHECKING:
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer


class ModelText:
    """What a model of this path reads and writes text with; `path` is None for one that was made in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._header = read_header(path) if path is not None and path.is_file() else None  # until text is read

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._found[0]

    @property
    def template(self) -> ChatTemplate | None:
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Tokenizer | None, ChatTemplate | None]:
        with gc_paused():
            found = _read(self._path)
        self._header = None
        return found


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
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, None if tokenizer is None else ChatTemplate.from_gguf(metadata, tokenizer)
