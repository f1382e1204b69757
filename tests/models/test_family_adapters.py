"""Adapters that peft makes of every family's own linear layers: the same logits, and none is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers.pytorch_utils import Conv1D

import headway as hw
from headway.models.adapters.bound import bind
from headway.models.config import from_hf
from support.checks import all_logits, assert_close, random_tokens
from support.gguf_families import write_family, write_family_lora
from support.gguf_recurrent import recurrent_model, write_recurrent
from support.hf import save_hf
from support.hf_families import NAMES, family_model
from support.lora import logits_of, save_lora, state_of, with_lora
from support.own_drafts import own_drafts

QUICK = (
    "gpt2",
    "gpt-neox",
    "falcon-new",
    "gptj",
    "phi3",
    "glm4",
    "qwen3.5",
    "lfm2",
    "mamba2",
    "deepseek-v2",
    "gemma3n",
)
ROUTER = "feed_forward.router"  # whose module peft does not wrap, but its parameter (see `test_expert_adapters`)


def linear_layers(model: torch.nn.Module) -> Iterator[str]:
    """The names of every linear layer."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D))
    return (name for name in linear if not name.endswith(ROUTER))


def adapted(model: Any, layers: Iterable[str]) -> PeftModel:
    """The model under an adapter of these layers, as peft makes it of models that it does not know by their type: of
    the others it refuses some, and makes experts' parameters of some."""
    model = copy.deepcopy(model)
    model.config.model_type = "unknown"
    return with_lora(model, target_modules="|".join(re.escape(layer) for layer in layers))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_linear_layer_gives_the_logits_of_peft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 21)
    wrapped = adapted(model, linear_layers(model))
    adapter, expected = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped)), logits_of(wrapped, tokens)
    for native, deterministic in (("auto", False), ("auto", True), ("off", False)):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, dtype="float32", pages=16, threads=2, deterministic=deterministic) as engine:
            assert_close(all_logits(engine, tokens, adapter), expected)


def test_no_linear_layer_of_any_family_is_refused() -> None:
    for name in NAMES:
        _, model = family_model(name)
        state: dict[str, torch.Tensor] = {}
        for layer in linear_layers(model):
            module: Any = model.get_submodule(layer)
            outputs, inputs = module.weight.shape[:: -1 if isinstance(module, Conv1D) else 1]
            state |= {f"{layer}.lora_A.weight": torch.ones(1, inputs), f"{layer}.lora_B.weight": torch.ones(outputs, 1)}
        bound = bind(hw.Adapter.from_tensors(state), from_hf(model.config.to_dict()))
        assert all(bound.layers), name


RECURRENT = ("qwen3.5", "lfm2", "mamba2")  # whose recurrences differ by rounding
QUANTIZED = ("gpt2", "falcon-new", "glm4", "phi3", "deepseek-v2", "deepseek-v2-lite", *RECURRENT)
QUANTIZED += ("gemma3n", "gemma3n-second-stream", "gemma4")


@pytest.mark.parametrize("name", [n if n in QUICK[2:6] else pytest.param(n, marks=pytest.mark.slow) for n in QUANTIZED])
def test_beside_quantized_weights_an_adapter_is_peft_s_but_for_their_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, tokens, found = save_hf(tmp_path, model), random_tokens(97, 21), []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, quantize="int8", pages=16, threads=2) as engine:
            wrapped = adapted(model, linear_layers(model))
            adapter = hw.Adapter.from_tensors(state_of(wrapped), alpha=6)
            error = kl(logits_of(model, tokens), all_logits(engine, tokens))
            found.append(all_logits(engine, tokens, adapter))
            assert kl(logits_of(wrapped, tokens), found[-1]) <= 5 * error + 1e-4
            assert kl(logits_of(wrapped, tokens), all_logits(engine, tokens)) > 0.005
    if name not in RECURRENT:
        assert np.array_equal(*found)


def kl(expected: np.ndarray, found: np.ndarray) -> float:
    p, q = (torch.from_numpy(np.asarray(x)).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


GGUF_QUICK = ("gpt2", "falcon", "phi3", "granite", "gemma4")
GGUF_SLOW = (
    *("gemma2-head-scale", "gemma3-pattern", "phi", "olmo2", "olmo3", "smollm3-every-fourth", "cohere2-pattern"),
    *("stablelm", "gpt-neox", "falcon-new", "starcoder2", "glm", "glm4", "mixtral", "qwen2-moe", "qwen3-moe"),
    *("granite-moe", "llama4-published", "gemma3n-published", "gemma4-even"),
)


@pytest.mark.parametrize("name", [*GGUF_QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in GGUF_SLOW)])
def test_a_gguf_adapter_is_the_peft_adapter(name: str, tmp_path: Path) -> None:
    """Over a GGUF model and over a folder, whose rows and names are others."""
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 21)
    file = write_family(tmp_path / "model.gguf", folder, model)
    wrapped = adapted(model, linear_layers(model))
    expected, given = logits_of(wrapped, tokens), tmp_path / "adapter.gguf"
    adapter = hw.Adapter.load(write_family_lora(given, state_of(wrapped), model.config, alpha=6.0))
    for path in (folder, file):
        with hw.Engine(path, dtype="float32", pages=16, threads=1) as engine:
            assert_close(all_logits(engine, tokens, adapter), expected)


