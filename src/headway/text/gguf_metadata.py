"""The tokenizer of a Hugging Face folder as GGUF metadata: what `gguf_vocab` reads.

Byte-level BPE with a pre-tokenizer that GGUF files have a name for, and SentencePiece BPE (`gguf_pieces`). It is never
guessed: another one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.base.errors import Unsupported
from headway.base.files import read_json
from headway.text.gguf_pieces import has_space_prefix, is_pieces, kinds_of, scores_of
from headway.text.gguf_vocab import CONTROL, DIGITS, GPT2, KEY, NORMAL, PRE_TOKENIZERS, USER_DEFINED

Value = str | int | bool | Sequence[str] | Sequence[int] | Sequence[float]
UNUSED = 5
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
SPECIAL |= {"unk_token": "unknown_token_id"}


def gguf_metadata(folder: Path, vocab_size: int) -> dict[str, Value]:
    """Tokens, merges, special tokens and chat template; a folder without a tokenizer has none."""
    data = read_json(folder / "tokenizer.json")
    if not data.get("model"):
        return {KEY + "model": "no_vocab"}
    model, settings = data["model"], read_json(folder / "tokenizer_config.json")
    if model.get("type") != "BPE":
        raise _refused(folder)
    added = {entry["id"]: entry for entry in data.get("added_tokens") or ()}
    texts = {id: text for text, id in model["vocab"].items()} | {id: entry["content"] for id, entry in added.items()}
    ids = range(max(vocab_size, max(texts) + 1))
    kinds = [_kind(added.get(id)) if id in texts else UNUSED for id in ids]
    tokens = [texts.get(id, f"[PAD{id}]") for id in ids]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    found: dict[str, Value] = {KEY + "tokens": tokens, KEY + "merges": merges}
    if is_pieces(data):
        kinds = kinds_of(tokens, kinds, model.get("unk_token"))
    found[KEY + "token_type"] = kinds
    numbers = {text: id for id, text in texts.items()}
    for name, key in SPECIAL.items():
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text in numbers:
            found[KEY + key] = numbers[text]
    found[KEY + "add_bos_token"] = bos = _adds_bos(data, found, settings)
    if is_pieces(data):
        found |= _pieces(folder, data, tokens, kinds, bos=bos)
    else:
        found |= {KEY + "model": "gpt2", KEY + "pre": _pre_name(folder, data)}
    if template := _template(folder, settings):
        found["tokenizer.chat_template"] = template
    return found


def _pieces(
    folder: Path, data: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], *, bos: bool
) -> dict[str, Value]:
    """The model `llama`, whose scores say the merges; where none do, `gemma4`, which has merges, a BOS, no ▁ in front,
    and no token of line ends and others."""
    prefix = has_space_prefix(folder, data)
    merges = [_pair(pair) if isinstance(pair, str) else tuple(pair) for pair in data["model"]["merges"]]
    lines = all(set(text) == {"\n"} or "\n" not in text for text, kind in zip(tokens, kinds) if kind == NORMAL)
    try:
        scores = scores_of(folder, tokens, kinds, merges)
    except Unsupported:
        if prefix or not bos or not lines:
            raise
        return {KEY + "model": "gemma4"}
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "add_space_prefix": prefix,
        KEY + "scores": scores,
    }


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _kind(entry: Mapping[str, Any] | None) -> int:
    return NORMAL if entry is None else CONTROL if entry.get("special") else USER_DEFINED


def _pre_name(folder: Path, data: Mapping[str, Any]) -> str:
    """The name of its pre-tokenizer: the first with the same steps, normalization and way to merge."""
    steps = tuple(_steps(data.get("pre_tokenizer") or {}))
    nfc = (data.get("normalizer") or {}).get("type") == "NFC"
    whole = bool(data["model"].get("ignore_merges", False))
    for name, pre in PRE_TOKENIZERS.items():
        if (pre.steps, pre.nfc, pre.ignore_merges) == (steps, nfc, whole):
            return name
    raise _refused(folder)


def _refused(folder: Path) -> Unsupported:
    return Unsupported(
        f"the tokenizer of {folder} is not byte-level BPE with a pre-tokenizer that GGUF files name, nor SentencePiece "
        "BPE; use --to int8, int4 or fp8"
    )


def _steps(step: Mapping[str, Any]) -> Iterator[str]:
    match step.get("type"):
        case "Sequence":
            for each in step["pretokenizers"]:
                yield from _steps(each)
        case "Split" if step.get("behavior") == "Isolated" and not step.get("invert"):
            yield str(step["pattern"].get("Regex"))
        case "Digits" if step.get("individual_digits"):
            yield DIGITS
        case "ByteLevel" if not step.get("add_prefix_space"):
            if step.get("use_regex", True):
                yield GPT2
        case other:
            yield f"<{other}>"


def _adds_bos(data: Mapping[str, Any], found: Mapping[str, Value], settings: Mapping[str, Any]) -> bool:
    """Whether texts begin with the first token: the template of tokenizer.json decides, else the settings."""
    bos, post = found.get(KEY + "bos_token_id"), data.get("post_processor") or {}
    if bos is None:
        return False
    parts = [post, *(post.get("processors") or ())]
    singles = [part["single"] for part in parts if part.get("type") == "TemplateProcessing"]
    if singles:
        return any("SpecialToken" in single[0] for single in singles if single)
    return bool(settings.get("add_bos_token", False))


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    value = settings.get("chat_template")
    if isinstance(value, list):  # several by name
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
