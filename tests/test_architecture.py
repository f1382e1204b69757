"""docs/architecture.md places every module of the runtime and of the program, and names none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "headway"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(
    re.findall(
        r"`((?:base|kernels|models|kv|text|runtime|program|pipelines|remote|server|cli|bench|jobs)/[\w/]+\.py)`", PAGE
    )
)


def test_every_module_that_is_named_exists() -> None:
    assert NAMED
    assert [name for name in sorted(NAMED) if not (SOURCES / name).exists()] == []


def test_every_module_of_the_runtime_and_of_the_program_is_placed() -> None:
    modules = {
        str(path.relative_to(SOURCES))
        for package in ("runtime", "program")
        for path in (SOURCES / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(modules - NAMED) == []


def test_every_folder_of_the_tree_exists() -> None:
    tree = PAGE.split("```text")[1].split("```")[0]
    for line in tree.strip().splitlines():
        for name in re.findall(r"^([\w| ]+?)  ", line)[0].split("|"):
            assert (SOURCES / name.strip()).is_dir() or (SOURCES / f"{name.strip()}.py").exists(), name
