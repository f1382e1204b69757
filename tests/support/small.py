"""A small random model that is served as any other is: real weights and pages, a tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import headway as hw
from support.live import Live
from support.speaker import TEMPLATES, speaking_folder

POSITIONS = 256
PROMPT = "the quick brown fox"


def small_folder(folder: Path, *, template: str = "hermes", **config: Any) -> Path:
    """A folder with such a model; `config` replaces what its config.json says."""
    made = speaking_folder(folder)
    (made / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    path = made / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": POSITIONS} | config))
    return made


def small_engine(folder: Path, *, pages: int = 256, **options: Any) -> hw.Engine:
    return hw.Engine(small_folder(folder, **options), threads=1, pages=pages)


def tokens_of(served: Live, prompt: str = PROMPT, **more: Any) -> list[Any]:
    """What a neighbor gets: the tokens it draws and their log-probabilities, with a seed of its own."""
    asked = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "logprobs": 0, "ignore_eos": True} | more
    (choice,) = served.complete(prompt, **asked)["choices"]
    return [choice["text"], choice["logprobs"]["tokens"]]


def at_rest(served: Live) -> None:
    """Wait until nothing is under way; then no page may be held, and every page be free or cached."""
    served.until(served.is_quiet)
    served.engine._allocator.check([])
