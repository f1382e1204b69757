"""Task: what a pipeline computes, and the values that pass through it (Row, PreparedItem, ModelInputs)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.factory import PipelineSpec
    from headway.pipelines.inputs.arrays import Ragged

    Results = Sequence[Mapping[str, np.ndarray]]


SAMPLES = (
    "The film was a great pleasure from its first minute to its last.",
    "Trains from Paris to London leave every hour, except on Sundays.",
    "No.",
    "She said that the results of the second experiment could not be repeated by anybody else.",
)


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One row of a batch: model inputs without the batch dimension, and `length`, its cost in tokens.

    `marks` are the positions whose outputs the task needs, where it does not need all (`Task.reads = "marks"`).
    """

    inputs: Mapping[str, Any]
    length: int
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class PreparedItem:
    """A preprocessed item: its rows, and in `facts` whatever postprocess needs to know."""

    rows: tuple[Row, ...]
    facts: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class ModelInputs:
    """The tensors a model is called with, and the rows they came from.

    Usually each is [R, …] with sequences padded. An `unpadded` (variable-length) batch has its tokens end to end, [T].
    While a CUDA graph is captured `rows` is empty; `cu_seqlens` then has the row boundaries on the device, [R + 1].
    """

    inputs: dict[str, Any]
    rows: tuple[Row, ...]
    unpadded: bool = False
    buffers: Any = None  # the host buffers of a CUDA graph's inputs
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class TaskOptions:
    """The keyword options of a call; tasks add fields, and check them in `__post_init__`."""

    def __post_init__(self) -> None: ...


OFF = ("generate_kwargs", "image_processor_kwargs", "is_split_into_words", "offset_mapping", "return_language")
"""Options of some tasks in transformers that are not here: None, False and no options at all change nothing."""
INSTEAD = {
    "multi_class": "it is multi_label now",
    "is_split_into_words": "join the words with spaces",
    "generate_kwargs": "the model generates nothing",
}
CAPTURABLE = "capturable"
GENERATES = "its model generates token by token, with one pass for each"


def capturable(reduce: Any) -> Any:
    """Marks a `Task.reduce` that a CUDA graph may capture: it computes on the device alone, and uses its batch only
    through `arrays.pooled` and `arrays.by_token`. An override must be marked again.
    """
    setattr(reduce, CAPTURABLE, True)
    return reduce


