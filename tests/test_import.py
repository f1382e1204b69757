"""Importing headway is quick and light: torch comes with the first engine."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import headway
import headway.batch
from headway import testing

LIMIT = 0.3  # seconds
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "gguf",
    "jinja2",
    "safetensors",
    "llguidance",
    "fastapi",
    "pydantic",
)


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_takes_less_than_a_third_of_a_second_of_the_processor() -> None:
    timed = "import time; start = time.process_time(); import headway; print(time.process_time() - start)"
    assert min(float(python(timed)) for _ in range(3)) < LIMIT


def test_importing_loads_nothing_heavy() -> None:
    loaded = python("import sys, headway; print(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == []


def test_errors_and_specs_need_no_torch() -> None:
    program = """
import sys, headway as hw
hw.Argmax(), hw.TopKTopP(5, 0.9), hw.Sampling(temperature=0.5), hw.Logits(), hw.Hidden(3), hw.Mask.causal()
try:
    hw.TopK(-1)
except hw.HeadwayError as error:
    assert isinstance(error, ValueError)
else:
    raise SystemExit("TopK(-1) was taken")
print("torch" in sys.modules)
"""
    assert python(program).strip() == "False"


def test_every_public_name_is_there_and_documented() -> None:
    assert len(set(headway.__all__)) == len(headway.__all__)
    for name in headway.__all__:
        thing = getattr(headway, name)
        assert thing.__doc__ or name in ("Sampler", "Probe"), name
    assert set(headway.__all__) <= set(dir(headway))


def test_the_reference_names_what_is_there() -> None:
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    named = set(re.findall(r"^::: headway\.(\w+)$", page, re.MULTILINE))
    others = re.findall(r"^::: headway\.([a-z_.]+)$", page, re.MULTILINE)
    modules = {
        import_module(f"headway.{name}") for name in others if name not in headway.__all__
    }  # the rest: functions
    assert {name for name in named if name[0].isupper()} <= set(headway.__all__)
    for module in modules - {testing, headway.batch}:
        own = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        assert own
        assert {name for name in own if not name.startswith("_")} <= set(headway.__all__), module.__name__


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Enigne"):
        headway.Enigne  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert headway.__version__ == version("headway")


def test_the_collector_is_on_again_after_much_was_made() -> None:
    program = """
import gc, threading
import headway as hw
from headway.base.system.gc_paused import gc_paused

hw.Engine
assert gc.isenabled()
with gc_paused():
    assert not gc.isenabled()
    with gc_paused():
        pass
    assert not gc.isenabled()
assert gc.isenabled()
first, second = threading.Event(), threading.Event()

def other():
    with gc_paused():
        first.set()
        second.wait()

thread = threading.Thread(target=other)
with gc_paused():
    thread.start()
    first.wait()
second.set()
thread.join()
assert gc.isenabled()
gc.disable()
with gc_paused():
    pass
assert not gc.isenabled()  # somebody else's choice
print("fine")
"""
    assert python(program).strip() == "fine"
