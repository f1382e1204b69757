"""The GPU benchmark runs on a tiny model, on any machine, and writes what it says it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_section_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["results"]
    works = " ".join(row["work"] for row in found)
    assert all(
        word in works
        for word in ("1 sequence", "whole run", "prompt", "masks", "sampler", "constraint", "window", "loading")
    )
    assert all(row["value"] > 0 for row in found if row["unit"] != "%" and "grammar" not in row["work"])
    (grammars,) = (row for row in found if "grammar" in row["work"])
    assert grammars["value"] is None and "a vocabulary of 300 has no room" in grammars["note"]  # noqa: PT018
    table = (tmp_path / "gpu.txt").read_text()
    assert all(row["work"] in table for row in found)
    peers = {row["work"]: row["note"] for row in found if row["work"].startswith("transformers: ")}
    assert all(any(word in work for work in peers) for word in ("static", "eager", "prompt", "batched"))
    assert all("; Headway " in note and note.endswith(" times as fast") for note in peers.values())


def test_a_section_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--only", "decode,bach", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "there is no section 'bach'; it takes step, quantized, decode" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_transformers_the_table_says_so(tmp_path: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; sys.path.insert(0, 'benchmarks'); import gpu; gpu.main()"
    command = [sys.executable, "-c", code, "--quick", "--only", "peers", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert (row["work"], row["value"]) == ("transformers", None)
    assert "not installed" in (tmp_path / "gpu.txt").read_text()


@pytest.fixture
def gpu_peers() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu_peers  # type: ignore[import-not-found]

        yield gpu_peers
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_a_peer_is_told_beside_headways_own_figure(gpu_peers: Any) -> None:
    def said(unit: str, value: float | None, own: dict[str, float | None]) -> str:
        work = gpu_peers.Work("w", unit, "ours", {}, 1.0, lambda answer: 0.0)
        return gpu_peers.Found(work, value, "5.0").beside(own)

    assert said("ms", 8.0, {"ours": 4.0}) == "5.0; Headway 4.00 ms: 2.00 times as fast"
    assert said("tok/s", 8.0, {"ours": 4.0}) == "5.0; Headway 4.00 tok/s: 0.50 times as fast"
    assert said("ms", None, {"ours": 4.0}) == "5.0; Headway 4.00 ms"
    assert said("ms", 8.0, {}) == said("ms", None, {"ours": None}) == "5.0; Headway was not measured in this run"


def test_a_peer_that_fails_or_is_late_is_skipped_with_the_reason(gpu_peers: Any) -> None:
    load = {"do": "load", "shape": {}, "device": "cpu", "dtype": "float7", "static": None, "batched": None}
    soon, later = time.perf_counter(), time.perf_counter() + 200
    with gpu_peers.Process(load) as failing, gpu_peers.Process(load) as late:
        late.prepare(soon)
        failing.prepare(later)
        for process, why in ((late, "not ready: no answer in 0 s"), (failing, "not ready: AttributeError: .*float7")):
            with pytest.raises(gpu_peers.PeerFailed, match=why):
                process.ask({"do": "prefill", "tokens": 4, "repeats": 1}, later)


@pytest.mark.gpu
def test_steps_of_experts_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_experts.py", "--layers", "1", "--against", "", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-experts.json").read_text())
    assert {row["shape"] for row in found} == {"qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"}
    assert all(row["ms"] > row["weights_ms"] > 0 for row in found)
    quantized = [*command[:2], "qwen3-30b-a3b", *command[2:], "--experts", "q4_k"]
    done = subprocess.run(quantized, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    fewer = json.loads((tmp_path / "gpu-experts-q4_k.json").read_text())
    floats = {row["rows"]: row["weights_ms"] for row in found if row["shape"] == "qwen3-30b-a3b"}
    assert all(row["weights_ms"] < floats[row["rows"]] for row in fewer)
