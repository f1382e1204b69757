"""From text to token ids: the tokenizer's own rules, the model's length limit, truncation and strides on request.

Owns copies of the tokenizer whose truncation never changes, so that any number of threads can encode at once. Texts
that are too long are an error unless the call asks for truncation or a stride.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.text import check_unicode
from headway.pipelines.task import PreparedItem, Row, Task, TaskOptions, check_count, check_switch, check_text

UNLIMITED = 1 << 30  # tokenizers without a limit report a huge number


class Encoding(Protocol):
    """The part of a `tokenizers` Encoding that is used here."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def type_ids(self) -> list[int]: ...
    @property
    def overflowing(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class TextOptions(TaskOptions):
    """The options of every text task.

    A text longer than the model's limit (or `max_length`) is an error, unless `truncation=True` cuts it or `stride=n`
    splits it into chunks that share n tokens with their neighbors.
    """

    truncation: bool = False
    max_length: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("truncation", self.truncation)
        check_count("max_length", self.max_length)
        check_count("stride", self.stride, 0)
        if self.truncation and self.stride is not None:
            raise InvalidInput("truncation=True cuts a text and stride=n splits it; pass only one of them")


class TextTask(Task):
    """A task whose items are texts. They are tokenized several at a time, which is faster."""

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        return self.preprocess_many([item], options)[0]

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        assert self.loaded.text is not None
        return self.loaded.text.prepared([self.text_of(item) for item in items], options)

    def text_of(self, item: Any) -> str | tuple[str, str]:
        """The text or pair of texts of an item."""
        return check_text(item, self.expected_input())


class TextEncoder:
    """A tokenizer for many threads. `longest` is the model's longest row, None for no limit."""

    def __init__(self, tokenizer: Any, longest: int | None, *, types: bool) -> None:
        self.tokenizer, self._longest, self.types = tokenizer, longest, types
        self._lock = threading.Lock()
        self._truncating: dict[tuple[int, int, str], Any] = {}
        self._plain = _without_limits(tokenizer)
        probe = self._plain.encode("a") if types and self._plain is not None else None
        self._one_type = probe is not None and not any(
            probe.type_ids
        )  # single texts have type 0 throughout, which can be left out

    @property
    def limit(self) -> int | None:
        """The longest row: that of the model or of the tokenizer as it is set now, whichever is less."""
        declared = getattr(self.tokenizer, "model_max_length", None)
        if not isinstance(declared, (int, float)) or not 0 < declared < UNLIMITED:
            return self._longest
        return int(declared) if self._longest is None else min(int(declared), self._longest)

    def rows(self, texts: Sequence[str | tuple[str, str]], options: TextOptions) -> list[list[Row]]:
        """The rows of each text or pair: one, or one per chunk with a stride."""
        return [[self.row(part) for part in parts] for parts in self.encode(texts, options)]

    def prepared(self, texts: Sequence[str | tuple[str, str]], options: TextOptions) -> list[PreparedItem]:
        """A PreparedItem for each text or pair."""
        if options.stride is None:
            return [PreparedItem((self.row(parts[0]),)) for parts in self.encode(texts, options)]
        return [PreparedItem(tuple(rows)) for rows in self.rows(texts, options)]

    def row(self, encoding: Encoding) -> Row:
        """The row of an encoded text; token types that are all 0 are left out."""
        ids = encoding.ids
        if not self.types or (self._one_type and encoding.n_sequences == 1):  # type: ignore[attr-defined]
            return Row({"input_ids": ids}, len(ids))
        return Row({"input_ids": ids, "token_type_ids": encoding.type_ids}, len(ids))

    def encode(
        self,
        texts: Sequence[str | tuple[str, str]],
        options: TextOptions,
        *,
        offsets: bool = False,
        cut: str = "longest_first",
        special: bool = True,
    ) -> list[list[Encoding]]:
        """The encodings of each text, with character `offsets` if set; `cut` is the truncation strategy for pairs."""
        for text in texts:
            for part in text if isinstance(text, tuple) else (text,):
                check_unicode(part)
        limit = self._limit(options)
        if self._plain is None:
            return self._encode_slow(texts, options, limit, offsets, special)
        shortens = limit is not None and (options.truncation or options.stride is not None)
        backend = self._truncating_copy(limit, options.stride or 0, cut, special) if shortens and limit else self._plain
        encode = backend.encode_batch if offsets else backend.encode_batch_fast
        try:
            encodings = encode(list(texts), add_special_tokens=special)
        except BaseException as error:  # tokenizers has no class for it, and panics if a stride does not fit
            if "runcation" in str(error) or "stride" in str(error) or type(error).__name__ == "PanicException":
                raise InvalidInput(
                    f"the text that is not split leaves too few of {limit} tokens for the one that is; "
                    "shorten it, or pass a smaller stride or a larger limit"
                ) from error
            raise
        if options.stride is not None:
            return [[one, *one.overflowing] for one in encodings]
        if limit is not None and not options.truncation:
            for text, one in zip(texts, encodings):
                if len(one) > limit:
                    raise too_long(text, len(one), limit)
        return [[one] for one in encodings]

    def _limit(self, options: TextOptions) -> int | None:
        if options.max_length is None:
            return self.limit
        if self.limit is not None and options.max_length > self.limit:
            raise InvalidInput(f"max_length is {options.max_length} and the model takes at most {self.limit} tokens")
        return options.max_length

    def _truncating_copy(self, limit: int, stride: int, cut: str, special: bool) -> Any:
        """A cached copy of the tokenizer that truncates at `limit`."""
        key = (limit, stride, cut)
        with self._lock:
            if key not in self._truncating:
                spare = limit - self._plain.num_special_tokens_to_add(cut != "longest_first")
                if stride >= spare or spare < 1:
                    raise InvalidInput(
                        f"chunks of at most {limit} tokens leave {spare} for text, too few for a stride of {stride}; "
                        "pass a smaller stride or a larger max_length"
                    )
                copy = _copied(self._plain)
                copy.enable_truncation(max_length=limit, stride=stride, strategy=cut)
                self._truncating[key] = copy
            return self._truncating[key]

    def _encode_slow(
        self,
        texts: Sequence[str | tuple[str, str]],
        options: TextOptions,
        limit: int | None,
        offsets: bool,
        special: bool,
    ) -> list[list[Encoding]]:
        if offsets:
            raise Unsupported(
                f"{type(self.tokenizer).__name__} has no character offsets; this needs a model with a tokenizer.json"
            )
        encodings: list[list[Encoding]] = []
        with self._lock:
            for text in texts:
                if options.stride is not None:
                    encodings.append(self._split(text, limit, options.stride))
                    continue
                pair = text if isinstance(text, tuple) else (text, None)
                encoded = self.tokenizer(pair[0], pair[1], add_special_tokens=special)
                if limit is not None and len(encoded["input_ids"]) > limit:
                    if not options.truncation:
                        raise too_long(text, len(encoded["input_ids"]), limit)
                    encoded = self.tokenizer(
                        pair[0], pair[1], add_special_tokens=special, truncation=True, max_length=limit
                    )
                ids = list(encoded["input_ids"])
                types = list(encoded.get("token_type_ids", [0] * len(ids)))
                encodings.append([PlainEncoding(ids, types, n_sequences=1 + isinstance(text, tuple))])
        return encodings

    def _split(self, text: str | tuple[str, str], limit: int | None, stride: int) -> list[Encoding]:
        """A text in chunks of at most `limit` tokens, special tokens included."""
        name = type(self.tokenizer).__name__
        if isinstance(text, tuple) or not hasattr(self.tokenizer, "build_inputs_with_special_tokens"):
            raise Unsupported(f"{name} can only split single texts; this needs a model with a tokenizer.json")
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        added = len(self.tokenizer.build_inputs_with_special_tokens([]))
        spare = len(ids) if limit is None else limit - added
        if limit is not None and stride >= spare:
            raise InvalidInput(
                f"chunks of at most {limit} tokens leave {spare} for text, too few for a stride of {stride}; "
                "pass a smaller stride or a larger max_length"
            )
        starts = range(0, max(len(ids) - stride, 1), max(spare - stride, 1))
        chunks = [self.tokenizer.build_inputs_with_special_tokens(ids[at : at + spare]) for at in starts]
        return [PlainEncoding(list(chunk), [0] * len(chunk)) for chunk in chunks]


@dataclass(frozen=True)
class PlainEncoding:
    """An encoded text without offsets."""

    ids: list[int]
    type_ids: list[int]
    overflowing: tuple[()] = ()
    n_sequences: int = 1


def too_long(text: str | tuple[str, str], tokens: int, limit: int) -> InvalidInput:
    whole = text if isinstance(text, str) else " / ".join(text)
    shown = whole if len(whole) <= 40 else whole[:39] + "…"
    return InvalidInput(
        f"the text {shown!r} has {tokens} tokens and the limit is {limit}; "
        "pass truncation=True to cut it or stride=n to split it into overlapping chunks"
    )


def _without_limits(tokenizer: Any) -> Any:
    """A copy of `tokenizer`'s fast backend that neither truncates nor pads; None if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch"):
        return None
    copy = _copied(backend)
    copy.no_truncation()
    copy.no_padding()
    if not hasattr(copy, "encode_batch_fast"):
        copy.encode_batch_fast = copy.encode_batch
    return copy


def _copied(backend: Any) -> Any:
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


def longest_row(config: Any) -> int | None:
    """The longest row of a model by its positions."""
    positions = getattr(config, "max_position_embeddings", None)
    return positions - _position_offset(config) if isinstance(positions, int) and positions > 0 else None


def _position_offset(config: Any) -> int:
    """Positions that the RoBERTa family reserves for padding."""
    family = getattr(config, "model_type", "")
    keeps = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm", "mpnet", "longformer")
    return (getattr(config, "pad_token_id", None) or 0) + 1 if family in keeps else 0
