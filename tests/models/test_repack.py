"""Matrices of files as QuantizedMatrix: GGUF blocks repacked, whole models, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headway as hw
from headway.kernels.host.quantized import QuantizedMatrix
from headway.kernels.native.library import ThreadPool, available_isas, open_library, use_isa
from headway.kernels.reference.quantized import dequantize, quantize_rows
from headway.kernels.reference.quantized import dequantize_rows as reference_rows
from headway.models.files.dequant import FLOATS
from headway.models.files.gguf import KINDS, GgufFile
from headway.models.files.weights import GgufWeights, open_weights
from headway.models.weights.load import load_quantized_model
from headway.models.weights.load_tensors import load_model
from support.arrays import dequantize_rows, linear, load_matrix
from support.checks import all_logits, random_tokens
from support.gguf_files import ARCHS, HALVES, random_bytes, write, write_gguf
from support.hf import random_hf, save_hf, variant
from support.sweeps import instruction_sets

CPU = torch.device("cpu")
QUANTIZED = [kind for kind in KINDS if kind not in FLOATS]
MIXED = ("Q4_K", "Q6_K", "Q5_0", "Q2_K", "Q8_0", "Q3_K", "Q5_1", "Q4_0", "Q5_K", "Q4_1")
pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")


@pytest.fixture(scope="module")
def thread_pool() -> ThreadPool:
    return ThreadPool(2)


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in available_isas():
        pytest.skip(f"this machine has no {request.param}")
    before = open_library().isa
    use_isa(request.param)
    yield request.param
    use_isa(before)


def one_matrix(folder: Path, kind: str, n: int, k: int, seed: int = 0) -> GgufWeights:
    path = write(folder / f"{kind}-{n}-{k}-{seed}.gguf", {"w": (kind, random_bytes(kind, n, k, seed))})
    return GgufWeights(GgufFile.open(path))


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    np.testing.assert_array_equal(one.numpy().view(np.uint32), other.contiguous().numpy().view(np.uint32))


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.sampled_from((1, 15, 16, 17, 37, 64)), spans=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=12)
def test_every_kind_keeps_the_bits_it_decodes_to(
    *, tmp_path_factory: pytest.TempPathFactory, thread_pool: ThreadPool, kind: str, n: int, spans: int, seed: int
) -> None:
    k = KINDS[kind].block * spans if kind in QUANTIZED else 19 * spans
    with one_matrix(tmp_path_factory.mktemp("repack"), kind, n, k, seed) as weights:
        plain = weights.load("w", dtype=torch.float32, device=CPU)
        rng = np.random.default_rng(seed)
        for rows in (None, torch.from_numpy(rng.permutation(n))):
            expected = plain if rows is None else plain[rows]
            w = load_matrix(weights, "w", thread_pool=thread_pool, keep=True, rows=rows)
            assert_same_bits(dequantize(w), expected)
            by_torch = load_matrix(weights, "w", thread_pool=None, keep=True, rows=rows)
            assert_same_bits(dequantize(by_torch), expected)
            assert (by_torch.kind, by_torch.label, by_torch.has_min) == (w.kind, w.label, w.has_min)
            assert_same_bits(reference_rows(w, torch.arange(n)), expected)
            assert_same_bits(dequantize_rows(thread_pool, w, torch.arange(n)), expected)
            as_floats = load_matrix(weights, "w", thread_pool=thread_pool, keep=False, rows=rows)
            assert (w.n, w.k, as_floats.kind) == (n, k, "f32")
            assert_same_bits(dequantize(as_floats), expected)
    bits = {**dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "int4"), "MXFP4": "fp4"}.get(
        kind, "int8"
    )
    assert w.label == (f"{bits} in groups of {w.group}" if kind in QUANTIZED else kind.lower())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_comes_along_in_float32(tmp_path: Path, thread_pool: ThreadPool, kind: str) -> None:
    bias = torch.arange(20, dtype=torch.float16)
    with one_matrix(tmp_path, kind, 20, 256) as weights:
        for keep in (True, False):
            w = load_matrix(weights, "w", thread_pool=thread_pool, keep=keep, bias=bias)
            assert w.bias is not None
            assert np.array_equal(w.bias, bias.float().numpy())


@pytest.mark.parametrize("kind", QUANTIZED)
def test_the_matmul_of_every_kind_is_that_of_its_numbers(tmp_path: Path, isa: str, kind: str) -> None:
    """Blocks have tame scales here, so that sums can be compared; rows alone and together have the same bits."""
    pools = [ThreadPool(1), ThreadPool(3)]
    assert pools[0].isa == isa
    for n, k in ((33, 256), (16, 768)):
        raw = random_bytes(kind, n, k).reshape(-1, KINDS[kind].nbytes)
        for at in HALVES[kind]:
            raw[:, at : at + 2] = np.random.default_rng(at).normal(0, 0.01, len(raw)).astype("<f2")[:, None].view("u1")
        path = write(tmp_path / f"{n}.gguf", {"w": (kind, raw.reshape(n, -1))})
        with GgufWeights(GgufFile.open(path)) as weights:
            w = load_matrix(weights, "w", thread_pool=pools[0], keep=True, bias=torch.randn(n))
        for rows in (1, 2, 13, 70, 260):
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
            check_matmul(linear(pools[0], x, w), x, w)
            whole = linear(pools[1], x, w)
            assert torch.equal(linear(pools[0], x, w), whole)
            assert torch.equal(linear(pools[1], x[-1:], w)[0], whole[-1])


def check_matmul(y: Tensor, x: Tensor, w: QuantizedMatrix) -> None:
    assert w.bias is not None
    exact = quantize_rows(x, "groups").double() @ dequantize(w).double().T + w.bias
    limit = 4e-6 * float(dequantize(w).abs().max()) * x.abs().sum(1, keepdim=True) + 1e-6
    assert ((y - exact).abs() <= limit).all()


# -- floats, quantized or not --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_quantized_when_asked_and_only_then(tmp_path: Path, thread_pool: ThreadPool, kind: str) -> None:
    with one_matrix(tmp_path, kind, 30, 70) as weights:
        plain = weights.load("w", dtype=torch.float32, device=CPU)
        for how, label in (("int8", "int8"), ("int4", "int4 in groups of 32"), (None, kind.lower())):
            w = load_matrix(weights, "w", thread_pool=thread_pool, keep=True, quantize=how)
            assert w.label == label
            assert torch.equal(dequantize(w), plain) == (how is None)
            limit = {"int8": plain.abs().max() / 254, "int4": (plain.max() - plain.min()) / 29, None: 0}[how]
            assert (dequantize(w) - plain).abs().max() <= limit * 1.0001


@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_is_quantized_already_is_never_quantized_again(tmp_path: Path, thread_pool: ThreadPool, kind: str) -> None:
    with one_matrix(tmp_path, kind, 8, 256) as weights:
        kept = load_matrix(weights, "w", thread_pool=thread_pool, keep=True, quantize="int8")
        assert torch.equal(dequantize(kept), weights.load("w", dtype=torch.float32, device=CPU))


# -- whole models --------------------------------------------------------------------------------------------------


def mixed_kinds(name: str) -> str:
    """Another kind for every matrix of a layer; q, k and v in three of them."""
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")
    return MIXED[next(i for i, part in enumerate(parts) if part in name)]


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("kind", ["mixed", *QUANTIZED])
def test_a_quantized_model_has_the_weights_of_the_plain_one(
    tmp_path: Path, thread_pool: ThreadPool, family: str, kind: str
) -> None:
    """Rows of q and k in llama files are stored for another rotation, and are put in order; biases with them."""
    _, model = random_hf(family, 1, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, kind=mixed_kinds if kind == "mixed" else kind)
    quantized = load_quantized_model(path, thread_pool=thread_pool, keep=True)
    plain = load_model(path, dtype=torch.float32, device=CPU)
    assert torch.equal(dequantize(quantized.embedding), plain.embedding)
    assert torch.equal(dequantize(quantized.output), plain.output)
    for one, other in zip(quantized.layers, plain.layers, strict=True):
        for names, whole in (("qkv", other.qkv), (("o",), other.out), (("gate", "up"), other.gate_up)):
            parts = [getattr(one, name) for name in names]
            assert torch.equal(torch.cat([dequantize(w) for w in parts]), whole.weight)
            assert [w.bias is None for w in parts] == [whole.bias is None] * len(parts)
            if whole.bias is not None:
                assert torch.equal(torch.cat([torch.from_numpy(w.bias) for w in parts]), whole.bias)
        assert one.down is not None
        assert torch.equal(dequantize(one.down), other.down.weight)
    assert set(quantized.formats()) == {w.label for w in (*quantized.layers[0].matrices(), quantized.output)}
    assert len(quantized.formats()) == (4 if kind == "mixed" else 1)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_folder_is_near_the_plain_one(tmp_path: Path, quantize: str) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 192, "attention_bias": True, "mlp_bias": True}
    folder = save_hf(tmp_path, random_hf("llama", 2, **wide)[1])
    tokens = random_tokens(97, 40)
    with hw.Engine(folder, pages=8, threads=2) as plain, hw.Engine(folder, pages=8, quantize=quantize) as coarse:
        assert coarse.info.format.startswith(quantize)
        assert coarse.info.weight_bytes < plain.info.weight_bytes / 3
        assert coarse.fingerprint != plain.fingerprint
        near, exact = all_logits(coarse, tokens), all_logits(plain, tokens)
    error = np.abs(near - exact).mean() / exact.std()
    assert 1e-4 < error < {"int8": 0.08, "int4": 0.5}[quantize]


def test_other_ways_to_quantize_are_refused(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, variant("llama-biases")[1])
    with pytest.raises(hw.InvalidInput, match="quantize is 'int5'; it must be int8, int4 or fp8"):
        hw.Engine(folder, quantize="int5")
    with pytest.raises(hw.Unsupported, match="quantize='fp8' is for CUDA devices, not for cpu; use int8"):
        hw.Engine(folder, quantize="fp8", device="cpu")


def test_a_quantized_file_is_not_quantized_silently(smollm2_path: Path) -> None:
    with pytest.raises(hw.Unsupported, match=r"quantize='int8' is for float matrices, and .* has only Q4_"):
        hw.Engine(smollm2_path, quantize="int8", device="cpu")
    with hw.Engine(smollm2_path, quantize="int8", dtype="float32", device="cpu", pages=8) as again:
        assert again.info.format.startswith("int8")


def test_the_default_model_is_kept_in_the_numbers_of_its_file(smollm2_path: Path, thread_pool: ThreadPool) -> None:
    with open_weights(smollm2_path) as weights:
        names = [n for n in weights.names() if weights.stored(n) in QUANTIZED]
        assert names
        for name in (names[0], names[-1], "blk.17.ffn_down.weight"):
            w = load_matrix(weights, name, thread_pool=thread_pool, keep=True)
            assert torch.equal(dequantize(w), weights.load(name, dtype=torch.float32, device=CPU))
