"""Text models inside of models with images and sound: what config.json and the files' names say of them.

Gemma3ForConditionalGeneration
  text_config           ──▶ the config of a text model
  language_model.model.…, language_model.lm_head.…  or  model.language_model.…, lm_head.…  ──▶ model.…, lm_head.…
  everything else       is left out
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headway.base.errors import BadModelFile, Unsupported
from headway.base.text import short_repr
from headway.models.families import FAMILIES
from headway.models.families.family import Family

HEAD, TEXT, OLDER_TEXT = "lm_head.", "model.language_model.", "language_model."
FLAT = ("qwen2_vl", "qwen2_5_vl")  # older folders have the text model's keys beside the others'


def outer_family(data: Mapping[str, Any]) -> tuple[Family, str] | None:
    """The family of the text model in a model with images or sound, and what it calls itself; None for other models."""
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None  # as text_config leaves it, from_hf refuses it
    found = [(family, family.outer[names[0]]) for family in FAMILIES if names[0] in family.outer]
    text = data.get("text_config")
    own = text.get("model_type") if isinstance(text, dict) else None
    return next((each for each in found if each[1] == own), found[0] if found else None)


def text_config(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model; all of it, where there is nothing else."""
    if (found := outer_family(data)) is None:
        return data
    (family, kind), outer = found, data["architectures"][0]
    text = data if data.get("model_type") in FLAT and "text_config" not in data else data.get("text_config")
    if not isinstance(text, dict):
        raise BadModelFile(f"config.json: text_config is {short_repr(text)}; {outer} has its text model's keys there")
    if text is not data and text.get("model_type", kind) != kind:
        raise Unsupported(
            f"config.json: the text model of {outer} is {text['model_type']!r} (text_config.model_type); supported are "
            f"{', '.join(f.outer[outer] for f in FAMILIES if outer in f.outer)}"
        )
    if data.get("quantization_config") or data.get("compression_config"):
        raise Unsupported(
            f"config.json: {outer} with quantized weights is not supported; use its float weights, or a GGUF file"
        )
    tied = [own["tie_word_embeddings"] for own in (data, text) if "tie_word_embeddings" in own]
    named: dict[str, Any] = {"architectures": [family.architectures[0]], "model_type": family.model_types[0]}
    named |= {"tie_word_embeddings": True in tied} if tied else {}
    return {**text, **named}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The tensors of the text model: its own name for each, and the files'."""
    every = tuple(names)
    if any(name.startswith(TEXT) for name in every):
        own = {"model." + name.removeprefix(TEXT): name for name in every if name.startswith(TEXT)}
        return own | {name: name for name in every if name.startswith(HEAD)}
    if any(name.startswith(OLDER_TEXT) for name in every):
        return {name.removeprefix(OLDER_TEXT): name for name in every if name.startswith(OLDER_TEXT)}
    return {name: name for name in every if name.startswith(("model.", HEAD))}
