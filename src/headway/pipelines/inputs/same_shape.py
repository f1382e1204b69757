"""Tasks whose rows share a model call only with rows of the same shape, because padding would change their results.

Images that keep their aspect ratio, audio for models without a mask, questions that a decoder reads without one. The
batcher does not need to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.pipelines.inputs.arrays import Ragged
from headway.pipelines.task import ModelInputs, Row, Task


class SameShapeTask(Task):
    """A task whose `compute` gets rows of one shape at a time."""

    def pads(self) -> bool:
        return False

    def assemble(self, rows: Sequence[Row]) -> ModelInputs:
        return ModelInputs({}, tuple(rows))  # `forward` collates each shape by itself

    def forward(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        groups = group_by_shape(batch.rows)
        outputs = [self.compute(self.collate([batch.rows[i] for i in group]), options) for group in groups]
        return outputs[0] if len(outputs) == 1 else merge(outputs, groups)

    def compute(self, batch: ModelInputs, options: Any) -> Mapping[str, Tensor | Ragged]:
        """`Task.forward` for rows of one shape."""
        return self.reduce(self.loaded.backend(batch.inputs), batch, options)


def group_by_shape(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of rows whose inputs have the same names and shapes, one list per shape."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple((name, _shape(value)) for name, value in row.inputs.items()), []).append(i)
    return list(groups.values())


def _shape(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return tuple(shape) if shape is not None else len(value)


def merge(
    outputs: Sequence[Mapping[str, Tensor | Ragged]], groups: Sequence[Sequence[int]]
) -> dict[str, Tensor | Ragged]:
    """The outputs of several groups of rows as one, in the order of the rows."""
    order = [i for group in groups for i in group]
    back = sorted(range(len(order)), key=order.__getitem__)  # where row 0, 1, … is in `order`
    joined: dict[str, Tensor | Ragged] = {}
    for name in outputs[0]:
        values = [output[name] for output in outputs]
        rows = [row for value in values for row in _rows(value)]
        rows = [rows[i] for i in back]
        if isinstance(values[0], Ragged):
            joined[name] = Ragged(torch.cat(rows), [len(row) for row in rows])
        else:
            joined[name] = torch.stack(rows)
    return joined


def _rows(value: Tensor | Ragged) -> Sequence[Tensor]:
    return value.values.split(list(value.counts)) if isinstance(value, Ragged) else value.unbind(0)
