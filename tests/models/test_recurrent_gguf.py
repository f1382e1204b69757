"""GGUF files of families with recurrent layers: the logits of the folder they were written from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headway as hw
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.gguf_recurrent import recurrent_model, write_recurrent
from support.hf import save_hf

QUICK = ("lfm2", "qwen3.5", "granite-hybrid")
SLOW = ("granite-hybrid-dense", "mamba2", "mamba2-groups", "qwen3-next-plain", "qwen3.5-moe")


@pytest.mark.parametrize("native", ["require", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_gguf_file_is_the_model_it_was_written_from(
    name: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    model = recurrent_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 40)
    expected = reference_logits(model, tokens)
    with hw.Engine(write_recurrent(tmp_path / "m.gguf", folder, model), pages=8, threads=1) as engine:
        assert engine.info.runner.startswith("native" if native == "require" else "torch")
        assert_close(all_logits(engine, tokens), expected)
        assert engine.info.parameters == sum(p.numel() for p in model.parameters())
        assert engine.config.tied == model.config.tie_word_embeddings
    quantized = write_recurrent(tmp_path / "q.gguf", folder, model, kind="Q8_0")
    with hw.Engine(quantized, pages=8, threads=1) as engine:
        close = np.corrcoef(all_logits(engine, tokens).ravel(), expected.ravel())[0, 1]
        assert close > 0.9  # routers in 8 bits choose other experts now and then
