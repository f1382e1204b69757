"""Rows into tensors: sequences are padded to the longest, arrays of one shape are stacked, dicts are entered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import InvalidInput
from headway.pipelines.task import Row


def collate(
    rows: Sequence[Row], padding: Mapping[str, int], takes: Callable[[str], bool], width: int | None = None
) -> dict[str, Any]:
    """The inputs of `rows` as tensors [R, …], with an attention mask over `input_ids` where the model takes one.

    Sequences are padded with `padding[name]` (0 if it has none) to the longest of them, or to `width`.
    """
    first = rows[0].inputs
    for row in rows[1:]:
        if row.inputs.keys() != first.keys():
            raise InvalidInput(f"rows with inputs {sorted(first)} and {sorted(row.inputs)} cannot share a batch")
    batch = {name: join([row.inputs[name] for row in rows], name, padding, width) for name in first}
    if "input_ids" in first and "attention_mask" not in first and takes("attention_mask"):
        batch["attention_mask"] = mask_of([len(row.inputs["input_ids"]) for row in rows], padding, width)
    return batch


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
