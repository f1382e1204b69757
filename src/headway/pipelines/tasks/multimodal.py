"""Images to text: captions, and answers to questions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel
from headway.pipelines.backends.loading import model_type
from headway.pipelines.generation.generate import cut_at_eos, generate, merge_generate_kwargs
from headway.pipelines.generation.options import NAMES, GenerationOptions, GenerationSettings, resolve_lengths
from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.inputs.images import is_image
from headway.pipelines.inputs.text import TextOptions
from headway.pipelines.task import (
    GENERATES,
    MISSING,
    ModelInputs,
    PreparedItem,
    Row,
    check_count,
    check_text,
    wrong_type,
)
from headway.pipelines.tasks.text_classification import apply, labels_of
from headway.pipelines.tasks.vision import ImageOptions, ImageTask

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.factory import PipelineSpec
    from headway.pipelines.task import Results

CAPTIONERS = ("blip", "vision-encoder-decoder", "git")


@dataclass(frozen=True)
class CaptionOptions(GenerationOptions, ImageOptions):
    """Generation parameters, and a `prompt` to continue, for models that take one."""

    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None:
            check_text(self.prompt, "a prompt")


class GenerativeImageTask(ImageTask):
    """Images, optionally with a text, for which a model generates text."""

    Options: ClassVar[Any] = CaptionOptions
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._family = str(getattr(self.config, "model_type", ""))
        decoder = getattr(self.config, "text_config", None) or getattr(self.config, "decoder", None) or self.config
        own = dict(loaded.module.generation_config.to_diff_dict())
        if self._family == "blip":  # its generate ends at sep_token_id
            own["eos_token_id"] = decoder.sep_token_id
        elif own.get("eos_token_id") is None:
            own["eos_token_id"] = getattr(decoder, "eos_token_id", None)
        positions = getattr(decoder, "max_position_embeddings", None)
        self._settings = GenerationSettings(own, {}, positions, decoder.vocab_size)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        given = merge_generate_kwargs(given)
        merged = super().options(base, resolve_lengths(base, given))
        if self._family == "blip" and (merged.eos_token_id is not None or merged.pad_token_id is not None):
            raise InvalidInput("eos_token_id and pad_token_id are fixed by BLIP models; leave them out")
        self._settings.keywords(merged)  # raises for meaningless combinations
        return merged

    def batch_key(self, options: Any) -> Hashable:
        return tuple(getattr(options, name) for name in sorted(NAMES))

    def compute(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        keywords = {name: value for name, value in self._settings.keywords(options).items() if value is not None}
        sampled = self._settings.samples(options)
        sequences = generate(self.loaded.backend, batch, keywords, options, sampled=sampled)
        return {"sequences": Ragged(sequences.flatten(), [sequences[0].numel()] * len(sequences))}

    def texts(self, result: Mapping[str, np.ndarray], options: Any, prompt: int = 1) -> list[str]:
        """The `num_return_sequences` texts of a row."""
        count = options.num_return_sequences or self._settings.defaults.get("num_return_sequences") or 1
        eos_ids = self._settings.eos_ids(options)
        return [
            self.loaded.tokenizer.decode(cut_at_eos(ids, eos_ids, prompt).tolist(), skip_special_tokens=True)
            for ids in result["sequences"].reshape(count, -1)
        ]

    def sample_rows(self) -> list[Row]:
        return []

    def multi_pass_reason(self) -> str | None:
        return GENERATES


class ImageToText(GenerativeImageTask):
    """Captions of an image: `[{"generated_text": ...}]`."""

    auto_class: ClassVar[str] = "AutoModelForImageTextToText"

    def __init__(self, loaded: LoadedModel) -> None:
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
        new, capacity = self._settings.new_tokens(options), (self._settings.positions or len(ids) + 1) - len(ids) + 1
        if self._settings.positions is not None and new > capacity:
            raise InvalidInput(
                f"the prompt has {len(ids) - 1} tokens, {new} new ones may follow, and the model's decoder has only "
                f"{self._settings.positions} positions; shorten the prompt or pass max_new_tokens={max(capacity, 1)}"
            )
        return PreparedItem((self.image_row(item, options, input_ids=ids),), len(ids) - 1)

    def batch_key(self, options: CaptionOptions) -> Hashable:
        return options.prompt, super().batch_key(options)

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> list[dict[str, str]]:
        return [{"generated_text": text} for text in self.texts(results[0], options, prepared.facts)]


# -- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VqaClassificationOptions(ImageOptions):
    """The best `top_k` answers. A question over the model's length limit is an error unless `truncation=True`."""

    top_k: int | None = 5
    truncation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k)


