"""Weights in chunks: the bits that the plain loader gives, whatever the buffers' size, on a CPU in a device's place."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headway as hw
from headway.models.decoder import Decoder
from headway.models.files.gguf import KINDS, BlockFormat
from headway.models.files.mapped import Span, map_file, unmap
from headway.models.files.staging import Staging, chunks
from headway.models.layers import DecoderLayer, Linear
from headway.models.weights.load_tensors import load_model
from support.gguf_files import ARCHS, write_gguf
from support.hf import VARIANTS, random_hf, save_hf
from support.plain_files import write_llama, write_safetensors

CPU = torch.device("cpu")
SIZES = (256, 1000, 1 << 20)


def tensors_of(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    yield "embedding", decoder.embedding
    yield "final_norm", decoder.final_norm
    yield "output", decoder.output
    yield "inv_freq", decoder.inv_freq
    for i, layer in enumerate(decoder.layers):
        for name in ("input_norm", "mlp_norm", "q_norm", "k_norm"):
            if (norm := getattr(layer, name)) is not None:
                yield f"{i}.{name}", norm
        for name in ("qkv", "out", "gate_up", "down"):
            linear: Linear = getattr(layer, name)
            yield f"{i}.{name}", linear.weight
            if linear.bias is not None:
                yield f"{i}.{name}.bias", linear.bias


def assert_same_bits(one: Decoder, other: Decoder) -> None:
    ours, theirs = dict(tensors_of(one)), dict(tensors_of(other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.contiguous().view(kind), theirs[name].contiguous().view(kind)), name


def check(path: Path, dtype: torch.dtype, sizes: tuple[int, ...] = SIZES) -> None:
    plain = load_model(path, dtype=dtype, device=CPU)
    for size in sizes:
        assert_same_bits(load_model(path, dtype=dtype, device=CPU, staging=Staging(CPU, size)), plain)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_loads_the_same(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, tied: bool) -> None:
    check(write_llama(tmp_path, dtype=stored, tied=tied), dtype)


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_every_family_loads_the_same(tmp_path: Path, family: str) -> None:
    _, model = random_hf(family, 1, **VARIANTS[family][0])
    check(save_hf(tmp_path, model, shards=True), torch.bfloat16, (500,))


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
def test_a_gguf_file_loads_the_same(tmp_path: Path, family: str, kind: str) -> None:
    wide = 256 if kind.endswith("K") else 64
    _, model = random_hf(family, 2, hidden_size=wide, intermediate_size=wide, head_dim=wide // 4)
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind)
    check(path, torch.float32)
    check(path, torch.bfloat16, (3000,))


def test_nothing_of_the_file_is_looked_through(tmp_path: Path) -> None:
    """A staged weight is memory of its own, not a view of the file."""
    folder = write_llama(tmp_path)
    loaded = load_model(folder, dtype=torch.bfloat16, device=CPU, staging=Staging(CPU, 4096))
    before = loaded.embedding.clone()
    write_llama(tmp_path, hidden=32, heads=2)
    assert torch.equal(loaded.embedding, before)


def test_a_layer_is_changed_as_soon_as_it_is_there(tmp_path: Path) -> None:
    order: list[str] = []

    def halved(layer: DecoderLayer) -> DecoderLayer:
        order.append("changed")
        layer.input_norm.mul_(0.5)
        return layer

    folder = write_llama(tmp_path, layers=3)
    plain = load_model(folder, dtype=torch.bfloat16, device=CPU)
    changed = load_model(
        folder,
        dtype=torch.bfloat16,
        device=CPU,
        staging=Staging(CPU, 4096),
        change=halved,
        progress=lambda done, _: order.append(str(done)),
    )
    assert order == ["changed", "1", "changed", "2", "changed", "3"]
    for before, after in zip(plain.layers, changed.layers, strict=True):
        assert torch.equal(before.input_norm * 0.5, after.input_norm)


@pytest.mark.parametrize("size", SIZES)
def test_a_number_that_does_not_fit_is_refused_with_its_value(tmp_path: Path, size: int) -> None:
    folder = write_llama(tmp_path, dtype=torch.float32)
    plain = load_model(folder, dtype=torch.float32, device=CPU)
    down = plain.layers[1].down.weight.clone()
    down[-1, -1] = 1e6
    names = {f"model.layers.1.mlp.{n}_proj.weight": w for n, w in (("down", down),)}
    rewrite(folder, plain, names)
    for staging in (None, Staging(CPU, size)):
        with pytest.raises(hw.Unsupported, match=r"layers\.1\.mlp\.down_proj.*F32.* 1e\+06 does not fit float16"):
            load_model(folder, dtype=torch.float16, device=CPU, staging=staging)
    load_model(folder, dtype=torch.bfloat16, device=CPU, staging=Staging(CPU, size))


def test_infinity_in_the_file_stays_infinity(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, dtype=torch.float32)
    plain = load_model(folder, dtype=torch.float32, device=CPU)
    embedding = plain.embedding.clone()
    embedding[0, 0], embedding[0, 1] = torch.inf, torch.nan
    rewrite(folder, plain, {"model.embed_tokens.weight": embedding})
    loaded = load_model(folder, dtype=torch.float16, device=CPU, staging=Staging(CPU, 300))
    assert loaded.embedding[0, 0] == torch.inf
    assert loaded.embedding[0, 1].isnan()


def rewrite(folder: Path, plain: Decoder, changed: dict[str, Tensor]) -> None:
    from headway.models.files.weights import open_weights

    with open_weights(folder) as weights:
        whole = {n: weights.load(n, dtype=torch.float32, device=CPU).clone() for n in weights.names()}
    assert changed.keys() <= whole.keys()
    del plain
    write_safetensors(folder / "model.safetensors", whole | changed)


def test_a_weight_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    text = (folder / "config.json").read_text()
    for old, new, message in (
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', r"layers\.2.*is missing"),
        ('"intermediate_size": 96', '"intermediate_size": 95', r"shape \[96, 64\].*needs \[95, 64\]"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1', r"weights do not belong.*layers\.1"),
    ):
        (folder / "config.json").write_text(text.replace(old, new))
        with pytest.raises(hw.BadModelFile, match=message):
            load_model(folder, dtype=torch.bfloat16, device=CPU, staging=Staging(CPU))


# -- the plan ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.integers(1, 9), st.integers(1, 5000))
def test_chunks_cover_everything_once_and_fit(kind: str, units: int, blocks: int, room: int) -> None:
    packing = KINDS[kind]
    unit = blocks * packing.block
    plan = list(chunks(units * unit, packing, unit, room))
    size = blocks * packing.nbytes
    assert (plan[0].start, plan[0].first) == (0, 0)
    assert (plan[-1].stop, plan[-1].last) == (units * size, units * unit)
    for one, following in pairwise(plan):
        assert (one.stop, one.last) == (following.start, following.first)
    for chunk in plan:
        assert chunk.stop - chunk.start <= max(room, size)
        assert (chunk.stop - chunk.start) * packing.block == (chunk.last - chunk.first) * packing.nbytes
        assert chunk.first % unit == chunk.last % unit == 0


def test_there_is_no_chunk_of_nothing() -> None:
    assert list(chunks(0, BlockFormat(1, 2), 1, 64)) == []


# -- the map -------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of mapped files in this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    pytest.skip("this system does not tell files from other memory")


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system cannot let go of parts of a map")
def test_what_was_read_of_a_file_leaves_this_process_memory(tmp_path: Path) -> None:
    path, size, step = tmp_path / "big", 48 << 20, 1 << 20
    path.write_bytes(bytes(range(256)) * (size // 256))
    data = map_file(path)
    span = Span(data, 100, size - 100)
    before = resident()
    assert int(span.bytes().astype("int64").sum()) > 0
    assert resident() - before > size // 2
    span.forget(0, span.nbytes)
    assert resident() - before < 4 << 20
    for start in range(0, span.nbytes, step):
        stop = min(start + step, span.nbytes)
        assert span.bytes(start, stop)[0] == (start + 100) % 256
        span.forget(start, stop)
        assert resident() - before < 8 << 20
    unmap(data)
