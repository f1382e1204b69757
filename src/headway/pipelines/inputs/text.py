"""From text to token ids: the tokenizer's own rules, the model's length, truncation when asked, strides.

Owns copies of the tokenizer whose truncation never changes after they are made, so that any number of threads can
encode at once. Texts that are too long are an error unless truncation or a stride was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.pipelines.task import PreparedItem, Row, TaskOptions

UNLIMITED = 1 << 30  # a tokenizer that knows no limit names a huge number


class Encoding(Protocol):
    """What this module needs of an encoded text."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def type_ids(self) -> list[int]: ...
    @property
    def overflowing(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class TextOptions(TaskOptions):
    """What every task over text takes.

    A text longer than the model's limit (or `max_length`) is an error, unless `truncation=True` cuts it or `stride=n`
    divides it into pieces that share n tokens with their neighbours.
    """

    truncation: bool = False
    max_length: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.truncation, bool):
            raise InvalidInput(f"truncation is {self.truncation!r}; it takes True or False")
        if self.max_length is not None:
            check_integer(self.max_length, "max_length", 1)
        if self.stride is not None:
            check_integer(self.stride, "stride")
        if self.truncation and self.stride is not None:
            raise InvalidInput("truncation=True cuts a text and stride=n divides it; only one of them can be asked for")


