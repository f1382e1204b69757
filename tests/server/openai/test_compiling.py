"""Grammars of requests are compiled in threads, whatever they are combined with: never in the server's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.program.constraints.cache import GrammarCache
from headway.testing import ScriptedRunner
from support.live import Live, live
from support.sweeps import swept

USER = {"role": "user", "content": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def schema(name: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "maxLength": 3, "pattern": f"^{name}*$"}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


def shaped(name: str) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema(name)}}}


def tool(name: str) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema(name)}}]}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bad words": (CHAT, {"messages": [USER], "bad_words": ["zebra"], **shaped("a")}),
    "tools": (CHAT, {"messages": [USER], **tool("b"), **shaped("c")}),
    "a required tool": (CHAT, {"messages": [USER], **tool("d"), "tool_choice": "required"}),
    "a required tool and bad words": (
        CHAT,
        {"messages": [USER], **tool("e"), "tool_choice": "required", "bad_words": ["zebra"]},
    ),
    "several choices": (CHAT, {"messages": [USER], "n": 2, **shaped("g")}),
    "beams": (TEXT, {"prompt": "x", "use_beam_search": True, "n": 2, "structured_outputs": {"json": schema("h")}}),
    "a minimum": (TEXT, {"prompt": "x", "min_tokens": 3, "structured_outputs": {"regex": "[j-k]{2,4}l"}}),
    "a custom tool": (
        CHAT,
        {
            "messages": [USER],
            "tools": [
                {
                    "type": "custom",
                    "custom": {
                        "name": "g",
                        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[m-n]{2,5}o"}},
                    },
                }
            ],
            "tool_choice": "required",
        },
    ),
}


@pytest.fixture(scope="module")
def scripted(smollm2_path: Path) -> Iterator[Live]:
    """A server whose model costs nothing."""
    engine = hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=400, threads=1)
    with live(engine) as server:
        yield server


@pytest.mark.parametrize("name", swept(REQUESTS, 4))
def test_a_grammar_is_compiled_outside_the_event_loop(
    scripted: Live, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, bool]] = []
    real = GrammarCache.compile

    def watched(self: GrammarCache, *args: Any) -> Any:
        compiled.append((threading.current_thread().name, asyncio._get_running_loop() is not None))
        return real(self, *args)

    monkeypatch.setattr(GrammarCache, "compile", watched)
    path, body = REQUESTS[name]
    answer = scripted.post(path, max_tokens=12, **body)
    assert answer.status == 200, answer.body[:300]
    assert compiled
    assert [thread for thread, in_loop in compiled if in_loop] == []
