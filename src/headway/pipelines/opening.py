"""From a request to a pipeline: load the model, choose how it is computed, bind the task's options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headway.base.errors import InvalidInput, Unsupported
from headway.base.machine import read_machine
from headway.pipelines.backends.compiled import CompiledForward
from headway.pipelines.backends.cuda_graphs import GraphedEncoder
from headway.pipelines.backends.forward import Forward, place
from headway.pipelines.backends.linear import int8_maker
from headway.pipelines.backends.loading import Loaded, load
from headway.pipelines.backends.onnx import OnnxForward
from headway.pipelines.backends.quantize import difference, quantize_linears
from headway.pipelines.backends.unpadded import PackedEncoder, Ragged, attention_for, can_pack
from headway.pipelines.budget import key_of
from headway.pipelines.inputs.same_shape import ShapedTask
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


def open_here(request: Request, face: type[Pipeline] = Pipeline) -> Pipeline:
    """A pipeline over a transformers model in this process, with the face that a task wants."""
    model = request.model if request.model is not None else request.kind.default_model
    if model is None:
        raise InvalidInput(f"{request.name} has no default model; pass model=... (a folder, a name or a hub id)")
    placement = place(request.device, request.dtype)
    loaded = load(
        model,
        request.kind.auto_class,
        request.kind.needs,
        placement,
        request.parts,
        changes=request.quantize is not None,
    )
    task = request.kind(computed_as(request, loaded))
    task.name = request.name
    defaults = task.options(task.Options(), request.options)
    return face(task, batch_size=request.batch_size, key=_key(request, loaded), defaults=defaults)


def computed_as(request: Request, loaded: Loaded) -> Loaded:
    """The model, with the way of computing it that was asked for."""
    packs = _packs(request, loaded)
    if request.quantize is not None and (request.compile or request.backend != "torch"):
        raise Unsupported("quantize is for the torch backend without compile; choose one of them")
    if request.compile and request.backend != "torch":
        raise Unsupported("compile is for the torch backend; choose compile=True or backend='onnxruntime'")
    if request.compile or request.backend != "torch":
        _check_single(request, loaded)
    if request.backend == "onnxruntime":
        return loaded.but(run=OnnxForward(loaded.run, _example(request, loaded)))
    if request.compile:
        return loaded.but(run=CompiledForward(loaded.run, loaded.text.limit if loaded.text else None))
    if request.quantize == "int8":
        return _in_int8(request, loaded, packs)
    return loaded.but(packed=_packed(loaded.run)) if packs else loaded


def _packed(run: Forward) -> PackedEncoder:
    """Captured passes where the device can replay them, launched ones elsewhere."""
    return GraphedEncoder(run) if isinstance(attention_for(run), Ragged) else PackedEncoder(run)


def _check_single(request: Request, loaded: Loaded) -> None:
    """Only a model that is called once a batch can be compiled or exported whole."""
    if (reason := request.kind(loaded).several()) is not None:
        asked = "compile=True" if request.compile else f"backend={request.backend!r}"
        raise Unsupported(f"{asked} is for tasks of a single pass, and {request.name} is none: {reason}; leave it out")


def _example(request: Request, loaded: Loaded) -> dict[str, Any]:
    """Inputs of the kind the task's model is called with, two rows."""
    task = request.kind(loaded)
    rows = task.samples()[:2]
    if not rows:
        raise Unsupported(f"{request.name} has no example that its model could be exported with; use backend='torch'")
    if isinstance(task, ShapedTask) and not task.pads():
        rows = [rows[0], rows[0]]  # others may be of another shape
    return task.collate(rows).inputs


def _in_int8(request: Request, loaded: Loaded, packs: bool) -> Loaded:
    """The model with 8-bit linear layers, and what that changed on sample items."""
    run = loaded.run
    if run.device.type != "cpu" or run.placement.dtype != torch.float32 or run.placement.autocast is not None:
        raise Unsupported(f'quantize="int8" is for float32 on a CPU, not {run.placement}; use device="cpu"')
    make = int8_maker(torch.get_num_threads())
    task = request.kind(loaded)
    batches = [task.collate([row]).inputs for row in task.samples()]
    floats = [run(inputs) for inputs in batches]
    packed = PackedEncoder(run, make) if packs else None  # from the float weights, before they go
    report = quantize_linears(loaded.module, make)
    if batches:
        worst, cosine = difference(floats, [run(inputs) for inputs in batches])
        report = replace(report, relative_error=worst, cosine=cosine)
    return loaded.but(packed=packed, quantization=report)


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
    return run.device.type == "cpu" or isinstance(attention_for(run), Ragged)


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
