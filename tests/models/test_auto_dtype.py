"""`dtype="auto"`: what the file has decides, by its weights and not by its config."""

from pathlib import Path

import pytest
import torch

import headway as hw
from headway.cli.facts import read_model
from headway.models.weights.load import stored_dtype
from headway.runtime.device import dtype_name, pick_dtype
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "float64", None])
def test_auto_keeps_halves_on_a_gpu(stored):
    assert pick_dtype("auto", CUDA, stored) == (stored if stored in ("float16", "bfloat16") else "bfloat16")
    assert pick_dtype("auto", CPU, stored) == "float32"
    assert pick_dtype("float32", CUDA, stored) == "float32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_folder_is_what_its_weights_are(tmp_path, dtype):
    folder = save_hf(tmp_path / "model", random_hf("llama", 0)[1].to(dtype))
    config = folder / "config.json"
    config.write_text(config.read_text().replace(str(dtype).removeprefix("torch."), "float64"))  # it may be wrong
    assert stored_dtype(folder) == dtype_name(dtype)
    computed = dtype if dtype in HALVES else torch.bfloat16
    assert read_model(folder).gpu_dtype == str(computed).removeprefix("torch.")
    with hw.Engine(folder, threads=1, pages=8, device="cpu") as engine:
        assert (engine.info.stored, engine.info.dtype) == (str(dtype).removeprefix("torch."), "float32")


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", None)])
def test_a_gguf_file_is_what_its_matrices_are(tmp_path: Path, kind, dtype):
    """Its norms are float32 all the same."""
    model = random_hf("llama", 0, hidden_size=64, intermediate_size=96)[1]
    assert stored_dtype(write_gguf(tmp_path / "model.gguf", model, kind=kind)) == dtype


def test_a_file_of_several_types_has_none(tmp_path):
    def kind(name: str) -> str:
        return "F16" if "attn_q" in name else "BF16"

    assert stored_dtype(write_gguf(tmp_path / "model.gguf", random_hf("llama", 0)[1], kind=kind)) is None


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", None)])
def test_float32_matrices_beside_others_do_not_change_it(tmp_path, kind, dtype):
    """Routers of experts are float32 in files of halves."""
    model = random_hf("llama", 0, hidden_size=64, intermediate_size=96)[1]
    path = write_gguf(tmp_path / "model.gguf", model, kind=lambda name: "F32" if "attn_q" in name else kind)
    assert stored_dtype(path) == dtype


def test_the_computed_dtype_is_that_of_the_choice(tmp_path, monkeypatch):
    """What `auto` chooses for a GPU is what the weights are loaded in."""
    from headway.base.config import settings
    from headway.models.weights import load_tensors
    from headway.runtime.runners import select

    seen = []
    monkeypatch.setattr(load_tensors, "load_model", lambda path, *, dtype, **_: seen.append(dtype))
    for dtype in (*HALVES, torch.float32):
        folder = save_hf(tmp_path / str(dtype), random_hf("llama", 0)[1].to(dtype))  # pyright: ignore[reportArgumentType]
        options = {"dtype": "auto", "device": CUDA, "threads": 1, "quantize": None}
        assert select.open_backend(folder, **options, settings=settings()).stored == dtype_name(dtype)
    assert seen == [torch.float16, torch.bfloat16, torch.bfloat16]
