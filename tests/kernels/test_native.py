"""The native kernels against their torch references: every format, instruction set and thread count, any shape."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.base.errors import InvalidInput, OutOfRange, Unsupported, WrongType
from headway.kernels.host.quantized import FP4, QuantizedMatrix
from headway.kernels.native import library
from headway.kernels.native.library import ISAS, ThreadPool, available_isas, check, open_library, use_isa
from headway.kernels.native.matmul import matrix_struct
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.ordered_matmul import linear_reference
from headway.kernels.reference.quantized import dequantize, quantize_rows
from support.arrays import (
    dequantize_rows,
    interleave_floats,
    interleave_groups,
    interleave_int8,
    linear,
    quantize_int4,
    quantize_int8,
)
from support.properties import examples
from support.sweeps import instruction_sets

Build = Callable[[int, int, torch.Generator], QuantizedMatrix]
THREADS = (1, 2, 3, 4, 8, 9, 17)
few = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
some = settings(few, max_examples=30)


def here() -> tuple[str, ...]:
    """The instruction sets that this machine and this build have."""
    return available_isas()


@pytest.fixture(scope="module", params=instruction_sets())
def thread_pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], ThreadPool]]:
    """Thread pools of any size that keep to one instruction set."""
    if request.param not in here():
        pytest.skip(open_library().missing or f"this machine has no {request.param}")
    before = open_library().isa

    @cache
    def made(threads: int) -> ThreadPool:
        use_isa(request.param)
        found = ThreadPool(threads)
        assert found.isa == request.param
        return found

    yield made
    use_isa(before)


# -- matrices of every format --------------------------------------------------------------------------------------


def grouped(bits: int, group: int, scale: torch.dtype, has_min: bool, zero: int) -> Build:
    def build(n: int, k: int, generator: torch.Generator) -> QuantizedMatrix:
        def uniform(low: float, high: float) -> Tensor:
            return (torch.rand(n, -(-k // group), generator=generator) * (high - low) + low).to(scale)

        quants = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
        bias = torch.randn(n, generator=generator) if n % 2 else None
        floor = uniform(-0.5, 0.5) if has_min else None
        return interleave_groups(quants, uniform(-0.1, 0.1), floor, bits=bits, group=group, zero=zero, bias=bias)

    return build


def k_scales(n: int, k: int, generator: torch.Generator) -> QuantizedMatrix:
    """Bytes times float16s: what Q4_K keeps. Inputs come by 256."""
    k = -(-k // 256) * 256
    quants = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    plain = interleave_groups(quants, torch.zeros(n, k // 32), torch.zeros(n, k // 32), bits=4, group=32)
    blocks = len(plain.quants)
    factors = torch.randint(0, 64, (blocks, k // 32, 2, 16), generator=generator, dtype=torch.uint8)
    above = (torch.randn(blocks, k // 256, 2, 16, generator=generator) * 0.01).half()
    arrays = plain.quants, factors.numpy(), above.numpy()
    return QuantizedMatrix("groups", n, k, *arrays, bits=4, group=32, has_min=True, scale_kind="k")


def fp4(n: int, k: int, generator: torch.Generator) -> QuantizedMatrix:
    """Floats of 4 bits with a power of two for each 32: what MXFP4 keeps."""
    quants = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.randint(115, 130, (n, -(-k // 32)), generator=generator, dtype=torch.uint8)
    return interleave_groups(quants, scale, None, bits=4, group=32, zero=FP4[0])


def floats(dtype: torch.dtype) -> Build:
    def build(n: int, k: int, generator: torch.Generator) -> QuantizedMatrix:
        bias = torch.randn(n, generator=generator) if n % 2 else None
        return interleave_floats(torch.randn(n, k, generator=generator).to(dtype), bias)

    return build


def quantized(how: Callable[[Tensor, Tensor | None], QuantizedMatrix]) -> Build:
    def build(n: int, k: int, generator: torch.Generator) -> QuantizedMatrix:
        return how(torch.randn(n, k, generator=generator), torch.randn(n, generator=generator) if n % 2 else None)

    return build


HALF, FULL = torch.float16, torch.float32
FORMATS: dict[str, Build] = {
    "f32": floats(torch.float32),
    "f16": floats(torch.float16),
    "bf16": floats(torch.bfloat16),
    "int8": quantized(quantize_int8),
    "int4": quantized(quantize_int4),
    "k": k_scales,
    "fp4": fp4,
    **{f"4 bits, {g}": grouped(4, g, HALF, False, 8) for g in (32, 64, 128)},
    **{f"4 bits, {g}, minimum": grouped(4, g, HALF, True, 0) for g in (32, 64, 128)},
    **{f"8 bits, {g}": grouped(8, g, HALF, False, 128) for g in (32, 64, 128)},
    **{f"8 bits, {g}, zero at 16": grouped(8, g, HALF, False, 16) for g in (32, 64, 128)},
    **{f"8 bits, {g}, minimum": grouped(8, g, HALF, True, 0) for g in (32, 64, 128)},
    **{f"4 bits, {g}, minimum, wide": grouped(4, g, FULL, True, 0) for g in (16, 32, 64, 128)},
    **{f"8 bits, {g}, minimum, wide": grouped(8, g, FULL, True, 0) for g in (32, 64, 128)},
    "4 bits, 16, wide": grouped(4, 16, FULL, False, 4),
    "8 bits, 16, wide": grouped(8, 16, FULL, False, 32),
    "8 bits, 16, wide, zero at 128": grouped(8, 16, FULL, False, 128),
}
EDGES = (1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 128, 160)
sizes = st.one_of(st.sampled_from(EDGES), st.integers(1, 200))
counts = st.one_of(st.integers(1, 20), st.sampled_from((63, 64, 65, 127, 128, 129, 200, 300)))
seeds = st.integers(0, 1 << 30)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(rows: int, k: int, seed: int) -> Tensor:
    """Rows of very different sizes, a few of their values zero."""
    draw = generator(seed + 1)
    x = torch.randn(rows, k, generator=draw) * 10 ** torch.empty(rows, 1).uniform_(-3, 3, generator=draw)
    return torch.where(torch.rand(rows, k, generator=draw) < 0.05, 0.0, x)


def assert_matmul(y: Tensor, x: Tensor, w: QuantizedMatrix) -> None:
    """Equal to the reference up to the rounding of float32 sums."""
    exact = quantize_rows(x, w.row_quantization).double() @ dequantize(w).double().T
    bias = torch.zeros(w.n) if w.bias is None else torch.from_numpy(w.bias)
    largest = float(dequantize(w).abs().max()) * x.abs().sum(1, keepdim=True).double() + bias.abs()
    worst = ((y - (exact + bias)).abs() / (largest + 1e-30)).max()
    assert y.shape == (len(x), w.n)
    assert worst < 4e-6, f"{w.label}, {w.n} x {w.k}, {len(x)} rows: {worst:.2e} of the largest sum"


# -- matmul ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@given(n=sizes, k=sizes, rows=counts, seed=seeds, threads=st.sampled_from((1, 2, 3)))
@few
def test_a_matmul_is_that_of_the_reference(
    thread_pool: Callable[[int], ThreadPool], *, name: str, n: int, k: int, rows: int, seed: int, threads: int
) -> None:
    w = FORMATS[name](n, k, generator(seed))
    x = inputs(rows, w.k, seed)
    y = linear(thread_pool(threads), x, w)
    assert_matmul(y, x, w)
    assert torch.equal(y, linear_reference(x, w))  # the same order of sums, so the same bits


@pytest.mark.parametrize("name", FORMATS)
@given(n=sizes, k=sizes, rows=st.integers(2, 40), seed=seeds)
@few
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    thread_pool: Callable[[int], ThreadPool], *, name: str, n: int, k: int, rows: int, seed: int
) -> None:
    w, rng = FORMATS[name](n, k, generator(seed)), np.random.default_rng(seed)
    x = inputs(rows, w.k, seed)
    whole = linear(thread_pool(1), x, w)
    for threads in (2, 3):
        assert torch.equal(linear(thread_pool(threads), x, w), whole)
    for i in {0, rows - 1, int(rng.integers(rows))}:
        assert torch.equal(linear(thread_pool(1 + i % 2), x[i : i + 1], w)[0], whole[i])
    order = torch.from_numpy(rng.permutation(rows))[: int(rng.integers(1, rows + 1))]
    assert torch.equal(linear(thread_pool(2), x[order], w), whole[order])


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", ["f32", "int8", "int4", "4 bits, 32", "8 bits, 16, wide", "k"])
def test_any_number_of_threads_gives_the_same_bits(
    thread_pool: Callable[[int], ThreadPool], name: str, threads: int
) -> None:
    for n, rows in ((5, 1), (40, 3), (200, 130)):
        w = FORMATS[name](n, 96, generator(n))
        x = inputs(rows, w.k, n)
        assert torch.equal(linear(thread_pool(threads), x, w), linear(thread_pool(1), x, w))
        assert torch.equal(dequantize_rows(thread_pool(threads), w, torch.arange(n)), dequantize(w))


def test_teams_of_their_own_compute_side_by_side(thread_pool: Callable[[int], ThreadPool]) -> None:
    """Working memory belongs to a thread_pool: a wide matmul between two narrow ones leaves nothing behind."""
    one, other = thread_pool(2), thread_pool(3)
    narrow, wide = FORMATS["4 bits, 32"](20, 64, generator(1)), FORMATS["8 bits, 32"](50, 190, generator(2))
    x, wider = inputs(2, 64, 1), inputs(100, 190, 2)
    first = linear(one, x, narrow)
    assert_matmul(linear(one, wider, wide), wider, wide)
    assert torch.equal(linear(other, x, narrow), first)
    assert torch.equal(linear(one, x, narrow), first)


def test_a_matmul_of_no_rows_is_empty(thread_pool: Callable[[int], ThreadPool]) -> None:
    assert linear(thread_pool(1), torch.empty(0, 40), FORMATS["f32"](7, 40, generator(0))).shape == (0, 7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (grouped(8, 16, FULL, True, 0), "int8 in groups of 16 with f32 scales and a minimum"),
        (grouped(8, 16, HALF, False, 0), "int8 in groups of 16 with f16 scales and zero at 0"),
        (grouped(4, 16, HALF, False, 8), "int4 in groups of 16 with f16 scales and zero at 8"),
        (grouped(4, 32, FULL, False, 8), "int4 in groups of 32 with f32 scales and zero at 8"),
    ],
)
def test_a_format_without_a_native_matmul_is_refused(build: Build, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        matrix_struct(build(16, 64, generator(0)))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 41), InvalidInput, r"rows have shape \[2, 41\]; \[rows, 40\]"),
        (torch.zeros(40), InvalidInput, r"rows have shape \[40\]"),
        (torch.zeros(2, 40, dtype=torch.float64), WrongType, "float64"),
        (torch.zeros(2, 40, dtype=torch.float16), WrongType, "float16"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    thread_pool: Callable[[int], ThreadPool], x: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        linear(thread_pool(1), x, FORMATS["f32"](7, 40, generator(0)))


def test_rows_that_lie_apart_are_read_in_order(thread_pool: Callable[[int], ThreadPool]) -> None:
    w, x = FORMATS["8 bits, 32"](7, 40, generator(0)), torch.randn(40, 6, generator=generator(1)).T
    assert torch.equal(linear(thread_pool(2), x, w), linear(thread_pool(2), x.contiguous(), w))


@pytest.mark.parametrize("rows", [[7], [-1], [0, 3, 1 << 33]])
def test_rows_that_a_matrix_does_not_have_are_refused(
    thread_pool: Callable[[int], ThreadPool], rows: list[int]
) -> None:
    with pytest.raises(OutOfRange, match="the matrix has rows 0 to 6"):
        dequantize_rows(thread_pool(1), FORMATS["f32"](7, 40, generator(0)), torch.tensor(rows))


def test_row_indices_must_be_integers(thread_pool: Callable[[int], ThreadPool]) -> None:
    with pytest.raises(WrongType, match="float32"):
        dequantize_rows(thread_pool(1), FORMATS["f32"](7, 40, generator(0)), torch.zeros(2))


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_whose_tensors_do_not_fit_its_size_is_refused(name: str) -> None:
    w = FORMATS[name](33, 80, generator(0))
    assert w.problem() is None
    assert replace(w, bias=None).problem() is None
    changes: list[dict[str, Any]] = [{"n": 49}, {"k": 512}, {"quants": w.quants[1:]}]
    changes += [{"quants": w.quants.astype(np.float64)}, {"bias": torch.zeros(33)}]
    changes += [{"bias": np.zeros(40, np.float32)}, {"bias": np.zeros(66, np.float32)[::2]}]
    changes += [{"scales": None}, {"scales": w.scales[:-1]}] if w.scales is not None else []
    changes += [{"group": 48}, {"bits": 5}] if w.kind == "groups" else []
    changes += [{"super": None}, {"k": 240}] if w.super is not None else []
    for change in changes:
        with pytest.raises(InvalidInput, match="cannot be used"):
            matrix_struct(replace(w, **change))


# -- how rows are quantized ----------------------------------------------------------------------------------------

ODD = (0.0, -0.0, 1e-36, 0.9e-36, 1.1e-36, 1e-38, 1e-45, -3e-40, 3.4e38, -3.4e38, float("inf"), -float("inf"))
values = st.one_of(st.floats(width=32), st.floats(-3, 3, width=32), st.sampled_from((*ODD, float("nan"))))


def one_for_one(name: str, k: int) -> QuantizedMatrix:
    """The unit matrix in a format: its matmul gives the row as the format sees it."""
    unit = torch.eye(k)
    if name == "int8":
        return interleave_int8(unit.to(torch.int8), torch.ones(k))
    scale = torch.ones(k, -(-k // 32)).half()
    return interleave_groups(128 + unit.to(torch.uint8), scale, None, bits=8, group=32, zero=128)


@pytest.mark.parametrize("name", ["groups", "int8"])
@given(row=st.lists(values, min_size=1, max_size=70), rows=st.integers(1, 3))
@settings(some, max_examples=examples(100))
def test_rows_are_quantized_to_the_bits_of_the_reference(
    thread_pool: Callable[[int], ThreadPool], *, name: str, row: list[float], rows: int
) -> None:
    """NaN, infinity, denormals and zeros too: a group with something that is not finite is NaN as a whole."""
    x = torch.tensor([row] * rows, dtype=torch.float32) * torch.tensor([1.0, 0.5, -1.0])[:rows, None]
    w = one_for_one(name, len(row))
    expected = quantize_rows(x, "groups")
    found = linear(thread_pool(1), x, w)
    # The other inputs of a row are multiplied by zero: where one of them is NaN, so is the output.
    spoilt = expected.isnan().any(1)
    np.testing.assert_array_equal(found[~spoilt].numpy(), expected[~spoilt].numpy())
    assert found[spoilt].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_is_seen_there(
    thread_pool: Callable[[int], ThreadPool], *, name: str, what: float
) -> None:
    w = FORMATS[name](21, 70, generator(3))
    x = inputs(11, w.k, 3)
    plain = linear(thread_pool(2), x, w)
    x[4, 33] = what
    found, expected = linear(thread_pool(2), x, w), linear_reference(x, w)
    kept = [i for i in range(11) if i != 4]
    assert torch.equal(found[kept], plain[kept])
    assert torch.equal(found[4].isnan(), expected[4].isnan())
    assert torch.equal(found[4].isinf(), expected[4].isinf())
    assert not found[4].isfinite().any()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_denormal_rows_are_not_flushed(thread_pool: Callable[[int], ThreadPool], name: str) -> None:
    w = FORMATS[name](33, 50, generator(4))
    x = torch.randn(5, 50, generator=generator(5)) * 1e-40
    found, exact = linear(thread_pool(1), x, interleave_floats(dequantize(w))), x.double() @ dequantize(w).double().T
    assert float(found.abs().max()) > 0
    assert float((found - exact).abs().max()) < 50 * 2e-45


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_of_every_kind_of_float_come_back_as_they_are(
    thread_pool: Callable[[int], ThreadPool], dtype: torch.dtype
) -> None:
    """All 65,536 of two bytes; of four bytes, the same patterns in the upper half."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).view(256, 256)
    wide = (patterns << 16).view(torch.float32) if dtype == torch.float32 else patterns.to(torch.int16).view(dtype)
    w = interleave_floats(wide)
    found = dequantize_rows(thread_pool(2), w, torch.arange(256)).numpy()
    np.testing.assert_array_equal(found, wide.float().numpy())


