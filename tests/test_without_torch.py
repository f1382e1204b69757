"""The native path where torch cannot be imported: the same values as with it, and a sentence where it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.kernels.native.library import open_library
from support import without_torch
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf
from support.hf_families import family_model
from support.lora import save_lora, with_lora

pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")
TESTS = Path(__file__).parent


def blocked(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python, in an environment of its own."""
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False, cwd=TESTS,
        env={**os.environ, **environment},
    )  # fmt: skip


def without(model: Path, adapter: str, cache: Path, **options: Any) -> dict[str, Any]:
    done = blocked("-m", "support.without_torch", str(model), adapter, str(cache), json.dumps(options))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same(one: dict[str, Any], other: dict[str, Any], *, rtol: float) -> None:
    for name in one.keys() - {"runner", "probes"}:
        assert one[name] == other[name], name
    for a, b in zip(one["probes"], other["probes"], strict=True):
        np.testing.assert_allclose(_flat(a), _flat(b), rtol=rtol, atol=rtol)


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for each in value for number in _flat(each)]
    return [float(value)]


def test_tokens_probes_masks_snapshots_beams_and_adapters_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized weights have one result to the bit, so every token is that of the torch reference."""
    _, model = random_hf("llama", 0, hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "model.gguf", model, kind="Q8_0")
    adapter = str(save_lora(tmp_path / "adapter", with_lora(model, seed=1, r=3)))
    here = without(path, adapter, tmp_path / "one")
    assert here["runner"].startswith("native")
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    reference = without_torch.run(str(path), adapter, str(tmp_path / "two"))
    assert reference["runner"] == "torch"
    assert_same(here, reference, rtol=1e-5)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-v2", "llama4", "lfm2", "granite-hybrid")]


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next", *SLOW])
def test_latent_and_recurrent_layers_need_no_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf(tmp_path / "model", family_model(name)[1])
    here = without(folder, "", tmp_path / "one")
    assert here["runner"].startswith("native")
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    reference = without_torch.run(str(folder), "", str(tmp_path / "two"))
    assert (reference["runner"], reference["greedy"]) == ("torch", here["greedy"])
    for ours, theirs in zip(here["probes"], reference["probes"], strict=True):
        np.testing.assert_allclose(_flat(ours), _flat(theirs), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_folder_of_floats_loads_and_quantizes(tmp_path: Path, quantize: str | None) -> None:
    folder = save_hf(tmp_path / "model", random_hf("qwen2", 0)[1])
    found = without(folder, "", tmp_path / "cache", quantize=quantize)
    assert found["runner"].startswith("native")
    assert found["snapshot"][:8] == found["greedy"][:8]


NEEDS_TORCH = {
    "the reference": "import headway as hw; hw.Engine({model!r})",
    "a pipeline": "import headway as hw; hw.pipeline('fill-mask', {model!r})",
    "a random model": "from headway.testing import random_model; random_model()",
    "a CUDA device": "import headway as hw; hw.Engine({model!r}, device='cuda')",
}


@pytest.mark.parametrize("what", NEEDS_TORCH)
def test_what_needs_torch_says_so_with_the_command(tmp_path: Path, what: str) -> None:
    folder = save_hf(tmp_path / "model", random_hf("llama", 0)[1])
    code = "import sys; sys.modules['torch'] = None; " + NEEDS_TORCH[what].format(model=str(folder))
    native = "off" if what == "the reference" else "auto"
    done = blocked("-c", code, HEADWAY_NATIVE=native)
    said = done.stderr.strip().splitlines()[-1]
    assert "needs torch, which is not installed; run: pip install 'headway[" in said
