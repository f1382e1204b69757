"""Folders with quantized weights: the floats they stand for, the integers that are kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headway as hw
from headway.cli.facts import read_model
from headway.kernels.reference.quantized import dequantize
from headway.models.files.mxfp4_folder import Mxfp4Folder
from headway.models.files.quantized_folder import E4M3, QuantizedFolder
from headway.models.files.staging import Staging
from headway.models.files.weights import SafetensorsWeights, open_weights
from headway.models.quantized.repack import kept_weight, load_matrix
from headway.models.weights.load import load_quantized_model
from headway.models.weights.load_tensors import load_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.hf import build_hf, random_hf, save_hf
from support.quantized_files import Packer, awq, compress, fp8, gptq, mxfp4, with_weights, write_folder

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
COMPRESSED: dict[str, dict[str, Any]] = {
    "int4 in groups": INT4 | {"strategy": "group", "group_size": 32},
    "int4 in groups with zeros": INT4 | {"strategy": "group", "group_size": 16, "symmetric": False},
    "int4 by rows": INT4 | {"strategy": "channel"},
    "int8 by rows": INT8 | {"strategy": "channel"},
    "int8 by rows with zeros": INT8 | {"strategy": "channel", "symmetric": False},
    "int8 in groups": INT8 | {"strategy": "group", "group_size": 32},
    "fp8 by matrix": FLOAT8 | {"strategy": "tensor"},
    "fp8 by rows": FLOAT8 | {"strategy": "channel"},
    "fp8 by blocks": FLOAT8 | {"strategy": "block", "block_structure": [16, 32]},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
WRITTEN: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": (GPTQ, gptq()),
    "gptq with zeros": (GPTQ | {"sym": False}, gptq(symmetric=False)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(symmetric=False, offset=0)),
    "gptq in act order": (GPTQ | {"desc_act": True}, gptq(symmetric=False, act_order=True)),
    "gptq by rows": (GPTQ | {"group_size": -1}, gptq(4, -1)),
    "gptq in groups of 16": (GPTQ | {"group_size": 16}, gptq(4, 16)),
    "gptq in groups of 16 with zeros": (GPTQ | {"group_size": 16}, gptq(4, 16, symmetric=False)),
    "gptq int8 in groups of 16": (GPTQ | {"bits": 8, "group_size": 16}, gptq(8, 16)),
    "gptq int8 in groups of 16 with zeros": (GPTQ | {"bits": 8, "group_size": 16}, gptq(8, 16, symmetric=False)),
    "gptq int8 by rows": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, -1)),
    "awq": (AWQ, awq()),
    "fp8 by matrix": (FP8, fp8()),
    "fp8 by blocks of 128": (FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128))),
    "fp8 by small blocks": (FP8 | {"weight_block_size": [24, 40]}, fp8((24, 40))),
}
NOT_KEPT = ("fp8", "gptq in act order", "zeros")


def assert_holds(folder: Path, floats: dict[str, torch.Tensor], *, exact: bool = True) -> None:
    """The folder's weights are these, to the bit, and so are the matrices that stay quantized."""
    with open_weights(folder) as weights:
        assert isinstance(weights, QuantizedFolder)
        assert set(weights.names()) == set(floats)
        for name, tensor in floats.items():
            array = weights.array(name)
            assert np.array_equal(array, tensor.numpy()), name
            if weights.is_quantized(name):
                matrix = load_matrix(weights, name, thread_pool=None, keep=True)
                assert np.array_equal(dequantize(matrix).numpy(), array), name
                assert (matrix.kind in ("int8", "groups")) == weights.keeps(name)
                assert kept_weight(weights, name)[0] == matrix.label
                assert abs(kept_weight(weights, name)[1] - matrix.nbytes) <= 0.1 * matrix.nbytes


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_folder_of_compressed_tensors_is_the_model_that_the_package_decompresses(name: str, tmp_path: Path) -> None:
    _, model = random_hf("qwen2", 1, **SIZES)
    floats = compress(tmp_path, model, **COMPRESSED[name])
    _, plain = random_hf("qwen2", 2, **SIZES)
    assert_holds(tmp_path, floats)
    tokens = random_tokens(plain.config.vocab_size, 20)
    with hw.Engine(tmp_path, pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), reference_logits(with_weights(plain, floats), tokens))
    with hw.Engine(tmp_path, pages=8, threads=1) as engine:  # as it is: activations are quantized where weights are
        found, expected = all_logits(engine, tokens), reference_logits(plain, tokens)
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max()
    with open_weights(tmp_path) as weights:
        assert isinstance(weights, QuantizedFolder)
        assert weights.keeps("model.layers.0.mlp.up_proj.weight") != any(part in name for part in NOT_KEPT)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_is_the_model_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    how, pack = WRITTEN[name]
    _, model = random_hf("llama", 3, **SIZES)
    floats = write_folder(tmp_path, model, how, pack)
    assert_holds(tmp_path, floats)
    tokens = random_tokens(model.config.vocab_size, 20)
    expected = reference_logits(with_weights(model, floats), tokens)
    with hw.Engine(tmp_path, pages=8, threads=1, dtype="float32") as engine:
        assert_close(all_logits(engine, tokens), expected)
    with hw.Engine(tmp_path, pages=8, threads=1) as engine:  # as it is: activations are quantized where weights are
        found = all_logits(engine, tokens)
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max()
    staged = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), staging=Staging(torch.device("cpu")))
    q = floats["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(staged.layers[0].qkv.weight[: len(q)], q)


GPT_OSS = SIZES | {"num_local_experts": 5, "head_dim": 16, "sliding_window": 6, "intermediate_size": 32 * 3}


@pytest.mark.parametrize("hidden", [64, 96])
def test_experts_in_mxfp4_stay_so_and_are_what_transformers_makes_of_them(
    hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPT-OSS is published: blocks and scales."""
    sizes = GPT_OSS | {"hidden_size": hidden, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    _, model = build_hf("GptOssConfig", "GptOssForCausalLM", sizes, 5)
    floats = mxfp4(tmp_path, model)
    with open_weights(tmp_path) as weights:
        assert isinstance(weights, Mxfp4Folder)
        assert set(weights.names()) == set(floats)
        for name, tensor in floats.items():
            assert np.array_equal(weights.array(name), tensor.numpy()), name
            loaded = weights.load(name, dtype=torch.bfloat16, device="cpu")
            assert torch.equal(loaded, tensor.bfloat16()), name
    tokens, found = random_tokens(model.config.vocab_size, 20), []
    expected = reference_logits(with_weights(model, floats), tokens)
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(tmp_path, pages=8, threads=1, dtype="float32") as engine:
            assert_close(all_logits(engine, tokens), expected)
        with hw.Engine(tmp_path, pages=8, threads=1) as engine:  # as it is: inputs of experts are quantized
            assert "fp4 in groups of 32" in engine.info.format
            found.append(all_logits(engine, tokens))
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0] - expected).max() <= 0.1 * np.abs(expected).max()
    held = load_quantized_model(tmp_path, thread_pool=None)
    size = model.config.intermediate_size
    for l, layer in enumerate(held.layers):
        at = f"model.layers.{l}.mlp.experts."
        both, down = floats[f"{at}gate_up_proj"], floats[f"{at}down_proj"]
        for matrix, wanted in ((layer.expert_gate, both[..., 0::2]), (layer.expert_up, both[..., 1::2])):
            assert matrix is not None
            for x in range(5):
                assert torch.equal(dequantize(matrix.expert(x, size)), wanted[x].T)
        assert layer.expert_down is not None
        assert torch.equal(dequantize(layer.expert_down.expert(3, hidden)), down[3].T)
    facts = read_model(tmp_path)
    assert dict(facts.stored_types)["MXFP4"] == 4
    assert "MXFP4 stays quantized on a CPU (fp4 in groups of 32)" in facts.in_memory
    with open_weights(tmp_path) as weights:
        label, count = kept_weight(weights, "model.layers.0.mlp.experts.down_proj")
        assert (label, count) == ("fp4 in groups of 32", held.layers[0].expert_down.nbytes - 4 * 5 * hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no scales", r"has no 'model.layers.0.mlp.experts.down_proj_scales', which weights quantized as 'mxfp4' need"),
        ("floats too", "has 'model.layers.0.mlp.experts.down_proj' both as floats and quantized"),
        ("narrow blocks", r"are \[5, 64, 3, 8\] and its scales \[5, 64, 3\]; .* need \[experts, outputs, groups, 16\]"),
        ("scales of floats", "down_proj_scales' is stored as F32; weights quantized as 'mxfp4' need U8"),
        ("fewer experts", r"down_proj' has shape \[4, 96, 64\]; this config needs \[5, 96, 64\]"),
        ("all floats", "quantized as 'mxfp4', and no tensor is"),
        ("other bytes", "'model.norm.weight' is stored as U8, not part of a weight quantized as 'mxfp4'"),
    ],
)
def test_mxfp4_that_does_not_fit_is_refused_before_a_weight_is_read(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    _, model = build_hf("GptOssConfig", "GptOssForCausalLM", sizes, 5)
    floats = mxfp4(tmp_path, model)
    tensors, at = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    match change:
        case "no scales":
            del tensors[f"{at}_scales"]
        case "floats too":
            tensors[at] = floats[at]
        case "narrow blocks":
            tensors[f"{at}_blocks"] = tensors[f"{at}_blocks"][..., :8].contiguous()
        case "scales of floats":
            tensors[f"{at}_scales"] = tensors[f"{at}_scales"].float()
        case "fewer experts":
            tensors |= {n: tensors[n][:4].contiguous() for n in (f"{at}_blocks", f"{at}_scales")}
        case "all floats":
            tensors = floats
        case "other bytes":
            tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.BadModelFile, match=message):
        hw.Engine(tmp_path, pages=8, threads=1)


def test_quantized_experts_stay_quantized(tmp_path: Path) -> None:
    sizes = SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    _, model = build_hf("Qwen3MoeConfig", "Qwen3MoeForCausalLM", sizes, 4)
    floats = write_folder(tmp_path, model, GPTQ | {"group_size": -1}, gptq(4, -1))
    layer = load_quantized_model(tmp_path, thread_pool=None).layers[1]
    assert layer.expert_up is not None
    assert layer.expert_up.label == "int4 in groups of 64"
    for i in range(5):
        held = dequantize(layer.expert_up.expert(i, 40))
        assert torch.equal(held, floats[f"model.layers.1.mlp.experts.{i}.up_proj.weight"])
    tokens = random_tokens(model.config.vocab_size, 12)
    folder = save_hf(tmp_path / "floats", model)
    weights = load_file(folder / "model.safetensors")
    save_file({name: floats[name].contiguous() for name in weights}, folder / "model.safetensors")
    with (
        hw.Engine(folder, pages=8, threads=1) as plain,
        hw.Engine(tmp_path, pages=8, threads=1, dtype="float32") as own,
    ):
        assert_close(all_logits(own, tokens), all_logits(plain, tokens))


def test_every_float8_is_torchs() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, theirs, equal_nan=True)


def test_models_show_says_what_is_kept_and_what_becomes_floats(tmp_path: Path) -> None:
    _, model = random_hf("llama", 3, **SIZES)
    write_folder(tmp_path / "kept", model, AWQ, awq())
    write_folder(tmp_path / "floats", model, FP8, fp8())
    assert read_model(tmp_path / "kept").in_memory == "AWQ int4 stays quantized on a CPU (int4 in groups of 32)"
    assert read_model(tmp_path / "floats").in_memory == "FP8 becomes floats when it is loaded"
    assert read_model(tmp_path / "kept").stored_types[0][0] == "AWQ int4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized as 'bitsandbytes'"),
        ({"quant_method": None}, "quantized as None"),
        ({"bits": 3}, "with bits 3; supported are 2, 4, 8"),
        ({"bits": 8}, "tensor '.*' is .* need"),
        ({"group_size": 0}, "group_size in quantization_config is 0"),
        ({"group_size": 64}, "do not divide|need"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq"}, "has 12 inputs, which groups of 32 .* do not divide"),
        ({"quant_method": "fp8"}, "quantized as 'fp8', and no tensor is"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": {}}},
            "in the format 'nvfp4-pack-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": INT4 | {"strategy": None, "group_size": "many"}}},
            },
            "group_size in quantization_config is 'many'",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name_before_memory_is_taken(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = random_hf("llama", 3, **SIZES)
    write_folder(tmp_path, model, GPTQ | changes, gptq())
    monkeypatch.setattr(QuantizedFolder, "array", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.HeadwayError, match=message):
        hw.Engine(tmp_path, pages=8, threads=1)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", None, "no 'model.layers.0.mlp.up_proj.scales' beside it"),
        ("scales", torch.ones(2, 95), r"is \[2, 95\] of F32; .* need \[2, 96\] of F32 or F16 or BF16"),
        ("scales", torch.ones(2, 96, dtype=torch.int32), r"\[2, 96\] of I32"),
        ("qzeros", torch.ones(3, 12, dtype=torch.int32), r"need \[2, 12\] of I32"),
        ("g_idx", torch.full((64,), 7, dtype=torch.int32), "names group 7; there are 2"),
        ("qweight", torch.ones(8, dtype=torch.int32), "a matrix is needed"),
        ("packed", torch.ones(8, dtype=torch.int32), "stored as I32, not part of a matrix"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    part: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    _, model = random_hf("llama", 3, **SIZES)
    write_folder(tmp_path, model, GPTQ, gptq())
    weights = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    weights = {n: t for n, t in weights.items() if n != name} | ({} if value is None else {name: value})
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(hw.BadModelFile, match=message):
        hw.Engine(tmp_path, pages=8, threads=1)


def test_a_config_without_quantization_refuses_quantized_tensors(tmp_path: Path) -> None:
    _, model = random_hf("llama", 3, **SIZES)
    write_folder(tmp_path, model, GPTQ, gptq())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(hw.BadModelFile, match="is missing"):
        hw.Engine(tmp_path, pages=8, threads=1)
