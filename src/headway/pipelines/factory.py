"""`hw.pipeline(...)`: checks the arguments, loads the model, chooses the backend, binds the task's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import torch

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.system.machine import read_machine
from headway.base.text import short_repr
from headway.pipelines.arguments import (
    call_options,
    checked,
    device_of,
    dtype_of,
    loading_arguments,
    model_of,
    refuse_remote_code,
)
from headway.pipelines.backends.compiled import CompiledBackend
from headway.pipelines.backends.cuda_graphs import CudaGraphEncoder
from headway.pipelines.backends.linear import int8_factory
from headway.pipelines.backends.loading import LoadedModel, load, stored_dtype
from headway.pipelines.backends.onnx import OnnxBackend
from headway.pipelines.backends.quantize import compare_outputs, quantize_linears
from headway.pipelines.backends.torch import TorchBackend, place
from headway.pipelines.backends.unpadded import UnpaddedEncoder, VarlenAttention, attention_for, can_unpad
from headway.pipelines.infer_task import task_of
from headway.pipelines.inputs.same_shape import SameShapeTask
from headway.pipelines.pipeline import Pipeline
from headway.pipelines.registry import task_named
from headway.pipelines.task import Task, known_options
from headway.pipelines.token_budget import budget_key

BACKENDS = ("torch", "onnxruntime")


def pipeline(
    task: str | None = None,
    model: Any = None,
    *,
    device: str | int | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto",
    batch_size: int | str | None = "auto",
    quantize: str | None = None,
    compile: bool = False,
    backend: str = "torch",
    unpadded: bool | str = "auto",
    tokenizer: Any = None,
    image_processor: Any = None,
    feature_extractor: Any = None,
    processor: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    device_map: Any = None,
    torch_dtype: Any = None,
    **options: Any,
) -> Pipeline:
    """A model ready for a task: `hw.pipeline("text-classification", model="path-or-name")`.

    `model` is a known name, a folder, a hub id (of which `revision` and `token` fetch a version or a private one) or a
    torch module in memory (then pass its tokenizer); without a task, the model's config tells which. `device` is auto,
    cpu, cuda:N, mps, a GPU's number (-1: the CPU) or a torch.device. `dtype` is auto (float32 on a CPU; elsewhere
    float16 where the files are, else bfloat16), float32, bfloat16, float16, or autocast[:bfloat16|:float16] for
    float32 weights. `batch_size` is a
    number of rows, or auto: a token budget chosen by measurement. `quantize="int8"` computes linear layers in 8 bits
    on a CPU; `compile=True` compiles for a few lengths; `backend="onnxruntime"` exports once and runs there.
    `unpadded=False` never uses variable-length batches. Further keywords become defaults of the task's options.

    Code written for `transformers.pipeline` runs with this one: docs/coming-from.md lists its other arguments.
    """
    loading = loading_arguments(model_kwargs)
    options = _without_idle_arguments(options)
    local_only = options.pop("local_files_only", loading.get("local_files_only", False))
    model = model_of(model, _first(revision, loading.get("revision")), _first(token, loading.get("token")), local_only)
    name, kind = task_named(task_of(model) if task is None else task)
    _check_arguments(quantize, compile, backend, unpadded)
    parts = {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "feature_extractor": feature_extractor,
        "processor": processor,
    }
    for part, value in parts.items():
        if isinstance(value, tuple):
            raise InvalidInput(f"{part} is a tuple; make it with its options first (from_pretrained), and pass that")
    spec = PipelineSpec(
        name=name,
        kind=kind,
        model=model,
        device=device_of(device, _first(device_map, loading.get("device_map"))),
        dtype=dtype_of(dtype, _first(torch_dtype, loading.get("torch_dtype"), loading.get("dtype"))),
        batch_size="auto" if batch_size is None else batch_size,
        quantize=quantize,
        compile=compile,
        backend=backend,
        unpadded=unpadded,
        parts={part: value for part, value in parts.items() if value is not None},
        options=options,
    )
    return kind.open(spec)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def _without_idle_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without the arguments of `transformers.pipeline` that change no result here; others are refused."""
    rest = dict(options)
    refuse_remote_code(rest.pop("trust_remote_code", None))
    checked(
        rest.pop("use_fast", None), (None, True), "use_fast",
        "pass the slow tokenizer itself: tokenizer=AutoTokenizer.from_pretrained(..., use_fast=False)",
    )  # fmt: skip
    checked(rest.pop("framework", None), (None, "pt"), "framework", "models run in torch; leave it out")
    checked(rest.pop("binary_output", None), (None, False), "binary_output", "pickle the results yourself")
    checked(rest.pop("config", None), (None,), "config", "build the torch module with it and pass that (model=...)")
    checked(rest.pop("pipeline_class", None), (None,), "pipeline_class", "write a hw.Task and hw.register_task it")
    checked(rest.pop("video_processor", None), (None,), "video_processor", "no task here takes videos")
    checked(rest.pop("assistant_model", None), (None,), "assistant_model", "leave it out")
    if (workers := rest.pop("num_workers", None)) is not None:
        check_integer(workers, "num_workers", 0)
    return rest