@pytest.mark.parametrize("name", FORMATS)
@given(n=sizes, k=sizes, seed=seeds, count=st.integers(0, 30))
@few
def test_rows_of_a_matrix_come_back_exactly(
    thread_pool: Callable[[int], ThreadPool], *, name: str, n: int, k: int, seed: int, count: int
) -> None:
    w = FORMATS[name](n, k, generator(seed))
    rows = torch.randint(0, n, (count,), generator=generator(seed))
    np.testing.assert_array_equal(dequantize_rows(thread_pool(2), w, rows).numpy(), dequantize(w)[rows].numpy())


# -- the head and the choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "8 bits, 32"])
@given(n=sizes, k=sizes, rows=st.integers(1, 40), seed=seeds)
@few
def test_logits_are_the_matmul_of_normed_rows(
    thread_pool: Callable[[int], ThreadPool], *, name: str, n: int, k: int, rows: int, seed: int
) -> None:
    w = FORMATS[name](n, k, generator(seed))
    x, weight = inputs(rows, w.k, seed), torch.randn(w.k, generator=generator(seed))
    norm = library.NormStruct(weight.data_ptr(), None)
    model = library.ModelStruct(output=matrix_struct(w), final_norm=norm, eps=1e-5, logit_scale=1.0)
    wide, threads = -(-n // 16) * 16 + 16, thread_pool(2)
    y = torch.empty(rows, wide)
    assert threads.calls.hw_logits(threads.handle, model, x.data_ptr(), rows, 1, 1, y.data_ptr(), wide) == 0
    normed = rms_norm(x, weight, 1e-5)
    if w.row_quantization is None:
        assert_matmul(y[:, :n], normed, w)
        return
    # A value on the border of two quants may take either: one step of each input at most.
    step = normed.abs().amax(1, keepdim=True) / 127 * dequantize(w).abs().sum(1) * 0.05
    limit = step + 1e-5 * (normed.abs().sum(1, keepdim=True) * dequantize(w).abs().max() + 1)
    assert ((y[:, :n] - linear_reference(normed, w)).abs() <= limit).all()


def choose(thread_pool: ThreadPool, logits: Tensor, vocab: int) -> tuple[list[int], list[int]]:
    rows, stride = logits.shape
    best, bad = np.full(rows, -7, np.int64), np.full(rows, 9, np.uint8)
    call = thread_pool.calls.hw_argmax
    check(call(thread_pool.handle, logits.data_ptr(), rows, vocab, stride, best.ctypes.data, bad.ctypes.data))
    return best.tolist(), bad.tolist()


@given(
    rows=st.integers(1, 9),
    vocab=st.one_of(st.integers(1, 70), st.just(1000)),
    beyond=st.sampled_from((0, 5, 16)),
    ties=st.booleans(),
    seed=seeds,
)
@some
def test_the_choice_is_the_first_of_the_largest(
    thread_pool: Callable[[int], ThreadPool], *, rows: int, vocab: int, beyond: int, ties: bool, seed: int
) -> None:
    draw = generator(seed)
    logits = torch.randn(rows, vocab + beyond, generator=draw)
    logits = logits.round() if ties else logits
    logits[:, vocab:] = torch.nan  # what lies beyond the vocabulary is never read
    best, bad = choose(thread_pool(1 + seed % 3), logits, vocab)
    assert best == [int(np.argmax(row[:vocab])) for row in logits.numpy()]
    assert bad == [0] * rows


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 40])
def test_rows_with_a_nan_are_told_and_infinities_are_ordinary(
    thread_pool: Callable[[int], ThreadPool], vocab: int
) -> None:
    inf = float("inf")
    for at in range(vocab):
        rows = torch.randn(5, vocab, generator=generator(at))
        rows[0, at] = torch.nan
        rows[1, at] = inf
        rows[2, :] = -inf
        rows[3, at] = -inf
        rows[4, :] = inf
        best, bad = choose(thread_pool(1 + at % 3), rows, vocab)
        assert bad == [1, 0, 0, 0, 0]
        assert best[1:] == [at, 0, int(np.argmax(rows[3].numpy())), 0]


