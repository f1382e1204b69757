"""The supported families. A family is a small file: what its config means and where it differs from plain Llama."""

from __future__ import annotations

from headway.base.errors import UnsupportedModel
from headway.models.families import llama, mistral, qwen2, qwen3
from headway.models.families.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def by_architecture(name: str) -> Family:
    """The family whose config.json says this architecture."""
    for family in FAMILIES:
        if name in family.architectures:
            return family
    known = ", ".join(sorted(a for family in FAMILIES for a in family.architectures))
    raise UnsupportedModel(f"the architecture {name!r} is not supported; supported are {known}")


def by_gguf(name: str) -> Family:
    """The family whose GGUF files say this architecture."""
    for family in FAMILIES:
        if name == family.gguf:
            return family
    known = ", ".join(sorted(family.gguf for family in FAMILIES if family.gguf))
    raise UnsupportedModel(f"the GGUF architecture {name!r} is not supported; supported are {known}")
