"""From a request to a pipeline: load the model, choose how it is computed, bind the task's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from headway.base.errors import InvalidInput, Unsupported
from headway.base.machine import read_machine
from headway.pipelines.budget import key_of
from headway.pipelines.forward import Forward, place
from headway.pipelines.loading import Loaded, load
from headway.pipelines.packed import PackedEncoder, attend_ragged, attention_for, can_pack
from headway.pipelines.pipeline import Pipeline
from headway.pipelines.task import Task


@dataclass(frozen=True, eq=False)
class Request:
    """What `hw.pipeline` was asked for, checked as far as it can be without a model."""

    name: str
    kind: type[Task]
    model: Any
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int | str = "auto"
    quantize: str | None = None
    compile: bool = False
    backend: str = "torch"
    packed: bool | str = "auto"
    parts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def open_here(request: Request) -> Pipeline:
    """A pipeline over a transformers model in this process."""
    model = request.model if request.model is not None else request.kind.default_model
    if model is None:
        raise InvalidInput(f"{request.name} has no default model; pass model=... (a folder, a name or a hub id)")
    placement = place(request.device, request.dtype)
    loaded = load(model, request.kind.auto_class, request.kind.needs, placement, request.parts)
    task = request.kind(computed_as(request, loaded))
    task.name = request.name
    defaults = task.options(task.Options(), request.options)
    return Pipeline(task, batch_size=request.batch_size, key=_key(request, loaded), defaults=defaults)


def computed_as(request: Request, loaded: Loaded) -> Loaded:
    """The model, with the way of computing it that was asked for."""
    if _packs(request, loaded):
        loaded = loaded.but(packed=PackedEncoder(loaded.run))
    return loaded


def _packs(request: Request, loaded: Loaded) -> bool:
    if request.packed is False or request.kind.reads is None or request.compile or request.backend != "torch":
        if request.packed is True:
            raise Unsupported(f"packed=True: {request.name} with these options is computed on padded rows only")
        return False
    if not can_pack(loaded.module):
        if request.packed is True:
            family = getattr(loaded.config, "model_type", type(loaded.module).__name__)
            raise Unsupported(f"packed=True: {family} models are computed on padded rows only; leave packed out")
        return False
    return request.packed is True or _packing_pays(loaded.run)


def _packing_pays(run: Forward) -> bool:
    """On a CPU always; on a GPU where attention over rows of any length is one call."""
    if run.placement.autocast is not None:
        return False
    return run.device.type == "cpu" or attention_for(run) is attend_ragged


def _key(request: Request, loaded: Loaded) -> str:
    """What a measured budget holds for: this model, computed in this way, on this machine."""
    config = loaded.config.to_json_string() if hasattr(loaded.config, "to_json_string") else repr(loaded.module)
    where = torch.cuda.get_device_name(loaded.run.device) if loaded.run.device.type == "cuda" else read_machine().cpu
    return key_of(
        task=request.name,
        model=config,
        kind=type(loaded.module).__name__,
        placement=str(loaded.run.placement),
        quantize=request.quantize,
        compile=request.compile,
        backend=request.backend,
        packed=request.packed,
        where=where,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
