"""torch.compile over a few sizes: rows are padded up to a bucket, so that each bucket is compiled once.

Token ids with a mask are padded in length too. Pictures and recordings are not, as padding would change them: they are
compiled for their own shapes, and for changing ones from the second on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.pipelines.backends.forward import Forward, to_device

SEQUENCES = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
ROW_BUCKETS = (1, 8, 32, 64, 128, 256)


class CompiledForward(Forward):
    """A Forward whose model is compiled; inputs are padded to a bucket of rows and of tokens, answers cut back.

    Padding has attention 0, so the rows that are read are those of the plain model, to float rounding. A pass by hand
    with parameters of its own is the plain model's.
    """

    def __init__(self, run: Forward, limit: int | None) -> None:
        self.module, self.placement = run.module, run.placement
        self._compiled: Any = torch.compile(run.module, dynamic=False)
        self._shaped: Any = torch.compile(run.module)
        self._limit = limit

    def call_on_device(self, inputs: Mapping[str, Any], method: str, parameters: Mapping[str, Any]) -> Any:
        if method != "forward" or parameters:
            return super().call_on_device(inputs, method, parameters)
        if not _padded_by_mask(inputs):
            return self._by_shape(inputs)
        rows, tokens = inputs["input_ids"].shape
        width, height = token_bucket(tokens, self._limit), row_bucket(rows)
        wide = {name: _stretched(value, height, width) for name, value in inputs.items()}
        found = self._compiled(**self._moved(wide))
        return type(found)(**{name: _cut(value, rows, tokens, width) for name, value in found.items()})

    def _by_shape(self, inputs: Mapping[str, Any]) -> Any:
        rows = len(next(iter(inputs.values())))
        tall = {name: _heightened(value, row_bucket(rows)) for name, value in inputs.items()}
        found = self._shaped(**self._moved(tall))
        return type(found)(**{name: _cut(value, rows) for name, value in found.items()})

    def _moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return to_device(dict(inputs), self.device, self.placement.dtype)


def _padded_by_mask(inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs are token ids with a mask that starts each row with its tokens."""
    if set(inputs) - set(SEQUENCES[:3]) or "attention_mask" not in inputs or "input_ids" not in inputs:
        return False
    return bool(inputs["attention_mask"][:, 0].all())


def token_bucket(tokens: int, limit: int | None) -> int:
    """The length that rows of `tokens` are padded to: 16, 32, 48, 64, then in steps of a quarter, at most `limit`."""
    step = 16
    while tokens > 4 * step:
        step *= 2
    width = -(-tokens // step) * step
    return width if limit is None else max(min(width, limit), tokens)


def row_bucket(rows: int) -> int:
    """The number of rows a batch is padded to."""
    return next((size for size in ROW_BUCKETS if size >= rows), -(-rows // ROW_BUCKETS[-1]) * ROW_BUCKETS[-1])


def _stretched(value: Tensor, rows: int, tokens: int) -> Tensor:
    """`value` [R, L] with zeros up to [rows, tokens]; added rows repeat the first, whose mask is not empty."""
    return _heightened(torch.nn.functional.pad(value, (0, tokens - value.shape[1])), rows)


def _heightened(value: Tensor, rows: int) -> Tensor:
    """`value` [R, …] with its first row repeated up to [rows, …]."""
    missing = rows - len(value)
    return torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) if missing > 0 else value


def _cut(value: Any, rows: int, tokens: int = 0, width: int | None = None) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_cut(part, rows, tokens, width) for part in value)
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    value = value[:rows]
    return value[:, :tokens] if value.ndim > 1 and value.shape[1] == width else value
