"""Weights by name: safetensors folders whole and sharded, every dtype, and what a folder may not do."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headway.base.errors import BadModelFile, Closed, HeadwayError, InvalidInput, ModelNotFound, Unsupported
from headway.models.files.weights import GgufWeights, SafetensorsWeights, open_weights

CPU = torch.device("cpu")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def shard(folder: Path, parts: dict[str, dict[str, torch.Tensor]], **changes: str) -> Path:
    """A sharded folder. `changes` puts names in other files in the index than they are in."""
    folder.mkdir(exist_ok=True)
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in parts.items() for name in tensors} | changes
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_raw(folder: Path, header: dict[str, object], data: bytes, pad: int = 0) -> Path:
    text = json.dumps(header).encode() + b" " * pad
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.mark.parametrize("target", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_dtype_loads_as_every_other(tmp_path: Path, stored: str, target: torch.dtype) -> None:
    tensor = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)).to(DTYPES[stored])
    save_file({"w": tensor, "b": tensor[0].clone()}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        assert set(weights.names()) == {"w", "b"}
        assert (weights.stored("w"), weights.shape("w")) == (stored, (300, 1000))
        assert weights.nbytes("w") == tensor.nbytes
        loaded = weights.load("w", dtype=target, device=CPU)
        assert loaded.dtype == target
        assert torch.equal(loaded, tensor.to(target))
        assert torch.equal(weights.load("b", dtype=target, device=CPU), tensor[0].to(target))


def test_shards_are_one_set_of_weights(tmp_path: Path) -> None:
    parts = {f"model-{i}.safetensors": {f"{i}.a": torch.randn(3, 4), f"{i}.b": torch.randn(5)} for i in range(3)}
    with open_weights(shard(tmp_path, parts)) as weights:
        assert len(weights.names()) == 6
        for tensors in parts.values():
            for name, tensor in tensors.items():
                assert torch.equal(weights.load(name, dtype=torch.float32, device=CPU), tensor)


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "blobs" / "abc123")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blobs/abc123")
    with open_weights(folder) as weights:
        assert weights.names() == ("w",)


def test_the_stored_type_on_the_cpu_is_a_view_of_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        first = weights.load("w", dtype=torch.float32, device=CPU)
        assert first.data_ptr() == weights.load("w", dtype=torch.float32, device=CPU).data_ptr()
        assert first.data_ptr() != weights.load("w", dtype=torch.float64, device=CPU).data_ptr()


def test_tensors_outlive_close_and_never_write_to_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    weights = open_weights(tmp_path)
    loaded = weights.load("w", dtype=torch.float32, device=CPU)
    weights.close()
    weights.close()
    loaded.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(Closed):
        weights.load("w", dtype=torch.float32, device=CPU)


def test_loading_warns_of_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with warnings.catch_warnings(), open_weights(tmp_path) as weights:
        warnings.simplefilter("error")
        for dtype in DTYPES.values():
            weights.load("w", dtype=dtype, device=CPU)


def test_data_at_an_odd_address_loads(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    header = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [1, 25]}}
    for pad in range(4):
        with open_weights(write_raw(tmp_path, header, b"x" + values.tobytes(), pad)) as weights:
            for dtype in (torch.float32, torch.float16):
                loaded = weights.load("w", dtype=dtype, device=CPU)
                assert torch.equal(loaded, torch.from_numpy(values).view(2, 3).to(dtype))


def test_empty_tensors_scalars_and_gaps_are_read(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]},
        "one": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]},
        "late": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    data = np.float16(2.5).tobytes() + b"??" + np.float32(-1.5).tobytes()
    with open_weights(write_raw(tmp_path, header, data)) as weights:
        for dtype in (torch.float32, torch.bfloat16):
            assert weights.load("none", dtype=dtype, device=CPU).shape == (0, 5)
            assert weights.load("one", dtype=dtype, device=CPU).item() == 2.5
            assert weights.load("late", dtype=dtype, device=CPU).tolist() == [-1.5]


def test_a_value_too_large_for_the_dtype_is_refused_with_its_name(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, -1e5])}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(Unsupported, match=r"'w'.*-100000 does not fit float16"):
        weights.load("w", dtype=torch.float16, device=CPU)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_other_stored_types_are_listed_but_not_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"w": torch.zeros(4).to(dtype), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        with pytest.raises(Unsupported, match=f"'w' is stored as {weights.stored('w')}.*F64, F32, F16, BF16"):
            weights.load("w", dtype=torch.float32, device=CPU)
        assert torch.equal(weights.load("v", dtype=torch.float32, device=CPU), torch.ones(2))


def test_weights_load_only_as_floats(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(InvalidInput, match=r"torch\.int8.*float32"):
        weights.load("w", dtype=torch.int8, device=CPU)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights, pytest.raises(BadModelFile, match="no tensor 'v'"):
        weights.load("v", dtype=torch.float32, device=CPU)


def test_a_gguf_file_opens_whatever_its_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "m.gguf").rename(tmp_path / "b179c952")
    with open_weights(tmp_path / "b179c952") as weights:
        assert isinstance(weights, GgufWeights)
        assert weights.names() == ("w",)


def test_one_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Unsupported, match=r"one of 3 parts.*merge"):
        open_weights(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "..", "w.bin", "", 7])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "out.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(BadModelFile, match="same folder"):
        open_weights(folder)


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    one, two = {"w": torch.ones(1), "u": torch.ones(1)}, {"v": torch.ones(1)}
    files = {"1.safetensors": one, "2.safetensors": two}
    with pytest.raises(BadModelFile, match=r"'x' in '1\.safetensors', which lacks it"):
        open_weights(shard(tmp_path / "a", files, x="1.safetensors"))
    with pytest.raises(BadModelFile, match=r"'w' in '2\.safetensors', which lacks it"):
        open_weights(shard(tmp_path / "b", files, w="2.safetensors"))
    with pytest.raises(BadModelFile, match=r"lists the file '3\.safetensors', which is not in the folder"):
        open_weights(shard(tmp_path / "c", files, w="3.safetensors"))
    with pytest.raises(BadModelFile, match="'w' is in both"):
        open_weights(shard(tmp_path / "d", {"1.safetensors": one, "2.safetensors": two | {"w": torch.ones(1)}}))
    with pytest.raises(BadModelFile, match="cannot be read"):
        open_weights(shard(tmp_path / "e", files, w="n" * 300 + ".safetensors"))
    with pytest.raises(BadModelFile, match=r"lists the file|cannot be read"):
        open_weights(shard(tmp_path / "f", files, w="\ud800.safetensors"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"a": 1, "a": 2}'])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadModelFile, match=r"index\.json"):
        open_weights(tmp_path)


def test_a_pickle_is_never_loaded_and_the_way_out_is_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadModelFile, match=r"pickle.*never loaded.*save_pretrained"):
        open_weights(tmp_path)


def test_paths_without_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    refusals: list[tuple[Path, type[HeadwayError], str]] = [
        (tmp_path / "no.gguf", ModelNotFound, "no file"),
        (tmp_path / "nothing", ModelNotFound, "no file"),
        (tmp_path / "nul\0.gguf", BadModelFile, "cannot be read"),
        (tmp_path, BadModelFile, "neither model.safetensors nor"),
    ]
    for path, error, message in refusals:
        with pytest.raises(error, match=message):
            open_weights(path)
    with pytest.raises(ModelNotFound, match="cannot be read: No such file"):
        SafetensorsWeights(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadModelFile, match="neither a GGUF file nor a folder"):
        open_weights(tmp_path / "notes.txt")
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(BadModelFile, match=r"neither"):
        open_weights(tmp_path / "m.gguf")
    with pytest.raises(BadModelFile, match="pass the file itself"):
        open_weights(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(InvalidInput, match="pass its folder"):
        open_weights(tmp_path / "w.safetensors")
