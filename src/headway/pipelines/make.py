"""`pipeline(...)`: from what a user asks for to a Pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput
from headway.pipelines.registry import task_named

if TYPE_CHECKING:
    from headway.pipelines.pipeline import Pipeline

BACKENDS = ("torch", "onnxruntime")


def pipeline(
    task: str,
    model: Any = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    batch_size: int | str = "auto",
    quantize: str | None = None,
    compile: bool = False,
    backend: str = "torch",
    packed: bool | str = "auto",
    tokenizer: Any = None,
    image_processor: Any = None,
    feature_extractor: Any = None,
    processor: Any = None,
    **options: Any,
) -> Pipeline:
    """A model ready for a task: `hw.pipeline("text-classification", model="path-or-name")`.

    `model` is a known name, a folder, a hub id or a torch module in memory (pass its tokenizer then). `dtype` is auto
    (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16, float16, or autocast[:bfloat16|:float16] for float32
    weights. `batch_size` is a number of rows, or auto: a token budget found by measuring. `quantize="int8"` computes
    linear layers in 8 bits on a CPU; `compile=True` compiles for a few lengths; `backend="onnxruntime"` exports once
    and runs there. `packed=False` never computes rows without padding. Further keywords become defaults of the task's
    options.
    """
    name, kind = task_named(task)
    _check(quantize, compile, backend, packed)
    parts = {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "feature_extractor": feature_extractor,
        "processor": processor,
    }
    from headway.pipelines.opening import Request

    request = Request(
        name=name,
        kind=kind,
        model=model,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        quantize=quantize,
        compile=compile,
        backend=backend,
        packed=packed,
        parts={part: value for part, value in parts.items() if value is not None},
        options=options,
    )
    return kind.open(request)


def _check(quantize: Any, compile: Any, backend: Any, packed: Any) -> None:
    if quantize not in (None, "int8"):
        raise InvalidInput(f"quantize is {quantize!r}; it takes None or 'int8'")
    if not isinstance(compile, bool):
        raise InvalidInput(f"compile is {compile!r}; it takes True or False")
    if packed not in (True, False, "auto"):
        raise InvalidInput(f"packed is {packed!r}; it takes 'auto', True or False")
    if backend not in BACKENDS:
        hint = "; TensorRT is refused by name" if str(backend).lower() in ("tensorrt", "trt") else ""
        raise InvalidInput(f"backend is {backend!r}; it takes {' or '.join(BACKENDS)}{hint}")
