"""GGUF files as the gguf package writes them: metadata, places, and every kind's values against that package."""

from __future__ import annotations

import struct
import time
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.base.errors import BadModelFile, Closed, InvalidInput, Unsupported
from headway.models.files import dequant
from headway.models.files.dequant import dequantize
from headway.models.files.gguf import KINDS, GgufFile, read_header
from headway.models.files.weights import GgufWeights
from support.gguf_files import random_bytes, write

CPU = torch.device("cpu")


def reference(kind: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_decodes_to_the_bits_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    rows, cols = 1100, 256  # more values than one chunk holds
    assert rows * cols > dequant.CHUNK_VALUES
    data = random_bytes(kind, rows, cols)
    path = write(tmp_path / "m.gguf", {"before": ("F32", random_bytes("F32", 1, 3)), "w": (kind, data)})
    with GgufFile.open(path) as file:
        weights = GgufWeights(file)
        assert (weights.shape("w"), weights.stored("w"), weights.nbytes("w")) == ((rows, cols), kind, data.size)
        loaded = weights.load("w", dtype=torch.float32, device=CPU)
        np.testing.assert_array_equal(loaded.numpy().view(np.uint32), reference(kind, data).view(np.uint32))
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(weights.load("w", dtype=dtype, device=CPU), loaded.to(dtype))


def test_no_kind_that_the_gguf_package_dequantizes_is_missing() -> None:
    theirs = {kind.name for kind in gguf.quants._type_traits}
    assert len(theirs) > 20
    assert theirs <= KINDS.keys()


def test_decoding_a_large_tensor_makes_only_small_temporaries() -> None:
    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view:
                self.nbytes = max(self.nbytes, result.nbytes)
            return result

    for kind in ("Q4_K", "Q8_0", "F16"):
        data = torch.from_numpy(random_bytes(kind, 4096, 1024).reshape(-1))  # 16 MiB as float32
        out = torch.empty(4096, 1024)
        with Largest() as largest:
            dequantize(kind, data, (4096, 1024), torch.float32, out)
        assert largest.nbytes <= 2 << 20


def test_out_is_filled_and_returned() -> None:
    data = torch.from_numpy(random_bytes("Q5_1", 4, 64).reshape(-1))
    out = torch.full((4, 64), torch.nan)
    assert dequantize("Q5_1", data, (4, 64), torch.float32, out) is out
    assert torch.equal(out, dequantize("Q5_1", data, (4, 64), torch.float32))


def test_bytes_at_an_odd_address_decode_the_same() -> None:
    for kind in ("F32", "F16", "Q6_K"):
        data = torch.from_numpy(random_bytes(kind, 2, 256).reshape(-1))
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
        assert torch.equal(
            dequantize(kind, shifted, (2, 256), torch.float32), dequantize(kind, data, (2, 256), torch.float32)
        )


def test_a_value_that_the_dtype_cannot_hold_is_refused_with_its_name(tmp_path: Path) -> None:
    values = np.array([[1.0, 7e4]], dtype=np.float32)
    path = write(tmp_path / "m.gguf", {"big": ("F32", values.view(np.uint8))})
    with GgufFile.open(path) as file:
        with pytest.raises(Unsupported, match=r"'big'.*70000 does not fit float16 \(largest 65504\)"):
            GgufWeights(file).load("big", dtype=torch.float16, device=CPU)
        assert GgufWeights(file).load("big", dtype=torch.bfloat16, device=CPU).isfinite().all()


def test_a_stored_infinity_is_passed_on(tmp_path: Path) -> None:
    values = np.array([[1.0, np.inf, np.nan]], dtype=np.float32)
    with GgufFile.open(write(tmp_path / "m.gguf", {"w": ("F32", values.view(np.uint8))})) as file:
        loaded = GgufWeights(file).load("w", dtype=torch.float16, device=CPU)
    assert torch.equal(loaded.isinf(), torch.tensor([[False, True, False]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Q8_K", torch.zeros(292, dtype=torch.uint8), (1, 256), torch.float32), "Q8_K"),
        (("Q8_0", torch.zeros(33, dtype=torch.uint8), (1, 32), torch.float32), "33 bytes.*takes 34"),
        (("Q8_0", torch.zeros(34, dtype=torch.uint8), (1, 31), torch.float32), "blocks of 32"),
        (("Q8_0", torch.zeros(34, dtype=torch.int8), (1, 32), torch.float32), "uint8"),
        (("Q8_0", torch.zeros(34, dtype=torch.uint8), (1, 32), torch.int8), "floating"),
        (("Q8_0", torch.zeros(34, dtype=torch.uint8), (1, 32), torch.float32, torch.zeros(32, 1)), r"\(32, 1\)"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises((Unsupported, InvalidInput), match=message):
        dequantize(*arguments)


def test_metadata_comes_back_as_written(tmp_path: Path) -> None:
    values = {
        "u8": (200, "UINT8"),
        "i8": (-100, "INT8"),
        "u16": (60_000, "UINT16"),
        "i16": (-30_000, "INT16"),
        "u32": (4_000_000_000, "UINT32"),
        "i32": (-2_000_000_000, "INT32"),
        "u64": (2**64 - 1, "UINT64"),
        "i64": (-(2**63), "INT64"),
        "f32": (0.5, "FLOAT32"),
        "f64": (0.1, "FLOAT64"),
        "yes": (True, "BOOL"),
        "no": (False, "BOOL"),
        "text": ("naïve 🙂 \x00 text", "STRING"),
    }
    arrays = {"words": ["a", "", "ß"], "ids": [1, -2, 3], "scores": [0.5, -1.5], "flags": [True, False], "none": []}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for key, value in arrays.items():
        if value:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert {key: file.metadata[key] for key in values} == {key: value for key, (value, _) in values.items()}
        assert {type(file.metadata[key]) for key in ("yes", "no")} == {bool}
        assert {key: file.metadata[key] for key in arrays if arrays[key]} == {k: v for k, v in arrays.items() if v}
        assert all(type(flag) is bool for flag in file.metadata["flags"])  # type: ignore[union-attr]
        assert file.metadata["general.architecture"] == "llama"
        assert not file.tensors


def test_shapes_are_in_torch_order_and_names_in_file_order(tmp_path: Path) -> None:
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = write(tmp_path / "m.gguf", {"z": ("F32", data), "a": ("F32", data[0])})
    with GgufWeights(GgufFile.open(path)) as weights:
        assert weights.names() == ("z", "a")
        assert (weights.shape("z"), weights.shape("a")) == ((2, 3, 4), (3, 4))
        np.testing.assert_array_equal(weights.load("z", dtype=torch.float32, device=CPU).numpy(), data)


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[4:8] = struct.pack("<I", 2)
    (tmp_path / "m.gguf").write_bytes(data)
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert [t.offset % 256 for t in file.tensors.values()] == [0, 0]
        np.testing.assert_array_equal(file.raw("b").view(np.float32), np.arange(5, dtype=np.float32))


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(50_000)]
    merges = [f"left{i} right{i}" for i in range(50_000)]
    path = write(tmp_path / "m.gguf", {}, words=words, merges=merges, scores=[0.25] * 50_000)
    seconds = []
    for _ in range(5):  # the quickest: the machine may be busy
        started = time.process_time()
        with GgufFile.open(path):
            seconds.append(time.process_time() - started)
    assert min(seconds) < 0.3
    with GgufFile.open(path) as file:
        assert list(file.metadata["words"]) == words
        assert list(file.metadata["merges"]) == merges


def test_views_outlive_the_file_and_never_write_to_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": ("F32", np.ones((2, 2), np.float32))})
    before = path.read_bytes()
    weights = GgufWeights(GgufFile.open(path))
    loaded = weights.load("w", dtype=torch.float32, device=CPU)
    weights.close()
    weights.close()
    loaded += 1
    assert torch.equal(loaded, torch.full((2, 2), 2.0))
    assert path.read_bytes() == before
    with pytest.raises(Closed, match="closed"):
        weights.load("w", dtype=torch.float32, device=CPU)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with GgufFile.open(write(tmp_path / "m.gguf", {"w": ("F32", np.ones(2, np.float32))})) as file:
        with pytest.raises(BadModelFile, match="no tensor 'v'"):
            file.raw("v")
        for ask in (GgufWeights(file).shape, GgufWeights(file).stored, GgufWeights(file).nbytes):
            with pytest.raises(BadModelFile, match="no tensor 'v'; it has 1: 'w'"):
                ask("v")


def test_a_header_is_read_once_while_somebody_has_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": ("F32", random_bytes("F32", 2, 3))}, answer="42")
    kept = read_header(path)
    with GgufFile.open(path) as one, GgufFile.open(path) as other:
        assert one.header is other.header is kept
        assert np.array_equal(one.raw("w"), other.raw("w"))
    gone = weakref.ref(kept)
    del kept, one, other
    assert gone() is None  # nobody has it any more


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": ("F32", random_bytes("F32", 2, 3))}, answer="42")
    kept = read_header(path)
    write(path, {"w": ("F32", random_bytes("F32", 2, 3))}, answer="43")  # as long as before
    assert read_header(path).metadata["answer"] == "43"
    assert kept.metadata["answer"] == "42"
