"""Text ↔ token ids (`Tokenizer`), ids → streamed text (`TextStream`), messages → prompt (`ChatTemplate`).

Each is imported when it is first used: the remote client needs the parts of replies alone, and no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.text.stream import TextStream
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextStream", "Tokenizer"]
_MODULES = {"ChatTemplate": "templates.chat_template", "TextStream": "stream", "Tokenizer": "tokenizer"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'headway.text' has no attribute {name!r}")
    return getattr(import_module(f"headway.text.{_MODULES[name]}"), name)
