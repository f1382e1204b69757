"""Pictures that a model writes about: captions, and answers to questions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headway.base.errors import InvalidInput, UnsupportedModel, WrongType
from headway.pipelines.backends.peek import model_type
from headway.pipelines.generation.sampling import NAMES, GenerationOptions, Writer, without_rivals
from headway.pipelines.generation.writing import cut, flattened, written
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.images import MAX_PIXELS, is_image
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import MISSING, WRITES, Batch, PreparedItem, Row, check_text
from headway.pipelines.tasks.classification import apply, check_top_k, labels_of
from headway.pipelines.tasks.vision import ImageOptions, ImageTask, check_max_pixels

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import Loaded
    from headway.pipelines.opening import Request
    from headway.pipelines.task import Results

CAPTIONERS = ("blip", "vision-encoder-decoder", "git")


@dataclass(frozen=True)
class CaptionOptions(GenerationOptions):
    """How the text is generated; a `prompt` that it goes on from, for models that take one."""

    prompt: str | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_pixels(self.max_pixels)
        if self.prompt is not None:
            check_text(self.prompt, "a prompt")


class WritingTask(ImageTask):
    """Pictures, perhaps with a text, that a model writes about with its own `generate`."""

    Options: ClassVar[Any] = CaptionOptions
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._family = str(getattr(self.config, "model_type", ""))
        words = getattr(self.config, "text_config", None) or getattr(self.config, "decoder", None) or self.config
        own = dict(loaded.module.generation_config.to_diff_dict())
        if self._family == "blip":  # names the ends of its decoder by itself
            own["eos_token_id"] = words.sep_token_id
        elif own.get("eos_token_id") is None:
            own["eos_token_id"] = getattr(words, "eos_token_id", None)
        self._writer = Writer(own, {}, getattr(words, "max_position_embeddings", None), words.vocab_size)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        given = flattened(given)
        found = super().options(base, without_rivals(base, given))
        if self._family == "blip" and (found.eos_token_id is not None or found.pad_token_id is not None):
            raise InvalidInput("eos_token_id and pad_token_id are fixed by BLIP models; leave them out")
        self._writer.settings(found)  # refuses what cannot be, before anything is read
        return found

    def batch_key(self, options: Any) -> Hashable:
        return tuple(getattr(options, name) for name in sorted(NAMES))

    def compute(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        sequences = written(self.loaded.run, self._writer, batch, options)
        return {"sequences": Ragged(sequences.flatten(), [sequences[0].numel()] * len(sequences))}

    def texts(self, result: Mapping[str, np.ndarray], options: Any, prompt: int = 1) -> list[str]:
        """What was written for a row, cut at its end, as many texts as were asked for."""
        count = options.num_return_sequences or self._writer.known.get("num_return_sequences") or 1
        ends = self._writer.ends(options)
        return [
            self.loaded.tokenizer.decode(cut(ids, ends, prompt), skip_special_tokens=True)
            for ids in result["sequences"].reshape(count, -1)
        ]

    def samples(self) -> list[Row]:
        return []

    def several(self) -> str | None:
        return WRITES


class ImageToText(WritingTask):
    """Captions of a picture: `[{"generated_text": ...}]`."""

    auto_class: ClassVar[str] = "AutoModelForImageTextToText"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        if self._family not in CAPTIONERS:
            raise UnsupportedModel(
                f"{loaded.name} is a {self._family} model; image-to-text takes {', '.join(CAPTIONERS)}"
            )

    def preprocess(self, item: Any, options: CaptionOptions) -> PreparedItem:
        if options.prompt is None:
            return PreparedItem((self.image_row(item, options),), 1)
        if self._family != "blip":
            raise InvalidInput(f"{self._family} models take no prompt; leave prompt out")
        assert self.loaded.text is not None
        ids = self.loaded.text.encode([options.prompt], TextOptions())[0][0].ids
        new, room = self._writer.new_tokens(options), (self._writer.positions or len(ids) + 1) - len(ids) + 1
        if self._writer.positions is not None and new > room:
            raise InvalidInput(
                f"the prompt has {len(ids) - 1} tokens and {new} new ones may follow, and the model's decoder has "
                f"{self._writer.positions} positions; shorten the prompt or pass max_new_tokens={max(room, 1)}"
            )
        return PreparedItem((self.image_row(item, options, input_ids=ids),), len(ids) - 1)

    def batch_key(self, options: CaptionOptions) -> Hashable:
        return options.prompt, super().batch_key(options)

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> list[dict[str, str]]:
        return [{"generated_text": text} for text in self.texts(results[0], options, prepared.facts)]


# -- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerOptions(ImageOptions):
    """The best `top_k` answers. A question over the model's length is an error unless `truncation=True`."""

    top_k: int | None = 5
    truncation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k)


