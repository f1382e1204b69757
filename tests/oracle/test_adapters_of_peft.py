"""Adapters against peft: the same logits over the dense base in float32, for every family and every linear layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import headway as hw
from support.gguf_files import round_weights, write_gguf
from support.hf import random_hf, save_hf, variant
from support.lora import logits_of, save_lora, state_of, with_lora, write_gguf_lora

TOKENS = [5, 17, 3, 88, 41, 2, 9, 30, 61, 7, 19, 23, 4, 77, 50, 12, 8, 91, 33]
FAMILIES = [
    "llama-biases",
    "llama-gqa-tied",
    "llama-linear-headdim10",
    "mistral-window",
    "qwen2-mqa",
    "qwen3-biases-mha",
]


@pytest.fixture(params=["native", "torch"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("HEADWAY_NATIVE", "off")
    return request.param


def logits(engine: hw.Engine, tokens: list[int], *uses: tuple[hw.Adapter, float]) -> np.ndarray:
    """The logits [T, V] of a sequence under adapters."""

    async def program(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as ctx:
            fwd = ctx.forward().input(tokens)
            for adapter, scale in uses:
                fwd.adapter(adapter, scale)
            handles = [fwd.probe(i, hw.Logits()) for i in range(len(tokens))]
            out = await fwd.execute()
            return np.stack([out.logits(handle) for handle in handles])

    return engine.run(program)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_gives_the_logits_of_peft(tmp_path: Path, runner: str, name: str) -> None:
    _, model = variant(name)
    wrapped = with_lora(model)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", threads=1, pages=16) as engine:
        found, plain = logits(engine, TOKENS, (adapter, 1.0)), logits(engine, TOKENS)
    close(found, logits_of(wrapped, TOKENS))
    close(plain, logits_of(model, TOKENS))
    assert np.abs(found - plain).max() > 0.1 * np.abs(plain).max()


CONFIGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 5, "lora_alpha": 3},
    "few": {"target_modules": ["q_proj", "v_proj"]},
    "pattern": {"target_modules": r".*\.(?:k|up)_proj"},
    "whole names": {"target_modules": ["model.layers.1.mlp.down_proj", "self_attn.o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "ranks": {"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"gate_proj": 1.5}},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer": {"layers_to_transform": 0},
    "excluded": {"exclude_modules": ["down_proj"]},
    "excluded by pattern": {"exclude_modules": r"model\.layers\.0\..*"},
    "wide": {"r": 40, "lora_alpha": 80},
    "the head alone": {"target_modules": ["lm_head"], "alpha_pattern": {"lm_head": 3}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_the_config_means_what_it_does_in_peft(tmp_path: Path, name: str) -> None:
    _, model = random_hf("qwen2", 1)
    wrapped = with_lora(model, **CONFIGS[name])
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", threads=1, pages=16) as engine:
        close(logits(engine, TOKENS, (adapter, 1.0)), logits_of(wrapped, TOKENS))


def test_a_head_that_is_tied_to_the_embedding_is_peft_s(tmp_path: Path) -> None:
    """peft changes the output alone, unless it is told to tie both: that is LoRA of the embedding, and refused."""
    _, model = variant("llama-gqa-tied")
    wrapped = with_lora(model, target_modules=["lm_head"], ensure_weight_tying=True)
    tensors, config = state_of(wrapped), wrapped.peft_config["default"].to_dict()
    head = {name: tensor for name, tensor in tensors.items() if "lm_head" in name and ".lora_" in name}
    for given in (tensors, head):
        with pytest.raises(hw.Unsupported, match="embedding"):
            hw.Adapter.from_tensors(given, config)
    with_lora(model, target_modules=["lm_head"]).save_pretrained(str(tmp_path))  # and the base weights with it
    with pytest.raises(hw.Unsupported, match="save_embedding_layers=False"):
        hw.Adapter.load(tmp_path)


def test_the_head_is_adapted_wherever_it_is_read(tmp_path: Path, runner: str) -> None:
    """Decode rows, the token before a pass, and the logit lens, whose last layer is the model's own output."""
    _, model = variant("llama-gqa-tied")
    wrapped = with_lora(model)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    tokens = list(TOKENS)
    for _ in range(12):
        tokens.append(int(logits_of(wrapped, tokens)[-1].argmax()))

    async def program(engine: hw.Engine) -> tuple[list[int], int, Any, Any]:
        async with engine.context().fill(TOKENS) as ctx:
            found = await ctx.generate(hw.Argmax(), max_tokens=12, stop_only=True, adapter=adapter).tokens()
            await ctx.flush(adapter=adapter)
            again = ctx.forward()
            last, layers = again.probe(-1, hw.Distribution()), engine.config.layers
            lens = again.probe(-1, hw.LogitLens([layers], 0))
            token = again.sample([-1], hw.Argmax())
            out = await again.execute()
            return found, out.token(token), out.distribution(last), out.lens(lens)[0]

    with hw.Engine(save_hf(tmp_path, model), dtype="float32", threads=1, pages=16) as engine:
        found, token, (ids, chances), (same, lens) = engine.run(program)
    assert [*TOKENS, *found] == tokens
    expected = torch.from_numpy(logits_of(wrapped, tokens)[-1]).softmax(-1).numpy()
    assert (token, ids[0], same[0]) == (expected.argmax(),) * 3
    assert chances == pytest.approx(expected[ids], abs=1e-5)
    assert lens == pytest.approx(expected[same], abs=1e-5)


