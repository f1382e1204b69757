"""Models written with fewer bits: folders that the compressed-tensors package reads, GGUF files that gguf reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import headway as hw
from headway.models.files.encode import ENCODABLE, encode
from headway.models.files.weights import GgufWeights, open_weights
from headway.models.quantized.write import FOLDER, _to_e4m3, quantize_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
NEAR = {"int8": 0.01, "int4": 0.12, "fp8": 0.07}


@pytest.mark.parametrize("to", FOLDER)
def test_a_quantized_folder_is_read_by_transformers_and_by_us_alike(to: str, tmp_path: Path) -> None:
    _, model = random_hf("qwen2", 1, **SIZES)
    folder, seen = save_hf(tmp_path, model), list[tuple[int, int]]()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    result = quantize_model(folder, to, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert result.tensors == 14
    assert not result.requantized
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "modeling.py").exists()
    with open_weights(folder) as before, open_weights(tmp_path / "out") as after:
        assert set(before.names()) == set(after.names())
        for name in before.names():
            wanted, found = before.array(name), after.array(name)
            assert np.abs(wanted - found).max() <= NEAR[to] * np.abs(wanted).max(), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = random_tokens(97, 20)
    with hw.Engine(tmp_path / "out", pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(theirs, tokens))


def test_float8_rounds_as_torch_does() -> None:
    values = np.concatenate([np.linspace(-448, 448, 100_001), np.linspace(-0.1, 0.1, 10_001)]).astype(np.float32)
    values = np.concatenate([values, np.arange(-448, 448, 0.5, dtype=np.float32) / 64])
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(_to_e4m3(values), theirs)


@pytest.mark.parametrize("kind", ENCODABLE)
def test_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    values = np.random.default_rng(7).standard_normal((40, 256)).astype(np.float32)
    values[3] = 0
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    assert encode(kind, values) == theirs.tobytes()


# Relative errors (root mean square) of llama.cpp's own quantizer on the same numbers: normal, and heavy-tailed.
K_ERRORS = {
    "Q2_K": (0.2959, 0.3636),
    "Q3_K": (0.1515, 0.1790),
    "Q4_K": (0.0716, 0.0903),
    "Q5_K": (0.0362, 0.0459),
    "Q6_K": (0.0179, 0.0233),
}


@pytest.mark.parametrize("kind", K_ERRORS)
def test_k_kinds_are_as_near_as_llama_cpp_makes_them(kind: str) -> None:
    rng = np.random.default_rng(7)
    values = rng.standard_normal((64, 256)).astype(np.float32) * np.float32(0.02)
    heavy = values * np.abs(rng.standard_normal((64, 256)).astype(np.float32))
    for numbers, theirs in zip((values, heavy), K_ERRORS[kind], strict=True):
        blocks = np.frombuffer(encode(kind, numbers), np.uint8).reshape(64, -1)
        found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.sqrt(np.square(found - numbers).mean() / np.square(numbers).mean()) <= 1.03 * theirs
    odd = np.stack([np.zeros(256), np.full(256, 0.5), np.abs(values[0]), -np.abs(values[1])]).astype(np.float32)
    found = gguf.quants.dequantize(
        np.frombuffer(encode(kind, odd), np.uint8).reshape(4, -1), gguf.GGMLQuantizationType[kind]
    )
    assert not found[0].any()
    np.testing.assert_allclose(found[1], odd[1], rtol=0.02)
    assert (np.abs(found - odd).max(1) <= K_ERRORS[kind][1] * np.abs(odd).max(1) + 1e-6).all()
    for bad in (1e6, np.nan):
        with pytest.raises(hw.HeadwayError, match="cannot hold"):
            encode(kind, np.full((1, 256), bad, np.float32))


@pytest.mark.parametrize("to", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K"])
def test_a_mix_of_k_kinds_gives_more_bits_to_what_costs_most(to: str, tmp_path: Path) -> None:
    _, model = random_hf("llama", 2, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    quantize_model(write_gguf(tmp_path / "m.gguf", model), to, tmp_path / "out.gguf")
    file = gguf.GGUFReader(tmp_path / "out.gguf")
    assert file.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{to}"]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert kinds["blk.0.attn_q.weight"] == to[:4]
    assert kinds["blk.1.ffn_down.weight"] == {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}.get(to, "Q6_K")
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        all_logits(engine, random_tokens(97, 8))


@pytest.mark.parametrize("to", ["Q8_0", "Q4_0", "Q5_1", "BF16"])
def test_a_quantized_gguf_file_keeps_its_metadata(to: str, tmp_path: Path) -> None:
    _, model = random_hf("llama", 2, **SIZES)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"t{i}" for i in range(97)])
        writer.add_int32("test.number", -7)
        writer.add_chat_template("{{ messages }}")
        writer.add_file_type(0)

    source = write_gguf(tmp_path / "m.gguf", model, metadata=more)
    quantize_model(source, to, tmp_path / "out.gguf")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    for key, field in before.fields.items():
        if key != "general.file_type" and not key.startswith("GGUF."):
            assert after.fields[key].types == field.types, key
            assert after.fields[key].contents() == field.contents(), key
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{to}"]
    stored = {tensor.name: tensor for tensor in after.tensors}
    assert stored["blk.0.attn_q.weight"].tensor_type.name == to
    assert stored["token_embd.weight"].tensor_type.name == ("BF16" if to == "BF16" else "Q8_0")
    assert stored["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    with open_weights(tmp_path / "out.gguf") as weights:
        assert isinstance(weights, GgufWeights)
        for name, tensor in stored.items():
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(weights.array(name).ravel(), theirs.ravel()), name
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1) as engine:
        all_logits(engine, random_tokens(97, 8))


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = random_hf("llama", 2, **SIZES)
    folder, file = save_hf(tmp_path, model), write_gguf(tmp_path / "m.gguf", model)
    cases: list[tuple[Path, str, str, str]] = [
        (file, "IQ2_S", "out.gguf", "--to is 'IQ2_S'"),
        (folder, "Q8_0", "out", "ends with .gguf"),
        (file, "int8", "out", "is a GGUF file, and int8 is for folders"),
        (file, "Q8_0", "out.bin", "ends with .gguf"),
        (file, "Q8_0", "m.gguf", "exists; nothing is overwritten"),
        (folder, "int8", "none/out", "does not exist"),
    ]
    for source, to, out, message in cases:
        with pytest.raises(hw.HeadwayError, match=message):
            quantize_model(source, to, tmp_path / out)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for source, to, out in ((folder, "int8", "out"), (file, "Q8_0", "out.gguf")):
        with pytest.raises(KeyboardInterrupt):
            quantize_model(source, to, tmp_path / out, stop)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "m.gguf"}
