"""The real model, once for the whole run: SmolLM2 from Headway's cache, fetched on first use.

Engines take HEADWAY_NATIVE as they find it: `make test-all` runs everything with `require`, so that nothing falls back
to torch unnoticed, and the suite of the program API once more with `off`, on the torch reference.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support.interpreter import steady_dots
from support.properties import load_profile

if TYPE_CHECKING:
    import headway as hw


# Without a device Triton's kernels run in its interpreter. It looks when it is first imported, by whomever.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No example of Hypothesis has a deadline: under load each takes many times as long.
settings.register_profile("headway", deadline=None)
settings.load_profile("headway")

# What is imported stays: nothing is looked through for garbage until all tests are collected.
gc.disable()

# A shell that starts this run in the background has it ignore ctrl-C, which every program started here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files with few tests, each of which takes long: processes, models of other kinds, browsers, pages of the docs, Ray.
LONG = ("tests/test_", "tests/cluster/", "tests/examples/", "tests/server/", "tests/pipelines/", "tests/cli/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: workers take file after file, and all would wait for the one that takes a long one last."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Thousands of tests are not looked through for garbage again and again: that takes half a second each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Tests of Triton kernels have imported its interpreter by now."""
    steady_dots()


def pytest_unconfigure() -> None:
    """What is left is cleared away at the end as ever."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried with fewer examples, unless `--hypothesis-profile` says otherwise."""
    load_profile(config.getoption("--hypothesis-profile"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file."""
    from headway.models.hub.store import resolve

    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[hw.Engine]:
    """An engine on the default model, shared by every test that only adds contexts of its own."""
    import headway as hw

    with hw.Engine("smollm2", pages=1024, threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm2_float(smollm2_path: Path) -> Iterator[hw.Engine]:
    """The same with its weights and rows as floats: what others compute from that file, to float32 rounding."""
    import headway as hw

    with hw.Engine("smollm2", dtype="float32", pages=256, threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def guest() -> Path:
    """The machine code of the sandbox's guest; built and compiled once, kept in build/ and in the cache."""
    from headway.sandbox.artifact import BUILT, compiled_guest
    from headway.sandbox.build import build

    build(BUILT.parent)
    return compiled_guest()
