"""The torch backend: a module in eval and inference mode, on its device and in its dtype, with checked arguments.

Owns the module. Calling it leaves the output on the device; `to_host` copies nested tensors to the host with a single
synchronization. It does not batch and knows nothing of tasks.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.text import short_repr
from headway.pipelines.inputs.arrays import Ragged
from headway.runtime.device import DTYPES, dtype_name, pick_device, pick_dtype

FORWARD_PARAMETERS = ("output_hidden_states", "output_attentions", "return_dict")
AUTOCAST = "autocast"
REFUSED = {
    "tpu": "there is no TPU backend; use cpu, cuda, cuda:N or mps",
    "xla": "there is no XLA (TPU) backend; use cpu, cuda, cuda:N or mps",
    "tensorrt": 'there is no TensorRT backend; use device="cuda", with compile=True where it pays',
    "trt": 'there is no TensorRT backend; use device="cuda", with compile=True where it pays',
}


@dataclass(frozen=True)
class Placement:
    """Where a model runs: device, `dtype` of the weights, and the dtype of `autocast` if not None."""

    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        cast = f", autocast to {str(self.autocast).removeprefix('torch.')}" if self.autocast else ""
        return f"{self.device} {name}{cast}"


def place(device: str, dtype: str, stored: torch.dtype | None = None) -> Placement:
    """The placement for the arguments `device` and `dtype`. `autocast` and `autocast:float16` keep float32 weights.

    `stored` is the float type of the model's files, which `auto` keeps on a GPU where it is float16 or bfloat16.
    """
    name = device.lower().partition(":")[0] if isinstance(device, str) else ""
    if name in REFUSED:
        raise Unsupported(f"device {short_repr(device)} is not supported: {REFUSED[name]}")
    picked = pick_device(device)
    where = torch.device(str(picked))
    if isinstance(dtype, str) and dtype.partition(":")[0] == AUTOCAST:
        half = dtype.partition(":")[2] or "bfloat16"
        if half not in ("bfloat16", "bf16", "float16", "f16"):
            raise InvalidInput(f"dtype is {short_repr(dtype)}; autocast must be autocast:bfloat16 or autocast:float16")
        return Placement(where, torch.float32, getattr(torch, DTYPES[half]))
    return Placement(where, getattr(torch, pick_dtype(dtype, picked, dtype_name(stored) or None)))


class TorchBackend:
    """A module ready to be called: `backend(inputs)`, `backend(inputs, method="generate", max_new_tokens=5)`."""

    def __init__(self, module: nn.Module, placement: Placement) -> None:
        self.module = module.eval().to(device=placement.device, dtype=placement.dtype)
        self.placement = placement

    @property
    def device(self) -> torch.device:
        return self.placement.device

    def takes(self, name: str, method: str = "forward") -> bool:
        """Whether the model's `method` has an argument of that name."""
        return name in accepted(type(self.module), method)

    def check(self, names: Mapping[str, Any], method: str = "forward") -> None:
        """Raise InvalidInput for arguments that the model does not take."""
        known = accepted(type(self.module), method)
        for name in names:
            if name not in known:
                listed = ", ".join(sorted(known & _explicit(type(self.module), method))) or "nothing by name"
                raise InvalidInput(
                    f"{type(self.module).__name__}.{method} takes no argument {name!r}; it takes {listed}"
                )

    def __call__(self, inputs: Mapping[str, Any], /, *, method: str = "forward", **parameters: Any) -> Any:
        """The model's own output, on the device."""
        self.check(inputs, method)
        self.check(parameters, method)
        with self.context():
            return self.call_on_device(inputs, method, parameters)

    def call_on_device(self, inputs: Mapping[str, Any], method: str, parameters: Mapping[str, Any]) -> Any:
        """The call itself, with floats in the model's dtype; the caller is in `context()`."""
        moved = to_device(dict(inputs), self.device, self.placement.dtype)
        call: Callable[..., Any] = self.module if method == "forward" else getattr(self.module, method)
        return call(**moved, **parameters)

    def context(self) -> AbstractContextManager[Any]:
        """Inference mode, with autocast if the placement has one."""
        return _Both(torch.inference_mode(), self._cast())

    def _cast(self) -> AbstractContextManager[Any]:
        if self.placement.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.placement.autocast)


