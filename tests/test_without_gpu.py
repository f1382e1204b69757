"""Without a GPU, and without Triton, everything imports, computes on what there is, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules["triton"] = None  # importing it fails, and looking for it finds nothing
"""
EVERYTHING = """
import pkgutil, importlib, headway
names = [m.name for m in pkgutil.walk_packages(headway.__path__, "headway.")]
names = [name for name in names if not name.endswith(("__main__", "._headway"))]
needs_triton = (
    "headway.kernels.triton.", "headway.runtime.runners.cuda.", "headway.runtime.runners.parallel.cuda",
    "headway.models.quantized.cuda",
)
failed = []
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(name)
        assert "triton" in str(error), (name, error)
print([name for name in failed if not name.startswith(needs_triton)], len(names) > 100)
"""
ENGINE = """
import headway as hw
from headway.testing import random_model

async def first(engine):
    async with engine.context() as ctx:
        return await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=4, stop_only=True).tokens()

with hw.Engine(random_model(), pages=8, threads=1) as engine:
    assert len(engine.run(first)) == 4
try:
    hw.Engine(random_model(), device="cuda", pages=8)
except hw.Unsupported as error:
    print(error)
"""


ASKED = """
import os
import headway as hw
from headway.testing import random_model
os.environ["HEADWAY_NATIVE"] = "triton"
try:
    hw.Engine(random_model(), pages=8)
except hw.Unsupported as error:
    print(error)
finally:
    del os.environ["HEADWAY_NATIVE"]
"""
DOCTOR = """
from headway.cli.main import dispatch
dispatch(["doctor", "--json", "--threads", "1"])
print("for people:")
dispatch(["doctor", "--threads", "1"])
"""
PROGRAMS = {"engine": ENGINE, "asked": ASKED, "doctor": DOCTOR, "everything": EVERYTHING}
# One process runs them all, each in a namespace of its own, and prints what each of them printed, as JSON.
RUNNER = """
import contextlib, io, json
printed = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    printed[name] = out.getvalue().strip()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each of the programs prints."""
    environment = {k: v for k, v in os.environ.items() if k != "HEADWAY_NATIVE"} | {"CUDA_VISIBLE_DEVICES": ""}
    command, given = [sys.executable, "-c", WITHOUT + RUNNER], json.dumps(PROGRAMS)
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_but_its_kernels_imports_without_triton(printed: dict[str, str]) -> None:
    assert printed["everything"] == "[] True"


def test_an_engine_runs_on_the_cpu_and_says_that_there_is_no_gpu(printed: dict[str, str]) -> None:
    assert printed["engine"] == "device 'cuda' was asked for and this machine has 0 CUDA devices; use cpu"


def test_asking_for_triton_says_how_to_get_it(printed: dict[str, str]) -> None:
    told = printed["asked"]
    assert told.startswith("HEADWAY_NATIVE asks for Triton kernels, and the package triton is not installed")
    assert "pip install triton" in told


def test_the_doctor_says_what_is_missing_for_a_gpu(printed: dict[str, str]) -> None:
    shown, text = printed["doctor"].split("for people:")
    report = json.loads(shown)
    assert report["cuda"] == []
    assert "CUDA" in report["gpu"]["missing"]
    assert report["gpu"]["reason"].startswith("the package triton is not installed")
    assert report["gpu"]["graphs"] == "off: there is no CUDA device"
    line = next(line for line in text.splitlines() if "CUDA devices" in line)
    assert "none: torch" in line
