"""PTX of inline assembly, by numpy: what Triton's interpreter needs to run kernels that have it.

Registers are arrays [.., 32 lanes] of their bits. It knows the instructions that the kernels use, as the PTX manual has
them; four elements of a tensor's last dimension, which has 128, are one lane's.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton._C.libtriton import interpreter as memory
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

LANES = 32


def run_inline_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run inline assembly."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _inline, raising=False)


def _inline(_: Any, asm: str, constraints: str, args: list[TensorHandle], types: list[Any], *how: Any) -> Any:
    if "ld.global" in asm:  # of each element by itself
        at = args[0]
        there = args[1].data != 0 if len(args) > 1 else np.ones(at.data.shape, bool)
        found = memory.load(at.data.astype(np.uint64), there, np.zeros(at.data.shape, np.int32), np.dtype(np.int32))
        return SimpleNamespace(get_result=lambda i: _handle(found, types[i]))
    if not args:
        return SimpleNamespace(get_result=lambda i: TensorHandle(np.zeros(1, np.int32), types[i]))
    assert how[1] == 4  # elements at a time
    outputs = constraints.count("=")
    registers: dict[str, np.ndarray] = {}
    for arg in args:
        lanes = np.ascontiguousarray(arg.data).reshape(*arg.data.shape[:-1], LANES, 4)
        words = lanes.view(np.uint32)  # of 16 bits two are in one register
        for i in range(words.shape[-1]):
            registers[f"${outputs + len(registers)}"] = words[..., i]
    assert len(registers) == constraints.count(",") + 1 - outputs
    lines = re.split(r";|\n", asm.strip().removeprefix("{").removesuffix("}"))
    for line in filter(None, map(str.strip, lines)):
        if not line.startswith((".reg", "bar.")):
            _step(registers, line)
    shape = args[0].data.shape

    def result(i: int) -> TensorHandle:
        words = np.stack([np.broadcast_to(registers[f"${4 * i + j}"], (*shape[:-1], LANES)) for j in range(4)], -1)
        return _handle(words.reshape(shape), types[i])

    return SimpleNamespace(get_result=result)


def _handle(words: np.ndarray, kind: Any) -> TensorHandle:
    scalar = getattr(kind, "scalar", kind)
    return TensorHandle(words.view(np.float32 if scalar.is_floating() else np.int32).copy(), scalar)


def _step(registers: dict[str, np.ndarray], line: str) -> None:
    name, rest = line.split(None, 1)
    operands = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if part.strip()]

    def value(operand: str) -> Any:
        if operand in registers:
            return registers[operand]
        if operand.startswith("0f"):
            return np.uint32(int(operand[2:], 16))
        return np.uint32(int(operand, 0))

    def several(operand: str) -> list[Any]:
        return [value(part.strip()) for part in operand.strip("{}").split(",")]

    to = operands[0]
    if name == "mov.b32" and to.startswith("{"):
        for i, half in enumerate(part.strip() for part in to.strip("{}").split(",")):
            registers[half] = value(operands[1]) >> np.uint32(16 * i) & np.uint32(0xFFFF)
    elif name.startswith("mma."):
        kind = name.split(".")[-2]
        names = [part.strip() for part in to.strip("{}").split(",")]
        a, b, c = map(several, operands[1:])
        registers |= zip(names, _mma(a, b, c, kind), strict=True)
    else:
        registers[to] = _result(name, [value(operand) for operand in operands[1:]])


def _result(name: str, v: list[Any]) -> np.ndarray:
    def floats(i: int) -> np.ndarray:
        return np.asarray(v[i], np.uint32).view(np.float32)

    def bits(x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float32).view(np.uint32)

    match name:
        case "mov.b32" | "mov.f32" | "mov.u32":
            return np.asarray(v[0], np.uint32)
        case "shr.u32":
            return v[0] >> v[1]
        case "shl.b32":
            return v[0] << v[1]
        case "and.b32":
            return v[0] & v[1]
        case "mul.lo.u32":
            return v[0] * v[1]
        case "lop3.b32":
            a, b, c, table = np.broadcast_arrays(*v)
            found = np.zeros_like(a)
            for i in range(8):
                terms = [x if i >> (2 - j) & 1 else ~x for j, x in enumerate((a, b, c))]
                found |= np.where(table >> np.uint32(i) & 1, terms[0] & terms[1] & terms[2], np.uint32(0))
            return found
        case "prmt.b32":
            both = np.asarray(v[0], np.uint64) | np.asarray(v[1], np.uint64) << np.uint64(32)
            picked = [both >> np.uint64(8 * (int(v[2]) >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
            return np.add.reduce([byte << np.uint64(8 * i) for i, byte in enumerate(picked)]).astype(np.uint32)
        case "bfe.u32" | "bfe.s32":
            at, size = int(v[1]), int(v[2])
            found = (v[0] << np.uint32(32 - size - at)).view(np.int32 if name == "bfe.s32" else np.uint32)
            return (found >> found.dtype.type(32 - size)).view(np.uint32)
        case "cvt.rn.f32.s32":
            return bits(v[0].view(np.int32))
        case "cvt.f32.f16":
            return bits(np.asarray(v[0], np.uint16).view(np.float16))
        case "mul.f32":
            return bits(floats(0) * floats(1))
        case "fma.rn.f32":
            return bits(floats(0).astype(np.float64) * floats(1) + floats(2))
        case "fma.rn.bf16x2" | "fma.rn.f16x2":
            kind = name.removeprefix("fma.rn.")
            a, b, c = (_halves(x, kind) for x in v)
            return _joined(a * b + c, kind)
        case "sub.rn.f16x2":
            return _joined(_halves(v[0], "f16x2") - _halves(v[1], "f16x2"), "f16x2")
        case _:
            raise NotImplementedError(name)


def _halves(words: Any, kind: str) -> np.ndarray:
    """The two numbers of each word, float64 [.., 2]."""
    words = np.asarray(words, np.uint32)
    each = np.stack((words & 0xFFFF, words >> 16), -1).astype(np.uint32)
    if kind.startswith("bf16"):
        return (each << np.uint32(16)).view(np.float32).astype(np.float64)
    return each.astype(np.uint16).view(np.float16).astype(np.float64)


def _joined(numbers: np.ndarray, kind: str) -> np.ndarray:
    if kind.startswith("bf16"):
        wide = numbers.astype(np.float32).view(np.uint32)
        each = (wide + 0x7FFF + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    else:
        each = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return each[..., 0] | each[..., 1] << np.uint32(16)


def _mma(a: list[Any], b: list[Any], c: list[Any], kind: str) -> list[np.ndarray]:
    """m16n8k16: lane 4r + q has of A the rows r and r + 8 and the columns 2q, 2q + 1 and those 8 further on, of B the
    same rows of column r, of C and D the columns 2q and 2q + 1."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (*a, *b, *c)), (LANES,))
    pa = np.stack([_halves(np.broadcast_to(x, shape), kind) for x in a], -2).reshape(*shape[:-1], 8, 4, 2, 2, 2)
    pb = np.stack([_halves(np.broadcast_to(x, shape), kind) for x in b], -2).reshape(*shape[:-1], 8, 4, 2, 2)
    products = np.einsum("...rqkhi,...nqki->...hrn", pa, pb)  # k: 8 columns further on
    total = np.stack([np.broadcast_to(np.asarray(x, np.uint32), shape).view(np.float32) for x in c], -1)
    total = total + products.reshape(*shape[:-1], 2, 8, 4, 2).swapaxes(-4, -3).swapaxes(-3, -2).reshape(*shape, 4)
    found = total.astype(np.float32).view(np.uint32)
    return [found[..., i] for i in range(4)]
