"""A model's tokenizer: text → ids, ids → text, the bytes of one token, and the special ids.

Built from a Hugging Face folder (tokenizer.json etc.) or from GGUF metadata, around a `tokenizers.Tokenizer`. It never
adds BOS or EOS tokens by itself and never truncates.

Decoding is by bytes: the bytes of all tokens are joined and decoded as UTF-8, invalid ones as U+FFFD (one per maximal
subpart, as in Python and Rust). It never "cleans up" spaces. `TextStream` gives the same text incrementally.
"""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headway.base.checks import check_token_id
from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, InvalidToken, Unsupported, WrongType
from headway.base.files import read_json
from headway.base.text import check_unicode, short_repr
from headway.text.gguf_vocab import SPACE, read_native, read_vocab
from headway.text.native_bpe import NativeBpe
from headway.text.parts import cuts_anywhere, parts_of
from headway.text.templates.chat_template import gguf_template_sources, template_sources
from headway.text.tokenizer_json import ByteLevelFile, read_byte_level

if TYPE_CHECKING:
    import tokenizers

# Tokens that end a turn if the chat template uses them, whatever the config says about EOS.
END_MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|eot|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
)
LONG = 4096  # characters of a text that is encoded without the GIL, which `tokenizers` releases for batches only
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenDecoding:
    """How a token's text becomes bytes: `bytes` (byte-level alphabet), `spaces` (▁ and <0xNN>), or `opaque`.

    An opaque decoder (WordPiece, …) depends on neighboring tokens, so only whole sequences can be decoded.
    """

    kind: str
    byte_fallback: bool = False
    strip: int = 0  # spaces stripped from the front of a decoded sequence


