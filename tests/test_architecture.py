"""docs/architecture.md places every module of the packages that follow, and names no file that is not there."""

from __future__ import annotations

import re
import threading
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import headway as hw

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "headway"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = sorted(path.parent.name for path in SOURCES.glob("*/__init__.py"))
NAMED = set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.(?:py|cpp|h))`", PAGE))
PLACED = ("runtime", "program", "jobs", "sandbox", "cluster")  # every module of theirs is on the page


def test_every_file_that_is_named_exists() -> None:
    assert {name.partition("/")[0] for name in NAMED} >= {*PLACED, "kernels", "kv", "server"}
    assert [name for name in sorted(NAMED) if not (SOURCES / name).exists()] == []


def test_every_module_of_these_packages_is_placed() -> None:
    modules = {
        str(path.relative_to(SOURCES))
        for package in PLACED
        for path in (SOURCES / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(modules - NAMED) == []


def test_every_folder_of_the_tree_exists() -> None:
    tree = PAGE.split("```text")[1].split("```")[0]
    for line in tree.strip().splitlines():
        for name in re.findall(r"^([\w| ]+?)  ", line)[0].split("|"):
            assert (SOURCES / name.strip()).is_dir() or (SOURCES / f"{name.strip()}.py").exists(), name


DECODE_STEP = PAGE.split("## The decode step")[1].split("\n## ")[0]
WALK, ASKED = (
    set(re.findall(r"`([\w/]+\.(?:py|cpp))`", part)) & NAMED
    for part in (
        DECODE_STEP.split("\n1. ")[1].split("\n\n")[0],
        DECODE_STEP.split("**Asked on the way**")[1].split("\n\n")[0],
    )
)


def test_a_decode_token_is_followed_through_ten_files() -> None:
    assert len(WALK) == 10
    assert not WALK & ASKED


def test_a_decode_token_takes_the_files_that_are_named(smollm2_path: Path) -> None:
    """Every one of them for each token, and no other."""
    calls: Counter[str] = Counter()
    first, last, number, counting = 20, 84, 0, False

    def note(frame: FrameType, event: str, _: object) -> None:
        if counting and event == "call" and not frame.f_code.co_name.startswith("<"):  # no expressions over many
            calls[frame.f_code.co_filename] += 1

    async def program(engine: hw.Engine) -> None:
        nonlocal counting, number
        async with engine.context() as ctx:
            ctx.fill("A lighthouse is")
            async for _ in ctx.generate(hw.Argmax(), max_tokens=last + 8, stop_only=True):
                number += 1
                counting = first <= number < last

    threading.setprofile(note)  # of threads that begin from now on
    try:
        with hw.Engine("smollm2", threads=1, pages=64) as engine:
            if "native" not in engine.info.runner:
                pytest.skip("the native library is not here")
            thread = threading.Thread(target=engine.run, args=[program])
            thread.start()
            thread.join()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert number == last + 8
    counted = {name: count for name, count in calls.items() if Path(name).is_relative_to(SOURCES)}
    taken = {str(Path(name).relative_to(SOURCES)) for name, count in counted.items() if count > (last - first) / 2}
    documented = {name for name in WALK | ASKED if name.endswith(".py")}
    assert (sorted(taken - documented), sorted(documented - taken)) == ([], [])


def test_every_package_is_a_layer() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.strip() for line in contract["layers"] for name in line.split("|")}
    assert layers >= {f"headway.{name}" for name in PACKAGES}
    assert layers - {f"headway.{name}" for name in PACKAGES} == {"headway.batch", "headway.testing"}


def test_only_the_cluster_imports_ray() -> None:
    importing = re.compile(r"^\s*(?:import ray\b|from ray\b)", re.MULTILINE)
    found = [path.relative_to(SOURCES) for path in SOURCES.rglob("*.py") if importing.search(path.read_text())]
    assert {path.parts[0] for path in found} == {"cluster"}


def test_cancelled_has_one_spelling() -> None:
    """Python's and OpenAI's, so that a search finds all of it."""
    files = [path for part, kind in (("src", "py"), ("docs", "md"), ("clients/js/src", "ts"), ("tests", "py"))
             for path in (ROOT / part).rglob(f"*.{kind}")]  # fmt: skip
    other = re.compile("cancel" + "(ed|ing)", re.IGNORECASE)
    assert len(files) > 1000
    assert [str(path.relative_to(ROOT)) for path in files if other.search(path.read_text())] == []


def test_what_users_have_says_what_it_is() -> None:
    made = [kind for name in hw.__all__ if isinstance(kind := getattr(hw, name), type)]
    plain = {kind.__name__ for kind in made if kind.__repr__ is object.__repr__}
    assert plain == {"Constraint", "Drafter", "ProbeOf"}  # which users write themselves, or only annotate with


def test_packages_are_small() -> None:
    folders = {path.parent for path in SOURCES.rglob("*.py")} - {SOURCES / "models" / "families"}
    modules = {str(folder): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {name: count for name, count in modules.items() if count > 16} == {}


def test_no_two_classes_have_one_name() -> None:
    names = [
        name for path in SOURCES.rglob("*.py") for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.M)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []
