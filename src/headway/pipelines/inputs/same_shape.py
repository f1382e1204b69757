"""Rows that are computed together only with rows of the same shape: for models that padding would change.

Pictures that keep their proportions, recordings for models that take no mask, questions that a decoder reads without
one: whoever shares a batch with them must look exactly like them. The batcher does not need to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.task import Batch, Row, Task


class ShapedTask(Task):
    """A task whose `compute` is called with rows of one shape at a time."""

    def pads(self) -> bool:
        return False

    def assemble(self, rows: Sequence[Row]) -> Batch:
        return Batch({}, tuple(rows))  # `forward` makes the tensors of each shape

    def forward(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        places = alike(batch.rows)
        found = [self.compute(self.collate([batch.rows[i] for i in some]), options) for some in places]
        return found[0] if len(found) == 1 else merged(found, places)

    def compute(self, batch: Batch, options: Any) -> Mapping[str, Tensor | Ragged]:
        """What `Task.forward` would give for these rows."""
        return self.reduce(self.loaded.run(batch.inputs), batch, options)


def alike(rows: Sequence[Row]) -> list[list[int]]:
    """The places of rows whose inputs have the same names and shapes, a list for each kind."""
    found: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(tuple((name, _shape(value)) for name, value in row.inputs.items()), []).append(i)
    return list(found.values())


def _shape(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return tuple(shape) if shape is not None else len(value)


def merged(
    found: Sequence[Mapping[str, Tensor | Ragged]], places: Sequence[Sequence[int]]
) -> dict[str, Tensor | Ragged]:
    """The answers for several lists of places as one, in the order of places."""
    order = [i for some in places for i in some]
    back = sorted(range(len(order)), key=order.__getitem__)  # where in `order` place 0, 1, … is
    joined: dict[str, Tensor | Ragged] = {}
    for name in found[0]:
        values = [answer[name] for answer in found]
        rows = [row for value in values for row in _rows(value)]
        rows = [rows[i] for i in back]
        if isinstance(values[0], Ragged):
            joined[name] = Ragged(torch.cat(rows), [len(row) for row in rows])
        else:
            joined[name] = torch.stack(rows)
    return joined


def _rows(value: Tensor | Ragged) -> Sequence[Tensor]:
    return value.values.split(list(value.counts)) if isinstance(value, Ragged) else value.unbind(0)
