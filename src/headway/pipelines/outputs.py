"""ModelOutput: a model's output, by attribute, by name and by index, and on disk.

Holds arrays, tensors, tuples of them and plain values in the order of the model's output; fields that are None are left
out, as in transformers. It iterates its values, so that `logits, hidden = out` unpacks it like a tuple; `keys()`,
`items()`, `in` and `dict(out)` go by name. `to_json`/`from_json` and `save`/`load` (safetensors) are lossless.
"""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from os import PathLike
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import BadModelFile, InvalidInput, WrongType


class ModelOutput(Mapping[str, Any]):
    """A model's output: `out.logits`, `out["logits"]` and `out[0]` are the same; `logits, hidden = out`."""

    __slots__ = ("_fields",)
    _fields: dict[str, Any]

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        fields = {
            name: _checked(name, value) for name, value in {**(fields or {}), **more}.items() if value is not None
        }
        object.__setattr__(self, "_fields", fields)

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        return self._fields[key] if isinstance(key, str) else self.to_tuple()[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_fields")[name]
        except (KeyError, AttributeError):
            has = ", ".join(self._fields) if name != "_fields" else ""
            raise AttributeError(f"this output has no {name!r}; it has {has}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"outputs are immutable; {name!r} cannot be set")

    def __iter__(self) -> Iterator[Any]:  # values, not names: it unpacks like the model's tuple
        return iter(self._fields.values())

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def keys(self) -> KeysView[str]:
        return self._fields.keys()

    def values(self) -> ValuesView[Any]:
        return self._fields.values()

    def items(self) -> ItemsView[str, Any]:
        return self._fields.items()

    def __len__(self) -> int:
        return len(self._fields)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fields})

    def __repr__(self) -> str:
        return f"ModelOutput({', '.join(f'{name}={_sketch(value)}' for name, value in self._fields.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelOutput) and _equal(self._fields, other._fields)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModelOutput, (self._fields,))

    def to_tuple(self) -> tuple[Any, ...]:
        """The values in order."""
        return tuple(self._fields.values())

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The output as JSON; arrays keep their dtype and shape."""
        return json.dumps({name: _plain(value) for name, value in self._fields.items()})

    @classmethod
    def from_json(cls, text: str) -> ModelOutput:
        """The output that `to_json` serialized."""
        try:
            return cls({name: _restored(value) for name, value in json.loads(text).items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"not the JSON of an output ({error}); from_json reads what to_json wrote") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the output as a safetensors file."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        shape = {name: _flatten(name, value, tensors) for name, value in self._fields.items()}
        save_file(tensors, path, metadata={"headway_output": json.dumps(shape)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ModelOutput:
        """The output that `save` wrote, its tensors on the CPU."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                note = (file.metadata() or {}).get("headway_output")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise BadModelFile(f"{path} cannot be read as safetensors: {error}") from error
        if note is None:
            raise BadModelFile(f"{path} holds tensors but not an output; load reads what ModelOutput.save wrote")
        return cls({name: _unflatten(value, tensors) for name, value in json.loads(note).items()})


def _checked(name: str, value: Any) -> Any:
    match value:
        case list() | tuple():
            return tuple(_checked(name, part) for part in value)
        case Mapping():
            return {str(key): _checked(name, part) for key, part in value.items()}
        case Tensor() | np.ndarray() | str() | bool() | int() | float() | None:
            return value
        case np.generic():
            return value.item()
    raise WrongType(f"field {name!r} holds a {type(value).__name__}; it must be a tensor, array, number or string")


def _plain(value: Any) -> Any:
    match value:
        case Tensor():
            return {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "data": _listed(value),
            }
        case np.ndarray():
            data = {"dtype": str(value.dtype), "shape": list(value.shape), "data": value.reshape(-1).tolist()}
            return data | {"numpy": True}
        case tuple():
            return [_plain(part) for part in value]
        case dict():
            return {"fields": {key: _plain(part) for key, part in value.items()}}
    return value


def _listed(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().reshape(-1)
    return (flat.float() if flat.is_floating_point() and flat.dtype != torch.float64 else flat).tolist()


def _restored(value: Any) -> Any:
    match value:
        case list():
            return tuple(_restored(part) for part in value)
        case {"fields": dict() as fields}:
            return {key: _restored(part) for key, part in fields.items()}
        case {"numpy": True}:
            return np.array(value["data"], dtype=value["dtype"]).reshape(value["shape"])
        case {"dtype": dtype, "shape": shape, "data": data}:
            return torch.tensor(data, dtype=getattr(torch, dtype)).reshape(shape)
    return value


def _flatten(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` with its tensors moved to `tensors` and replaced by their names there."""
    match value:
        case Tensor():
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name}
        case np.ndarray():
            tensors[name] = torch.from_numpy(np.ascontiguousarray(value)).clone()
            return {"array": name}
        case tuple():
            return {"tuple": [_flatten(f"{name}.{i}", part, tensors) for i, part in enumerate(value)]}
        case dict():
            return {"fields": {key: _flatten(f"{name}.{key}", part, tensors) for key, part in value.items()}}
    return {"value": value}


def _unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"array": name}:
            return tensors[name].numpy()
        case {"tuple": parts}:
            return tuple(_unflatten(part, tensors) for part in parts)
        case {"fields": fields}:
            return {key: _unflatten(part, tensors) for key, part in fields.items()}
    return value["value"]


def _equal(a: Any, b: Any) -> bool:
    match a, b:
        case Tensor(), Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
        case np.ndarray(), np.ndarray():
            return a.dtype == b.dtype and np.array_equal(a, b)
        case dict(), dict():
            return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
        case tuple(), tuple():
            return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _sketch(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_sketch(part)}' for key, part in value.items())}}}"
    return f"({', '.join(map(_sketch, value))})" if isinstance(value, tuple) else repr(value)
