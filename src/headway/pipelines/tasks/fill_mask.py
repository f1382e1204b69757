"""Fill-mask: the most likely tokens for each mask of a text."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel
from headway.base.text import short_repr
from headway.pipelines.inputs.arrays import Ragged, at_marks
from headway.pipelines.inputs.text import TextOptions, TextTask
from headway.pipelines.task import ModelInputs, PreparedItem, Row, check_count, check_text

if TYPE_CHECKING:
    from headway.pipelines.backends.loading import LoadedModel
    from headway.pipelines.task import Results


@dataclass(frozen=True)
class FillMaskOptions(TextOptions):
    """`top_k` tokens for each mask; with `targets`, only of those words, each one token of the vocabulary."""

    top_k: int = 5
    targets: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top_k", self.top_k, optional=False)
        if self.stride is not None:
            raise InvalidInput("fill-mask takes no stride: a mask belongs to one chunk; use truncation=True")
        if self.targets is not None and not isinstance(self.targets, Iterable):
            raise InvalidInput(f"targets is {short_repr(self.targets)}; it must be a word or a list of words")
        if self.targets is not None:
            words = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
            if not words:
                raise InvalidInput("targets is empty; pass at least one word, or None for the whole vocabulary")
            object.__setattr__(self, "targets", tuple(check_text(word, "a target") for word in words))


class FillMask(TextTask):
    """A list of `score`, `token`, `token_str`, `sequence`, best first; one such list per mask if there are several."""

    Options = FillMaskOptions
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    reads: ClassVar[str | None] = "marks"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        if getattr(loaded.tokenizer, "mask_token_id", None) is None:
            raise UnsupportedModel(f"the tokenizer of {loaded.name} has no mask token, which fill-mask needs")
        self._mask: int = loaded.tokenizer.mask_token_id
        self._vocabulary: dict[str, int] = loaded.tokenizer.get_vocab()

    def expected_input(self) -> str:
        return f"a string with {self.loaded.tokenizer.mask_token} in it"

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        merged: FillMaskOptions = super().options(base, given)
        self._target_ids(merged)
        most = len(merged.targets) if merged.targets is not None else int(self.config.vocab_size)
        if "top_k" in given and merged.top_k > most and merged.targets is None:
            raise InvalidInput(f"top_k is {merged.top_k} and the vocabulary has {most} tokens")
        return merged

    def _target_ids(self, options: FillMaskOptions) -> list[int] | None:
        if options.targets is None:
            return None
        for word in options.targets:
            if word not in self._vocabulary:
                raise InvalidInput(
                    f"target {short_repr(word)} is not a token of the vocabulary; targets must be single tokens"
                )
        return sorted({self._vocabulary[word] for word in options.targets})

    def preprocess_many(self, items: Sequence[Any], options: FillMaskOptions) -> list[PreparedItem]:
        text = self.loaded.text
        assert text is not None
        encoded = text.encode([self.text_of(item) for item in items], options)
        return [self._prepared(item, text.row(parts[0])) for item, parts in zip(items, encoded)]

    def _prepared(self, item: str, row: Row) -> PreparedItem:
        ids = row.inputs["input_ids"]
        marks = tuple(i for i, token in enumerate(ids) if token == self._mask)
        if not marks:
            raise InvalidInput(
                f"{short_repr(item)} has no {self.loaded.tokenizer.mask_token}; put it where a word is missing"
            )
        return PreparedItem((Row(row.inputs, row.length, marks),), ids)

    def reduce(self, output: Any, batch: ModelInputs, options: FillMaskOptions) -> Mapping[str, Any]:
        at = at_marks(output.logits, batch)
        scores, targets = at.values.softmax(-1), self._target_ids(options)
        if targets is not None:
            places = torch.tensor(targets, device=scores.device)
            best, order = scores[:, places].topk(min(options.top_k, len(targets)))
            ids = places[order]
        else:
            best, ids = scores.topk(options.top_k)
        return {"scores": Ragged(best, at.counts), "ids": Ragged(ids, at.counts)}

    def batch_key(self, options: FillMaskOptions) -> Hashable:
        return options.top_k, options.targets

    def postprocess(self, prepared: PreparedItem, results: Results, options: FillMaskOptions) -> list[Any]:
        result, marks = results[0], prepared.rows[0].marks
        single = len(marks) == 1
        lists = [
            [self._filled(prepared.facts, mark, int(token), float(score), single) for score, token in zip(scores, ids)]
            for mark, scores, ids in zip(marks, result["scores"], result["ids"])
        ]
        return lists[0] if single else lists

    def _filled(self, ids: Sequence[int], mark: int, token: int, score: float, single: bool) -> dict[str, Any]:
        tokenizer = self.loaded.tokenizer
        whole = np.array(ids)
        whole[mark] = token
        whole = whole[whole != tokenizer.pad_token_id]
        # with several masks the others must stay visible
        text = tokenizer.decode(whole.tolist(), skip_special_tokens=single)
        return {"score": score, "token": token, "token_str": tokenizer.decode([token]), "sequence": text}
