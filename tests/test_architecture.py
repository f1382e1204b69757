"""docs/architecture.md places every module of the runtime and of the program, and names none that is not there."""

from __future__ import annotations

import re
from collections import Counter
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


def test_a_decode_token_is_followed_through_ten_files() -> None:
    walk = (
        PAGE.split("## The decode step")[1].split("\n7. ")[0]
        + PAGE.split("\n7. **`program/generation")[1].split("\n\n")[0]
    )
    files = set(re.findall(r"`([\w/]+\.(?:py|cpp))`", walk)) | {"program/generation/generator.py"}
    assert [name for name in sorted(files) if not (SOURCES / name).exists()] == []
    assert len(files) == 10


def test_packages_are_small() -> None:
    folders = {path.parent for path in SOURCES.rglob("*.py")} - {SOURCES / "models" / "families"}
    modules = {str(folder): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {name: count for name, count in modules.items() if count > 16} == {}


def test_no_two_classes_have_one_name() -> None:
    names = [
        name for path in SOURCES.rglob("*.py") for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.M)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []
