"""What a task is: the values that travel through a pipeline, and the four functions that move them on."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.inputs.arrays import Ragged
    from headway.pipelines.opening import Request

    Results = Sequence[Mapping[str, np.ndarray]]


SAMPLES = (
    "The film was a great pleasure from its first minute to its last.",
    "Trains from Paris to London leave every hour, except on Sundays.",
    "No.",
    "She said that the results of the second experiment could not be repeated by anybody else.",
)


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One row of a batch: a model's inputs without the batch dimension, what the row costs, tokens to be read.

    `marks` are positions that the task's head must read, where it does not read all of them (`Task.reads = "marks"`).
    """

    inputs: Mapping[str, Any]
    length: int
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class PreparedItem:
    """An item that the model can compute: its rows, and what postprocess will want to know."""

    rows: tuple[Row, ...]
    facts: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Rows together: the tensors a model is called with.

    Usually each is [R, …] with sequences padded. A `packed` batch has its tokens end to end, [T], without any padding.
    In a pass that is being captured its `rows` are not known; `ends` of rows are then on the device, [R + 1] from 0.
    """

    inputs: dict[str, Any]
    rows: tuple[Row, ...]
    packed: bool = False
    room: Any = None  # the size that a captured pass must have for it
    ends: Tensor | None = None


@dataclass(frozen=True)
class TaskOptions:
    """What a call of a task may set; a task adds fields. Values are checked in `__post_init__`."""


CAPTURABLE = "capturable"
WRITES = "its model writes token by token, a pass for each"


def capturable(reduce: Any) -> Any:
    """Marks a `Task.reduce` that may be captured once and replayed: it computes on the device alone, and knows of its
    batch only what `arrays.pooled` and `arrays.by_token` tell it. One that overrides it must be marked again.
    """
    setattr(reduce, CAPTURABLE, True)
    return reduce


class Task:
    """One kind of work over one loaded model. Subclass it, then `hw.register_task("name", MyTask)`.

    `preprocess` and `postprocess` must be written; `collate` and `forward` have useful defaults. All of them may be
    called from several threads at once, except `forward`, which only the batcher calls.
    """

    name: str = ""  # what it was asked for as
    Options: ClassVar[type[TaskOptions]] = TaskOptions
    auto_class: ClassVar[str] = "AutoModel"  # the transformers class that loads its model
    needs: ClassVar[tuple[str, ...]] = ("tokenizer",)  # tokenizer, image_processor, feature_extractor, processor
    default_model: ClassVar[str | None] = None
    lookahead: ClassVar[int] = 1024  # rows that may be prepared ahead
    reads: ClassVar[str | None] = None  # the states its head needs: all, first (of a row), marks; None: never packed

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.config = loaded.config

    @classmethod
    def open(cls, request: Request) -> Any:
        """The pipeline that a request asks for; only a task whose model runs elsewhere makes its own."""
        from headway.pipelines.opening import open_here

        return open_here(request)

    # -- what a task says ----------------------------------------------------------------------------------------------

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        """What the model must compute for `item`."""
        raise NotImplementedError

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        """The same for several items, where doing them together is quicker."""
        return [self.preprocess(item, options) for item in items]

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Rows as the tensors of one call: sequences padded, arrays stacked."""
        from headway.pipelines.inputs.arrays import collate

        types = self.loaded.text is not None and self.loaded.text.types
        return Batch(collate(rows, self.padding(), self.loaded.run.takes, types=types), tuple(rows))

    def forward(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        """The model's answer on the device, reduced to what `postprocess` needs: name → [R, …], or Ragged by token."""
        if batch.packed:
            assert self.loaded.packed is not None
            assert self.reads is not None
            key = (self.batch_key(options),) if getattr(type(self).reduce, CAPTURABLE, False) else None
            return self.loaded.packed.answered(batch, self.reads, partial(self._reduced, options), key)
        return self.reduce(self.loaded.run(batch.inputs), batch, options)

    def _reduced(self, options: Any, output: Any, batch: Batch) -> Mapping[str, Tensor | Ragged]:
        return self.reduce(output, batch, options)

    @capturable
    def reduce(self, output: Any, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        """The part of the model's own output that must leave the device; by default its logits as float32.

        What comes by token is padded, or packed, or at marks only; `arrays.by_token` and `arrays.at_marks` take all.
        """
        return {"logits": output.logits.float()}

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> Any:
        """What the user gets for an item, from its rows' results."""
        raise NotImplementedError

    # -- what it may say too -------------------------------------------------------------------------------------------

    def batch_key(self, options: Any) -> Hashable:
        """Rows share a batch when their keys are equal: whatever of the options `forward` looks at."""
        return options

    def pads(self) -> bool:
        """Whether rows of a batch are padded to one length, so that a batch costs its longest row times its rows."""
        return self.reads is None or self.loaded.packed is None

    def assemble(self, rows: Sequence[Row]) -> Batch:
        """The batch that `forward` is given: packed where the task and the model allow, else collated."""
        packed = None if self.pads() else self.loaded.packed
        return self.collate(rows) if packed is None else packed.batch(rows)

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The item and the options of a call; a task that takes an item in keywords puts it together here."""
        if item is MISSING:
            raise InvalidInput(f"nothing was given; call it with {self.wanted()}, a list of them or an iterable")
        return item, given

    def is_item(self, value: Any) -> bool:
        """Whether `value` is one item rather than a list or an iterable of items."""
        return isinstance(value, (str, bytes, Mapping))

    def wanted(self) -> str:
        """What one item is, in words, for messages."""
        return "a string"

    def several(self) -> str | None:
        """Why its model is not called once for each batch, in words; None where it is, and can be compiled whole."""
        return None

    def samples(self) -> list[Row]:
        """Rows on which the effect of quantisation is measured; a task over something else than text has its own."""
        from headway.pipelines.inputs.text import TextOptions

        text = self.loaded.text if self.needs == ("tokenizer",) else None
        return [row for rows in text.rows(SAMPLES, TextOptions(truncation=True)) for row in rows] if text else []

    def padding(self) -> Mapping[str, int]:
        """What sequences are padded with, by input name; the special name `side` says where (1: at the end)."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            return {}
        left = getattr(tokenizer, "padding_side", "right") == "left"
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        types = getattr(tokenizer, "pad_token_type_id", 0)
        return {"input_ids": pad, "token_type_ids": types, "side": 0 if left else 1}

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        """`base` with what a call gave; names that the task does not know are refused."""
        if not given:
            return base
        known = {field.name for field in dataclasses.fields(base)}
        for name in given:
            if name not in known:
                listed = ", ".join(sorted(known)) or "nothing"
                raise InvalidInput(f"{name!r} is no option of this task; it takes {listed}")
        return dataclasses.replace(base, **given)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


def check_text(value: Any, what: str = "a string") -> str:
    """`value` if it is a string that has something in it."""
    if not isinstance(value, str):
        raise WrongType(f"{short_repr(value)} of type {type(value).__name__} was given where {what} is wanted")
    return value