def test_several_adapters_add_up_as_peft_adds_them(tmp_path: Path) -> None:
    _, model = random_hf("llama", 2)
    folders = [save_lora(tmp_path / f"{i}", with_lora(model, seed=i, r=2 + i)) for i in range(2)]
    one, two = (hw.Adapter.load(folder) for folder in folders)
    both = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folders[0]), adapter_name="one")
    both.load_adapter(str(folders[1]), adapter_name="two")
    both.add_weighted_adapter(["one", "two"], [0.25, 1.5], "sum", combination_type="cat")
    both.set_adapter("sum")
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", threads=1, pages=16) as engine:
        close(logits(engine, TOKENS, (one, 0.25), (two, 1.5)), logits_of(both.eval(), TOKENS))


def test_tensors_in_memory_give_the_same_adapter_as_their_file(tmp_path: Path) -> None:
    _, model = random_hf("llama", 2)
    wrapped = with_lora(model, r=3, lora_alpha=9)
    saved = hw.Adapter.load(save_lora(tmp_path, wrapped))
    tensors = state_of(wrapped)
    given = hw.Adapter.from_tensors(tensors, wrapped.peft_config["default"].to_dict())
    assert given.digest == saved.digest == hw.Adapter.from_tensors(tensors, alpha=9).digest
    assert hw.Adapter.from_tensors(tensors).digest != saved.digest
    raw = {name: tensor for name, tensor in wrapped.state_dict().items() if ".lora_" in name}
    assert hw.Adapter.from_tensors(raw, alpha=9).digest == saved.digest  # names with the adapter's own in them
    with torch.no_grad():
        next(iter(tensors.values())).zero_()
    assert given.digest == saved.digest  # its tensors are copies


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_adapter_gives_the_logits_of_the_peft_adapter(tmp_path: Path, family: str) -> None:
    """Over a GGUF model and a folder; llama's files have q and k rows in another order."""
    _, model = random_hf(family, 3)
    wrapped = with_lora(model, r=4, lora_alpha=6)
    adapter = hw.Adapter.load(write_gguf_lora(tmp_path / "adapter.gguf", wrapped, alpha=6.0))
    expected = logits_of(wrapped, TOKENS)
    for path in (write_gguf(tmp_path / "model.gguf", model), save_hf(tmp_path, model)):
        with hw.Engine(path, dtype="float32", threads=1, pages=16) as engine:
            close(logits(engine, TOKENS, (adapter, 1.0)), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_an_adapter_beside_quantized_weights_takes_unquantized_rows(tmp_path: Path, kind: str) -> None:
    """Its share of the logits is that of peft over the dequantized base, whatever the weights do to the rest."""
    _, model = random_hf("llama", 4, intermediate_size=96)
    round_weights(model, kind)
    wrapped = with_lora(model)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    plain, adapted = logits_of(model, TOKENS), logits_of(wrapped, TOKENS)
    with hw.Engine(write_gguf(tmp_path / "model.gguf", model, kind=kind), threads=2, pages=16) as engine:
        error = kl(plain, logits(engine, TOKENS))
        assert kl(adapted, logits(engine, TOKENS, (adapter, 1.0))) <= 3 * error + 1e-6
        assert kl(adapted, logits(engine, TOKENS)) > 0.05


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_beside_quantized_weights_torch_computes_the_native_bits(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = random_hf("llama", 5, intermediate_size=96, hidden_size=96)
    folders = [save_lora(tmp_path / f"{i}", with_lora(model, seed=i, r=3 + 16 * i)) for i in range(2)]
    uses = [(hw.Adapter.load(folders[0]), 0.7), (hw.Adapter.load(folders[1]), -1.3)]
    file, found = write_gguf(tmp_path / "model.gguf", model, kind=kind), []
    for mode in ("auto", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(file, threads=2, pages=16) as engine:
            assert engine.info.runner.startswith("native" if mode == "auto" else "torch")
            found.append(logits(engine, TOKENS, *uses))
    assert np.array_equal(*found)


def kl(expected: np.ndarray, found: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())
