"""Matmul of quantized blocks on tensor cores, written as PTX `mma` instructions.

One instruction multiplies A [16 outputs, 16 inputs] by B [16 inputs, 8 rows] and adds to D [16, 8]. A block of
quantized weights holds four such A. A lane 4r + q holds a few numbers of each matrix: of A the outputs r and r + 8 in
four registers of two float16 (a₀: r, its first two inputs; a₁: r + 8, the same; a₂ and a₃: the next two inputs), of B
two registers of row r, of D the outputs r (d₀, d₁) and r + 8 (d₂, d₃) of rows 2q and 2q + 1. t numbers the four
instructions of a block.

Two instructions convert two quants to float16: four or eight bits joined with the exponent of 1024 are 1024 + quant,
and the excess is subtracted. 4-bit quants of outputs r + 8 are four bits higher, which is 16 times as much.

One row needs one instruction: the bits alone are a subnormal number, quant × 2⁻²⁴, which tensor cores multiply exactly.
The offset of every quant, 8 or 128, is then subtracted by multiplying the same inputs with a constant A.
"""

# ruff: noqa: PLR0917
from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _mma(d: str, a: str, b: str, c: str, kind: str = "f16") -> str:
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"


@triton.constexpr_function
def _list(first: int, count: int = 4, step: int = 1) -> str:
    return ", ".join(f"${first + i * step}" for i in range(count))


def _four_sums(kind: str) -> str:
    """$0–3 = $4–7 + the four matmuls of A in $8–23 (a₀ of all four, then a₁, …) with B in $24–31."""
    lines, total = ["{", ".reg .f32 d<4>;"], _list(4)
    for t in range(4):
        lines.append(_mma("d0, d1, d2, d3", _list(8 + t, step=4), _list(24 + 2 * t, 2), total, kind))
        total = "d0, d1, d2, d3"
    return "\n".join([*lines, *(f"mov.f32 ${i}, d{i};" for i in range(4)), "}"])


def _four_bit_sums() -> str:
    """$0–3 = $4–7 + the sums of two groups times their scales in $32 and $33. A is in $8–23, B in $24–31."""
    lines = ["{", ".reg .f32 d<8>, s<4>, z;", ".reg .f16 h<4>;", "mov.f32 z, 0f00000000;"]
    for group in range(2):
        d = ", ".join(f"d{4 * group + i}" for i in range(4))
        for t in (2 * group, 2 * group + 1):
            begin = "z, z, z, z" if t % 2 == 0 else d
            lines.append(_mma(d, _list(8 + t, step=4), _list(24 + 2 * t, 2), begin))
    lines += ["mov.b32 {h0, h1}, $32;", "mov.b32 {h2, h3}, $33;", *(f"cvt.f32.f16 s{i}, h{i};" for i in range(4))]
    for i in range(4):
        lines.append(f"fma.rn.f32 d{i}, d{i}, s{i // 2 * 2}, ${4 + i};")
        lines.append(f"fma.rn.f32 ${i}, d{4 + i}, s{i // 2 * 2 + 1}, d{i};")
    return "\n".join([*lines, "}"])


def _four_bit_unpack() -> str:
    """A of four words $16–19 into $0–15: a₀ of all four, then a₁, …; those of outputs r + 8 are 16 times as large."""
    lines = ["{", ".reg .b32 u, k, l, m;", "mov.b32 k, 0x64006400;", "mov.b32 l, 0x64086408;", "mov.b32 m, 0x64806480;"]
    for t in range(4):
        lines.append(f"shr.u32 u, ${16 + t}, 8;")
        for word, low, high in ((f"${16 + t}", t, 4 + t), ("u", 8 + t, 12 + t)):
            lines += [f"lop3.b32 ${low}, {word}, 0x000f000f, k, 0xea;", f"sub.rn.f16x2 ${low}, ${low}, l;"]
            lines += [f"lop3.b32 ${high}, {word}, 0x00f000f0, k, 0xea;", f"sub.rn.f16x2 ${high}, ${high}, m;"]
    return "\n".join([*lines, "}"])


