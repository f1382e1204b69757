"""Engines for the examples, and how one is run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import headway as hw
from support.examples import fixed, gallery, load


@pytest.fixture(scope="module")
def floats() -> Iterator[hw.Engine]:
    """The default model with float weights, for claims that hold to float rounding."""
    with hw.Engine("smollm2", dtype="float32", pages=64, threads=1) as engine:
        yield engine


@pytest.fixture
def run(smollm2: hw.Engine, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example: what it returned and what it printed. It must leave no page behind."""

    def go(name: str, *args: Any, engine: hw.Engine = smollm2) -> tuple[Any, str]:
        before = engine.stats().pages_held
        value = engine.run(load(name).program, *args)
        for _ in range(1000):  # a pass that ran ahead of a stop gives its pages back when its step ends
            if engine.stats().pages_held == before:
                break
            time.sleep(0.01)
        assert engine.stats().pages_held == before, "the example kept pages"
        printed = capsys.readouterr().out
        assert printed.strip()
        if name in gallery():
            shown, seen = (fixed(name, text.splitlines()) for text in (gallery()[name], printed))
            assert shown, "nothing is compared"
            assert shown == seen, "the gallery shows another output"
        return value, printed

    return go
