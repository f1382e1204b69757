"""int8 for a whole model: its linear layers replaced by 8-bit products, and what that changed, measured.

Weights have one scale an output, activations one scale a row found as they come: nothing is calibrated, and a row's
numbers do not depend on its neighbours. Heads stay in floats, as they decide: those outside the base model, and
the one that names the tokens of a model that writes. The report names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.base.errors import Unsupported
from headway.pipelines.backends.linear import Maker, QuantizedLinear

SKIPPED = ("pooler",)  # one row a text: nothing to win


@dataclass(frozen=True)
class QuantizationReport:
    """What int8 did to a model: layers replaced, bytes of their weights, and its answers on samples.

    `left` are the linear layers that stay in floats. `relative_error` is the length of the difference over the length
    of the float answer, the largest of any sample; `cosine` is the smallest between the two answers. Both are None
    where a task has no samples.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    left: tuple[str, ...] = ()
    relative_error: float | None = None
    cosine: float | None = None


def quantize_linears(module: nn.Module, make: Maker) -> QuantizationReport:
    """Replace the linear layers of `module`'s base model in place."""
    base: nn.Module = getattr(module, getattr(module, "base_model_prefix", ""), module)
    inside, words = set(base.modules()), _writes(module)
    layers = before = after = 0
    left: list[str] = []
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            path = f"{parent_name}.{name}".lstrip(".")
            if child not in inside or child is words or any(skip in path for skip in SKIPPED):
                left.append(path)
                continue
            replaced = QuantizedLinear(child, make)
            setattr(parent, name, replaced)
            layers += 1
            before += child.weight.nbytes
            after += getattr(replaced.product, "nbytes", 0)
    if not layers:
        raise Unsupported(f"{type(module).__name__} has no linear layers that int8 could replace; leave quantize out")
    return QuantizationReport(layers, before, after, tuple(sorted(left)))


def _writes(module: Any) -> nn.Module | None:
    """The layer that names tokens, of a model that writes."""
    if not hasattr(module, "generate") or not hasattr(module, "get_output_embeddings"):
        return None
    return module.get_output_embeddings()


def difference(floats: Sequence[Any], ints: Sequence[Any]) -> tuple[float, float]:
    """(relative error, cosine) of the answer that differs most, between a model's answers before and after."""
    worst, least = 0.0, 1.0
    for wide, narrow in zip(floats, ints):
        for a, b in zip(_answers(wide), _answers(narrow)):
            worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-12)))
            least = min(least, float(torch.cosine_similarity(a, b, dim=0)))
    return worst, least


def _answers(output: Any) -> list[Tensor]:
    """Logits of any name, or the final states where a model has no head."""
    values = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    named = [value for name, value in values.items() if name.endswith("logits")] or list(values.values())[:1]
    return [value.float().flatten() for value in named]
