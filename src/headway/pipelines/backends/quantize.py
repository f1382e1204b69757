"""int8 quantization of a model's linear layers, and its measured effect on outputs.

Weights have one scale per output channel, activations one dynamic scale per row: no calibration, and a row does not
depend on its neighbors. Heads stay in floats: those outside the base model, and the LM head of a generative model. The
report names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.pipelines.backends.linear import LinearFactory, QuantizedLinear

SKIPPED = ("pooler",)  # one row per text: nothing to gain


@dataclass(frozen=True)
class QuantizationReport:
    """The effect of int8: layers replaced, bytes of their weights, and the error of outputs on sample rows.

    `left` are the linear layers that stay in floats. `relative_error` is the largest ‖int8 - float‖ / ‖float‖ of any
    sample output, `cosine` the smallest similarity of the two. Both are None if a task has no sample rows.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    left: tuple[str, ...] = ()
    relative_error: float | None = None
    cosine: float | None = None


def quantize_linears(module: nn.Module, make: LinearFactory) -> QuantizationReport:
    """Replace the linear layers of `module`'s base model in place."""
    base: nn.Module = getattr(module, getattr(module, "base_model_prefix", ""), module)
    inside, lm_head = set(base.modules()), _lm_head(module)
    layers = before = after = 0
    left: list[str] = []
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            path = f"{parent_name}.{name}".lstrip(".")
            if child not in inside or child is lm_head or any(skip in path for skip in SKIPPED):
                left.append(path)
                continue
            quantized = QuantizedLinear(child, make)
            setattr(parent, name, quantized)
            layers += 1
            before += child.weight.nbytes
            after += getattr(quantized.op, "nbytes", 0)
    if not layers:
        raise Unsupported(f"{type(module).__name__} has no linear layers that int8 could replace; leave quantize out")
    return QuantizationReport(layers, before, after, tuple(sorted(left)))


def _lm_head(module: Any) -> nn.Module | None:
    """The layer that computes token logits, of a generative model."""
    if not hasattr(module, "generate") or not hasattr(module, "get_output_embeddings"):
        return None
    return module.get_output_embeddings()


def compare_outputs(floats: Sequence[Any], ints: Sequence[Any]) -> tuple[float, float]:
    """(largest relative error, smallest cosine) between a model's outputs before and after quantization."""
    worst, least = 0.0, 1.0
    for before, after in zip(floats, ints):
        for a, b in zip(_compared(before), _compared(after)):
            worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-12)))
            least = min(least, float(torch.cosine_similarity(a, b, dim=0)))
    return worst, least


def _compared(output: Any) -> list[Tensor]:
    """The logits, whatever their names, or the final hidden states of a model without a head."""
    values = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    named = [value for name, value in values.items() if name.endswith("logits")] or list(values.values())[:1]
    return [value.float().flatten() for value in named]
