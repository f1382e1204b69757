"""Our `dataclass` makes what the standard library's makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import weakref
from dataclasses import KW_ONLY, FrozenInstanceError, field
from functools import cached_property
from typing import Any, ClassVar

import pytest

from headway.base.dataclass import dataclass


def classes(decorator: Any, **options: Any) -> tuple[type, type, type]:
    """The same classes by either decorator."""

    @decorator(**options)
    class Point:
        """A point."""

        x: int
        y: float = 0.5
        tags: list[str] = field(default_factory=list, compare=False)
        kind: ClassVar[str] = "point"
        _: KW_ONLY
        note: str = field(default="", repr=False)

        def norm(self) -> float:
            return self.x + self.y

    @decorator(**options)
    class Named(Point):
        """A point with a name."""

        name: str = "p"
        length: int = field(init=False, default=3)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.name))

    @decorator(**options)
    class Nothing:
        """No field at all."""

    return Point, Named, Nothing


OPTIONS = [
    {"frozen": frozen, "eq": eq, "slots": slots, "kw_only": kw_only, "repr": shown}
    for frozen in (False, True)
    for eq in (False, True)
    for slots in (False, True)
    for kw_only, shown in ((False, True), (True, False))
]


def outcome(call: Any) -> Any:
    """A value, or the type and text of an error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error).replace("classes.<locals>.", "")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(key for key, on in o.items() if on) or "plain")
def test_every_form_is_as_the_standard_library_makes_it(options: dict[str, bool]) -> None:
    ours, standard = classes(dataclass, **options), classes(dataclasses.dataclass, **options)
    given: list[dict[str, Any]] = [{}, {"x": 1}, {"x": 1, "y": 2.0, "note": "n"}, {"x": 2, "tags": ["a"]}, {"z": 1}]
    for mine, theirs in zip(ours, standard, strict=True):
        assert str(inspect.signature(mine)) == str(inspect.signature(theirs))
        assert mine.__match_args__ == theirs.__match_args__
        assert [f.name for f in dataclasses.fields(mine)] == [f.name for f in dataclasses.fields(theirs)]
        assert (mine.__hash__ is None) == (theirs.__hash__ is None)
        for values in given:
            assert looks(mine, values) == looks(theirs, values)


def looks(kind: type, values: dict[str, Any]) -> list[Any]:
    """What can be seen of an object: texts, comparisons, changes."""
    made = outcome(lambda: kind(**values))
    if isinstance(made, tuple):
        return [made]
    same, other = kind(**values), copy.copy(made)
    found = [
        repr(made).split(" at 0x")[0] if "object at" in repr(made) else repr(made),
        made == same,
        made == other,
        made != object(),
        made == 3,
        dataclasses.asdict(made),
        outcome(lambda: hash(made) == hash(same)),
    ]
    for name in ("x", "y", "other") if "__slots__" not in kind.__dict__ else ():  # there the standard one has a bug
        found += [outcome(lambda name=name: setattr(made, name, 9)), outcome(lambda name=name: delattr(made, name))]
    if "x" in values:
        found.append(dataclasses.asdict(dataclasses.replace(same, x=7)))
        found.append(outcome(lambda: kind(1) == kind(2)))
    return found


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Kept:
    """At module level, so that it can be pickled."""

    a: int
    b: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lazy:
    """With a property that is computed once."""

    a: int
    inner: Any = None

    @cached_property
    def double(self) -> int:
        return 2 * self.a


def test_frozen_objects_are_pickled_and_copied() -> None:
    for one in (Kept(1, (2, 3)), Lazy(4)):
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) == one
    assert weakref.ref(kept := Kept(1))() is kept
    lazy = Lazy(4)
    assert (lazy.double, lazy.double) == (8, 8)
    with pytest.raises(FrozenInstanceError, match="'a'"):
        lazy.a = 5  # type: ignore[misc]


def test_an_object_in_itself_is_shown() -> None:
    lazy = Lazy(1, [])
    lazy.inner.append(lazy)
    assert repr(lazy) == "Lazy(a=1, inner=[...])"


def test_methods_that_a_class_has_stay() -> None:
    @dataclass(frozen=True)
    class Own:
        a: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert (repr(Own(1)), Own(1) == 3, hash(Own(1))) == ("own", True, 5)


@pytest.mark.slow
def test_it_takes_less_time_than_the_standard_one() -> None:
    code = """
import time, dataclasses
from headway.base.dataclass import dataclass
def made(decorator):
    began = time.process_time()
    for _ in range(200):
        @decorator(frozen=True)
        class Made:
            "A class."
            a: int
            b: str = ""
            c: tuple[int, ...] = ()
            d: int = 3
    return time.process_time() - began
print(min(made(dataclass) for _ in range(3)) / min(made(dataclasses.dataclass) for _ in range(3)))
"""
    assert float(subprocess.check_output([sys.executable, "-c", code], text=True)) < 0.7