class TextEncoder:
    """A tokenizer for many threads. `limit` is the longest row the model takes, None for no limit."""

    def __init__(self, tokenizer: Any, limit: int | None, *, types: bool) -> None:
        self.tokenizer, self.limit, self.types = tokenizer, limit, types
        self._lock = threading.Lock()
        self._cutting: dict[tuple[int, int, str], Any] = {}
        self._plain = _without_limits(tokenizer)
        probe = self._plain.encode("a") if types and self._plain is not None else None
        self._one_type = probe is not None and not any(probe.type_ids)  # of single texts, which need not name it then

    @property
    def has_offsets(self) -> bool:
        """Whether tokens know the characters they came from."""
        return self._plain is not None

    def rows(self, texts: Sequence[str | tuple[str, str]], options: TextOptions) -> list[list[Row]]:
        """The rows of each text or pair: one, or with a stride as many as it takes."""
        return [[self.row(part) for part in parts] for parts in self.encode(texts, options)]

    def prepared(self, texts: Sequence[str | tuple[str, str]], options: TextOptions) -> list[PreparedItem]:
        """Each text or pair as an item of its rows."""
        if options.stride is None:
            return [PreparedItem((self.row(parts[0]),)) for parts in self.encode(texts, options)]
        return [PreparedItem(tuple(rows)) for rows in self.rows(texts, options)]

    def row(self, encoding: Encoding) -> Row:
        """The row of an encoded text; types that are all 0, as those of single texts mostly are, are left out."""
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
        """The encodings of each text. With `offsets` tokens know their characters; `cut` says which of a pair gives."""
        limit = self._limit(options)
        if self._plain is None:
            return self._slowly(texts, options, limit, offsets, special)
        shortens = limit is not None and (options.truncation or options.stride is not None)
        backend = self._cutter(limit, options.stride or 0, cut, special) if shortens and limit else self._plain
        encode = backend.encode_batch if offsets else backend.encode_batch_fast
        try:
            found = encode(list(texts), add_special_tokens=special)
        except BaseException as error:  # the library has no class for it, and panics over a stride that does not fit
            if "runcation" in str(error) or "stride" in str(error) or type(error).__name__ == "PanicException":
                raise InvalidInput(
                    f"the text that must stay whole leaves too little of {limit} tokens for the one that is divided; "
                    "shorten it, take a smaller stride or a larger limit"
                ) from error
            raise
        if options.stride is not None:
            return [[one, *one.overflowing] for one in found]
        if limit is not None and not options.truncation:
            for text, one in zip(texts, found):
                if len(one) > limit:
                    raise too_long(text, len(one), limit)
        return [[one] for one in found]

    def _limit(self, options: TextOptions) -> int | None:
        if options.max_length is None:
            return self.limit
        if self.limit is not None and options.max_length > self.limit:
            raise InvalidInput(f"max_length is {options.max_length} and the model takes at most {self.limit} tokens")
        return options.max_length

    def _cutter(self, limit: int, stride: int, cut: str, special: bool) -> Any:
        """A copy of the tokenizer that cuts at `limit`; made once for each way of cutting."""
        key = (limit, stride, cut)
        with self._lock:
            if key not in self._cutting:
                spare = limit - self._plain.num_special_tokens_to_add(cut != "longest_first")
                if stride >= spare or spare < 1:
                    raise InvalidInput(
                        f"pieces of at most {limit} tokens leave {spare} for text, too few for a stride of {stride}; "
                        "take a smaller stride or a larger max_length"
                    )
                copy = _copied(self._plain)
                copy.enable_truncation(max_length=limit, stride=stride, strategy=cut)
                self._cutting[key] = copy
            return self._cutting[key]

    def _slowly(
        self,
        texts: Sequence[str | tuple[str, str]],
        options: TextOptions,
        limit: int | None,
        offsets: bool,
        special: bool,
    ) -> list[list[Encoding]]:
        if offsets:
            raise Unsupported(
                f"{type(self.tokenizer).__name__} does not say which characters a token came from; "
                "this needs a model with a tokenizer.json"
            )
        found: list[list[Encoding]] = []
        with self._lock:
            for text in texts:
                if options.stride is not None:
                    found.append(self._divided(text, limit, options.stride))
                    continue
                pair = text if isinstance(text, tuple) else (text, None)
                made = self.tokenizer(pair[0], pair[1], add_special_tokens=special)
                if limit is not None and len(made["input_ids"]) > limit:
                    if not options.truncation:
                        raise too_long(text, len(made["input_ids"]), limit)
                    made = self.tokenizer(
                        pair[0], pair[1], add_special_tokens=special, truncation=True, max_length=limit
                    )
                ids = list(made["input_ids"])
                types = list(made.get("token_type_ids", [0] * len(ids)))
                found.append([Plain(ids, types, n_sequences=1 + isinstance(text, tuple))])
        return found

    def _divided(self, text: str | tuple[str, str], limit: int | None, stride: int) -> list[Encoding]:
        """A text in pieces of at most `limit` tokens, those that the tokenizer adds among them."""
        name = type(self.tokenizer).__name__
        if isinstance(text, tuple) or not hasattr(self.tokenizer, "build_inputs_with_special_tokens"):
            raise Unsupported(f"{name} divides single texts only; this needs a model with a tokenizer.json")
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        added = len(self.tokenizer.build_inputs_with_special_tokens([]))
        room = len(ids) if limit is None else limit - added
        if limit is not None and stride >= room:
            raise InvalidInput(
                f"pieces of at most {limit} tokens leave {room} for text, too few for a stride of {stride}; "
                "take a smaller stride or a larger max_length"
            )
        starts = range(0, max(len(ids) - stride, 1), max(room - stride, 1))
        whole = [self.tokenizer.build_inputs_with_special_tokens(ids[at : at + room]) for at in starts]
        return [Plain(list(piece), [0] * len(piece)) for piece in whole]


@dataclass(frozen=True)
class Plain:
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
        "pass truncation=True to cut it or stride=n to divide it into overlapping pieces"
    )


def _without_limits(tokenizer: Any) -> Any:
    """A copy of the fast tokenizer behind `tokenizer` that neither cuts nor pads; None if there is none."""
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


def length_limit(tokenizer: Any, config: Any) -> int | None:
    """The longest row a model takes: what its tokenizer says or its positions allow, whichever is less."""
    limits: list[int] = []
    said = getattr(tokenizer, "model_max_length", None)
    if isinstance(said, (int, float)) and 0 < said < UNLIMITED:
        limits.append(int(said))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        offset = _position_offset(config)
        limits.append(positions - offset)
    return min(limits, default=None) if limits else None


def _position_offset(config: Any) -> int:
    """Positions that the RoBERTa family keeps for padding."""
    family = getattr(config, "model_type", "")
    keeps = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm", "mpnet", "longformer")
    return (getattr(config, "pad_token_id", None) or 0) + 1 if family in keeps else 0