class Tokenizer:
    """Text to ids and back for one model. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | NativeBpe,
        *,
        make_backend: Callable[[], tokenizers.Tokenizer] | None = None,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        add_bos: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is the largest id + 1, if known. `make_backend` gives what a native one stands for."""
        self._native = backend if isinstance(backend, NativeBpe) else None
        self._make_backend = make_backend
        self.bos_id, self.eos_ids, self.add_bos = bos_id, eos_ids, add_bos
        self.special_tokens = dict(special_tokens or {})
        if isinstance(backend, NativeBpe):
            self.special_ids = backend.control
            self.decoding = TokenDecoding("bytes")
            self.vocab_size, self._added = len(backend), backend.added
        else:
            self.backend = _prepared(backend)
            added = backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in added.items() if token.special)
            self.decoding = _token_decoding(backend)
            if vocab_size is None:
                vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            self.vocab_size = vocab_size
            self._added = {id: token.content for id, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.vocab_size} tokens, bos_id={self.bos_id}, eos_ids={self.eos_ids}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "a tokenizer cannot be pickled or copied; it never changes, and another process loads its own"
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder; None if it has no tokenizer.json."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        data = file.read_bytes()
        config = read_json(folder / "tokenizer_config.json")
        said = {**read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        source = read_byte_level(data)
        native = None if source is None else source.native(_missing(folder, said, source)[1])
        backend = native or _whole(folder, said, data, file)
        frame = source.frame if native is not None and source is not None else backend
        assert not isinstance(frame, NativeBpe)
        names, _ = _missing(folder, said, backend)
        bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
        bos, add_bos = _bos(frame, bos, config.get("add_bos_token"), folder, backend)
        eos = [backend.token_to_id(names["eos_token"])] if "eos_token" in names else []
        ends = [*_generation_eos(folder), *eos, *_end_markers(backend, template_sources(folder))]
        return cls(
            backend,
            make_backend=partial(_whole, folder, said, data, file),
            bos_id=bos,
            eos_ids=tuple(dict.fromkeys(ends)),
            add_bos=add_bos,
            special_tokens=names,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer | None:
        """The tokenizer in GGUF metadata; None if it has none."""
        native = read_native(metadata)
        vocab = read_vocab(metadata) if native is None else None
        if native is not None:
            (backend, special), size = native, len(native[0])
        elif vocab is not None:
            backend, special, size = vocab.backend, vocab.special, len(vocab.tokens)
        else:
            return None
        ends = [*special.eos_ids, *_end_markers(backend, gguf_template_sources(metadata))]
        return cls(
            backend,
            make_backend=partial(_gguf_backend, metadata),
            bos_id=special.bos_id,
            eos_ids=tuple(dict.fromkeys(ends)),
            add_bos=special.add_bos,
            special_tokens=special.names,
            vocab_size=size,
        )

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizers package's own, made when something asks for it."""
        assert self._make_backend is not None, "without a native one it is there from the start"
        return _prepared(self._make_backend())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`, without BOS or EOS. Names of special tokens are plain text unless `special`."""
        if not isinstance(text, str):
            raise WrongType(f"text is a {type(text).__name__}; it must be a str")
        check_unicode(text)
        if self._native is not None:
            return self._native.encode(text, special=special, whole=self._encode_whole)
        backend = self.backend if special else self._plain_backend()
        if len(text) <= LONG:
            return backend.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for part in self._parts(text, special=special):
            ids += backend.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    def _encode_whole(self, text: str) -> list[int]:
        return self._plain_backend().encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _parts(self, text: str, *, special: bool) -> Iterable[str]:
        """A text in parts with the same tokens, where there are any: the ids of megabytes take long to hand over."""
        backend = self.backend
        names = (name for id, name in self._added.items() if special or id not in self.special_ids)
        if not self._may_cut or backend.pre_tokenizer is None or any(name in text for name in names):
            return (text,)
        return parts_of(text, backend.pre_tokenizer)

    @cached_property
    def _may_cut(self) -> bool:
        from tokenizers import models

        backend = self.backend
        return (
            isinstance(backend.model, models.BPE)
            and backend.normalizer is None
            and cuts_anywhere(backend.pre_tokenizer)
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; with `skip_special`, without special tokens."""
        kept = self.check_ids(ids)
        if skip_special:
            kept = [id for id in kept if id not in self.special_ids]
        if self.decoding.kind == "opaque":
            return self.backend.decode(kept, skip_special_tokens=False)
        text = b"".join(map(self._token_bytes, kept)).decode("utf-8", "replace")
        return strip_front(text, self.decoding.strip)[0]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of token `id`; for a special token, its name."""
        return self._token_bytes(self.check_ids((id,))[0])

    def last_with_text(self, ids: Sequence[int], *, skip_special: bool = True) -> int | None:
        """The last of `ids` that has text, or None: then what follows them begins a text."""
        for each in reversed(ids):
            id = check_token_id(each, "a token of after")
            if self.has(id) and not (skip_special and id in self.special_ids) and self._token_bytes(id):
                return id
        return None

    def token_text(self, id: int) -> str:
        """Token `id` as printable text, with escapes (`\\n`, `\\xf0`) for the rest."""
        text = self.token_bytes(id).decode("utf-8", "backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """`ids` as a list of ints, all of them in this vocabulary."""
        try:
            checked = [operator.index(id) for id in ids]
        except TypeError as error:
            raise WrongType(f"ids is {short_repr(ids)}; token ids are integers") from error
        for id in checked:
            if not self.has(id):
                raise InvalidToken(f"token id {id} is not in the vocabulary of {self.vocab_size} tokens")
        return checked

    def vocabulary(self) -> list[str | None]:
        """The name of every token, by id; None where an id has no token."""
        return [self._name(id) for id in range(self.vocab_size)]

    def has(self, id: int) -> bool:
        """Whether an id has a token."""
        if self._native is not None:
            return id in self._native
        return 0 <= id < self.vocab_size and (id in self._bytes or self._name(id) is not None)

    def token_to_id(self, name: str) -> int | None:
        """The id of the token with this name."""
        return (self._native or self.backend).token_to_id(name)

    @property
    def normalizes(self) -> bool:
        """Whether texts are changed before they are encoded, which may shorten them."""
        return self.backend.normalizer is not None if self._native is None else self._native.normalizes

    def _name(self, id: int) -> str | None:
        return self._added.get(id) or (self._native or self.backend).id_to_token(id)

    def _token_bytes(self, id: int) -> bytes:
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._read_bytes(id)
        return data

    def _read_bytes(self, id: int) -> bytes:
        name = self._name(id)
        assert name is not None, "ids are checked before"
        if id in self.special_ids or (id in self._added and self.decoding.kind == "bytes"):
            return name.encode()
        if self.decoding.kind == "bytes":
            table = byte_of_character()
            return bytes(table[c] for c in name) if all(c in table for c in name) else name.encode()
        if self.decoding.kind == "spaces":
            name = self.backend.id_to_token(id) or name  # an added token may be normalized, ▁ in front
            byte = _byte_token(name) if self.decoding.byte_fallback else None
            return name.replace(SPACE, " ").encode() if byte is None else byte
        return self.backend.decode([id], skip_special_tokens=False).encode()

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second backend that reads names of special tokens as plain text: the flag is state of the backend."""
        with self._lock:
            if self._plain is None:
                self._plain = _plain_copy(self.backend, {self._added[id] for id in self.special_ids})
            return self._plain


def _prepared(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def _gguf_backend(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    vocab = read_vocab(metadata)
    assert vocab is not None
    return vocab.backend


def strip_front(text: str, spaces: int) -> tuple[str, int]:
    """`text` without up to `spaces` leading spaces, and how many may still be stripped from what follows."""
    while spaces and text.startswith(" "):
        text, spaces = text[1:], spaces - 1
    return text, 0 if text else spaces


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 is itself, the other 68 bytes are U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _byte_token(name: str) -> bytes | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return None
    return None


def _token_decoding(backend: tokenizers.Tokenizer) -> TokenDecoding:
    decoder = backend.decoder
    if decoder is None:
        return TokenDecoding("opaque")
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoding("bytes")
    tail = [k for k in kinds if k != "ByteFallback"]
    if tail[:2] != ["Replace", "Fuse"] or tail[2:] not in ([], ["Strip"]) or kinds[0] != "Replace":
        return TokenDecoding("opaque")
    if steps[0].get("pattern") != {"String": SPACE} or steps[0].get("content") != " ":
        return TokenDecoding("opaque")
    strip = steps[-1] if tail[2:] else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"]:
        return TokenDecoding("opaque")
    return TokenDecoding("spaces", "ByteFallback" in kinds, strip["start"])


def _plain_copy(backend: tokenizers.Tokenizer, special: set[str]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    shared = _shared_copy(backend) if _merges_no_special(backend, special) else None
    if shared is not None:
        return shared
    saved = backend.to_str()
    state = json.loads(saved)
    plain = Backend.from_str(json.dumps(state, ensure_ascii=False) if _remove_special(state, special) else saved)
    plain.encode_special_tokens = True
    return plain


def _merges_no_special(backend: tokenizers.Tokenizer, special: set[str]) -> bool:
    """Whether no merge of a BPE model can produce a special token: a merge needs two tokens that spell it."""
    from tokenizers import models

    return isinstance(backend.model, models.BPE) and not any(
        backend.token_to_id(name[:cut]) is not None and backend.token_to_id(name[cut:]) is not None
        for name in special
        for cut in range(1, len(name))
    )


def _shared_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """A plain copy that shares the model; None if the ids of added tokens would differ."""
    from tokenizers import Tokenizer as Backend

    plain = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    for id in sorted(added):
        (plain.add_special_tokens if added[id].special else plain.add_tokens)([added[id]])
    plain.encode_special_tokens = True
    decoder = plain.get_added_tokens_decoder()
    return plain if {id: repr(t) for id, t in decoder.items()} == {id: repr(t) for id, t in added.items()} else None


def _remove_special(state: dict[str, Any], special: set[str]) -> bool:
    """Remove what could turn plain text into a special token; False if there is nothing to remove."""
    model = state["model"]
    if model["type"] == "BPE":
        merges = model["merges"]
        model["merges"] = [
            m for m in merges if ("".join(m) if isinstance(m, list) else m.replace(" ", "")) not in special
        ]
        return len(model["merges"]) < len(merges)
    if model["type"] == "Unigram":
        for id, entry in enumerate(model["vocab"]):
            if entry[0] in special and id != model.get("unk_id"):
                entry[0] = f"\0{id}"  # keeps its id but matches no text
        state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
        return True
    return False


# --- a Hugging Face folder


def _whole(folder: Path, said: Mapping[str, Any], data: bytes, file: Path) -> tokenizers.Tokenizer:
    """The tokenizers package's own, with the folder's special tokens marked."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside tokenizers is not an Exception
        raise BadModelFile(f"{file} is not a usable tokenizer.json: {error}") from error
    _, missing = _missing(folder, said, backend)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])
    return backend


def _missing(
    folder: Path, said: Mapping[str, Any], backend: tokenizers.Tokenizer | NativeBpe | ByteLevelFile
) -> tuple[dict[str, str], list[str]]:
    """The text of each named special token in the vocabulary; and which of BOS, EOS and the additional ones are not
    marked as special."""
    names = {role: text for role in ROLES if (text := _content(said.get(role), folder, role)) is not None}
    names = {role: text for role, text in names.items() if backend.token_to_id(text) is not None}
    extra = said.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise BadModelFile(f"additional_special_tokens in {folder} is {short_repr(extra)}; it must be a list")
    special = {names.get("bos_token"), names.get("eos_token"), *(_content(t, folder, "special token") for t in extra)}
    known = _marked_special(backend)
    return names, sorted(t for t in special - known if t and backend.token_to_id(t) is not None)


def _marked_special(backend: tokenizers.Tokenizer | NativeBpe | ByteLevelFile) -> set[str]:
    if isinstance(backend, NativeBpe):
        return {backend.added[id] for id in backend.control}
    if isinstance(backend, ByteLevelFile):
        return {backend.added[id] for id in backend.special}
    return {token.content for token in backend.get_added_tokens_decoder().values() if token.special}


def _content(value: object, folder: Path, role: str) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise BadModelFile(f"{role} in {folder} is {short_repr(value)}; it must be a string")
    return text


def _bos(
    frame: tokenizers.Tokenizer,
    bos: int | None,
    configured: object,
    folder: Path,
    backend: tokenizers.Tokenizer | NativeBpe,
) -> tuple[int | None, bool]:
    """The BOS id, and whether to add it: the config decides, else the post-processor of `frame`."""
    if configured is not None and not isinstance(configured, bool):
        raise BadModelFile(f"add_bos_token in {folder} is {configured!r}; it must be true or false")
    bare, whole = (frame.encode("a", add_special_tokens=add).ids for add in (False, True))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    front = whole[:start]
    if configured is False or (configured is None and not front):
        return bos, False
    if configured is None and (len(front) > 1 or (bos is not None and front != [bos])):
        names = ", ".join(repr(backend.id_to_token(id)) for id in front)
        raise Unsupported(f"the tokenizer in {folder} puts {names} before a text; only its BOS token is supported")
    if bos is None and not front:
        raise BadModelFile(f"add_bos_token in {folder} is true and bos_token is not in the vocabulary")
    return (bos if bos is not None else front[0]), True


def _generation_eos(folder: Path) -> list[int]:
    value = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise BadModelFile(
                f"eos_token_id in {folder / 'generation_config.json'} is {short_repr(value)}; it must be ids"
            )
    return ids


def _end_markers(backend: tokenizers.Tokenizer | NativeBpe, templates: Mapping[str, str]) -> list[int]:
    text = "".join(templates.values())
    # Where a turn ends with <|return|> or <|call|>, <|end|> ends only one message of it.
    skip = {"<|end|>"} if "<|return|>" in text else set()
    ids = (backend.token_to_id(marker) for marker in END_MARKERS if marker in text and marker not in skip)
    return [id for id in ids if id is not None]
