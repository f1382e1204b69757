"""Text ↔ token ids (`Tokenizer`), ids → streamed text (`TextStream`), messages → prompt (`ChatTemplate`)."""

from headway.text.stream import TextStream
from headway.text.templates.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextStream", "Tokenizer"]