@dataclass(frozen=True, eq=False)
class PipelineSpec:
    """The arguments of `hw.pipeline`, checked as far as is possible without a model."""

    name: str
    kind: type[Task]
    model: Any
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int | str = "auto"
    quantize: str | None = None
    compile: bool = False
    backend: str = "torch"
    unpadded: bool | str = "auto"
    parts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def open_pipeline(spec: PipelineSpec, pipeline_class: type[Pipeline] = Pipeline) -> Pipeline:
    """A pipeline over a transformers model in this process."""
    model = spec.model if spec.model is not None else spec.kind.default_model
    if model is None:
        raise InvalidInput(f"{spec.name} has no default model; pass model=... (a folder, a name or a hub id)")
    placement = place(spec.device, spec.dtype, stored_dtype(model))
    loaded = load(
        model, spec.kind.auto_class, spec.kind.needs, placement, spec.parts, changes=spec.quantize is not None
    )
    task = spec.kind(choose_backend(spec, loaded))
    task.name = spec.name
    defaults = task.options(task.Options(), call_options(spec.options, known_options(task.Options)))
    return pipeline_class(task, batch_size=spec.batch_size, key=_budget_key(spec, loaded), defaults=defaults)


def _check_arguments(quantize: Any, compile: Any, backend: Any, unpadded: Any) -> None:
    if not (quantize is None or (isinstance(quantize, str) and quantize == "int8")):
        raise InvalidInput(f"quantize is {short_repr(quantize)}; it must be None or 'int8'")
    if not isinstance(compile, bool):
        raise InvalidInput(f"compile is {short_repr(compile)}; it must be True or False")
    if not (isinstance(unpadded, bool) or (isinstance(unpadded, str) and unpadded == "auto")):
        raise InvalidInput(f"unpadded is {short_repr(unpadded)}; it must be 'auto', True or False")
    if not isinstance(backend, str) or backend not in BACKENDS:
        hint = "; there is no TensorRT backend" if short_repr(backend).strip("'").lower() in ("tensorrt", "trt") else ""
        raise InvalidInput(f"backend is {short_repr(backend)}; it must be {' or '.join(BACKENDS)}{hint}")


# -- backends ----------------------------------------------------------------------------------------------------------


def choose_backend(spec: PipelineSpec, loaded: LoadedModel) -> LoadedModel:
    """The model with the backend that the arguments ask for."""
    unpadded = _use_unpadded(spec, loaded)
    if spec.quantize is not None and (spec.compile or spec.backend != "torch"):
        raise Unsupported("quantize is for the torch backend without compile; choose one of them")
    if spec.compile and spec.backend != "torch":
        raise Unsupported("compile is for the torch backend; choose compile=True or backend='onnxruntime'")
    if spec.compile or spec.backend != "torch":
        _check_single_pass(spec, loaded)
    if spec.backend == "onnxruntime":
        return replace(loaded, backend=OnnxBackend(loaded.backend, _example_inputs(spec, loaded)))
    if spec.compile:
        return replace(loaded, backend=CompiledBackend(loaded.backend, loaded.text.limit if loaded.text else None))
    if spec.quantize == "int8":
        return _quantize(spec, loaded, unpadded)
    return replace(loaded, unpadded=_unpadded_encoder(loaded.backend)) if unpadded else loaded


