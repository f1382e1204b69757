"""`headway quantize`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hf import random_hf, save_hf
from support.hf_families import family_model


def test_the_command_writes_a_model_and_overwrites_none(tmp_path: Path, headway: Callable[..., Any]) -> None:
    _, model = random_hf("llama", 2, hidden_size=64, intermediate_size=96)
    folder = save_hf(tmp_path, model)
    done = headway("quantize", str(folder), "--to", "int4", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert written["tensors"] == 14
    assert written["bytes_after"] < written["bytes_before"]
    again = headway("quantize", str(folder), "--to", "int4", "--out", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "exists; nothing is overwritten" in again.stderr
    assert "give --to FORMAT and --out PATH" in headway("quantize", str(folder)).stderr


def test_what_stays_as_it_is_is_said(tmp_path: Path, headway: Callable[..., Any]) -> None:
    _, model = family_model("granite-moe", seed=3)
    folder, out = save_hf(tmp_path, model), tmp_path / "out"
    done = headway("quantize", str(folder), "--to", "int8", "--out", str(out))
    assert "4 tensors of linear layers" in done.stderr
    assert "stay as they are" in done.stderr
    grown = headway("quantize", str(out), "--to", "F32", "--out", str(tmp_path / "out.gguf"))
    assert "larger than the source" in grown.stderr