def test_a_kind_of_block_that_is_not_known_is_told() -> None:
    if not here():
        pytest.skip(open_library().missing)
    threads, nothing = ThreadPool(2), np.zeros(64, np.uint8)
    at = nothing.ctypes.data
    with pytest.raises(RuntimeError, match="this kind of block"):
        check(threads.calls.hw_repack(threads.handle, 4, at, 0, 32, None, at, at, None))


# -- the library itself --------------------------------------------------------------------------------------------


def test_the_native_library_is_there_where_a_compiler_is() -> None:
    """So that a build that fails does not go unnoticed. HEADWAY_NATIVE_BUILD=off asks for none."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or os.environ.get("HEADWAY_NATIVE_BUILD") == "off":
        pytest.skip("no C++ compiler, or none wanted")
    found = open_library()
    assert found.calls is not None, found.missing
    assert found.calls.hw_version() == library.VERSION
    assert found.isa in here()


def test_an_instruction_set_is_kept_to_until_another_is_asked_for() -> None:
    if not here():
        pytest.skip(open_library().missing)
    before = open_library().isa
    try:
        for name in here():
            use_isa(name)
            assert open_library().isa == name
        first = ThreadPool(1)
        use_isa("plain")
        assert (first.isa, ThreadPool(1).isa) == (here()[-1], "plain")  # a thread_pool keeps the set it was made under
    finally:
        use_isa(before)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'sse9'.*plain, avx2, avx512, vnni, bf16"):
        use_isa("sse9")
    for name in set(ISAS) - set(here()):
        with pytest.raises(Unsupported, match=f"'{name}' is not available"):
            use_isa(name)


def test_the_structs_mirror_the_header() -> None:
    """ctypes takes any attribute: a field of another name would be set and never read."""
    header = re.sub(r"//.*", "", Path(library.__file__).with_name("api.h").read_text())
    structs = {name: body for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", header, re.DOTALL)}
    for name, mirror in (
        ("hw_matrix", library.MatrixStruct),
        ("hw_norm", library.NormStruct),
        ("hw_layer", library.LayerStruct),
        ("hw_model", library.ModelStruct),
        ("hw_step", library.StepStruct),
        ("hw_sampling", library.SamplingStruct),
    ):
        fields = [field for line in structs[name].split(";") for field in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
        assert [field for field, _ in mirror._fields_] == fields