class Task:
    """One kind of work over one loaded model. Subclass it, then `hw.register_task("name", MyTask)`.

    `preprocess` and `postprocess` must be implemented; `collate` and `forward` have useful defaults. All of them may be
    called from several threads at once, except `forward`, which only the batcher's thread calls.
    """

    name: str = ""  # the name given to `hw.pipeline`
    Options: ClassVar[type[TaskOptions]] = TaskOptions
    auto_class: ClassVar[str] = "AutoModel"  # the transformers class that loads its model
    needs: ClassVar[tuple[str, ...]] = ("tokenizer",)  # tokenizer, image_processor, feature_extractor, processor
    default_model: ClassVar[str | None] = None
    lookahead: ClassVar[int] = 1024  # items of a stream that may be in progress
    positional: ClassVar[tuple[str, ...]] = ()  # options that a call also takes by position, after the item
    reads: ClassVar[str | None] = None  # the states its head needs: all, first (of a row), marks; None: padded only

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.config = loaded.config

    def __repr__(self) -> str:
        loaded = getattr(self, "loaded", None)  # text generation has an engine instead
        return f"{type(self).__name__}({'' if loaded is None else repr(loaded)})"

    @classmethod
    def open(cls, spec: PipelineSpec) -> Any:
        """The pipeline for these arguments; overridden by tasks whose model does not run in transformers."""
        from headway.pipelines.factory import open_pipeline

        return open_pipeline(spec)

    # -- the steps, in order -------------------------------------------------------------------------------------------

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        """The rows that the model must compute for `item`."""
        raise NotImplementedError

    def preprocess_many(self, items: Sequence[Any], options: Any) -> list[PreparedItem]:
        """The same for several items; override it where that is faster together."""
        return [self.preprocess(item, options) for item in items]

    def collate(self, rows: Sequence[Row]) -> ModelInputs:
        """The model inputs for these rows: sequences padded, arrays stacked."""
        from headway.pipelines.inputs.arrays import collate

        types = self.loaded.text is not None and self.loaded.text.types
        return ModelInputs(collate(rows, self.padding(), self.loaded.backend.takes, types=types), tuple(rows))

    def forward(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        """The model's output on the device, reduced to what `postprocess` needs: name → [R, …], or Ragged."""
        if batch.unpadded:
            assert self.loaded.unpadded is not None
            assert self.reads is not None
            key = (self.batch_key(options),) if getattr(type(self).reduce, CAPTURABLE, False) else None
            return self.loaded.unpadded.compute(batch, self.reads, partial(self._reduce, options), key)
        return self.reduce(self.loaded.backend(batch.inputs), batch, options)

    def _reduce(self, options: Any, output: Any, batch: ModelInputs) -> Mapping[str, Tensor | Ragged]:
        return self.reduce(output, batch, options)

    @capturable
    def reduce(self, output: Any, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        """The part of the model's output that postprocess needs; by default its logits as float32.

        Outputs per token are padded, unpadded or at marks only; `arrays.by_token` and `arrays.at_marks` handle all.
        """
        return {"logits": output.logits.float()}

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> Any:
        """The result of an item from the results of its rows."""
        raise NotImplementedError

    # -- what a task may override --------------------------------------------------------------------------------------

    def batch_key(self, options: Any) -> Hashable:
        """Rows share a batch when their keys are equal: the options that `forward` depends on."""
        return options

    def pads(self) -> bool:
        """Whether rows are padded to one length, so that a batch costs its longest row times its number of rows."""
        return self.reads is None or self.loaded.unpadded is None

    def assemble(self, rows: Sequence[Row]) -> ModelInputs:
        """The batch for `forward`: unpadded where the task and the model allow it, else padded."""
        encoder = None if self.pads() else self.loaded.unpadded
        return self.collate(rows) if encoder is None else encoder.batch(rows)

    def single(self, item: Any, result: Any, given: Mapping[str, Any]) -> Any:
        """What a call returns for one item; `given` are the options of that call."""
        return result

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The item and the options of a call; a task whose items may be keywords builds them here."""
        if item is MISSING:
            raise InvalidInput(f"no input; call it with {self.expected_input()}, a list of them or an iterable")
        return item, given

    def is_item(self, value: Any) -> bool:
        """Whether `value` is one item rather than a list or an iterable of items."""
        return isinstance(value, (str, bytes, Mapping))

    def expected_input(self) -> str:
        """A description of one item, for error messages."""
        return "a string"

    def multi_pass_reason(self) -> str | None:
        """Why the model is not called exactly once per batch, for error messages; None if it is."""
        return None

    def sample_rows(self) -> list[Row]:
        """Rows on which the effect of quantization is measured; tasks over other inputs than text override it."""
        from headway.pipelines.inputs.text import TextOptions

        text = self.loaded.text if self.needs == ("tokenizer",) else None
        return [row for rows in text.rows(SAMPLES, TextOptions(truncation=True)) for row in rows] if text else []

    def padding(self) -> Mapping[str, int]:
        """Padding values by input name; `side` is 1 to pad at the end, 0 at the beginning."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            return {}
        left = getattr(tokenizer, "padding_side", "right") == "left"
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        types = getattr(tokenizer, "pad_token_type_id", 0)
        return {"input_ids": pad, "token_type_ids": types, "side": 0 if left else 1}

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        """`base` with the options of a call; unknown names are an error."""
        if not given:
            return base
        known = {field.name for field in dataclasses.fields(base)}
        for name, value in given.items():
            if name not in known and not (name in OFF and _is_off(value)):
                listed = ", ".join(sorted(known)) or "nothing"
                hint = f"; {INSTEAD[name]}" if name in INSTEAD else ""
                raise InvalidInput(f"{name!r} is not an option of this task; it takes {listed}{hint}")
        return dataclasses.replace(base, **{name: value for name, value in given.items() if name in known})


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Mapping) and not value)


class OneResult(list[Any]):
    """`[result]`, as transformers returns it for one text in some tasks; `["label"]` reads the result itself."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(0)[key] if isinstance(key, str) else super().__getitem__(key)


def known_options(options: Any) -> dict[str, Any]:
    """The fields of a task's options, by name."""
    return {field.name: field for field in dataclasses.fields(options)}


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


def check_text(value: Any, what: str = "a string") -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise wrong_type(value, what)
    return value


def check_switch(name: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {short_repr(value)}; it must be True or False")


def check_count(name: str, value: Any, least: int = 1, *, optional: bool = True) -> None:
    """Raise InvalidInput unless `value` is an integer of at least `least`, or None if `optional`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise InvalidInput(
            f"{name} is {short_repr(value)}; it must be an integer of at least {least} and below 2**63"
            f"{', or None' * optional}"
        )


def wrong_type(value: Any, expected: str) -> WrongType:
    """The error for an item that is not what its task expects."""
    return WrongType(f"expected {expected}, got {short_repr(value)} ({type(value).__name__})")
