"""The GPU benchmark runs on a tiny model, on any machine, and writes what it says it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_section_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["results"]
    works = " ".join(row["work"] for row in found)
    assert all(
        word in works for word in ("1 sequence", "whole run", "prompt", "masks", "sampler", "constraint", "window")
    )
    assert all(row["value"] > 0 for row in found if row["unit"] != "%")
    table = (tmp_path / "gpu.txt").read_text()
    assert all(row["work"] in table for row in found)
