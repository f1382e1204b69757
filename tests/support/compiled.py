"""Compiles kernels of quantized experts for an H200 without having one, at the size of Qwen3-30B-A3B.

    python -m support.compiled int8.16.steps ...    kind, inputs of a group, and steps and minimum if it has them

It prints the instructions that read global memory, kernel by kernel, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.kernels.host.expert_form import ExpertForm
from headway.kernels.triton.experts import matmul as experts
from headway.kernels.triton.experts import quantized as kernels
from headway.kernels.triton.experts.matmul import form_options
from headway.kernels.triton.experts.quantized import StripTile, pick_strip_tile

HIDDEN, WIDTH, CHOSEN = 2048, 768, 8
INTS = ("n", "strips", "x_row")  # and, of one kernel, K


def form_of(name: str) -> ExpertForm:
    kind, group, *what = name.split(".")
    how: Any = dict.fromkeys(what, True)
    return ExpertForm(kind, int(group), **how)  # type: ignore[arg-type]


def loads(kernel: Any, tensors: dict[str, str | None], constants: dict[str, Any], warps: int) -> list[str]:
    """What a kernel's compiled code loads by."""
    signature, fixed, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = "i32" if name in INTS or (name == "K" and constants[name] is None) else tensors.get(name)
        signature[name] = kind or "constexpr"
        if kind is None:
            fixed[i,] = constants.get(name)
        else:
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    assert kernel is experts._expert_matmul or _lanes_have_whole_packs(made.asm["ttgir"])
    return sorted(set(re.findall(r"ld\.global[\w.:]*", made.asm["ptx"])))


def _lanes_have_whole_packs(ttgir: str) -> bool:
    """Whether a lane has all elements of what inline assembly takes together, beside each other."""
    held = re.findall(r"^#(\w+) = #ttg\.blocked<\{sizePerThread = \[[\d, ]*?(\d+)\]", ttgir, re.MULTILINE)
    calls = re.findall(r"packed_element = (\d+) : i32[^\n]*-> [^\n]*#(\w+)>", ttgir)
    assert calls
    return all(int(dict(held)[layout]) % int(count) == 0 for count, layout in calls)


def compiled(form: ExpertForm) -> dict[str, list[str]]:
    """The kernels of pairs one by one, of blocks of rows, and of one row; and of rows in float32."""
    read: dict[str, str | None] = {"x": "*i32", "words": "*i32", "scales": "*i32", "y": "*bf16"}
    read |= {"halves": "*fp16" if form.steps else None}
    same: dict[str, Any] = {**form_options(form), "FACTOR": 1.0, "HALF": False, "AHEAD": True, "EVEN": True}
    gate = {"PAIRED": True, "GATED": True, "KIND": "silu", "CLAMP": 0.0, "ALPHA": 1.0, "PER": CHOSEN, "K": HIDDEN}
    found = {}
    for name, rows in (("pairs", 0.0), ("blocks", 64.0)):
        tile: StripTile = pick_strip_tile(rows, form)
        shape = {"GROUPS": tile.warps if tile.wide else 1, "PARTS": tile.strips, "COLS": tile.columns}
        tensors = read | {"order": "*i32", "blocks": "*i32" if rows else None}
        constants = same | gate | shape | {"DEEP": tile.inputs}
        found[name] = loads(kernels._strip_matmul, tensors, constants, tile.warps)
    chosen = {"chosen": "*i32", "weights": "*fp32"}
    constants = same | {"K": WIDTH, "PAIRS": CHOSEN, "SLOTS": CHOSEN, "DEEP": 2, "EVEN": False}
    found["row"] = loads(kernels._strip_add_down, read | chosen, constants, 2 * CHOSEN)
    tensors = read | {"x": "*fp32", "weight": "*i32", "scales": "*u8" if form.kind == "fp4" else "*i32"}
    tensors |= {"order": "*i32", "blocks": "*i32", "y": "*fp32"}
    constants = same | gate | {"K": None, "BM": 16, "BN": 32, "BK": 32, "EVEN": True, "PRECISION": "ieee"}
    found["float32"] = loads(experts._expert_matmul, tensors, constants, 4)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({name: compiled(form_of(name)) for name in sys.argv[1:]}))