@pytest.mark.parametrize(
    "name", ["lfm2", pytest.param("mamba2", marks=pytest.mark.slow), "qwen3-next-plain", "qwen3.5"]
)
def test_a_recurrent_model_of_a_gguf_file_takes_peft_s_adapters(name: str, tmp_path: Path) -> None:
    """Qwen3.5's heads are in another order there, and adapters of what has heads are refused."""
    model = recurrent_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 21)
    with hw.Engine(write_recurrent(tmp_path / "model.gguf", folder, model), dtype="float32", pages=16) as engine:
        taken = list(linear_layers(model))
        if name == "qwen3.5":
            moved = [layer for layer in taken if ".linear_attn." in layer]
            taken = [layer for layer in taken if layer not in moved]
            for layer in moved[:5]:
                with pytest.raises(
                    hw.Unsupported, match=f"{layer.removeprefix('model.')} in the order.*load the model"
                ):
                    engine.load_adapter(hw.Adapter.from_tensors(state_of(adapted(model, [layer]))))
        wrapped = adapted(model, taken)
        adapter = hw.Adapter.from_tensors(state_of(wrapped), alpha=6)
        assert_close(all_logits(engine, tokens, adapter), logits_of(wrapped, tokens))


def test_drafts_of_the_first_layers_are_made_under_the_same_rows(tmp_path: Path) -> None:
    """The part of an adapter for the first layers is already cut, and in the model's order."""
    _, model = family_model("glm4")
    with torch.no_grad():  # the second layer adds nothing, so that the first drafts as the model draws
        for linear in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            linear.weight.zero_()
    first = [layer for layer in linear_layers(model) if ".0." in layer]
    adapter, tokens = hw.Adapter.from_tensors(state_of(adapted(model, first))), random_tokens(97, 9)
    stats = own_drafts(save_hf(tmp_path, model), adapter, tokens, 16)
    assert (stats.drafted > 0, stats.acceptance) == (True, 1.0)


def test_names_of_a_text_model_inside_of_another_are_its_own(tmp_path: Path) -> None:
    """As peft calls them where it wraps a model with images; what belongs to images is refused by its name."""
    _, model = family_model("gemma3")
    state = state_of(adapted(model, [l for l in linear_layers(model) if l != "lm_head"]))
    own = hw.Adapter.from_tensors(state)
    for outer in ("model.language_model.layers.", "language_model.model.layers.", "layers."):
        renamed = {name.replace("model.layers.", outer): tensor for name, tensor in state.items()}
        assert hw.Adapter.from_tensors(renamed).digest == own.digest
    for other in ("model.vision_tower.encoder.layers.", "model.encoder.layers."):
        renamed = {name.replace("model.layers.", other): tensor for name, tensor in state.items()}
        with pytest.raises(hw.Unsupported, match=r"self_attn\.q_proj\.lora_A.*none of a decoder's linear layers"):
            hw.Adapter.from_tensors(renamed)


def test_an_adapter_of_another_family_is_refused_by_its_layers_name(tmp_path: Path) -> None:
    _, model = family_model("phi3")
    _, other = family_model("gpt2")
    adapter = hw.Adapter.from_tensors(state_of(adapted(other, ["transformer.h.1.attn.c_attn"])))
    with (
        hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine,
        pytest.raises(hw.Unsupported, match=r"layers\.1\.attn\.c_attn.*phi3 model has no linear layer of that name"),
    ):
        engine.load_adapter(adapter)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
        {"target_modules": "all-linear", "rank_pattern": {"c_fc": 3}},
        {"target_modules": ["c_attn"], "layers_to_transform": [1], "layers_pattern": "h"},
        {"target_modules": ["c_attn"], "layers_to_transform": [0]},
        {"target_modules": r"transformer\.h\.1\.mlp\.c_.*"},
    ],
    ids=["transposed", "all linear", "layers", "layers without a pattern", "pattern"],
)
def test_a_config_means_what_it_does_in_peft_for_modules_of_other_names(tmp_path: Path, config: dict[str, Any]) -> None:
    _, model = family_model("gpt2")
    tokens, wrapped = random_tokens(97, 9), with_lora(model, **config)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens, adapter), logits_of(wrapped, tokens))
        facts = wrapped.peft_config["default"].to_dict()
        some = {name: t for name, t in state_of(wrapped).items() if "h.1." not in name}
        if some and len(some) < len(state_of(wrapped)):
            with pytest.raises(hw.BadModelFile, match=r"layers\.1\..*there are no weights"):
                engine.load_adapter(hw.Adapter.from_tensors(some, facts))
