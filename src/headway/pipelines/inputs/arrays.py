"""Rows into tensors and back: sequences padded or laid end to end, arrays stacked; states read by token or mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput
from headway.pipelines.task import Batch, Row

TYPES = "token_type_ids"


@dataclass(frozen=True, eq=False)
class Ragged:
    """Values of rows that differ in how many they have: [N, …] end to end, and how many belong to each row."""

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

    Sequences are padded with `padding[name]` (0 if it has none) to the longest of them, or to `width`. With `types`,
    rows that name no types have type 0.
    """
    inputs = [_typed(row.inputs) if types else row.inputs for row in rows]
    first = inputs[0]
    for other in inputs[1:]:
        if other.keys() != first.keys():
            raise InvalidInput(f"rows with inputs {sorted(first)} and {sorted(other)} cannot share a batch")
    batch = {name: join([one[name] for one in inputs], name, padding, width) for name in first}
    if "input_ids" in first and "attention_mask" not in first and takes("attention_mask"):
        batch["attention_mask"] = mask_of([len(row.inputs["input_ids"]) for row in rows], padding, width)
    return batch


def _typed(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if TYPES in inputs or "input_ids" not in inputs:
        return inputs
    return {**inputs, TYPES: [0] * len(inputs["input_ids"])}


def join(values: list[Any], name: str, padding: Mapping[str, int], width: int | None = None) -> Any:
    """One tensor (or dict of tensors) of the values that `name` has in each row."""
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
        raise InvalidInput(f"{name} of shapes {sorted(shapes)} cannot share a batch; a task must bring them to one")
    return torch.stack(tensors)


def pad(sequences: Sequence[Sequence[int]], value: int, side: int = 1, width: int | None = None) -> Tensor:
    """Whole numbers as one tensor [R, L]; `side` 1 pads at the end, 0 at the beginning."""
    longest = width or max(map(len, sequences))
    table = np.full((len(sequences), longest), value, dtype=np.int64)
    for i, sequence in enumerate(sequences):
        n = len(sequence)
        if side:
            table[i, :n] = sequence
        else:
            table[i, longest - n :] = sequence
    return torch.from_numpy(table)


def mask_of(lengths: Sequence[int], padding: Mapping[str, int], width: int | None = None) -> Tensor:
    """1 where a row has a token, [R, L]."""
    places, counts = np.arange(width or max(lengths)), np.array(lengths)[:, None]
    mask = places < counts if padding.get("side", 1) else places >= len(places) - counts
    return torch.from_numpy(mask.astype(np.int64))


# -- packed ------------------------------------------------------------------------------------------------------------


def pack(rows: Sequence[Row], takes_types: bool, first_position: int = 0) -> Batch:
    """Rows of token ids end to end, [T] each, with the position of every token in its own row."""
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
    return Batch(inputs, tuple(rows), packed=True)


def flat_types(rows: Sequence[Row], total: int) -> np.ndarray:
    """The types of rows end to end, [T]; 0 for those that name none."""
    parts = (row.inputs[TYPES] if TYPES in row.inputs else repeat(0, row.length) for row in rows)
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=total)


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring rows of one length: tokens [start, start + rows × length)."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.length


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Runs of rows that have the same length."""
    found, start = [], 0
    for length, same in groupby(row.length for row in rows):
        count = sum(1 for _ in same)
        found.append(Group(start, count, length))
        start += count * length
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def by_token(values: Tensor, batch: Batch) -> Ragged:
    """What belongs to each row's tokens, padding left out. `values` are [R, L, …], or [1, T, …] of a packed batch."""
    lengths = [row.length for row in batch.rows]
    if batch.packed:
        return Ragged(values[0].float(), lengths)
    if len(set(lengths)) == 1 and lengths[0] == values.shape[1]:
        return Ragged(values.float().flatten(0, 1), lengths)
    return Ragged(values[token_mask(values, batch)].float(), lengths)


def token_mask(values: Tensor, batch: Batch) -> Tensor:
    """Where a padded batch has tokens, [R, L], on the device of `values`."""
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        mask = mask_of([row.length for row in batch.rows], {}, values.shape[1])
    return mask.to(values.device).bool()


def at_marks(values: Tensor, batch: Batch) -> Ragged:
    """What belongs to each row's marks; a packed batch was computed at its marks only, [1, M, …]."""
    counts = [len(row.marks) for row in batch.rows]
    if batch.packed:
        return Ragged(values[0].float(), counts)
    where = [(i, mark) for i, row in enumerate(batch.rows) for mark in row.marks]
    rows, places = torch.tensor(where, device=values.device).reshape(-1, 2).unbind(1)
    return Ragged(values[rows, places].float(), counts)


def pooled(values: Tensor, batch: Batch, how: str) -> Tensor:
    """One vector a row, [R, H] in float32, of final states [R, L, H] or packed [1, T, H]: mean, cls, last or max."""
    if batch.ends is not None:
        return _pooled_between(values[0].float(), batch.ends, how)
    if batch.packed:
        parts = [values[0, g.start : g.end].view(g.rows, g.length, -1).float() for g in groups_of(batch.rows)]
        return torch.cat([_pooled(part, None, how) for part in parts])
    return _pooled(values.float(), token_mask(values, batch), how)


def _pooled_between(values: Tensor, ends: Tensor, how: str) -> Tensor:
    """`values` [T, H] over the rows between `ends` [R + 1]: boundaries stay on the device. Empty rows hold anything."""
    match how:
        case "cls":
            return values[ends[:-1].long().clamp(max=len(values) - 1)]
        case "last":
            return values[(ends[1:].long() - 1).clamp(min=0)]
    if how == "mean":
        return torch.segment_reduce(values, "mean", offsets=ends.long(), unsafe=True)
    row = torch.searchsorted(ends, torch.arange(len(values), device=ends.device, dtype=ends.dtype), right=True) - 1
    found = values.new_full((len(ends), values.shape[1]), float("-inf"))  # the last is of tokens behind the rows
    return found.scatter_reduce_(0, row[:, None].expand_as(values), values, "amax")[:-1]


def _pooled(values: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """`values` [R, L, H] over L; without a mask every place is a token."""
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
