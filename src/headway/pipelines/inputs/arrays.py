"""Rows into tensors and back: sequences padded or concatenated, arrays stacked; outputs by token, mark or pooled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.task import ModelInputs, Row

TYPES = "token_type_ids"


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged array: the values of all rows end to end, [N, …], and how many each row has."""

    values: Tensor
    counts: Sequence[int]


def collate(
    rows: Sequence[Row],
    padding: Mapping[str, int],
    takes: Callable[[str], bool],
    width: int | None = None,
    *,
    types: bool = False,
) -> dict[str, Any]:
    """The inputs of `rows` as tensors [R, …], with an attention mask over `input_ids` where the model takes one.

    Sequences are padded with `padding[name]` (default 0) to the longest, or to `width`. With `types`, rows without
    token types get type 0.
    """
    inputs = [_with_types(row.inputs) if types else row.inputs for row in rows]
    first = inputs[0]
    for other in inputs[1:]:
        if other.keys() != first.keys():
            raise InvalidInput(f"rows with inputs {sorted(first)} and {sorted(other)} cannot share a batch")
    batch = {name: join([one[name] for one in inputs], name, padding, width) for name in first}
    if "input_ids" in first and "attention_mask" not in first and takes("attention_mask"):
        batch["attention_mask"] = attention_mask([len(row.inputs["input_ids"]) for row in rows], padding, width)
    return batch


