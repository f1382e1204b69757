"""The forward pass and `generate` of decoders by hand, computed by the engine, with the outputs of transformers.

`forward` is one pass for each row, all of them in the engine's batch: logits, hidden states and attentions are probes.
`outputs_of_generate` reads what `generate` saw from one more pass over prompt and continuation, which gives the same
values. Shapes: R rows, T tokens, V vocabulary, H heads, D width, L layers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.specs.probes import AttentionScores, Hidden, Logits
from headway.base.specs.samplers import Sampling
from headway.base.text import short_repr
from headway.kernels.reference.sampling import RowSampler, changed_scores, processed_logprobs
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.task import ModelInputs, Row
from headway.program.generation.ngrams import banned_by_ngrams

if TYPE_CHECKING:
    from headway.program.engine import Engine

FORWARD = ("labels", "output_hidden_states", "output_attentions", "return_dict", "logits_to_keep", "use_cache")
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
IGNORED = -100  # the label that does not count, in transformers too


@dataclass(frozen=True, eq=False)
class Wanted:
    """What to read at the tokens of a pass, from the token `first` on."""

    logits: bool = True
    hidden: bool = False
    attentions: bool = False
    first: int = 0  # of the logits; hidden states and attentions are read at every token


@dataclass(frozen=True, eq=False)
class PassValues:
    """What was read in one row's pass."""

    logits: np.ndarray | None  # [T - first, V]
    hidden: np.ndarray | None  # [L + 1, T, D]
    attentions: np.ndarray | None  # [L, H, T, T]


# -- inputs ------------------------------------------------------------------------------------------------------------


def batch_of(rows: Sequence[Sequence[int]], pad: int) -> ModelInputs:
    """Token ids as tensors [R, T], padded at the beginning, as decoders need it to generate."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ModelInputs(
        {"input_ids": ids, "attention_mask": mask}, tuple(Row({"input_ids": list(r)}, len(r)) for r in rows)
    )


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Token ids [R, T] and the range of each row that is not padding."""

    ids: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> PaddedRows:
        """From `input_ids` and an `attention_mask`, whose zeros may only be at the ends of a row."""
        for name in inputs:
            if name not in ("input_ids", "attention_mask"):
                raise InvalidInput(f"{name!r} is not an input of this pipeline; it takes input_ids and attention_mask")
        if "input_ids" not in inputs:
            raise InvalidInput("input_ids is missing; pass texts, the ModelInputs of .preprocess or input_ids=[R, T]")
        ids = _integers(inputs["input_ids"], "input_ids")
        mask = _integers(inputs.get("attention_mask", torch.ones_like(ids)), "attention_mask")
        if mask.shape != ids.shape:
            raise InvalidInput(f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}; make them alike")
        return cls(ids, tuple(_span(row, i) for i, row in enumerate(mask)))

    def rows(self) -> list[list[int]]:
        """The token ids of each row, without padding."""
        return [self.ids[i, start:end].tolist() for i, (start, end) in enumerate(self.spans)]


