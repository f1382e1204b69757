"""New weights for a loaded decoder, by the names that they have in Hugging Face folders. Nothing is changed in place.

Each matrix keeps the format that it has: floats their type; int8, int4 and fp8 are quantized again. Weights may be
shared by engines and be views of a file, so a changed matrix is a new one and the others are taken over.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headway.base.arrays import aligned, from_tensor, is_tensor, narrow, unreadable, widen
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.kernels.host.quantized import (
    KINDS,
    QuantizedMatrix,
    interleave_floats,
    padded_experts,
    quantize_int4,
    quantize_int8,
)
from headway.models.config import ModelConfig
from headway.models.families import by_name, is_llama_like
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer
from headway.models.weights.given import (
    GivenRoles,
    check_whole_experts,
    folder_names,
    folder_shapes,
)
from headway.models.weights.load import folder_array, folder_vector
from headway.models.weights.roles import HARMLESS, HF_NAMES, parts_of
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import Shapes, layer_shapes, model_shapes

FLOATS = {kind: name for name, kind in KINDS.items()}


def checked(config: ModelConfig, tensors: Mapping[str, Any]) -> GivenWeights:
    """The weights of an update of a whole model, all of them checked before anything is made."""
    given = GivenWeights(config, tensors)
    given.check()
    return given


def updated(decoder: Any, given: GivenWeights, quantize: str | None = None) -> Any:
    """The decoder with these weights in place of its own."""
    if isinstance(decoder, QuantizedDecoder):
        llama = is_llama_like(decoder.config)
        return (_QuantizedUpdate if llama else _QuantizedRoles)(given, quantize).decoder(decoder)
    if not is_llama_like(decoder.config):
        from headway.models.weights.update_described import described

        return described(decoder, given.by_role())
    from headway.models.weights.update_tensors import dense

    return dense(decoder, given)


class GivenWeights:
    """The weights of an update, by name: tensors of torch, or arrays."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any]) -> None:
        if not isinstance(tensors, Mapping):
            raise WrongType(f"the weights are {short_repr(tensors)}; they must be a mapping from names to tensors")
        self.config = config
        self._tensors = {name: _weight(name, value) for name, value in tensors.items() if not _is_harmless(name)}
        self._tensors |= {name: _weight(name, tensors[name]) for name in ("lm_head.weight",) if name in tensors}
        if not is_llama_like(config):
            self._tensors = folder_names(config, self._tensors)

    def by_role(self) -> GivenRoles:
        """The same by role, of a family that is not Llama's."""
        tied = parts_of(by_name(self.config.family), gguf=False)["output"] if self.config.tied else None
        return GivenRoles(self.config, {name: t for name, t in self._tensors.items() if name != tied})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names and weights as they were given."""
        return self._tensors.items()

    def get(self, name: str) -> Any:
        """The weight of this name as it was given, or None."""
        return self._tensors.get(name)

    def array(self, name: str) -> np.ndarray | None:
        """The same as an array."""
        given = self._tensors.get(name)
        return None if given is None else from_tensor(given)

    def check(self) -> None:
        """Raise for a name or shape that the model does not have, or a weight that is not a number."""
        shapes = weight_shapes(self.config)
        for name, tensor in self._tensors.items():
            if name not in shapes:
                near = difflib.get_close_matches(str(name), shapes, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "names are those of a Hugging Face folder"
                raise InvalidInput(f"{short_repr(name)} is not a weight of this model; {hint}")
            if tuple(tensor.shape) != shapes[name]:
                raise InvalidInput(
                    f"the weight {name!r} has shape {list(tensor.shape)}; this model needs {list(shapes[name])}"
                )
            if not _is_finite(tensor):
                raise InvalidInput(f"the weight {name!r} has values that are not finite numbers")
        names = parts_of(by_name(self.config.family), gguf=False)
        output, embedding = str(names["output"]), str(names["embedding"])
        head, table = self.get(output), self.get(embedding)
        if self.config.tied and head is not None and (table is None or not _alike(head, table)):
            raise InvalidInput(f"{output!r} is tied to {embedding!r} in this model; give that one, or both alike")
        if not is_llama_like(self.config):
            check_whole_experts(self.config, self._tensors)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of a model, by their names in a Hugging Face folder, with their shapes."""
    names, shapes = parts_of(by_name(config.family), gguf=False), folder_shapes(config)
    return {str(names["output"]): shapes[str(names["embedding"])], **shapes}  # a tied one may be given, too


def _weight(name: object, value: Any) -> Any:
    if (why := unreadable(value)) is not None:
        raise WrongType(f"the weight {short_repr(name)} is {why}; it must be a dense tensor")
    if is_tensor(value) and value.is_floating_point():
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value
    kind = value.dtype if is_tensor(value) or isinstance(value, np.ndarray) else type(value).__name__
    raise WrongType(f"the weight {short_repr(name)} is {kind}; it must be a tensor or an array of floats")


def _is_finite(value: Any) -> bool:
    return bool(np.isfinite(value).all() if isinstance(value, np.ndarray) else value.isfinite().all())


def _alike(head: Any, table: Any) -> bool:
    """Whether two matrices are the same, in the type of the second."""
    first, second = from_tensor(head), from_tensor(table)
    name = str(getattr(table, "dtype", "")).removeprefix("torch.")
    return first.shape == second.shape and bool((narrow(first, name) == second).all())


