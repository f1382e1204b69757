"""Calls of transformers' own `generate` for a batch, with each row sampled as if it were alone.

The generation loop is `model.generate`, so results are those of transformers. Each item samples from its own random
generator, so that its result does not depend on its batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.backends.torch import TorchBackend
from headway.pipelines.task import ModelInputs


def generate(
    backend: TorchBackend, batch: ModelInputs, keywords: Mapping[str, Any], options: Any, *, sampled: bool
) -> Tensor:
    """The sequences of each row, [R, N, L]."""
    rows = len(batch.rows)
    with per_item_sampling(rows, options, backend.device, enabled=sampled):
        sequences = backend(batch.inputs, method="generate", **keywords)
    return sequences.view(rows, -1, sequences.shape[-1])


def per_item_sampling(items: int, options: Any, device: torch.device, *, enabled: bool) -> Any:
    """A context in which every item samples on its own; it does nothing unless `enabled`."""
    return PerItemSampling(items, options.seed, device) if enabled else nullcontext()


class PerItemSampling(TorchFunctionMode):
    """Within it, on this thread, every item of a batch samples tokens from its own random generator.

    `seed` seeds each of them alike, as a call for that item alone would; None seeds each at random.
    """

    def __init__(self, items: int, seed: int | None, device: torch.device) -> None:
        super().__init__()
        seeds = [secrets.randbits(63) if seed is None else seed for _ in range(items)]
        self._generators = [torch.Generator(device).manual_seed(one) for one in seeds]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.multinomial:
            return func(*args, **(kwargs or {}))
        return self._sample(*args, **(kwargs or {}))

    def _sample(self, weights: Tensor, num_samples: int) -> Tensor:
        """`weights` [items × rows of each, V] → [.., num_samples]."""
        each = len(weights) // len(self._generators)
        parts = zip(weights.split(each), self._generators)
        return torch.cat([torch.multinomial(part, num_samples, generator=g) for part, g in parts])


def merge_generate_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, including those in `generate_kwargs`."""
    more = given.get("generate_kwargs")
    more = {} if more is None else more
    if not isinstance(more, Mapping):
        raise WrongType(f"generate_kwargs is a {type(more).__name__}; it must be a dict of options")
    if twice := sorted(set(more) & set(given)):
        raise InvalidInput(f"{', '.join(twice)} is given both directly and in generate_kwargs; pass it once")
    return {**{name: value for name, value in given.items() if name != "generate_kwargs"}, **more}


def cut_at_eos(ids: np.ndarray, eos_ids: tuple[int, ...], prompt: int) -> np.ndarray:
    """A sequence up to its end token: what follows is there only because other rows went on."""
    ends = np.flatnonzero(np.isin(ids[prompt:], eos_ids))
    return ids[: prompt + ends[0] + 1] if len(ends) else ids
