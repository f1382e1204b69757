"""New weights for every family, by the names that transformers has in memory and in folders."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import headway as hw
from support.checks import all_logits, assert_close, random_tokens
from support.gguf_families import write_family
from support.hf import save_hf
from support.hf_families import NAMES, family_model
from support.lora import logits_of, state_of, with_lora

QUICK = ("gpt2", "falcon-new", "glm4", "gpt-oss", "mixtral", "qwen3-next")
TOKENS = random_tokens(97, 21)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as the folder has them."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def changed(model: Any, change: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The model's own weights, of which those that `change` picks are now others."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if change(name):
                tensor.mul_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    return {name: tensor for name, tensor in model.state_dict().items() if change(name)}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_new_weights_are_those_of_the_other_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = family_model(name, seed=0)
    _, other = family_model(name, seed=1)
    folder, in_folder = save_hf(tmp_path / "first", first), stored(save_hf(tmp_path / "other", other))
    in_memory, expected = other.state_dict(), logits_of(other, TOKENS)
    for native in ("auto", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        for tensors in (in_memory, in_folder):
            with hw.Engine(folder, dtype="float32", pages=16, threads=2) as engine:
                engine.update_weights(tensors)
                assert_close(all_logits(engine, TOKENS), expected)
    some = changed(first, lambda n: bool(re.search(r"\b(layers|h)\.1\.", n)) and not n.endswith("bias"))
    expected = logits_of(first, TOKENS)
    for native in ("auto", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, dtype="float32", pages=16, threads=2) as engine:
            engine.update_weights(some)
            assert_close(all_logits(engine, TOKENS), expected)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_are_quantized_again(quantize: str, tmp_path: Path) -> None:
    """As loading the other model quantizes them: the same bits."""
    for name in ("falcon-new", "granite-moe", "glm4", "deepseek-v3"):
        folders = [save_hf(tmp_path / f"{name}{seed}", family_model(name, seed=seed)[1]) for seed in range(2)]
        found = []
        for folder in folders:
            with hw.Engine(folder, quantize=quantize, pages=16, threads=2) as engine:
                engine.update_weights(stored(folders[1]))
                found.append(all_logits(engine, TOKENS))
        with hw.Engine(folders[1], quantize=quantize, pages=16, threads=2) as engine:
            found.append(all_logits(engine, TOKENS))
        assert np.array_equal(found[0], found[2]), name
        assert np.array_equal(found[1], found[2]), name


def test_adapters_and_pages_are_those_of_the_new_weights(tmp_path: Path) -> None:
    _, first = family_model("phi3", seed=0)
    _, other = family_model("phi3", seed=1)
    wrapped = with_lora(other, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    adapter = hw.Adapter.from_tensors(state_of(wrapped), wrapped.peft_config["default"].to_dict())

    def logits(engine: hw.Engine) -> tuple[np.ndarray, int]:
        with engine.context().fill(TOKENS[:-1]) as context:
            forward = context.forward().input(TOKENS[-1:]).adapter(adapter)
            handle = forward.probe(-1, hw.Logits())
            out = forward.execute().result()
            return out.logits(handle), out.stats.cache_hits

    with hw.Engine(save_hf(tmp_path, first), dtype="float32", pages=32, page_size=4, threads=1) as engine:
        old, _ = logits(engine)
        assert logits(engine)[1] > 0
        engine.update_weights(other.state_dict())
        new, hits = logits(engine)
        assert hits == 0
        assert_close(new, logits_of(wrapped, TOKENS)[-1])
        assert np.abs(new - old).max() > 0.1
        assert logits(engine)[1] > 0


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a name": (lambda t: t.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(84, 64)}), "not a weight of this"),
    "a layer": (lambda t: t.update({"model.layers.9.self_attn.q_proj.weight": torch.ones(64, 64)}), "did you mean"),
    "a shape": (lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 63)}), "has shape"),
    "a stack of other experts": (
        lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 168, 64)}),
        "5 experts of 168 rows",
    ),
    "some experts": (
        lambda t: [t.pop(name) for name in list(t) if "experts.3.w1" in name],  # type: ignore[func-returns-value]
        r"experts\.3\.w1\.weight' is missing",
    ),
    "a NaN": (lambda t: t.update({"model.norm.weight": torch.full((64,), float("nan"))}), "not finite"),
    "another head": (lambda t: t.update({"lm_head.weight": torch.ones(96, 64)}), "has shape"),
    "twice": (
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(5, 64)}),
        "given twice",
    ),
}


def test_what_is_wrong_changes_nothing(tmp_path: Path) -> None:
    _, first = family_model("mixtral", seed=0)
    _, other = family_model("mixtral", seed=1)
    folder, good = save_hf(tmp_path / "first", first), stored(save_hf(tmp_path / "other", other))
    with hw.Engine(folder, dtype="float32", pages=16, threads=1) as engine:
        before, fingerprint = all_logits(engine, TOKENS), engine.fingerprint
        for case, (spoil, words) in WRONG.items():
            bad: dict[str, Any] = dict(good)
            spoil(bad)
            with pytest.raises(hw.InvalidInput, match=words):
                engine.update_weights(bad)
            assert engine.fingerprint == fingerprint, case
        assert np.array_equal(all_logits(engine, TOKENS), before)


def test_a_tied_output_is_given_with_its_embedding_or_not_at_all(tmp_path: Path) -> None:
    _, model = family_model("gpt2")
    head = model.lm_head.weight.detach() + 1
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        with pytest.raises(hw.InvalidInput, match=r"tied to 'transformer\.wte\.weight'"):
            engine.update_weights({"lm_head.weight": head})
        engine.update_weights({"lm_head.weight": head, "transformer.wte.weight": head})
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        assert_close(all_logits(engine, TOKENS), logits_of(model, TOKENS))


def test_names_inside_of_a_model_with_images_are_the_text_model_s(tmp_path: Path) -> None:
    _, first = family_model("gemma3", seed=0)
    _, other = family_model("gemma3", seed=1)
    given = {name.replace("model.", "model.language_model."): tensor for name, tensor in other.state_dict().items()}
    given["model.vision_tower.embeddings.weight"] = torch.ones(3, 3)
    with hw.Engine(save_hf(tmp_path, first), dtype="float32", pages=8, threads=1) as engine:
        engine.update_weights(given)
        assert_close(all_logits(engine, TOKENS), logits_of(other, TOKENS))


def test_a_model_from_a_gguf_file_of_another_layout_is_not_updated(tmp_path: Path) -> None:
    _, model = family_model("gemma3-pattern")
    path = write_family(tmp_path / "m.gguf", save_hf(tmp_path / "folder", model), model)
    with (
        hw.Engine(path, pages=8, threads=1) as engine,
        pytest.raises(hw.Unsupported, match=r"GGUF file.*load the folder"),
    ):
        engine.update_weights(model.state_dict())


@pytest.mark.slow
def test_ranks_of_a_family_of_another_layout_are_not_updated(tmp_path: Path) -> None:
    _, model = family_model("gpt2")
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, tensor_parallel=2) as engine:
        assert not engine.capabilities.update_weights
        with pytest.raises(hw.Unsupported, match="gpt2 family cannot be updated over 2 ranks"):
            engine.update_weights(model.state_dict())