def _unpadded_encoder(backend: TorchBackend) -> UnpaddedEncoder:
    """With CUDA graphs where the device can replay them, without elsewhere."""
    varlen = isinstance(attention_for(backend), VarlenAttention)
    return CudaGraphEncoder(backend) if varlen else UnpaddedEncoder(backend)


def _check_single_pass(spec: PipelineSpec, loaded: LoadedModel) -> None:
    """Only a model that is called once per batch can be compiled or exported whole."""
    if (reason := spec.kind(loaded).multi_pass_reason()) is not None:
        argument = "compile=True" if spec.compile else f"backend={spec.backend!r}"
        raise Unsupported(f"{argument} is for single-pass tasks, and {spec.name} is not one: {reason}; leave it out")


def _example_inputs(spec: PipelineSpec, loaded: LoadedModel) -> dict[str, Any]:
    """Two rows of model inputs."""
    task = spec.kind(loaded)
    rows = task.sample_rows()[:2]
    if not rows:
        raise Unsupported(f"{spec.name} has no example inputs to export its model with; use backend='torch'")
    if isinstance(task, SameShapeTask) and not task.pads():
        rows = [rows[0], rows[0]]  # the second may have another shape
    return task.collate(rows).inputs


def _quantize(spec: PipelineSpec, loaded: LoadedModel, unpadded: bool) -> LoadedModel:
    """The model with int8 linear layers, and a report of the effect on sample rows."""
    backend = loaded.backend
    placement = backend.placement
    if backend.device.type != "cpu" or placement.dtype != torch.float32 or placement.autocast is not None:
        raise Unsupported(f'quantize="int8" is for float32 on a CPU, not {placement}; use device="cpu"')
    make = int8_factory(torch.get_num_threads())
    task = spec.kind(loaded)
    batches = [task.collate([row]).inputs for row in task.sample_rows()]
    floats = [backend(inputs) for inputs in batches]
    encoder = UnpaddedEncoder(backend, make) if unpadded else None  # before the float weights are replaced
    report = quantize_linears(loaded.module, make)
    if batches:
        worst, cosine = compare_outputs(floats, [backend(inputs) for inputs in batches])
        report = replace(report, relative_error=worst, cosine=cosine)
    return replace(loaded, unpadded=encoder, quantization=report)


def _use_unpadded(spec: PipelineSpec, loaded: LoadedModel) -> bool:
    if spec.unpadded is False or spec.kind.reads is None or spec.compile or spec.backend != "torch":
        if spec.unpadded is True:
            raise Unsupported(f"unpadded=True: {spec.name} with these options supports padded rows only")
        return False
    if not can_unpad(loaded.module):
        if spec.unpadded is True:
            family = getattr(loaded.config, "model_type", type(loaded.module).__name__)
            raise Unsupported(f"unpadded=True: {family} models support padded rows only; leave unpadded out")
        return False
    return spec.unpadded is True or _unpadded_pays(loaded.backend)


def _unpadded_pays(backend: TorchBackend) -> bool:
    """On a CPU always; on a GPU where variable-length attention is one call."""
    if backend.placement.autocast is not None:
        return False
    return backend.device.type == "cpu" or isinstance(attention_for(backend), VarlenAttention)


def _budget_key(spec: PipelineSpec, loaded: LoadedModel) -> str:
    """Identifies a measured token budget: this model with this backend on this machine."""
    config = loaded.config.to_json_string() if hasattr(loaded.config, "to_json_string") else repr(loaded.module)
    device = loaded.backend.device
    return budget_key(
        task=spec.name,
        model=config,
        kind=type(loaded.module).__name__,
        placement=str(loaded.backend.placement),
        quantize=spec.quantize,
        compile=spec.compile,
        backend=spec.backend,
        unpadded=spec.unpadded,
        where=torch.cuda.get_device_name(device) if device.type == "cuda" else read_machine().cpu,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
