"""Sequences that a model writes with its own `generate` about pictures and recordings, row by row as if alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.backends.forward import Forward
from headway.pipelines.generation.sampling import Draws, Writer
from headway.pipelines.task import Batch


def written(run: Forward, writer: Writer, batch: Batch, options: Any) -> Tensor:
    """The sequences of each row of a batch, [R, N, L]; each row draws for itself where tokens are drawn."""
    count = len(batch.rows)
    settings = {name: value for name, value in writer.settings(options).items() if value is not None}
    with Draws(count, options.seed, run.device) if writer.draws(options) else nullcontext():
        found = run(batch.inputs, method="generate", **settings)
    return found.view(count, -1, found.shape[-1])


def flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call with those in `generate_kwargs`, another place where people put them."""
    more = given.get("generate_kwargs") or {}
    if not isinstance(more, Mapping):
        raise WrongType(f"generate_kwargs is a {type(more).__name__}; it takes a dict of options")
    if twice := sorted(set(more) & set(given)):
        raise InvalidInput(f"{', '.join(twice)} is given by itself and in generate_kwargs; give it once")
    return {**{name: value for name, value in given.items() if name != "generate_kwargs"}, **more}


def cut(ids: np.ndarray, ends: tuple[int, ...], prompt: int) -> list[int]:
    """A sequence as it would be alone: what is behind its end is there because others went on."""
    found = np.flatnonzero(np.isin(ids[prompt:], ends))
    return (ids[: prompt + found[0] + 1] if len(found) else ids).tolist()
