"""A server with a small random model, for requests by the thousand; and one with every route there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.server import lab
from headway.server.keys import add_key
from headway.server.pooling import PoolingModels
from support import encoders, senses
from support.adapter_files import saved_adapter
from support.live import Live, live
from support.small import small_engine

LIMITS: dict[str, Any] = {
    "max_queue_tokens": 20_000,
    "max_grammar_seconds": 3.0,
    "request_timeout": 60.0,
    "stored_seconds": 0.5,
}
ADAPTER = "red"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("small") / "model"
    with live(small_engine(folder), **LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def whole(guest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, str]]:
    """A server with the Lab, with models for embeddings, scores, labels and speech, with adapters to load and programs
    to run, and its admin key."""
    root = tmp_path_factory.mktemp("whole")
    parts = {
        "embed": (encoders.model("bert", "base"), encoders.tokenizer("bert")),
        "rerank": (encoders.model("bert", "classify", num_labels=1), encoders.tokenizer("bert")),
        "classify": (encoders.model("bert", "classify"), encoders.tokenizer("bert")),
        "audio": senses.whisper(languages=True),
    }
    for role, saved in parts.items():
        for part in saved:
            part.save_pretrained(root / role)
    engine = small_engine(root / "model")
    saved_adapter(root / "loras" / ADAPTER, engine.config, seed=1)
    pooling = PoolingModels({role: str(root / role) for role in parts}, device="cpu")
    limits = LIMITS | {"stored_seconds": 600.0, "lora_dir": root / "loras", "allow_chat_template": True}
    key = add_key(root / "keys.json", "admin", admin=True)
    limits |= {"programs": "sandbox", "program_dir": root / "programs", "max_program_cpu": 1.0, "max_key_cpu": 1e6}
    with live(engine, pooling, key_file=root / "keys.json", routers=[lab.router], **limits) as server:
        yield server, key