def _with_types(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if TYPES in inputs or "input_ids" not in inputs:
        return inputs
    return {**inputs, TYPES: [0] * len(inputs["input_ids"])}


def join(values: list[Any], name: str, padding: Mapping[str, int], width: int | None = None) -> Any:
    """One tensor (or dict of tensors) of the rows' values of `name`."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: join([value[key] for value in values], key, padding, width) for key in first}
    if isinstance(first, (list, tuple)) and (not first or isinstance(first[0], int)):
        return pad(values, padding.get(name, 0), padding.get("side", 1), width)
    tensors = [value if isinstance(value, Tensor) else torch.as_tensor(value) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        if all(tensor.ndim == 1 and not tensor.is_floating_point() for tensor in tensors):
            return pad([tensor.tolist() for tensor in tensors], padding.get(name, 0), padding.get("side", 1), width)
        raise InvalidInput(f"{name} of shapes {sorted(shapes)} cannot share a batch; a task must make them equal")
    return torch.stack(tensors)


def pad(sequences: Sequence[Sequence[int]], value: int, side: int = 1, width: int | None = None) -> Tensor:
    """Integer sequences as one tensor [R, L]; `side` 1 pads at the end, 0 at the beginning."""
    longest = width or max(map(len, sequences))
    table = np.full((len(sequences), longest), value, dtype=np.int64)
    for i, sequence in enumerate(sequences):
        n = len(sequence)
        if side:
            table[i, :n] = sequence
        else:
            table[i, longest - n :] = sequence
    return torch.from_numpy(table)


def attention_mask(lengths: Sequence[int], padding: Mapping[str, int], width: int | None = None) -> Tensor:
    """1 where a row has a token, [R, L]."""
    places, counts = np.arange(width or max(lengths)), np.array(lengths)[:, None]
    mask = places < counts if padding.get("side", 1) else places >= len(places) - counts
    return torch.from_numpy(mask.astype(np.int64))


# -- unpadded ----------------------------------------------------------------------------------------------------------


def concatenate(rows: Sequence[Row], takes_types: bool, first_position: int = 0) -> ModelInputs:
    """An unpadded batch: token ids end to end, [T], with the position of every token in its row."""
    lengths = [row.length for row in rows]
    total = sum(lengths)

    def flat(name: str) -> Tensor:
        ids = chain.from_iterable(row.inputs[name] for row in rows)
        return torch.from_numpy(np.fromiter(ids, dtype=np.int64, count=total))

    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions = torch.from_numpy(np.arange(total) - starts + first_position)
    inputs = {"input_ids": flat("input_ids"), "position_ids": positions}
    if takes_types:
        typed = any(TYPES in row.inputs for row in rows)
        inputs[TYPES] = torch.from_numpy(flat_types(rows, total)) if typed else torch.zeros(total, dtype=torch.int64)
    return ModelInputs(inputs, tuple(rows), unpadded=True)


def flat_types(rows: Sequence[Row], total: int) -> np.ndarray:
    """The token types of rows end to end, [T]; 0 for rows without."""
    parts = (row.inputs[TYPES] if TYPES in row.inputs else repeat(0, row.length) for row in rows)
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=total)


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Consecutive rows of one length: tokens [start, start + rows × length)."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.length


def length_groups(rows: Sequence[Row]) -> list[LengthGroup]:
    """Runs of consecutive rows with the same length."""
    groups, start = [], 0
    for length, same in groupby(row.length for row in rows):
        count = sum(1 for _ in same)
        groups.append(LengthGroup(start, count, length))
        start += count * length
    return groups


# -- outputs -----------------------------------------------------------------------------------------------------------


def by_token(values: Tensor, batch: ModelInputs) -> Ragged:
    """The values of each row's tokens, without padding. `values` are [R, L, …], or [1, T, …] of an unpadded batch."""
    lengths = [row.length for row in batch.rows]
    if batch.unpadded:
        return Ragged(values[0].float(), lengths)
    if len(set(lengths)) == 1 and lengths[0] == values.shape[1]:
        return Ragged(values.float().flatten(0, 1), lengths)
    return Ragged(values[token_mask(values, batch)].float(), lengths)


def token_mask(values: Tensor, batch: ModelInputs) -> Tensor:
    """Where a padded batch has tokens, bool [R, L], on the device of `values`."""
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        mask = attention_mask([row.length for row in batch.rows], {}, values.shape[1])
    return mask.to(values.device).bool()


def at_marks(values: Tensor, batch: ModelInputs) -> Ragged:
    """The values at each row's marks; an unpadded batch was computed at its marks only, [1, M, …]."""
    counts = [len(row.marks) for row in batch.rows]
    if batch.unpadded:
        return Ragged(values[0].float(), counts)
    where = [(i, mark) for i, row in enumerate(batch.rows) for mark in row.marks]
    rows, places = torch.tensor(where, device=values.device).reshape(-1, 2).unbind(1)
    return Ragged(values[rows, places].float(), counts)


def pooled(values: Tensor, batch: ModelInputs, how: str) -> Tensor:
    """One float32 vector per row, [R, H], from final states [R, L, H] or unpadded [1, T, H]: mean, cls, last or max."""
    if batch.cu_seqlens is not None:
        return _pooled_segments(values[0].float(), batch.cu_seqlens, how)
    if batch.unpadded:
        parts = [values[0, g.start : g.end].view(g.rows, g.length, -1).float() for g in length_groups(batch.rows)]
        return torch.cat([_pooled(part, None, how) for part in parts])
    return _pooled(values.float(), token_mask(values, batch), how)


def _pooled_segments(values: Tensor, cu_seqlens: Tensor, how: str) -> Tensor:
    """`values` [T, H] pooled by row, without a synchronization. Empty rows have undefined values."""
    match how:
        case "cls":
            return values[cu_seqlens[:-1].long().clamp(max=len(values) - 1)]
        case "last":
            return values[(cu_seqlens[1:].long() - 1).clamp(min=0)]
    if how == "mean":
        return torch.segment_reduce(values, "mean", offsets=cu_seqlens.long(), unsafe=True)
    tokens = torch.arange(len(values), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    pooled = values.new_full((len(cu_seqlens), values.shape[1]), float("-inf"))  # the last one is for padding
    return pooled.scatter_reduce_(0, row[:, None].expand_as(values), values, "amax")[:-1]


def _pooled(values: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """`values` [R, L, H] pooled over L; without a mask every position is a token."""
    if mask is None:
        match how:
            case "cls":
                return values[:, 0]
            case "last":
                return values[:, -1]
        return values.amax(1) if how == "max" else values.mean(1)
    rows = torch.arange(len(values), device=values.device)
    places = torch.arange(values.shape[1], device=values.device)
    match how:
        case "cls":
            return values[rows, mask.int().argmax(1)]
        case "last":
            return values[rows, (places * mask).argmax(1)]
        case "max":
            return values.masked_fill(~mask[..., None], float("-inf")).amax(1)
    weights = mask[..., None].float()
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
