"""Weights that change and memory that is given back, between two steps of a running engine: for trainers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headway.base.arrays import from_tensor, widen
from headway.base.errors import InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.models.config import ModelConfig
from headway.models.families import is_llama_like
from headway.models.weights.update import GivenWeights, checked, updated
from headway.program.kv_cache.tiers import page_scope
from headway.runtime.adapters import NoWeights
from headway.runtime.memory import running_out

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.runtime.runners.parallel.launch import Ranks

Contexts = Literal["recompute", "keep"]


def update_weights(engine: Engine, tensors: Mapping[str, Any], contexts: Contexts) -> None:
    """See `Engine.update_weights`."""
    if not isinstance(contexts, str) or contexts not in ("recompute", "keep"):
        raise InvalidInput(f"contexts is {short_repr(contexts)}; it must be 'recompute' or 'keep'")
    model, before, ranks = engine._model, engine._model.backend.decoder, engine._model.backend.ranks
    _check_kind(engine)
    with running_out(before.device, "making the new weights"):
        given = checked(model.config, tensors)
        own = given if ranks is None else _share(given, ranks, before.config)
        decoder = updated(before, own, model.quantize)
    digest = hashlib.sha256(model.fingerprint.encode())
    for name in sorted(tensors):
        digest.update(str(name).encode())
        digest.update(np.ascontiguousarray(widen(from_tensor(tensors[name]))).data)

    def swap() -> None:
        with engine._lock:
            engine._loop.forget_contents(recompute=contexts == "recompute")
            model.update(decoder, digest.hexdigest())
            if engine._tiers is not None and engine._tiers.folder is not None:
                engine._tiers.folder.use_scope(page_scope(engine))
        if ranks is not None:
            ranks.update(given)
        if not engine.is_asleep:
            runner = engine._new_runner()
            engine._adapters.load_again(runner.load_adapter)
            engine._loop.replace_runner(runner)

    engine._loop.call(swap, even_asleep=True)


def _check_kind(engine: Engine) -> None:
    """Raise if the names of a folder's weights say nothing about the weights as they are kept."""
    model = engine._model
    if is_llama_like(model.config):
        return
    if model.path is not None and model.path.is_file():
        raise Unsupported(
            f"the {model.config.family} model was loaded from a GGUF file, whose weights lie otherwise than those of a "
            "folder; load the folder to update its weights"
        )
    if model.backend.ranks is not None:
        raise Unsupported(
            f"weights of the {model.config.family} family cannot be updated over {model.backend.tensor_parallel} "
            "ranks; load the model without tensor_parallel"
        )


def _share(given: GivenWeights, ranks: Ranks, config: ModelConfig) -> GivenWeights:
    """Rank 0's share of new weights."""
    from headway.models.weights.update_tensors import own_weights

    return own_weights(given.items(), ranks.split, config)


def sleep(engine: Engine) -> None:
    """See `Engine.sleep`."""

    def leave() -> None:
        if engine.is_asleep:
            return
        engine._loop.suspend()
        engine._pool = None
        engine._backend.release_pool()
        engine._adapters.load_again(lambda _: NoWeights())
        if engine._model.backend.decoder.device.type == "cuda":
            import torch

            engine._model.leave_device()
            torch.cuda.empty_cache()

    engine._loop.call(leave, even_asleep=True)


def wake(engine: Engine) -> None:
    """See `Engine.wake`."""

    def come_back() -> None:
        if not engine.is_asleep:
            return
        engine._model.return_to_device()
        engine._pool = engine._new_pool()
        runner = engine._new_runner()
        engine._adapters.load_again(runner.load_adapter)
        engine._loop.resume(runner)

    engine._loop.call(come_back, even_asleep=True)
