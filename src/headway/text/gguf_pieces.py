"""A SentencePiece tokenizer of a Hugging Face folder as GGUF metadata of the model `llama`: tokens, scores and types.

Such a tokenizer.json is BPE with byte fallback over texts whose spaces are ▁. A GGUF file has no merges for it but a
score for each token: the pair that makes the token with the highest score is merged first. The scores are the order of
merges, which is checked to say the same: a tokenizer that is more than that is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.base.errors import Unsupported
from headway.text.gguf_vocab import BYTE, NORMAL, SPACE, UNKNOWN, merges_from_scores

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
SPLIT = {"type": "Split", "pattern": {"String": " "}}  # no space is left when it comes
DECODERS = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def is_pieces(data: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is BPE with byte fallback, as SentencePiece tokenizers are."""
    return data["model"].get("type") == "BPE" and bool(data["model"].get("byte_fallback"))


def has_space_prefix(folder: Path, data: Mapping[str, Any]) -> bool:
    """Whether ▁ goes before every text. Raises for steps that a GGUF file cannot say."""
    normal, pre = data.get("normalizer"), data.get("pre_tokenizer") or {}
    steps = _listed(normal, "normalizers")
    prefix = steps == [PREPEND, REPLACE]
    metaspace = normal is None and pre.get("type") == "Metaspace"
    if metaspace:
        scheme = pre.get("prepend_scheme", "always")
        prefix = scheme == "always"
        if scheme not in ("always", "never") or pre.get("split", True) or pre.get("replacement") != SPACE:
            raise _refused(folder, f"a pre-tokenizer that is {pre!r}; it can have prepend_scheme always or never")
    elif not prefix and steps != [REPLACE]:
        raise _refused(folder, f"a normalizer that is {normal!r}")
    elif pre and {key: pre.get(key) for key in SPLIT} != SPLIT:
        raise _refused(folder, f"a pre-tokenizer that is {pre!r}")
    decoder, wanted = _listed(data.get("decoder"), "decoders"), DECODERS + [STRIP] * prefix
    if decoder != wanted and not (metaspace and decoder and decoder[0].get("type") in ("Metaspace", "Replace")):
        raise _refused(folder, f"a decoder that is {data.get('decoder')!r}")
    return prefix


def kinds_of(texts: Sequence[str], kinds: Sequence[int], unknown: str | None) -> list[int]:
    """Types of tokens: those of bytes, and the one for what has no token, are their own."""
    found = []
    for text, kind in zip(texts, kinds, strict=True):
        byte = kind == NORMAL and BYTE_TOKEN.fullmatch(text)
        found.append(UNKNOWN if text == unknown else BYTE if byte else kind)
    return found


def scores_of(
    folder: Path, texts: Sequence[str], kinds: Sequence[int], merges: Sequence[tuple[str, str]]
) -> list[float]:
    """Scores by which pairs are merged in the order of `merges`."""
    order: dict[str, int] = {}
    for left, right in merges:
        order.setdefault(left + right, len(order))
    scores = [-float(order.get(text, len(order))) for text in texts]
    normal = {text for text, kind in zip(texts, kinds, strict=True) if kind == NORMAL}
    given = [pair for pair in merges if {*pair, pair[0] + pair[1]} <= normal]
    made = merges_from_scores(texts, kinds, scores)
    if set(given) != set(made):
        pair = next(iter(set(given) ^ set(made)))
        raise _refused(folder, f"merges that are not all ways to make each token, such as {pair!r}")
    if [left + right for left, right in given] != [left + right for left, right in made]:
        raise _refused(folder, "merges that are not in the order of the tokens that they make")
    return scores


def _listed(step: Any, key: str) -> list[Any]:
    """A sequence of steps, or the one that there is."""
    if step is None:
        return []
    return list(step[key]) if step.get("type") == "Sequence" else [step]


def _refused(folder: Path, what: str) -> Unsupported:
    return Unsupported(
        f"the tokenizer of {folder} has {what}, which a GGUF file of a SentencePiece tokenizer cannot say; use --to "
        "int8, int4 or fp8"
    )
