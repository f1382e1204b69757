"""The crowd of benchmarks/serve_load.py, smaller and shorter: nothing goes wrong with the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.forked import forked

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "benchmarks" / "serve_load.py")


@pytest.mark.slow
def test_a_crowd_of_clients_that_come_and_go(tmp_path: Path, smollm2_path: Path) -> None:
    options = ["--clients", "60", "--seconds", "40", "--pages", "300", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPT, *options], text=True, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "serve_load.json").read_text())
    assert result["wrong"] == []
    assert result["ends"]["answered"] > 60
    assert result["ends"]["left after some events"] > 10
    assert result["compared_with_alone"] > 10
    assert result["pages"]["held_at_the_end"] == 0
    assert "nothing went wrong" in (tmp_path / "serve_load.txt").read_text()


def test_growth_is_measured_from_when_all_pages_were_in_use() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    from serve_load import MIB, Sample, growth

    def sample(second: int, mib: float, free: int) -> Sample:
        return Sample(second, int(mib * MIB), free, 0, 0, 1.0)

    filling = [sample(i, 100 + 10 * i, 100 - 10 * i) for i in range(10)]
    flat = [sample(10 + i, 200, 0) for i in range(40)]
    assert growth([*filling, *flat], 100) == (10, 0)
    leaking = [sample(10 + i, 200 + i, 0) for i in range(40)]
    since, grew = growth([*filling, *leaking], 100)
    assert (since, round(grew / MIB)) == (10, 36)


@pytest.mark.parametrize("wrong", [("--clients", "0"), ("--seconds", "0"), ("--leave", "2"), ("--crowd", "1")])
def test_options_that_make_no_sense_are_refused(wrong: tuple[str, str]) -> None:
    done = subprocess.run(forked(SCRIPT, *wrong), text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "error:" in done.stderr