class Questions(ImageTask):
    """What both ways of answering questions share: items are a picture and a question."""

    auto_class: ClassVar[str] = "AutoModelForVisualQuestionAnswering"
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")

    def wanted(self) -> str:
        return '{"image": ..., "question": ...}, or image=... and question=...'

    def is_item(self, value: Any) -> bool:
        return is_image(value)

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """`p(image, question=...)`, `p(image=..., question=...)`; several pictures are asked the same question."""
        rest = {name: value for name, value in given.items() if name not in ("image", "question")}
        if "image" in given and item is MISSING:
            item = given["image"]
        elif "image" in given:
            raise InvalidInput("a picture was given twice, by itself and as image=...; give it once")
        if "question" not in given:
            return super().gather(item, rest)
        question = given["question"]
        if isinstance(item, (list, tuple)):
            return [{"image": one, "question": question} for one in item], rest
        if not is_image(item) and hasattr(item, "__iter__"):
            return ({"image": one, "question": question} for one in item), rest
        return {"image": item, "question": question}, rest

    def preprocess(self, item: Any, options: Any) -> PreparedItem:
        if not isinstance(item, Mapping):
            raise WrongType(f"{item!r:.60} of type {type(item).__name__} was given where {self.wanted()} is wanted")
        if set(item) != {"image", "question"}:
            raise InvalidInput(f'an item has "image" and "question"; {sorted(map(str, item))} were given')
        question = check_text(item["question"], "a question")
        if not question.strip():
            raise InvalidInput("the question is empty; ask something about the picture")
        assert self.loaded.text is not None
        row = self.loaded.text.rows([question], TextOptions(truncation=options.truncation))[0][0]
        return PreparedItem((self.image_row(item["image"], options, **row.inputs),))

    def samples(self) -> list[Row]:
        return []


class ChosenAnswers(Questions):
    """`[{"score": ..., "answer": ...}, ...]`, best first: models that choose among known answers, such as ViLT."""

    Options = AnswerOptions

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)

    def compute(self, batch: Batch, options: AnswerOptions) -> Mapping[str, Tensor | Ragged]:
        with Repeatable():
            return super().compute(batch, options)

    def several(self) -> str | None:
        return "its model draws which parts of a picture it looks at"

    def postprocess(self, prepared: PreparedItem, results: Results, options: AnswerOptions) -> list[dict[str, Any]]:
        scores = apply(results[0]["logits"], "sigmoid")
        order = np.argsort(-scores, kind="stable")[: options.top_k].tolist()
        return [{"score": float(scores[i]), "answer": self._labels[i]} for i in order]


class Repeatable(TorchFunctionMode):
    """Within it, on this thread, draws are always the same: ViLT shuffles a picture's patches, and drops some."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        if func is torch.multinomial:
            more["generator"] = torch.Generator(args[0].device).manual_seed(0)
        return func(*args, **more)


@dataclass(frozen=True)
class WrittenAnswerOptions(GenerationOptions):
    """How the answer is generated."""

    truncation: bool = False
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_pixels(self.max_pixels)


class WrittenAnswers(Questions, WritingTask):
    """`[{"answer": ...}]`: models that write, such as BLIP."""

    Options = WrittenAnswerOptions

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> list[dict[str, str]]:
        return [{"answer": text.strip()} for text in self.texts(results[0], options)]


class VisualQuestionAnswering(Questions):
    """Answers to a question about a picture; which of the two ways depends on the model."""

    @classmethod
    def open(cls, request: Request) -> Any:
        family = model_type(request.model)
        ways = {"vilt": ChosenAnswers, "blip": WrittenAnswers}
        if family not in ways:
            raise UnsupportedModel(
                f"{request.model!s:.60} is a {family} model; visual question answering takes {', '.join(ways)}"
            )
        return ways[family].open(replace(request, kind=ways[family]))
