"""One server for the APIs beside OpenAI's chats: its model says what a test wants, with reasoning and tool calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.server.keys import add_key
from support import mcp_tools
from support.live import Answer, Live, live
from support.mcp_hostile import hostile
from support.speaker import TEMPLATES, Stage, speaking_folder

END = "<|im_end|>"


class McpScene:
    """MCP servers, and the operator's file that names them."""

    def __init__(self, url: str, hostile_url: str, seen: list[tuple[str, str]], folder: Path) -> None:
        self.url, self.hostile_url, self.seen, self.file = url, hostile_url, seen, folder / "mcp.json"
        servers: dict[str, Any] = {
            "local": _python(mcp_tools.__file__) | {"env": {"SECRET": "all's"}, "timeout": 100},
            "web": {"url": url, "headers": {"Authorization": "Bearer all"}, "timeout": 100},
            "bobs": {"url": url, "keys": ["bob"]},
            "few": {"url": url, "allowed_tools": ["weather"], "timeout": 100},
            "hangs": _python("-c", "import time; time.sleep(600)") | {"timeout": 1},
            "ends": _python("-c", "pass"),
            "talks": _python("-c", "print('hello', flush=True)\nimport time; time.sleep(600)"),
            "floods": _python("-c", "import sys\nwhile True: sys.stdout.write('x' * 65536)"),
            "missing": {"command": "/nonexistent/server"},
        }
        servers["local"]["credentials"] = {"bob": {"env": {"SECRET": "bob's"}}}
        servers["web"]["credentials"] = {"ada": {"headers": {"Authorization": "Bearer ada"}}}
        for how in ("list-hang", "call-hang", "call-endless"):
            servers[f"slow-{how}"] = {
                "url": f"{hostile_url}/{how}",
                "timeout": 3,
            }  # what comes first takes its time too
        self.file.write_text(json.dumps({"servers": servers, "hosts": ["127.0.0.1", "tools.example"]}))


def _python(*arguments: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": list(arguments)}


class Scene:
    """The model's words, and the server."""

    def __init__(self, stage: Stage, server: Live, keys: dict[str, str], mcp: McpScene) -> None:
        self.stage, self.server, self.keys, self.mcp = stage, server, keys, mcp
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
    limits |= {"max_tool_rounds": 3, "max_tool_calls": 4, "max_tool_output": 1000}
    with mcp_tools.over_http() as url, hostile() as (hostile_url, seen):
        mcp = McpScene(url, hostile_url, seen, path.parent)
        with live(stage.engine, model="speaker", key_file=path, mcp_file=mcp.file, **limits) as server:
            yield Scene(stage, server, keys, mcp)
