"""torch.compile for a few sizes: the number of rows is padded up to a bucket, so that each bucket compiles once.

Token ids with a mask are padded in length too. Images and audio are not, as padding would change them: they are
compiled for their own shape, and with dynamic shapes from the second shape on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.pipelines.backends.torch import TorchBackend, to_device

SEQUENCES = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
ROW_BUCKETS = (1, 8, 32, 64, 128, 256)


class CompiledBackend(TorchBackend):
    """Runs the compiled model; inputs are padded to a bucket of rows and tokens, and outputs cut back.

    Padding has attention 0, so results equal the eager model's to float rounding. Calls with extra parameters run the
    eager model.
    """

    def __init__(self, backend: TorchBackend, limit: int | None) -> None:
        self.module, self.placement = backend.module, backend.placement
        self._compiled: Any = torch.compile(backend.module, dynamic=False)
        self._dynamic: Any = torch.compile(backend.module)
        self._limit = limit

    def call_on_device(self, inputs: Mapping[str, Any], method: str, parameters: Mapping[str, Any]) -> Any:
        if method != "forward" or parameters:
            return super().call_on_device(inputs, method, parameters)
        if not _is_masked_tokens(inputs):
            return self._call_dynamic(inputs)
        rows, tokens = inputs["input_ids"].shape
        width, height = token_bucket(tokens, self._limit), row_bucket(rows)
        padded = {name: _pad(value, height, width) for name, value in inputs.items()}
        output = self._compiled(**self._to_device(padded))
        return type(output)(**{name: _cut(value, rows, tokens, width) for name, value in output.items()})

    def _call_dynamic(self, inputs: Mapping[str, Any]) -> Any:
        rows = len(next(iter(inputs.values())))
        padded = {name: _pad_rows(value, row_bucket(rows)) for name, value in inputs.items()}
        output = self._dynamic(**self._to_device(padded))
        return type(output)(**{name: _cut(value, rows) for name, value in output.items()})

    def _to_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return to_device(dict(inputs), self.device, self.placement.dtype)


def _is_masked_tokens(inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs are token ids with an attention mask, padded on the right."""
    if set(inputs) - set(SEQUENCES[:3]) or "attention_mask" not in inputs or "input_ids" not in inputs:
        return False
    return bool(inputs["attention_mask"][:, 0].all())


def token_bucket(tokens: int, limit: int | None) -> int:
    """The length that rows of `tokens` are padded to: 16, 32, 48, 64, then coarser, at most `limit`."""
    step = 16
    while tokens > 4 * step:
        step *= 2
    width = -(-tokens // step) * step
    return width if limit is None else max(min(width, limit), tokens)


def row_bucket(rows: int) -> int:
    """The number of rows a batch is padded to."""
    return next((size for size in ROW_BUCKETS if size >= rows), -(-rows // ROW_BUCKETS[-1]) * ROW_BUCKETS[-1])


def _pad(value: Tensor, rows: int, tokens: int) -> Tensor:
    """`value` [R, L] zero-padded to [rows, tokens]; added rows repeat the first, so that their mask is not empty."""
    return _pad_rows(torch.nn.functional.pad(value, (0, tokens - value.shape[1])), rows)


def _pad_rows(value: Tensor, rows: int) -> Tensor:
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
