"""Weights that change and memory that is given back, between two steps of a running engine: for those who train."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from headway.base.errors import InvalidInput
from headway.base.text import short_repr
from headway.models.update import moved, updated
from headway.runtime.adapters import NoWeights
from headway.runtime.memory import running_out

if TYPE_CHECKING:
    from headway.program.engine import Engine

Contexts = Literal["recompute", "keep"]


def update_weights(engine: Engine, tensors: Mapping[str, Any], contexts: Contexts) -> None:
    """See `Engine.update_weights`."""
    if contexts not in ("recompute", "keep"):
        raise InvalidInput(f"contexts is {short_repr(contexts)}; it must be 'recompute' or 'keep'")
    backend, before = engine._backend, engine.fingerprint
    with running_out(backend.decoder.device, "making the new weights"), torch.no_grad():
        decoder = updated(backend.decoder, tensors, engine._quantize)
    digest = hashlib.sha256(before.encode())
    for name in sorted(tensors):
        digest.update(str(name).encode())
        digest.update(torch.as_tensor(tensors[name]).detach().float().cpu().contiguous().numpy().tobytes())

    def swap() -> None:
        with engine._lock:
            engine._loop.forget_contents(recompute=contexts == "recompute")
            engine._backend = replace(backend, decoder=decoder)
            engine._decoder = decoder
            engine.__dict__["fingerprint"] = digest.hexdigest()
        if not engine.is_asleep:
            runner = engine._new_runner()
            engine._adapters.load_again(runner.load_adapter)
            engine._loop.replace_runner(runner)

    engine._loop.call(swap, even_asleep=True)


def sleep(engine: Engine) -> None:
    """See `Engine.sleep`."""

    def leave() -> None:
        if engine.is_asleep:
            return
        engine._loop.suspend()
        decoder = engine._backend.decoder
        engine._pool = None
        engine._adapters.load_again(lambda _: NoWeights())
        if decoder.device.type == "cuda":
            place = decoder.device
            host = moved(decoder, torch.device("cpu"))
            engine._place, engine._backend, engine._decoder = place, replace(engine._backend, decoder=host), host
            del decoder
            torch.cuda.empty_cache()

    engine._loop.call(leave, even_asleep=True)


def wake(engine: Engine) -> None:
    """See `Engine.wake`."""

    def come_back() -> None:
        if not engine.is_asleep:
            return
        if engine._place is not None:
            with running_out(engine._place, "taking the weights back"):
                decoder = moved(engine._backend.decoder, engine._place)
            engine._backend, engine._decoder, engine._place = replace(engine._backend, decoder=decoder), decoder, None
        engine._pool = engine._new_pool()
        runner = engine._new_runner()
        engine._adapters.load_again(runner.load_adapter)
        engine._loop.resume(runner)

    engine._loop.call(come_back, even_asleep=True)
