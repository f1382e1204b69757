"""GGUF files of families that are not Llama's: the logits of the folder they were written from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import headway as hw
from headway.kernels.host.attention import ChunkWindow
from headway.models.description import Temperature
from headway.models.files.gguf import GgufFile
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_families import write_family
from support.hf import save_hf
from support.hf_families import family_model

QUICK = (
    "gemma3-pattern",
    "granite-moe",
    "llama4-published",
    "gemma3n-published",
    "gemma4",
    "gemma4-experts",
    "olmo3",
    "phi3-longrope",
    "ministral3",
)
SLOW = (
    *(
        "gemma",
        "gemma2-head-scale",
        "phi3",
        "phi3-partial",
        "olmo2",
        "smollm3-every-fourth",
        "granite",
        "cohere2-pattern",
    ),
    "phi",
    *("stablelm", "stablelm-parallel-normed", "gpt2", "gpt-neox", "gpt-neox-serial", "falcon", "falcon-new"),
    *("falcon-new-one-norm", "starcoder2", "glm", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"),
)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_gguf_file_is_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 40)
    path = write_family(tmp_path / "m.gguf", folder, model)
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert engine.info.runner.startswith("native")
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))
        assert engine.info.parameters == sum(p.numel() for p in model.parameters())
        assert engine.config.tied == model.config.tie_word_embeddings


FILES = [("gemma3-pattern", "Q8_0"), ("granite-moe", "Q4_0"), ("gpt-oss", "MXFP4")]
OTHER_FILES = [(n, k) for n in QUICK + SLOW for k in ("Q8_0", "Q4_0", "MXFP4") if (n, k) not in FILES]


@pytest.mark.parametrize(("name", "kind"), [*FILES, *(pytest.param(*f, marks=pytest.mark.slow) for f in OTHER_FILES)])
def test_quantized_files_stay_so_with_the_bits_of_the_reference(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name, seed=3)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 20)
    path, found = write_family(tmp_path / "m.gguf", folder, model, kind=kind), []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(path, pages=8, threads=2) as engine:
            assert engine.info.runner.startswith("torch" if native == "off" else "native")
            assert (
                f"{'fp' if kind == 'MXFP4' else 'int'}{8 if kind == 'Q8_0' else 4} in groups of 32"
                in engine.info.format
            )
            found.append(all_logits(engine, tokens))
    np.testing.assert_array_equal(*found)


def test_a_quantized_file_read_as_floats_is_the_model_of_those_floats(tmp_path: Path) -> None:
    _, model = family_model("gemma3-pattern", seed=3)
    path = write_family(tmp_path / "m.gguf", save_hf(tmp_path, model), model, kind="Q8_0")
    tokens = random_tokens(97, 20)
    with GgufFile.open(path) as file, torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.shape[1] % 32 == 0:
                blocks = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)))
        assert file.tensors["blk.0.attn_q.weight"].kind == "Q8_0"
    with hw.Engine(path, pages=8, threads=2, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize("gguf_file", [False, True])
def test_a_context_ends_where_the_short_factors_of_longrope_do_and_says_why(gguf_file: bool, tmp_path: Path) -> None:
    _, model = family_model("phi3-longrope")
    path = save_hf(tmp_path, model)
    if gguf_file:
        path = write_family(tmp_path / "m.gguf", path, model)
    why = r"128 \(longrope's factors for longer contexts, up to 512, are not supported\)"
    with hw.Engine(path, pages=16, threads=1) as engine, engine.context() as context:
        assert engine.config.max_positions == 128
        with pytest.raises(hw.ContextLengthExceeded, match=why):
            context.forward().input([1] * 129).execute()
        with pytest.raises(hw.ContextLengthExceeded, match=why):
            context.forward().input_at([1], [128])


def test_what_a_file_of_llama4_does_not_say_is_as_published(tmp_path: Path) -> None:
    _, model = family_model("llama4-published", seed=3)
    folder = save_hf(tmp_path, model)
    with hw.Engine(write_family(tmp_path / "m.gguf", folder, model), pages=8, threads=1) as engine:
        config = engine.config
    assert [window is None for window in config.windows] == [False, False, False, True, False]
    assert config.windows[0] == ChunkWindow(8192)
    assert config.description.temperature == Temperature(8192.0, 0.1)
    assert config.description.qk_norm == "unit"
    without = write_family(tmp_path / "0.gguf", folder, model, metadata=lambda writer: writer.add_sliding_window(0))
    with pytest.raises(hw.Unsupported, match="sliding_window is 0; a file without chunks is not supported"):
        hw.Engine(without, pages=8, threads=1)
    _, many = family_model("llama4-published", num_local_experts=128, use_qk_norm=False, intermediate_size=32)
    tokens, path = random_tokens(97, 20), tmp_path / "many"
    path.mkdir()
    with hw.Engine(write_family(path / "m.gguf", save_hf(path, many), many), pages=8, threads=1) as engine:
        assert not engine.config.qk_norm
        assert_close(all_logits(engine, tokens), reference_logits(many, tokens))