def _int8_unpack() -> str:
    """A of four words of outputs r, $16–19, and of r + 8, $20–23, into $0–15."""
    lines = ["{", ".reg .b32 k, m;", "mov.b32 k, 0x64646464;", "mov.b32 m, 0x64806480;"]
    for t in range(4):
        for word, low, high in ((16 + t, t, 8 + t), (20 + t, 4 + t, 12 + t)):
            lines += [f"prmt.b32 ${low}, ${word}, k, 0x4140;", f"sub.rn.f16x2 ${low}, ${low}, m;"]
            lines += [f"prmt.b32 ${high}, ${word}, k, 0x4342;", f"sub.rn.f16x2 ${high}, ${high}, m;"]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _fp4_unpack(block: int) -> str:
    """A in bfloat16 of four words $16–19 of MXFP4 into $0–15: a₀ of all four, then a₁, … $20–23 have the exponents of
    outputs r and r + 8 for two words each, for four blocks.

    A place of a word is moved to where bfloat16 has these bits, and multiplied; adding -0 changes nothing.
    """
    lines = ["{", ".reg .b32 u, v, s<4>;"]
    for g in range(4):
        lines += [f"bfe.u32 u, ${20 + block}, {8 * g}, 8;", f"mul.lo.u32 s{g}, u, 0x00800080;"]
    for t in range(4):
        word, low, high = f"${16 + t}", f"s{t // 2 * 2}", f"s{t // 2 * 2 + 1}"
        lines.append(f"and.b32 ${t}, {word}, 0x81c081c0;")
        lines += [f"shl.b32 u, {word}, 3;", f"and.b32 ${4 + t}, u, 0x81c081c0;"]
        lines += [f"shl.b32 u, {word}, 6;", f"and.b32 ${8 + t}, u, 0x81c081c0;"]
        lines += [f"shl.b32 u, {word}, 1;", "and.b32 v, u, 0x80008000;"]
        lines += [f"shr.u32 u, {word}, 3;", "lop3.b32 v, u, 0x01800180, v, 0xea;"]
        lines += [f"shr.u32 u, {word}, 7;", f"lop3.b32 ${12 + t}, u, 0x00400040, v, 0xea;"]
        for a in range(4):
            scale = low if a % 2 == 0 else high
            lines.append(f"fma.rn.bf16x2 ${4 * a + t}, ${4 * a + t}, {scale}, z;")
    return "\n".join([*lines[:2], ".reg .b32 z;", "mov.b32 z, 0x80008000;", *lines[2:], "}"])


@triton.constexpr_function
def _pair(value: int, half: bool) -> str:
    """The bits of an integer twice, in float16 or bfloat16."""
    exponent = abs(value).bit_length() - 1
    size, bias = (10, 15) if half else (7, 127)
    bits = (value < 0) << 15 | (exponent + bias) << size | (abs(value) << size >> exponent) - (1 << size)
    return f"0x{bits:04x}{bits:04x}"


