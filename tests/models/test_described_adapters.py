"""Adapters on families that are not Llama's: against peft, and refused by name where a layer takes none."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from headway.models.adapters.bound import target_shapes
from headway.testing import random_adapter, random_config
from support.checks import assert_close, random_tokens
from support.hf import save_hf
from support.hf_families import family_model
from support.lora import ALL, logits_of, save_lora, with_lora

ATTENTION = ALL[:4]
LAYERS = ALL[:7]  # without the output matrix, whose logits some families scale or cap
# Families whose modules have the names of Llama's, and the ones that LoRA may change.
CASES = {
    "gemma3": ALL,
    "cohere2": LAYERS,
    "mixtral": ATTENTION,
    "gemma2": LAYERS,
    "olmo2": ALL,
    "smollm3": ALL,
    "granite": LAYERS,
    "glm4": [*ATTENTION, "down_proj"],
    "stablelm": ALL,
    "stablelm-parallel-normed": ALL,
    "starcoder2": ATTENTION,
    "phi3": ["o_proj", "down_proj"],
    "qwen2-moe-dense-layer": ATTENTION,
    "gpt-oss": ATTENTION,
}


@pytest.mark.parametrize("name", [n if i < 3 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(CASES)])
def test_an_adapter_gives_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    _, model = family_model(name)
    wrapped = with_lora(model, target_modules=CASES[name])
    adapter, tokens = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped)), random_tokens(97, 21)
    expected = logits_of(wrapped, tokens)
    for deterministic in (False, True):
        with hw.Engine(save_hf(tmp_path, model), pages=16, threads=2, deterministic=deterministic) as engine:
            with engine.context() as context:
                forward = context.forward().input(tokens).adapter(adapter)
                handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
                out = forward.execute().result()
            assert_close([out.logits(h) for h in handles], expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral", r"layers.0.mlp.gate_proj.*mixtral model has its experts.*train it on q, k, v, o$"),
        ("starcoder2", r"layers.0.mlp.gate_proj.*feed-forward without a gate.*train it on q, k, v, o, up, down$"),
    ],
)
def test_an_adapter_of_what_a_layer_does_not_have_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    llama = random_config("llama", hidden_size=64, intermediate_size=84)
    _, model = family_model(name)
    with hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine:
        assert set(engine.capabilities.adapters) == set(target_shapes(engine.config))
        with pytest.raises(hw.Unsupported, match=message):
            engine.load_adapter(random_adapter(llama, roles=("gate",)))


def test_a_family_with_other_modules_refuses_an_adapter_by_its_tensor(tmp_path: Path) -> None:
    _, model = family_model("phi3")
    folder = save_lora(tmp_path, with_lora(model, target_modules=["qkv_proj"]))
    with pytest.raises(hw.Unsupported, match=r"qkv_proj.*none of a decoder's linear layers"):
        hw.Adapter.load(folder)


def test_an_adapter_of_an_output_matrix_whose_logits_are_scaled_is_refused(tmp_path: Path) -> None:
    _, model = family_model("granite")
    folder = save_lora(tmp_path / "adapter", with_lora(model, target_modules=["q_proj", "lm_head"]))
    with hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine:
        assert not engine.capabilities.adapts_head
        with pytest.raises(hw.Unsupported, match=r"lm_head, and a granite model scales or caps its logits"):
            engine.load_adapter(hw.Adapter.load(folder))
