"""Kernels of quantized experts compile for an H200, and read their words four at a time; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
SLOW = ("fp4.32", "int4.32", "int4.32.minimum", "int8.32.minimum", "int4.16.steps", "int4.16.steps.minimum")


@pytest.mark.parametrize(
    "forms",
    [("int4.32.steps.minimum",), ("int8.16.steps",), pytest.param(("int8.32", *SLOW), marks=pytest.mark.slow)],
    ids=["Q4_K", "Q6_K", "others"],
)
def test_kernels_compile_and_read_words_together(forms: tuple[str, ...], tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(TESTS), *sys.path])
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "support.compiled", *forms]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for kernels in json.loads(done.stdout.splitlines()[-1]).values():
        assert kernels.pop("float32")  # one number at a time
        for found in kernels.values():
            weights = [each for each in found if "evict_first" in each]
            assert any("v4.b32" in each for each in weights)
            assert all("v4.b32" in each or "v2.b32" in each for each in weights)  # four halves are two words