@triton.constexpr_function
def _int_unpack(eight: bool, zero: int, half: bool) -> str:
    """A of four words $16–19 of integers into $0–15: a₀ of all four, then a₁, …; with 8 bits they are of outputs r, and
    those of r + 8 are $20–23. Numbers are float16 or bfloat16, and exact.

    An integer joined with the exponent of a power of two is that power plus the integer, and the excess is subtracted.
    bfloat16 has room for seven bits: with the eighth twice as much is subtracted, or not.
    """
    kind, power = ("f16x2", 1024) if half else ("bf16x2", 128)
    lines = ["{", ".reg .b32 u, v, k, l, m;", f"mov.b32 k, {_pair(power, half)};", f"mov.b32 l, {_pair(1, half)};"]
    lines.append(f"mov.b32 m, {_pair(-power - (zero if half or not eight else 0), half)};")
    for t in range(4):
        for a in range(4):
            to, word = f"${4 * a + t}", 16 + t + (4 * (a % 2) if eight else 0)
            if not eight:
                lines += [f"shr.u32 u, ${word}, {4 * a};", f"lop3.b32 {to}, u, 0x000f000f, k, 0xea;"]
                lines.append(f"fma.rn.{kind} {to}, {to}, l, m;")
            elif half:
                lines += [f"prmt.b32 {to}, ${word}, k, {'0x5150' if a < 2 else '0x5352'};"]
                lines.append(f"fma.rn.{kind} {to}, {to}, l, m;")
            else:
                lines += [f"prmt.b32 u, ${word}, 0, {'0x4140' if a < 2 else '0x4342'};"]
                lines += ["lop3.b32 v, u, 0x00800080, m, 0xae;", f"lop3.b32 {to}, u, 0x007f007f, k, 0xea;"]
                lines.append(f"fma.rn.{kind} {to}, {to}, l, v;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _int_scales(block: int, group: int, steps: bool, minimum: bool) -> str:
    """The four scales (g, h) of a block in groups of 32, or the eight (g, t, h) of 16, as float32.

    They are in a line of four words; with steps they are bytes, and the last two words are halves to multiply with:
    those of scales, and those of minima.
    """
    count = 128 // group
    first = block * count % (16 if steps else 8)
    lines = ["{", ".reg .b16 l, m;", ".reg .f32 f, d<2>;", ".reg .b32 u;"]
    if steps:
        lines += [f"mov.b32 {{l, m}}, ${count + 4 + minimum};", "cvt.f32.f16 d0, l;", "cvt.f32.f16 d1, m;"]
    for i in range(count):
        word, place = (first + i) // (4 if steps else 2) + count, (first + i) % (4 if steps else 2)
        if steps:
            lines += [f"bfe.s32 u, ${word}, {8 * place}, 8;", "cvt.rn.f32.s32 f, u;", f"mul.f32 ${i}, f, d{i % 2};"]
        else:
            lines += [f"mov.b32 {{l, m}}, ${word};", f"cvt.f32.f16 ${i}, {'lm'[place]};"]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _input_sums(group: int, half: bool) -> str:
    """The sums of a block's inputs of rows 2q and 2q + 1, by group, of B in $n … $n + 7."""
    count = 128 // group
    lines = ["{", ".reg .f32 d<4>, z;", ".reg .b32 o;", "mov.f32 z, 0f00000000;", f"mov.b32 o, {_pair(1, half)};"]
    for t in range(4):
        begin = "z, z, z, z" if group == 16 or t % 2 == 0 else "d0, d1, d2, d3"
        lines.append(_mma("d0, d1, d2, d3", "o, o, o, o", _list(count + 2 * t, 2), begin, "f16" if half else "bf16"))
        if group == 16 or t % 2 == 1:
            at = 2 * t if group == 16 else t - 1
            lines += [f"mov.f32 ${at}, d0;", f"mov.f32 ${at + 1}, d1;"]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _group_sums(group: int, minimum: bool, half: bool) -> str:
    """$0–3 = $4–7 + the sums of groups times their scales, from $32 on. A is in $8–23, B in $24–31.

    With `minimum` minima follow, and then sums of inputs, which they are multiplied with.
    """
    count = 128 // group
    lines = [
        "{",
        ".reg .f32 d<16>, e<4>, z;",
        "mov.f32 z, 0f00000000;",
        *(f"mov.f32 e{i}, ${4 + i};" for i in range(4)),
    ]
    for t in range(4):
        g = t if group == 16 else t // 2
        d = ", ".join(f"d{4 * g + i}" for i in range(4))
        begin = "z, z, z, z" if group == 16 or t % 2 == 0 else d
        lines.append(_mma(d, _list(8 + t, step=4), _list(24 + 2 * t, 2), begin, "f16" if half else "bf16"))
    for g in range(count // 2):
        for i in range(4):
            lines.append(f"fma.rn.f32 e{i}, d{4 * g + i}, ${32 + 2 * g + i // 2}, e{i};")
            if minimum:
                of, sum_of = 32 + count + 2 * g + i // 2, 32 + 2 * count + 2 * g + i % 2
                lines.append(f"fma.rn.f32 e{i}, ${of}, ${sum_of}, e{i};")
    return "\n".join([*lines, *(f"mov.f32 ${i}, e{i};" for i in range(4)), "}"])


def _lane_predicates() -> list[str]:
    """p0 … p3: whether the lane's q is 0 … 3."""
    tests = [f"setp.eq.u32 p{m}, lane, {m};" for m in range(4)]
    return [".reg .u32 lane;", ".reg .pred p<4>;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", *tests]


def _unpacked(kind: str, word: int, other: int) -> list[str]:
    """a0 … a3 of one instruction: from a word, and for eight bits from the same word of the outputs r + 8."""
    if kind == "int4":
        lines = [f"and.b32 a0, ${word}, 0x000f000f;", f"and.b32 a1, ${word}, 0x00f000f0;", f"shr.u32 u, ${word}, 8;"]
        return [*lines, "and.b32 a2, u, 0x000f000f;", "and.b32 a3, u, 0x00f000f0;"]
    if kind == "int8":
        low, high = "0, 0x4140", "0, 0x4342"
        lines = [f"prmt.b32 a0, ${word}, {low};", f"prmt.b32 a2, ${word}, {high};"]
        return [*lines, f"prmt.b32 a1, ${other}, {low};", f"prmt.b32 a3, ${other}, {high};"]
    lines = [f"mov.b32 {{l, m}}, ${word};", "cvt.rn.f16x2.e4m3x2 a0, l;", "cvt.rn.f16x2.e4m3x2 a2, m;"]
    lines += [f"mov.b32 {{l, m}}, ${other};", "cvt.rn.f16x2.e4m3x2 a1, l;", "cvt.rn.f16x2.e4m3x2 a3, m;"]
    return lines


def _one_row(kind: str) -> str:
    """$0–3 = $4–7 + one row times four blocks of inputs. B, $8–11, has a group of inputs in each column.

    Column 2m + g is group g of block m: multiplied with that group's quants only this column is meaningful, and it is
    held by the lanes whose q is m. The first two numbers are sums of the outputs r and r + 8. Words are in $12–27, or
    in $12–43 with those of r + 8 after those of r for each block; int4 has its scales in the last two.
    """
    wide = kind != "int4"
    registers = [
        ".reg .f32 d<4>, z<4>, s<4>, e0, e1;",
        ".reg .f16 h<4>;",
        ".reg .b32 a<4>, u, k, l2;",
        ".reg .b16 l, m;",
    ]
    lines = ["{", *registers, *_lane_predicates(), "mov.f32 e0, $4;", "mov.f32 e1, $5;"]
    if kind == "int4":
        lines += ["mov.b32 {h0, h1}, $28;", "mov.b32 {h2, h3}, $29;", *(f"cvt.f32.f16 s{i}, h{i};" for i in range(4))]
    if kind != "fp8":  # the offset of the quants, for all columns at once
        lines += [f"mov.b32 k, {'0x80808080' if wide else '0x80088008'};", "mov.b32 l2, 0x80808080;"]
        lines += ["mov.f32 z0, 0f00000000;", _mma("z0, z1, z2, z3", "k, l2, k, l2", "$8, $9", "z0, z0, z0, z0")]
        lines.append(_mma("z0, z1, z2, z3", "k, l2, k, l2", "$10, $11", "z0, z1, z2, z3"))
        lines += _added("z0", "z2", "s0", "s2", wide, "") + _added("z1", "z3", "s1", "s3", wide, "")
    for m in range(4):
        for g in range(2):
            for t in range(2):
                word = 12 + (8 if wide else 4) * m + 2 * g + t
                lines += _unpacked(kind, word, word + 4)
                lines.append("mov.f32 d0, 0f00000000;" if t == 0 else "")
                begin = "d0, d0, d0, d0" if t == 0 else "d0, d1, d2, d3"
                lines.append(_mma("d0, d1, d2, d3", "a0, a1, a2, a3", f"${8 + 2 * t}, ${9 + 2 * t}", begin))
            lines += _added(f"d{g}", f"d{2 + g}", f"s{g}", f"s{2 + g}", wide, f"@p{m} ")
    return "\n".join([*lines, "mov.f32 $0, e0;", "mov.f32 $1, e1;", "mov.f32 $2, $6;", "mov.f32 $3, $7;", "}"])


def _added(low: str, high: str, low_scale: str, high_scale: str, wide: bool, when: str) -> list[str]:
    if wide:
        return [f"{when}add.f32 e0, e0, {low};", f"{when}add.f32 e1, e1, {high};"]
    return [f"{when}fma.rn.f32 e0, {low}, {low_scale}, e0;", f"{when}fma.rn.f32 e1, {high}, {high_scale}, e1;"]


@triton.constexpr_function
def _registers(*kinds: tuple[str, int]) -> str:
    return ",".join(kind for kind, count in kinds for _ in range(count))


_UNPACK4 = tl.constexpr(_four_bit_unpack())
_UNPACK4_AT = tl.constexpr(_registers(("=&r", 16), ("r", 4)))
_UNPACK8 = tl.constexpr(_int8_unpack())
_UNPACK8_AT = tl.constexpr(_registers(("=&r", 16), ("r", 8)))
_SUMS4 = tl.constexpr(_four_bit_sums())
_SUMS4_AT = tl.constexpr(_registers(("=&f", 4), ("f", 4), ("r", 26)))
_ROW4 = tl.constexpr(_one_row("int4"))
_ROW4_AT = tl.constexpr(_registers(("=&f", 4), ("f", 4), ("r", 22)))
_ROW8 = tl.constexpr(_one_row("int8"))
_ROW_FP8 = tl.constexpr(_one_row("fp8"))
_ROW8_AT = tl.constexpr(_registers(("=&f", 4), ("f", 4), ("r", 36)))
_SUMS8 = tl.constexpr(_four_sums("f16"))
_SUMS8_AT = tl.constexpr(_registers(("=f", 4), ("f", 4), ("r", 24)))
_UNPACK_FP4_AT = tl.constexpr(_registers(("=&r", 16), ("r", 8)))
_SUMS_BF16 = tl.constexpr(_four_sums("bf16"))
_UNPACK_INT4_AT = tl.constexpr(_registers(("=&r", 16), ("r", 4)))


@triton.jit
def begun():
    """Issues the loads above before the computation below: the compiler would move each to its use."""
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def sums(total, w0, w1, s, xa, xb, KIND: tl.constexpr):
    """The totals plus a block's matmul."""
    a0, a1, a2, a3 = _unpack(w0, w1, KIND)
    if KIND == "int4":
        return tl.inline_asm_elementwise(_SUMS4, _SUMS4_AT, [total, a0, a1, a2, a3, xa, xb, s], tl.float32, True, 4)
    else:
        return tl.inline_asm_elementwise(_SUMS8, _SUMS8_AT, [total, a0, a1, a2, a3, xa, xb], tl.float32, True, 4)


@triton.jit
def _unpack(w0, w1, KIND: tl.constexpr):
    """A of four instructions, [.., 128] int32: two float16 numbers each."""
    if KIND == "int4":
        return tl.inline_asm_elementwise(_UNPACK4, _UNPACK4_AT, [w0], (tl.int32, tl.int32, tl.int32, tl.int32), True, 4)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK8, _UNPACK8_AT, [w0, w1], (tl.int32, tl.int32, tl.int32, tl.int32), True, 4
        )


@triton.jit
def row_sums(total, x, a0, b0, c0, d0, a1, b1, c1, d1, s, KIND: tl.constexpr):
    """The totals of one row plus four blocks' matmul; x, words and scales as in `_one_row`."""
    if KIND == "int4":
        return tl.inline_asm_elementwise(_ROW4, _ROW4_AT, [total, x, a0, b0, c0, d0, s], tl.float32, True, 4)
    elif KIND == "int8":
        return tl.inline_asm_elementwise(
            _ROW8, _ROW8_AT, [total, x, a0, a1, b0, b1, c0, c1, d0, d1], tl.float32, True, 4
        )
    else:
        return tl.inline_asm_elementwise(
            _ROW_FP8, _ROW8_AT, [total, x, a0, a1, b0, b1, c0, c1, d0, d1], tl.float32, True, 4
        )


@triton.jit
def fp4_unpacked(w, s, BLOCK: tl.constexpr):
    """A of four instructions, [.., 128] int32: two bfloat16 numbers each, of words of MXFP4 and exponents of four."""
    return tl.inline_asm_elementwise(
        _fp4_unpack(BLOCK), _UNPACK_FP4_AT, [w, s], (tl.int32, tl.int32, tl.int32, tl.int32), True, 4
    )


@triton.jit
def fp4_sums(total, a0, a1, a2, a3, xa, xb):
    """The totals plus a block's matmul with rows in bfloat16."""
    return tl.inline_asm_elementwise(_SUMS_BF16, _SUMS8_AT, [total, a0, a1, a2, a3, xa, xb], tl.float32, True, 4)


@triton.constexpr_function
def _float_registers(outputs: int, *inputs: int) -> str:
    """The registers of inline assembly that makes floats of words, or of floats, words and floats."""
    kinds = ("r",) if len(inputs) == 1 else ("f", "r", "f")
    return _registers(("=&f", outputs), *zip(kinds, inputs, strict=True))


@triton.jit
def int_unpacked(w0, w1, EIGHT: tl.constexpr, ZERO: tl.constexpr, HALF: tl.constexpr):
    """A of four instructions, [.., 128] int32: two numbers each, of words of integers; those of 4 bits are in w0."""
    asm: tl.constexpr = _int_unpack(EIGHT, ZERO, HALF)
    if EIGHT:
        return tl.inline_asm_elementwise(asm, _UNPACK8_AT, [w0, w1], (tl.int32, tl.int32, tl.int32, tl.int32), True, 4)
    else:
        return tl.inline_asm_elementwise(asm, _UNPACK_INT4_AT, [w0], (tl.int32, tl.int32, tl.int32, tl.int32), True, 4)


@triton.jit
def int_scales(line, halves, BLOCK: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr):
    """The scales or minima of a block, [.., 128] float32: those of two groups of 32, or twice those of two of 16."""
    asm: tl.constexpr = _int_scales(BLOCK, GROUP, STEPS, MINIMUM)
    at: tl.constexpr = _float_registers(128 // GROUP, 6 if STEPS else 4)
    if GROUP == 32:
        if STEPS:
            first = tl.inline_asm_elementwise(asm, at, [line, halves], tl.float32, True, 4)
        else:
            first = tl.inline_asm_elementwise(asm, at, [line], tl.float32, True, 4)
        return first, first
    elif STEPS:
        return tl.inline_asm_elementwise(asm, at, [line, halves], (tl.float32, tl.float32), True, 4)
    else:
        return tl.inline_asm_elementwise(asm, at, [line], (tl.float32, tl.float32), True, 4)


@triton.jit
def input_sums(xa, xb, GROUP: tl.constexpr, HALF: tl.constexpr):
    """The sums of a block's inputs by group, in the same places."""
    asm: tl.constexpr = _input_sums(GROUP, HALF)
    at: tl.constexpr = _float_registers(128 // GROUP, 8)
    if GROUP == 32:
        first = tl.inline_asm_elementwise(asm, at, [xa, xb], tl.float32, True, 4)
        return first, first
    else:
        return tl.inline_asm_elementwise(asm, at, [xa, xb], (tl.float32, tl.float32), True, 4)


@triton.jit
def group_sums(
    total, a0, a1, a2, a3, xa, xb, s0, s1, m0, m1, n0, n1,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The totals plus a block's matmul: the sum of each group times its scale, and with `MINIMUM` minima m times sums
    of inputs n."""
    asm: tl.constexpr = _group_sums(GROUP, MINIMUM, HALF)
    at: tl.constexpr = _float_registers(4, 4, 24, 128 // GROUP * (3 if MINIMUM else 1))
    if GROUP == 32 and MINIMUM:
        return tl.inline_asm_elementwise(asm, at, [total, a0, a1, a2, a3, xa, xb, s0, m0, n0], tl.float32, True, 4)
    elif GROUP == 32:
        return tl.inline_asm_elementwise(asm, at, [total, a0, a1, a2, a3, xa, xb, s0], tl.float32, True, 4)
    elif MINIMUM:
        return tl.inline_asm_elementwise(
            asm, at, [total, a0, a1, a2, a3, xa, xb, s0, s1, m0, m1, n0, n1], tl.float32, True, 4
        )
    else:
        return tl.inline_asm_elementwise(asm, at, [total, a0, a1, a2, a3, xa, xb, s0, s1], tl.float32, True, 4)
