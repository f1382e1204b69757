"""Tasks whose items are texts. Owns how such items become rows; it never says what is made of the model's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.pipelines.task import PreparedItem, Task, check_text


class TextTask(Task):
    """A task whose items are encoded several at a time, which is quicker; one is a list of one."""

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return self.preprocess_many([item], options)[0]

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        assert self.loaded.text is not None
        return self.loaded.text.prepared([self.text_of(item) for item in items], options)

    def text_of(self, item: Any) -> str | tuple[str, str]:
        """The text or the pair that an item is; anything else is refused."""
        return check_text(item, self.wanted())