class _Both(AbstractContextManager[None]):
    """Two contexts as one."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


# -- copies between host and device ------------------------------------------------------------------------------------


def to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`tree` with its nested tensors on `device`, floats in `dtype`; container types are kept."""
    match tree:
        case Tensor():
            cast = dtype if dtype is not None and tree.is_floating_point() else tree.dtype
            if device.type == "cuda" and tree.device.type == "cpu":
                return tree.pin_memory().to(device, cast, non_blocking=True)
            return tree.to(device, cast)
        case Mapping():
            moved = {key: to_device(value, device, dtype) for key, value in tree.items()}
            return moved if type(tree) is dict else _rebuilt(tree, moved)
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(to_device(value, device, dtype) for value in tree))
        case list() | tuple():
            return type(tree)(to_device(value, device, dtype) for value in tree)
    return tree


def _rebuilt(like: Mapping[str, Any], fields: dict[str, Any]) -> Any:
    try:
        return type(like)(**fields)  # type: ignore[call-arg]  # outputs of transformers take keywords
    except TypeError:
        return fields


@typing.runtime_checkable
class PendingResults(typing.Protocol):
    """Results that are being copied to the host."""

    def wait(self) -> Mapping[str, Sequence[Any]]:
        """name → one array per row, once they have arrived."""
        ...


class HostCopy:
    """Tensors that are being copied to the host; `wait` returns them by row."""

    def __init__(self, output: Mapping[str, Tensor | Ragged]) -> None:
        tensors = {name: value.values if isinstance(value, Ragged) else value for name, value in output.items()}
        self._counts = {name: value.counts for name, value in output.items() if isinstance(value, Ragged)}
        self._tensors = {name: _start_copy(tensor) for name, tensor in tensors.items()}
        self._event = None
        device = next((tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"), None)
        if device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> dict[str, Sequence[Any]]:
        """name → one array per row."""
        if self._event is not None:
            self._event.synchronize()
        return {name: self._rows(name, tensor.numpy()) for name, tensor in self._tensors.items()}

    def _rows(self, name: str, array: Any) -> Sequence[Any]:
        counts = self._counts.get(name)
        if counts is None:
            return array
        ends = list(accumulate(counts))
        return [array[end - count : end] for count, end in zip(counts, ends)]


def _start_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_host(tree: Any) -> Any:
    """`tree` with its tensors on the CPU, after a single synchronization."""
    copies: list[tuple[Tensor, Tensor]] = []

    def start(value: Any) -> Any:
        match value:
            case Tensor() if value.device.type == "cuda":
                host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                copies.append((host, value))
                return host
            case Tensor():
                return value.cpu()
            case Mapping():
                return {key: start(part) for key, part in value.items()}
            case list() | tuple():
                return tuple(start(part) for part in value)
        return value

    result = start(tree)
    for host, value in copies:
        host.copy_(value, non_blocking=True)
    if copies:
        torch.cuda.current_stream(copies[0][1].device).synchronize()
    return result


# -- arguments of a model ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def accepted(kind: type, method: str = "forward") -> frozenset[str]:
    """Names of the arguments of a class's method, including those of its typed **kwargs."""
    names = set(_explicit(kind, method))
    for parameter in inspect.signature(getattr(kind, method)).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names |= _typed_names(parameter.annotation) | set(FORWARD_PARAMETERS)
    if method == "generate":
        names |= _generation_names() | accepted(kind, "forward")
        for part in ("get_encoder", "get_decoder"):
            names |= {"encoder_outputs", "decoder_input_ids"} if hasattr(kind, part) else set()
    return frozenset(names)


@lru_cache(maxsize=512)
def _explicit(kind: type, method: str) -> frozenset[str]:
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(getattr(kind, method)).parameters
    return frozenset(name for name, p in parameters.items() if p.kind in plain and name != "self")


def _typed_names(annotation: Any) -> set[str]:
    """The keys of `**kwargs: Unpack[SomeTypedDict]`; empty if kwargs are untyped."""
    if isinstance(annotation, str) or annotation is inspect.Parameter.empty:
        return set()
    for part in typing.get_args(annotation):
        if hasattr(part, "__annotations__"):
            return set(typing.get_type_hints(part)) if _resolves(part) else set(part.__annotations__)
    return set()


def _resolves(kind: Any) -> bool:
    try:
        typing.get_type_hints(kind)
    except (NameError, TypeError):
        return False
    return True


@lru_cache(maxsize=1)
def _generation_names() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