def _integers(value: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongType(f"{name} is a {type(value).__name__}; it must be a tensor of integers, [R, T]") from error
    if tensor.is_floating_point() or tensor.ndim != 2 or 0 in tensor.shape:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InvalidInput(f"{name} is {kind}{list(tensor.shape)}; it must be integers [R, T], not empty")
    return tensor.cpu().to(torch.int64)


def _span(mask: Tensor, row: int) -> tuple[int, int]:
    seen = mask.nonzero().squeeze(1)
    if len(seen) == 0:
        raise InvalidInput(f"row {row} of attention_mask is all zeros; a row needs a token to attend to")
    start, end = int(seen[0]), int(seen[-1]) + 1
    if end - start != len(seen):
        raise Unsupported(
            f"row {row} of attention_mask has zeros between its ones; only padding at the ends is taken here, other "
            "masks are ctx.forward().attention_mask(...)"
        )
    return start, end


# -- forward -----------------------------------------------------------------------------------------------------------


def check_forward(parameters: Mapping[str, Any]) -> None:
    """Raise for parameters that the forward pass does not take."""
    for name, value in parameters.items():
        if name not in FORWARD:
            raise InvalidInput(f"forward takes no argument {name!r}; it takes {', '.join(FORWARD)}")
        if name.startswith("output_") or name == "return_dict":
            check_flag(name, value)
    if parameters.get("use_cache"):
        raise Unsupported("use_cache=True returns keys and values; the engine keeps them: use hw.Engine and a Context")


def check_flag(name: str, value: Any) -> None:
    if value not in (None, True, False):
        raise InvalidInput(f"{name} is {short_repr(value)}; it must be True or False")


async def forward(engine: Engine, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    """The output of a CausalLM: `loss` with labels, `logits` [R, T, V], and hidden states and attentions as asked.

    At padding every value is 0, and its labels do not count.
    """
    check_forward(parameters)
    padded = PaddedRows.of(inputs)
    wanted = Wanted(
        hidden=bool(parameters.get("output_hidden_states")), attentions=bool(parameters.get("output_attentions"))
    )
    values = await asyncio.gather(*(one_pass(engine, row, wanted) for row in padded.rows()))
    logits = _padded([value.logits for value in values], padded)  # [R, T, V]
    labels = parameters.get("labels")
    output = ModelOutput(
        loss=None if labels is None else _loss(logits, labels, padded),
        logits=_kept(logits, parameters.get("logits_to_keep")),
        hidden_states=_by_layer([value.hidden for value in values], padded) if wanted.hidden else None,
        attentions=_attentions([value.attentions for value in values], padded) if wanted.attentions else None,
    )
    return output.to_tuple() if parameters.get("return_dict") is False else output


async def one_pass(engine: Engine, ids: Sequence[int], wanted: Wanted) -> PassValues:
    """One row's values at each of its tokens."""
    layers = engine.config.layers
    async with engine.context() as ctx:
        pass_ = ctx.forward().input(ids)
        rows = range(len(ids))
        logits = [pass_.probe(i, Logits()) for i in rows if wanted.logits and i >= wanted.first]
        hidden = [[pass_.probe(i, Hidden(l)) for i in rows] for l in range(layers + 1)] if wanted.hidden else []
        scores = (
            [[pass_.probe(i, AttentionScores(l)) for i in rows] for l in range(layers)] if wanted.attentions else []
        )
        out = await pass_.execute()
    return PassValues(
        np.stack([out.logits(handle) for handle in logits]) if logits else None,
        np.stack([[out.hidden(handle) for handle in layer] for layer in hidden]) if hidden else None,
        np.stack([_square([out.attention(handle) for handle in layer]) for layer in scores]) if scores else None,
    )


def _square(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[H, T, T] from the attention of each token to the slots it sees, [H, slots]; 0 beyond."""
    square = np.zeros((rows[0].shape[0], len(rows), len(rows)), dtype=np.float32)
    for i, row in enumerate(rows):
        square[:, i, : row.shape[1]] = row
    return square


def _padded(rows: Sequence[np.ndarray | None], padded: PaddedRows) -> Tensor:
    """[R, T, …] from [T, …] of each row, 0 at padding."""
    first = rows[0]
    assert first is not None
    whole = torch.zeros((*padded.ids.shape, *first.shape[1:]))
    for i, (row, (start, end)) in enumerate(zip(rows, padded.spans)):
        whole[i, start:end] = torch.from_numpy(np.asarray(row))
    return whole


def _by_layer(rows: Sequence[np.ndarray | None], padded: PaddedRows) -> tuple[Tensor, ...]:
    """A tensor [R, T, D] for each layer from [L + 1, T, D] of each row."""
    first = rows[0]
    assert first is not None
    return tuple(_padded([row[l] for row in rows if row is not None], padded) for l in range(len(first)))


def _attentions(rows: Sequence[np.ndarray | None], padded: PaddedRows) -> tuple[Tensor, ...]:
    """A tensor [R, H, T, T] for each layer from [L, H, T, T] of each row."""
    first = rows[0]
    assert first is not None
    layers, heads = first.shape[:2]
    count, width = padded.ids.shape
    whole = torch.zeros((layers, count, heads, width, width))
    for i, (row, (start, end)) in enumerate(zip(rows, padded.spans)):
        whole[:, i, :, start:end, start:end] = torch.from_numpy(np.asarray(row))
    return tuple(whole)


def _loss(logits: Tensor, labels: Any, padded: PaddedRows) -> Tensor:
    """The mean cross-entropy of each label under the logits of the token before it."""
    wanted = _integers(labels, "labels")
    if wanted.shape != padded.ids.shape:
        raise InvalidInput(f"labels is {list(wanted.shape)} and input_ids {list(padded.ids.shape)}; make them alike")
    counted = torch.full_like(wanted, IGNORED)
    for i, (start, end) in enumerate(padded.spans):
        counted[i, start + 1 : end] = wanted[i, start + 1 : end]
    vocab = logits.shape[-1]
    if bool(((counted != IGNORED) & ((counted < 0) | (counted >= vocab))).any()):
        raise InvalidInput(f"labels must be token ids in [0, {vocab - 1}], or {IGNORED} where they do not count")
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), counted[:, 1:].flatten(), ignore_index=IGNORED
    )


def _kept(logits: Tensor, keep: Any) -> Tensor:
    return logits if keep is None else logits[:, -check_integer(keep, "logits_to_keep", 0) :]


# -- what generate saw -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Continued:
    """One sequence: the row of the batch it continues, and its new tokens, the end token included."""

    row: int
    prompt: tuple[int, ...]
    new: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Processing:
    """How the logits of a step become scores."""

    sampler: Sampling
    no_repeat_ngram_size: int
    min_tokens: int
    end_ids: tuple[int, ...]

    def scores(self, logits: Tensor, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
        """The logits [V] after penalties, temperature and filters; -inf for tokens that cannot come."""
        banned = banned_by_ngrams([*prompt, *new], self.no_repeat_ngram_size)
        banned |= set(self.end_ids) if len(new) < self.min_tokens else set()
        allowed = torch.ones(len(logits), dtype=torch.bool)
        allowed[list(banned)] = False
        seen = torch.tensor(sorted({*prompt, *new}))
        row = RowSampler(self.sampler, allowed=allowed, seen=seen)
        scores = logits.double()
        ids, changed = changed_scores(logits, row)
        scores[ids] = changed
        if self.sampler.temperature > 0:
            scores /= self.sampler.temperature
        return scores.masked_fill(processed_logprobs(logits, row) == -torch.inf, -torch.inf).float()


def sequences_of(padded: PaddedRows, continued: Sequence[Continued], pad: int) -> Tensor:
    """[sequences, T + new tokens]: each prompt as it was given, its continuation, padding."""
    longest = max(len(one.new) for one in continued)
    rows = [padded.ids[one.row].tolist() + list(one.new) + [pad] * (longest - len(one.new)) for one in continued]
    return torch.tensor(rows)


async def outputs_of_generate(
    engine: Engine, padded: PaddedRows, continued: Sequence[Continued], flags: Mapping[str, Any], processing: Processing
) -> dict[str, Any]:
    """`scores`, `logits`, `hidden_states` and `attentions` as asked: a tuple with an entry for each step.

    A step's scores and logits are [sequences, V]. Hidden states and attentions are a tuple of layers, [.., T, ..] at
    the first step and [.., 1, ..] at the others. Where a sequence has ended, and at padding, every value is 0.
    """
    wanted = Wanted(
        logits=bool(flags.get("output_scores") or flags.get("output_logits")),
        hidden=bool(flags.get("output_hidden_states")),
        attentions=bool(flags.get("output_attentions")),
    )
    if not any((wanted.logits, wanted.hidden, wanted.attentions)):
        return {}
    read = [Wanted(wanted.logits, wanted.hidden, wanted.attentions, len(one.prompt) - 1) for one in continued]
    passes = [one_pass(engine, [*one.prompt, *one.new[:-1]], want) for one, want in zip(continued, read)]
    values = await asyncio.gather(*passes)
    steps = range(max(len(one.new) for one in continued))
    fields: dict[str, Any] = {}
    if wanted.logits:
        rows = [torch.from_numpy(np.asarray(value.logits)) for value in values]  # [new tokens, V] of each
        if flags.get("output_scores"):
            scored = [_scored(row, one, processing) for row, one in zip(rows, continued)]
            fields["scores"] = tuple(_step(scored, step) for step in steps)
        if flags.get("output_logits"):
            fields["logits"] = tuple(_step(rows, step) for step in steps)
    spans = [padded.spans[one.row] for one in continued]
    if wanted.attentions:
        weights = [torch.from_numpy(np.asarray(value.attentions)) for value in values]  # [L, H, T, T]
        fields["attentions"] = tuple(_attention_step(weights, spans, padded.ids.shape[1], step) for step in steps)
    if wanted.hidden:
        states = [torch.from_numpy(np.asarray(value.hidden)) for value in values]  # [L + 1, T, D]
        fields["hidden_states"] = tuple(_hidden_step(states, spans, padded.ids.shape[1], step) for step in steps)
    return fields


def _scored(logits: Tensor, one: Continued, processing: Processing) -> Tensor:
    return torch.stack([processing.scores(row, one.prompt, one.new[:at]) for at, row in enumerate(logits)])


def _step(rows: Sequence[Tensor], step: int) -> Tensor:
    """[sequences, V] of a step; 0 for sequences that have ended."""
    return torch.stack([row[step] if step < len(row) else torch.zeros_like(row[0]) for row in rows])


def _places(span: tuple[int, int], width: int, step: int) -> tuple[slice, slice]:
    """The tokens of a step within a row's pass, and within the tensor of the step."""
    start, end = span
    count = end - start
    return (slice(0, count), slice(start, end)) if step == 0 else (slice(count + step - 1, count + step), slice(0, 1))


def _hidden_step(states: Sequence[Tensor], spans: Sequence[Any], width: int, step: int) -> tuple[Tensor, ...]:
    layers, _, size = states[0].shape
    whole = torch.zeros((layers, len(states), width if step == 0 else 1, size))
    for i, (state, span) in enumerate(zip(states, spans)):
        own, place = _places(span, width, step)
        if own.stop <= state.shape[1]:
            whole[:, i, place] = state[:, own]
    return tuple(whole)


def _attention_step(weights: Sequence[Tensor], spans: Sequence[Any], width: int, step: int) -> tuple[Tensor, ...]:
    layers, heads = weights[0].shape[:2]
    whole = torch.zeros((layers, len(weights), heads, width if step == 0 else 1, width + step))
    for i, (weight, span) in enumerate(zip(weights, spans)):
        own, place = _places(span, width, step)
        if own.stop > weight.shape[2]:
            continue
        start, end = span
        count = end - start
        whole[:, i, :, place, start:end] = weight[:, :, own, :count]
        whole[:, i, :, place, width:] = weight[:, :, own, count : count + step]
    return tuple(whole)
