"""How long a thread may run before another: as short as the shortest that is asked for, and as before afterwards."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import headway
from headway.base.system.switch_interval import SwitchInterval


@pytest.fixture
def usual() -> float:
    return sys.getswitchinterval()


def test_the_shortest_holds_in_any_order_of_ends(usual: float) -> None:
    short, shorter = SwitchInterval(usual / 10), SwitchInterval(usual / 100)
    short.set(on=True)
    shorter.set(on=True)
    assert sys.getswitchinterval() == pytest.approx(usual / 100)
    short.set(on=False)
    assert sys.getswitchinterval() == pytest.approx(usual / 100)
    shorter.set(on=False)
    assert sys.getswitchinterval() == usual


def test_a_longer_one_changes_nothing(usual: float) -> None:
    with SwitchInterval(usual * 10):
        assert sys.getswitchinterval() == usual
    assert sys.getswitchinterval() == usual


def test_on_twice_is_on_once(usual: float) -> None:
    with SwitchInterval(usual / 10) as interval:
        interval.set(on=True)
        assert sys.getswitchinterval() == pytest.approx(usual / 10)
    assert sys.getswitchinterval() == usual


def test_an_error_ends_it_too(usual: float) -> None:
    with pytest.raises(ZeroDivisionError), SwitchInterval(usual / 10):
        _ = 1 / 0
    assert sys.getswitchinterval() == usual


def test_nothing_else_sets_it() -> None:
    setters = []
    for path in Path(headway.__file__).parent.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        setters += [path.name] if "setswitchinterval" in names else []
    assert setters == ["switch_interval.py"]
