"""A server that drafts for every request: the same responses as one that does not, and its counters."""

from __future__ import annotations

import re
from typing import Any

import headway as hw
from support.live import Live, live

LINE = "The quick brown fox jumps over the lazy dog, and the cat sleeps.\n"
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": 4 * LINE, "max_tokens": 40, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": 4 * LINE, "max_tokens": 40, "seed": 5, "stop": ["sleeps"], "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Repeat: " + LINE}], "max_tokens": 30, "seed": 3},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "A city?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
            "logprobs": True,
            "temperature": 0,
        },
    ),
]


def test_responses_are_the_same_and_drafts_are_counted(served: Live) -> None:
    engine = hw.Engine(served.engine.decoder, pages=256, threads=1)
    engine._model.text = served.engine._model.text  # a decoder in memory has no tokenizer
    with live(engine, drafter=hw.PromptLookup(adaptive=False)) as drafting:
        for path, body in REQUESTS:
            plain, drafted = (server.post(path, **body) for server in (served, drafting))
            assert plain.status == drafted.status == 200, drafted.body
            assert drafted.json["choices"] == plain.json["choices"]
            assert drafted.json["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"]
        metrics = drafting.get("/metrics").body.decode()
        counts = [
            float(re.search(rf"^{name}{{.*}} (.+)$", metrics, re.MULTILINE)[1])  # type: ignore[index]
            for name in ("headway_draft_tokens_total", "headway_accepted_draft_tokens_total")
        ]
        assert counts == [engine.stats().drafted, engine.stats().accepted]
        assert counts[0] > counts[1] > 5
        drafting.until(drafting.is_quiet)
