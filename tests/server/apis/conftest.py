"""One server for the APIs beside OpenAI's chats: its model says what a test wants, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway.server.keys import add_key
from support.live import Answer, Live, live
from support.speaker import TEMPLATES, Stage, speaking_folder

END = "<|im_end|>"


class Scene:
    """The model's words, and the server."""

    def __init__(self, stage: Stage, server: Live, keys: dict[str, str]) -> None:
        self.stage, self.server, self.keys = stage, server, keys
        self.engine, self.url = server.engine, server.url

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """An answer to a request with Ada's key."""
        return self.server.ask(method, path, body, {"authorization": f"Bearer {self.keys['ada']}"})

    def say(self, *texts: str) -> None:
        self.stage.say(*texts, end=END)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = speaking_folder(tmp_path_factory.mktemp("speaker"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen.jinja").read_text())
    return Stage(folder)


@pytest.fixture(scope="session")
def scene(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {name: add_key(path, name) for name in ("ada", "bob")}
    limits = {"max_stored_responses": 4, "max_stored_bytes": 8000, "max_messages": 12}
    with live(stage.engine, model="speaker", key_file=path, **limits) as server:
        yield Scene(stage, server, keys)
