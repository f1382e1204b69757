"""How config.json says that a folder's weights are quantized: `quantization_config`, checked and refused by name.

Owns the reading of those keys: fp8, AWQ, GPTQ, compressed-tensors and MXFP4. It never looks at a tensor
(`quantized_folder` and `mxfp4_folder` do).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, Unsupported
from headway.base.text import short_repr

METHODS = ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4")
MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class WeightScheme:
    """How the quantized matrices of a folder are stored.

    `form` is fp8, awq, gptq, packed (integers in words of 32 bits), int8 or mxfp4. `group` is how many inputs share a
    scale: None is all of a row, or of the matrix. A `block` is [rows, inputs] that share one.
    """

    method: str
    form: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    zero_offset: int = 0  # what is added to zeros as they are stored

    @property
    def label(self) -> str:
        """The format in words."""
        if self.form == "fp8":
            return "FP8"
        name = {"awq": "AWQ int", "gptq": "GPTQ int"}.get(self.form, "INT")
        return f"{name}{self.bits}"


def read_scheme(config: Mapping[str, Any]) -> WeightScheme | None:
    """The scheme of a config.json, or None if its weights are not quantized; raises for one that is not supported."""
    how = config.get("quantization_config") or config.get("compression_config")
    if not how:
        return None
    if not isinstance(how, dict):
        raise BadModelFile(f"config.json: quantization_config is {short_repr(how)}; it must be an object")
    match how.get("quant_method"):
        case "fp8":
            return _fp8(how)
        case "awq":
            return _awq(how)
        case "gptq":
            return _gptq(how)
        case "compressed-tensors":
            return _compressed(how)
        case "mxfp4":
            return WeightScheme("mxfp4", "mxfp4", 4, group=32)
    raise Unsupported(
        f"config.json: the weights are quantized as {short_repr(how.get('quant_method'))} (quantization_config), which "
        f"is not supported in folders; supported are {', '.join(METHODS)}; or use the model's float weights, or a GGUF "
        "file"
    )


def _fp8(how: Mapping[str, Any]) -> WeightScheme:
    _one_of(how, "fmt", (None, "e4m3", "float8_e4m3fn"), "fp8")
    _one_of(how, "activation_scheme", (None, "dynamic", "static"), "fp8")
    return WeightScheme("fp8", "fp8", 8, block=_block(how.get("weight_block_size"), "weight_block_size"))


def _awq(how: Mapping[str, Any]) -> WeightScheme:
    _one_of(how, "bits", (4,), "awq")
    _one_of(how, "version", (None, "gemm", "GEMM"), "awq")
    return WeightScheme("awq", "awq", 4, group=_group(how.get("group_size", 128)), symmetric=False)


def _gptq(how: Mapping[str, Any]) -> WeightScheme:
    _one_of(how, "bits", (2, 4, 8), "gptq")
    _one_of(how, "checkpoint_format", (None, "gptq", "gptq_v2"), "gptq")
    offset = 0 if how.get("checkpoint_format") == "gptq_v2" else 1  # the first version stores zeros less one
    group = _group(how.get("group_size", -1))
    return WeightScheme("gptq", "gptq", how["bits"], group=group, symmetric=False, zero_offset=offset)


_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed(how: Mapping[str, Any]) -> WeightScheme:
    method = "compressed-tensors"
    for key in ("kv_cache_scheme", "transform_config"):
        if how.get(key):
            raise Unsupported(f"config.json: quantized as {method!r} with {key}, which is not supported")
    sparse = how.get("sparsity_config")
    if sparse and (not isinstance(sparse, dict) or sparse.get("format") not in (None, "dense")):
        raise Unsupported(f"config.json: quantized as {method!r} with a sparsity_config, which is not supported")
    _one_of(how, "quantization_status", (None, "compressed", "frozen"), method)
    groups = how.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise BadModelFile(
            f"config.json: quantized as {method!r}; config_groups is {short_repr(groups)}, not an object"
        )
    schemes = {_compressed_group(how, name, group) for name, group in groups.items()}
    if len(schemes) > 1:
        raise Unsupported(
            f"config.json: quantized as {method!r} with {len(groups)} different config_groups; supported is one"
        )
    return schemes.pop()


def _compressed_group(how: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> WeightScheme:
    what, form = f"config_groups.{name}", group.get("format") or how.get("format")
    weights = group.get("weights")
    if form not in _FORMS:
        raise Unsupported(
            f"config.json: quantized as 'compressed-tensors' in the format {short_repr(form)}; supported are "
            f"{', '.join(_FORMS)}"
        )
    if not isinstance(weights, dict):
        raise BadModelFile(f"config.json: {what}.weights is {short_repr(weights)}; it must be an object")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size, block = weights.get("group_size"), weights.get("block_structure")
    allowed = {
        "pack-quantized": (("int", 4), ("int", 8)),
        "int-quantized": (("int", 8), ("int", 4)),
        "float-quantized": (("float", 8),),
        "naive-quantized": (("int", 8), ("int", 4), ("float", 8)),
    }[form]
    if type(bits) is not int or (kind, bits) not in allowed:
        raise Unsupported(
            f"config.json: {what}.weights are {short_repr(kind)} of {short_repr(bits)} bits, which is not "
            f"supported in {form}; supported are {', '.join(f'{k} of {b}' for k, b in allowed)}"
        )
    strategy = strategy or ("tensor" if size in (None, -1) else "group")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise Unsupported(
            f"config.json: {what}.weights.strategy is {short_repr(strategy)}, not tensor, channel, group or block"
        )
    if isinstance(block, str) and block.count("x") == 1:
        block = [int(part) if part.isdecimal() else part for part in block.split("x")]
    return WeightScheme(
        "compressed-tensors",
        "fp8" if kind == "float" else "packed" if form == "pack-quantized" else "int8",
        bits,
        group=_group(size) if strategy == "group" else None,
        block=_block(block, f"{what}.weights.block_structure", required=True) if strategy == "block" else None,
        symmetric=bool(weights.get("symmetric", True)),
    )


def _one_of(how: Mapping[str, Any], key: str, allowed: tuple[Any, ...], method: str) -> None:
    value = how.get(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        known = ", ".join(str(each) for each in allowed if each is not None)
        raise Unsupported(f"config.json: quantized as {method!r} with {key} {short_repr(value)}; supported are {known}")


def _group(size: object) -> int | None:
    if size == -1:
        return None
    if type(size) is not int or not 1 <= size <= MAX_GROUP:
        raise BadModelFile(
            f"config.json: group_size in quantization_config is {short_repr(size)}; it must be an integer in "
            f"[1, {MAX_GROUP}], or -1"
        )
    return size


def _block(size: object, key: str, *, required: bool = False) -> tuple[int, int] | None:
    if size is None and not required:
        return None
    sides = [side for side in size if type(side) is int] if isinstance(size, list) else []
    if len(sides) != 2 or sides != size or not all(1 <= side <= MAX_GROUP for side in sides):
        raise BadModelFile(
            f"config.json: {key} in quantization_config is {short_repr(size)}; it must be two integers in "
            f"[1, {MAX_GROUP}]"
        )
    return sides[0], sides[1]