def _is_harmless(name: object) -> bool:
    return isinstance(name, str) and HARMLESS.fullmatch(name) is not None


# -- the native step's layout ------------------------------------------------------------------------------------------


class _QuantizedUpdate:
    def __init__(self, given: GivenWeights, quantize: str | None) -> None:
        self._given, self._quantize = given, quantize

    def decoder(self, decoder: QuantizedDecoder) -> QuantizedDecoder:
        n = HF_NAMES
        table = self._given.array(n["embedding"])
        embedding = self._matrix(decoder.embedding, n["embedding"], table, None)
        output = embedding
        if decoder.output is not decoder.embedding:
            head = self._given.array(n["output"]) if not decoder.config.tied else table
            output = self._matrix(decoder.output, n["output"], head, None)
        return replace(
            decoder,
            embedding=embedding,
            layers=tuple([self._layer(layer, n["layer"].format(i)) for i, layer in enumerate(decoder.layers)]),
            final_norm=_like(self._given.array(n["final_norm"]), decoder.final_norm),
            output=output,
        )

    def _layer(self, layer: QuantizedLayer, at: str) -> QuantizedLayer:
        n, given = HF_NAMES, self._given
        norms = {
            name: _like(given.array(at + n[name]), old)
            for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")
            if (old := getattr(layer, name)) is not None
        }
        parts = {}
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            name = at + n[role]
            weight, bias = given.array(f"{name}.weight"), given.array(f"{name}.bias")
            parts[role] = self._matrix(getattr(layer, role), f"{name}.weight", weight, bias)
        return replace(layer, **norms, **parts)

    def _matrix(
        self, old: QuantizedMatrix, name: str, weight: np.ndarray | None, bias: np.ndarray | None
    ) -> QuantizedMatrix:
        return _remade(old, name, weight, bias, self._quantize)


class _QuantizedRoles:
    """The same for families whose folders have other names and layouts than Llama's."""

    def __init__(self, given: GivenWeights, quantize: str | None) -> None:
        self._given, self._quantize = given.by_role(), quantize

    def decoder(self, decoder: QuantizedDecoder) -> QuantizedDecoder:
        shapes = model_shapes(self._given.config)
        new = self._parts(decoder, shapes, None)
        tied, outer = "output" not in shapes, replace(decoder, **new)
        if tied and ("embedding" in new or "output_bias" in shapes):
            bias = self._array("output_bias", shapes, None) if "output_bias" in shapes else None
            kept = decoder.output.bias if bias is None else aligned(bias)
            outer = replace(outer, output=outer.embedding if kept is None else replace(outer.embedding, bias=kept))
        layers = [self._layer(layer, i) for i, layer in enumerate(decoder.layers)]
        return replace(outer, layers=tuple(layers))

    def _layer(self, layer: QuantizedLayer, i: int) -> QuantizedLayer:
        if not self._given.in_layer(i):
            return layer
        return replace(layer, **self._parts(layer, layer_shapes(self._given.config, i), i))

    def _parts(self, old: Any, shapes: Shapes, layer: int | None) -> dict[str, Any]:
        """The weights of a layer, or outside of them, that are given."""
        new: dict[str, Any] = {}
        for role, shape in shapes.items():
            was = getattr(old, role, None)
            if isinstance(was, QuantizedMatrix):
                weight, bias = self._array(role, shapes, layer), self._array(f"{role}_bias", shapes, layer)
                if weight is not None or bias is not None:
                    new[role] = _remade(was, f"{self._given.at(layer)}{role}", weight, bias, self._quantize)
            elif was is not None and self._given.has(role, shape, layer):
                new[role] = aligned(folder_vector(self._given.roles, role, shapes, self._given.at(layer)).copy())
        return new

    def _array(self, role: str, shapes: Shapes, layer: int | None) -> np.ndarray | None:
        """A weight as a matrix in the decoder's order, None if it is not given."""
        c = self._given.config
        if role not in shapes or not self._given.has(role, shapes[role], layer):
            return None
        array = folder_array(self._given.roles, role, shapes[role], self._given.at(layer))
        base = role.removesuffix("_bias")
        if base in ("q", "k") and by_name(c.family).interleaved_hf:
            return half_split(array, c.head_dim, c.rope.dim)
        if layer is None and base not in shapes:
            return array
        return padded_experts(array) if len(shapes[base]) == 3 else array


def _remade(
    old: QuantizedMatrix, name: str, weight: np.ndarray | None, bias: np.ndarray | None, quantize: str | None
) -> QuantizedMatrix:
    """A matrix of new values in the format of the old one."""
    kept = old.bias if bias is None else aligned(widen(bias)).copy()
    if weight is None:
        return old if bias is None else replace(old, bias=kept)
    if old.kind in FLOATS:
        return interleave_floats(narrow(weight, FLOATS[old.kind]), kept)
    if old.kind == "int8":
        return quantize_int8(weight, kept)
    if quantize == "int4":
        return quantize_int4(weight, kept)
    raise Unsupported(
        f"the weight {name!r} is kept as {old.label}, the format of its file, and cannot be made from floats; "
        "load the model with dtype='float32', or from a folder of floats"
    )


def _like(new: np.ndarray | None, old: np.ndarray) -> np.ndarray:
    """The new weight in float32, as the old one: a copy, for the caller may go on training his."""
    return old if new is None else aligned(widen(new).copy())