class VqaTask(ImageTask):
    """A task whose items are an image and a question."""

    auto_class: ClassVar[str] = "AutoModelForVisualQuestionAnswering"
    needs: ClassVar[tuple[str, ...]] = ("image_processor", "tokenizer")

    def expected_input(self) -> str:
        return '{"image": ..., "question": ...}, or image=... and question=...'

    def is_item(self, value: Any) -> bool:
        return is_image(value)

    def gather(self, item: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """`p(image, question=...)`, `p(image=..., question=...)`; several images get the same question."""
        rest = {name: value for name, value in given.items() if name not in ("image", "question")}
        if "image" in given and item is MISSING:
            item = given["image"]
        elif "image" in given:
            raise InvalidInput("the image was given twice, positionally and as image=...; pass it once")
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
            raise wrong_type(item, self.expected_input())
        if set(item) != {"image", "question"}:
            raise InvalidInput(f'an item has "image" and "question"; {sorted(map(str, item))} were given')
        question = check_text(item["question"], "a question")
        if not question.strip():
            raise InvalidInput("the question is empty; pass a question about the image")
        assert self.loaded.text is not None
        row = self.loaded.text.rows([question], TextOptions(truncation=options.truncation))[0][0]
        return PreparedItem((self.image_row(item["image"], options, **row.inputs),))

    def sample_rows(self) -> list[Row]:
        return []


class VqaClassification(VqaTask):
    """`[{"score": ..., "answer": ...}, ...]`, best first: models with a fixed set of answers, such as ViLT."""

    Options = VqaClassificationOptions

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._labels = labels_of(self.config)

    def compute(self, batch: ModelInputs, options: VqaClassificationOptions) -> Mapping[str, Tensor | Ragged]:
        with FixedSampling():
            return super().compute(batch, options)

    def multi_pass_reason(self) -> str | None:
        return "its model samples which patches of an image it uses"

    def postprocess(
        self, prepared: PreparedItem, results: Results, options: VqaClassificationOptions
    ) -> list[dict[str, Any]]:
        scores = apply(results[0]["logits"], "sigmoid")
        order = np.argsort(-scores, kind="stable")[: options.top_k].tolist()
        return [{"score": float(scores[i]), "answer": self._labels[i]} for i in order]


class FixedSampling(TorchFunctionMode):
    """Makes torch.multinomial deterministic on this thread: ViLT shuffles an image's patches and drops some."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        if func is torch.multinomial:
            more["generator"] = torch.Generator(args[0].device).manual_seed(0)
        return func(*args, **more)


@dataclass(frozen=True)
class VqaGenerationOptions(GenerationOptions, ImageOptions):
    """Generation parameters of the answer."""

    truncation: bool = False


class VqaGeneration(VqaTask, GenerativeImageTask):
    """`[{"answer": ...}]`: generative models, such as BLIP."""

    Options = VqaGenerationOptions

    def postprocess(self, prepared: PreparedItem, results: Results, options: Any) -> list[dict[str, str]]:
        return [{"answer": text.strip()} for text in self.texts(results[0], options)]


class VisualQuestionAnswering(VqaTask):
    """Answers to a question about an image; the model decides which class computes them."""

    @classmethod
    def open(cls, spec: PipelineSpec) -> Any:
        family = model_type(spec.model)
        classes = {"vilt": VqaClassification, "blip": VqaGeneration}
        if family not in classes:
            raise UnsupportedModel(
                f"{spec.model!s:.60} is a {family} model; visual question answering takes {', '.join(classes)}"
            )
        return classes[family].open(replace(spec, kind=classes[family]))
