"""The benchmarks run, on a tiny model, and write what they say they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_concurrency_measures_every_section_and_describes_the_machine(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/concurrency.py", "--quick", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "concurrency.json").read_text())
    assert data["about"]["machine"]["cpu"]
    assert "transformers gave 12 of 12 greedy tokens as Headway did" in data["notes"]
    found = data["results"]
    assert [row["programs"] for row in found["throughput"]] == [1, 2, 4]
    assert all(row[f"{name} tokens/s"] > 0 for row in found["throughput"] for name in ("headway", "transformers"))
    forks, apart = found["fan-out"]
    assert forks["computed"] < apart["computed"] / 3
    assert forks["pages"] < apart["pages"]
    first, again = found["cache"]
    assert (first["page_hits"], again["page_hits"]) == (0, 3)  # of four: the last holds the row that is read
    alone, disturbed = found["latency"]
    assert 0 < alone["p50 ms"] <= alone["max ms"]
    assert disturbed["prompt seconds"] > 0
    table = (tmp_path / "concurrency.txt").read_text()
    assert all(section in table for section in found)


def test_an_unknown_engine_is_refused() -> None:
    command = [sys.executable, "benchmarks/concurrency.py", "--quick", "--against", "abacus"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'abacus'" in done.stderr
