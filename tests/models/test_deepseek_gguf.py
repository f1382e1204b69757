"""GGUF files of DeepSeek models: the logits of the folder they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.models.files.gguf import GgufFile
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_deepseek import FILES, write_deepseek
from support.hf import save_hf
from support.hf_families import build_hf, family_model


@pytest.mark.parametrize("native", ["require", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_is_the_model_it_was_written_from(
    name: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    kind, config = FILES[name]
    _, model = build_hf(f"{kind}Config", f"{kind}ForCausalLM", config, 3)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 40)
    expected = reference_logits(model, tokens)
    with hw.Engine(write_deepseek(tmp_path / "m.gguf", folder, model), pages=8, threads=1) as engine:
        assert engine.info.runner.startswith("native" if native == "require" else "torch")
        assert_close(all_logits(engine, tokens), expected)
        assert engine.config.tied == model.config.tie_word_embeddings
    with hw.Engine(write_deepseek(tmp_path / "q.gguf", folder, model, kind="Q8_0"), pages=8, threads=1) as engine:
        close = np.corrcoef(all_logits(engine, tokens).ravel(), expected.ravel())[0, 1]
        assert close > 0.9  # routers in 8 bits choose other experts now and then


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func is 3; supported are 1"),
        ({"expert_group_count": 3}, "expert_group_count is 3; 8 experts cannot be divided"),
        ({"expert_group_used_count": 9}, "expert_group_used_count is 9; it must be at most expert_group_count"),
        ({"attention.kv_lora_rank": None}, "has no key 'deepseek2.attention.kv_lora_rank'"),
        ({"attention.key_length_mla": None}, "has no key 'deepseek2.attention.key_length_mla'"),
        ({"attention.temperature_scale": 0.1}, "temperature_scale is .*which the deepseek-v2 family does not have"),
        ({"attention.key_length": 20}, "attention.key_length is 20; a latent vector of 20 numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name_before_memory_is_taken(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model("deepseek-v3")
    path = write_deepseek(tmp_path / "m.gguf", save_hf(tmp_path, model), model, **changes)
    monkeypatch.setattr(GgufFile, "array", lambda *_, **__: pytest.fail("a weight was read"), raising=False)
    with pytest.raises(hw.HeadwayError, match=message):
        hw.Engine(path, pages=8, threads=1)
