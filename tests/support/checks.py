"""What many tests need: rows of logits from an engine and from transformers, and what counts as the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import headway as hw


def assert_close(ours: Any, theirs: Any, what: str = "logits", tolerance: float = 1e-4) -> None:
    """Every value within tolerance × max(1, the largest)."""
    one, other = np.asarray(ours), np.asarray(theirs)
    assert one.shape == other.shape, f"{what}: {one.shape} and {other.shape}"
    worst, limit = float(np.abs(one - other).max()), tolerance * max(1.0, float(np.abs(other).max()))
    assert worst <= limit, f"{what}: {worst:.3g} apart, allowed {limit:.3g}"


def random_tokens(vocab: int, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(vocab, size=n).tolist()


def logit_rows(context: hw.Context, tokens: Sequence[int], adapter: hw.Adapter | None = None) -> np.ndarray:
    """The logits of every row of one pass [n, V]."""
    forward = context.forward().input(tokens)
    if adapter is not None:
        forward = forward.adapter(adapter)
    handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
    out = forward.execute().result()
    return np.stack([out.logits(h) for h in handles])


def all_logits(engine: hw.Engine, tokens: Sequence[int], adapter: hw.Adapter | None = None) -> np.ndarray:
    """The logits of every row of a prompt in a fresh context [n, V]."""
    with engine.context() as context:
        return logit_rows(context, tokens, adapter)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """The same from transformers."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()
