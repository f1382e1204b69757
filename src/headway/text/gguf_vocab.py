"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

A GGUF file has no tokenizer.json: it lists tokens, merges or scores, and names its pre-tokenizer. Two models are known:
`gpt2` (byte-level BPE, pre-tokenized as `tokenizer.ggml.pre` says) and `llama` (SentencePiece BPE). The result is the
tokenizer the model was trained with, following the original tokenizer.json of each family, including its Unicode
normalization. A name that is not in the table is refused, never guessed.

Byte-level vocabularies may lack a byte (SmolLM2 has no 0x04): such bytes have no id and encode to nothing, as in the
model's own tokenizer. `add_space_prefix` matters for `llama` only, as in the programs that write these files.

The metadata is not trusted: a wrong type, a mismatched length or an id out of range raises `BadModelFile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.kernels.native.bpe import Bpe, StringTable
from headway.text.native_bpe import MAX_TOKEN_CHARS, NativeBpe, merges_into

if TYPE_CHECKING:
    import tokenizers

KEY = "tokenizer.ggml."
MODELS = ("gpt2", "llama", "gemma4")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "▁"


@dataclass(frozen=True)
class GgufVocab:
    """The tokenizer in the metadata: the backend, the special ids, and whether to add BOS."""

    backend: tokenizers.Tokenizer
    tokens: tuple[str, ...]
    special: SpecialTokens


@dataclass(frozen=True)
class PreTokenizer:
    """How one family splits text into words: regexes in order, or a named step."""

    steps: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    add_bos: bool = False


DIGITS, FALCON = "<digits>", "<falcon>"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
    + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with case, as DeepSeek lists them. By code point, as many look alike.
_DEEPSEEK_LETTERS = "".join(
    f"\\x{{{low:x}}}-\\x{{{high:x}}}"
    for low, high in (
        *((0x41, 0x5A), (0x61, 0x7A), (0xB5, 0xB5), (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x1BA), (0x1BC, 0x1BF)),
        *((0x1C4, 0x293), (0x295, 0x2AF), (0x370, 0x373), (0x376, 0x377), (0x37B, 0x37D), (0x37F, 0x37F)),
        *((0x386, 0x386), (0x388, 0x38A), (0x38C, 0x38C), (0x38E, 0x3A1), (0x3A3, 0x3F5), (0x3F7, 0x481)),
        *((0x48A, 0x52F), (0x531, 0x556), (0x10A0, 0x10C5), (0x13A0, 0x13F5), (0x13F8, 0x13FD), (0x1C90, 0x1CBA)),
        *((0x1CBD, 0x1CBF), (0x1D00, 0x1D2B), (0x1D6B, 0x1D77), (0x1D79, 0x1D9A), (0x1E00, 0x1F15)),
        *((0x1F18, 0x1F1D), (0x1F20, 0x1F45), (0x1F48, 0x1F4D), (0x1F50, 0x1F57), (0x1F59, 0x1F59)),
        *((0x1F5B, 0x1F5B), (0x1F5D, 0x1F5D), (0x1F5F, 0x1F7D), (0x1F80, 0x1FB4), (0x1FB6, 0x1FBC)),
        *((0x1FBE, 0x1FBE), (0x1FC2, 0x1FC4), (0x1FC6, 0x1FCC), (0x1FD0, 0x1FD3), (0x1FD6, 0x1FDB)),
        *((0x1FE0, 0x1FEC), (0x1FF2, 0x1FF4), (0x1FF6, 0x1FFC), (0x2102, 0x2102), (0x2107, 0x2107)),
        *((0x210A, 0x2113), (0x2115, 0x2115), (0x2119, 0x211D), (0x2124, 0x2124), (0x2126, 0x2126)),
        *((0x2128, 0x2128), (0x212A, 0x212D), (0x212F, 0x2134), (0x2139, 0x2139), (0x213C, 0x213F)),
        *((0x2145, 0x2149), (0x214E, 0x214E), (0x2183, 0x2184), (0x2C00, 0x2C7B), (0x2C7E, 0x2CE4)),
        *((0x2CEB, 0x2CEE), (0x2CF2, 0x2CF3), (0xA640, 0xA66D), (0xA680, 0xA69B), (0xA722, 0xA76F)),
        *((0xA771, 0xA787), (0xA78B, 0xA78E), (0xAB70, 0xABBF), (0xFB00, 0xFB06), (0xFB13, 0xFB17)),
        *((0xFF21, 0xFF3A), (0xFF41, 0xFF5A), (0x10400, 0x1044F), (0x104B0, 0x104D3), (0x104D8, 0x104FB)),
        *((0x10C80, 0x10CB2), (0x10CC0, 0x10CF2), (0x118A0, 0x118DF), (0x1E900, 0x1E943)),
    )
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[" + _DEEPSEEK_LETTERS + r"]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Without Chinese characters, which are words of their own.
_KIMI_UPPER, _KIMI_LOWER = (rf"[{letters}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    r"[\p{Han}]+"
    f"|{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _TAIL
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_VIKING = (" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"), PreTokenizer((GPT2,))
    ),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer((GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), PreTokenizer((DIGITS, GPT2))),
    "command-r": PreTokenizer((DIGITS, GPT2), nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2"), PreTokenizer((_QWEN2,), nfc=True)),
    **dict.fromkeys(("megrez", "kormo"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "minicpm5": PreTokenizer(_MINICPM5, ignore_merges=True),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "viking": PreTokenizer(_VIKING),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
    "falcon": PreTokenizer((FALCON,)),
}


def read_vocab(metadata: Mapping[str, object]) -> GgufVocab | None:
    """The tokenizer in the metadata; None if it has none."""
    model = metadata.get(KEY + "model")
    if model in (None, "no_vocab", "none") and KEY + "tokens" not in metadata:
        return None
    if not isinstance(model, str):
        raise BadModelFile(f"{KEY}model is {model!r}; it should name a tokenizer model ({', '.join(MODELS)})")
    if model not in MODELS:
        raise Unsupported(f"the GGUF tokenizer model {model!r} is not supported; supported are {', '.join(MODELS)}")
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    if model == "gpt2":
        pre = _pre(metadata)
        backend, add_bos = _byte_level(metadata, tokens, pre), pre.add_bos
    else:
        backend, add_bos = _sentencepiece(metadata, tokens, types), True
    special = _special_tokens(metadata, tokens, types, add_bos=add_bos)
    _add(backend, tokens, special)
    return GgufVocab(backend, tuple(tokens), special)


def read_native(metadata: Mapping[str, object]) -> tuple[NativeBpe, SpecialTokens] | None:
    """The same as `read_vocab`, without the tokenizers package's model; None where that one has to look."""
    tokens, merges = metadata.get(KEY + "tokens"), metadata.get(KEY + "merges")
    if (
        metadata.get(KEY + "model") != "gpt2"
        or not isinstance(tokens, StringTable)
        or not isinstance(merges, StringTable)
    ):
        return None
    bpe, pre = Bpe.build(tokens, merges, MAX_TOKEN_CHARS), _pre(metadata)
    if bpe is None:
        return None
    special = _special_tokens(metadata, bpe, _types(metadata, len(bpe)), add_bos=pre.add_bos)
    if any(merges_into(bpe, bpe[id]) for id in special.control):
        return None
    added = {id: bpe[id] for id in (*special.control, *special.user_defined)}
    how = {"composes": pre.nfc, "ignore_merges": pre.ignore_merges}
    return NativeBpe(bpe, _pre_tokenizer(pre), control=special.control, added=added, **how), special


# --- the two models


def _byte_level(metadata: Mapping[str, object], tokens: list[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _merges(metadata)
    if merges is None:
        raise BadModelFile(f"{KEY}merges is missing; a byte-level vocabulary (gpt2) needs it")
    backend = Tokenizer(_build(lambda: models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """BPE over the whole text with ▁ for spaces, one in front, and bytes for characters that have no token. Gemma 4's
    files have its merges, and no ▁ in front."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _merges(metadata)
    scored = metadata[KEY + "model"] == "llama"
    if merges is None and not scored:
        raise BadModelFile(f"{KEY}merges is missing; the vocabulary of Gemma 4 needs it")
    if merges is None:
        merges = merges_from_scores(tokens, types, _scores(metadata, len(tokens)))
    unknown = next((tokens[id] for id, kind in enumerate(types) if kind == UNKNOWN), None)
    backend = Tokenizer(
        _build(lambda: models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    )
    prefix = _flag(metadata, "add_space_prefix", scored)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if prefix else [replace])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to merge two tokens into a normal token, best score first.

    Only normal tokens take part: plain text never becomes a control or byte token.
    """
    ids = {token: id for id, token in enumerate(tokens) if types[id] == NORMAL}
    ranked = [
        (-scores[id], -cut, cut - len(token), id, ids[token[:cut]], ids[token[cut:]])
        for token, id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(ranked)]


def _pre(metadata: Mapping[str, object]) -> PreTokenizer:
    name = metadata.get(KEY + "pre", "default")
    if not isinstance(name, str):
        raise BadModelFile(f"{KEY}pre is {name!r}; it must be a name")
    if name not in PRE_TOKENIZERS:
        raise Unsupported(
            f"the GGUF pre-tokenizer {name!r} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _pre_tokenizer(pre: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

    if pre.steps == (FALCON,):  # splits digits after the byte mapping, as Falcon was trained
        triples = Split(Regex("[0-9][0-9][0-9]"), "isolated")
        return Sequence([Punctuation("contiguous"), ByteLevel(add_prefix_space=False), Digits(), triples])
    cut: list[Any] = [Digits(individual_digits=True) if s == DIGITS else Split(Regex(s), "isolated") for s in pre.steps]
    return Sequence([*cut, ByteLevel(add_prefix_space=False, use_regex=False)])


def _build(build: Callable[[], Any]) -> Any:
    try:
        return build()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a merge whose result is unknown is a panic, which is not an Exception
        raise BadModelFile(f"{KEY}tokens and {KEY}merges do not form a tokenizer: {error}") from error


# --- special ids


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that the metadata names: begin and end, tokens that are not text, and tokens that text may spell."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    control: tuple[int, ...]
    user_defined: tuple[int, ...]
    names: dict[str, str]  # bos_token, eos_token, unk_token, pad_token → their text


def _special_tokens(
    metadata: Mapping[str, object], tokens: Sequence[str] | Bpe, types: list[int], *, add_bos: bool
) -> SpecialTokens:
    bos, eos = _id(metadata, "bos_token_id", tokens), _id(metadata, "eos_token_id", tokens)
    if metadata[KEY + "model"] == "llama":  # the ids of every such SentencePiece model
        bos = 1 if bos is None and len(tokens) > 1 and tokens[1] == "<s>" else bos
        eos = 2 if eos is None and len(tokens) > 2 and tokens[2] == "</s>" else eos
    ends = (eos, _id(metadata, "eot_token_id", tokens), _id(metadata, "eom_token_id", tokens))
    eos_ids = tuple(dict.fromkeys(id for id in ends if id is not None))
    roles = {id for id in (bos, *eos_ids) if id is not None}
    wants_bos = _flag(metadata, "add_bos_token", add_bos and bos is not None)
    if wants_bos and bos is None:
        raise BadModelFile(f"{KEY}add_bos_token is true and {KEY}bos_token_id is missing")
    named = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": _id(metadata, "unknown_token_id", tokens),
        "pad_token": _id(metadata, "padding_token_id", tokens),
    }
    other = [id for id, kind in enumerate(types) if kind != NORMAL]
    return SpecialTokens(
        bos,
        eos_ids,
        wants_bos,
        control=tuple(sorted({*(id for id in other if types[id] in (CONTROL, UNKNOWN)), *roles})),
        user_defined=tuple(id for id in other if types[id] == USER_DEFINED and id not in roles),
        names={name: tokens[id] for name, id in named.items() if id is not None},
    )


def _add(backend: tokenizers.Tokenizer, tokens: Sequence[str], special: SpecialTokens) -> None:
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(tokens[id], normalized=False, special=True) for id in special.control])
    backend.add_tokens([AddedToken(tokens[id], normalized=False, special=False) for id in special.user_defined])


# --- untrusted values


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _texts(metadata, "tokens")
    if not tokens:
        raise BadModelFile(f"{KEY}tokens is empty")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        id, size = next((id, len(token)) for id, token in enumerate(tokens) if len(token) > MAX_TOKEN_CHARS)
        raise BadModelFile(f"{KEY}tokens[{id}] has {size} characters; at most {MAX_TOKEN_CHARS} are allowed")
    if "" in tokens:  # an empty token matches nothing but keeps its id
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    if len(set(tokens)) == len(tokens):
        return tokens
    seen: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if seen.setdefault(token, id) != id:
            raise BadModelFile(f"{KEY}tokens[{id}] is {token!r}, and so is {KEY}tokens[{seen[token]}]")
    return tokens


def _merges(metadata: Mapping[str, object]) -> list[tuple[str, str]] | None:
    if KEY + "merges" not in metadata:
        return None
    merges = _texts(metadata, "merges")
    cuts = [merge.find(" ", 1) for merge in merges]
    for i, (merge, cut) in enumerate(zip(merges, cuts, strict=True)):
        if cut < 0 or cut == len(merge) - 1:
            raise BadModelFile(f"{KEY}merges[{i}] is {merge!r}; a merge is two tokens with a space between")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _types(metadata: Mapping[str, object], count: int) -> list[int]:
    if KEY + "token_type" not in metadata:
        return [NORMAL] * count
    values = _array(metadata, "token_type", count)
    if set(map(type, values)) <= {int}:
        return values
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadModelFile(f"{KEY}token_type[{i}] is {value!r}; it must be an integer")
    return values


def _scores(metadata: Mapping[str, object], count: int) -> list[float]:
    values = _array(metadata, "scores", count)
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModelFile(f"{KEY}scores[{i}] is {value!r}; it must be a finite number")
    return values


def _array(metadata: Mapping[str, object], name: str, count: int | None = None) -> list[Any]:
    value = metadata.get(KEY + name)
    if value is None:
        raise BadModelFile(f"{KEY}{name} is missing")
    values = getattr(value, "tolist", lambda: value)()  # numpy arrays become plain values
    if not isinstance(values, list | tuple):
        raise BadModelFile(f"{KEY}{name} is a {type(value).__name__}; it must be an array")
    if count is not None and len(values) != count:
        raise BadModelFile(f"{KEY}{name} has {len(values)} entries and {KEY}tokens has {count}")
    return list(values)


def _texts(metadata: Mapping[str, object], name: str) -> list[str]:
    """An array of strings; there may be hundreds of thousands, so they are checked one by one only if one is bad."""
    values = _array(metadata, name)
    try:
        "".join(values).encode("utf-8")  # a lone surrogate has no bytes
    except (TypeError, UnicodeError):
        return [_text(value, f"{KEY}{name}[{i}]") for i, value in enumerate(values)]
    return values


def _text(value: object, where: str) -> str:
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else value
        if isinstance(text, str):
            text.encode("utf-8")  # a lone surrogate has no bytes
            return text
    except UnicodeError as error:
        raise BadModelFile(f"{where} is {value!r}, which is not valid text: {error}") from error
    raise BadModelFile(f"{where} is {value!r}; it must be a string")


def _id(metadata: Mapping[str, object], name: str, tokens: Sized) -> int | None:
    value = metadata.get(KEY + name)
    if value is None:
        return None
    value = getattr(value, "item", lambda: value)()
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise BadModelFile(f"{KEY}{name} is {value!r}; it must be an id from 0 to {len(tokens) - 1}")
    return value


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(KEY + name, default)
    value = getattr(value, "item", lambda: value)()
    if not isinstance(value, bool):
        raise BadModelFile(f"{KEY}{name} is {value!r}; it must be true or false")
    return value
