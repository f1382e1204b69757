"""docs/architecture.md places every module of the packages that follow, and names no file that is not there."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

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


def test_a_decode_token_is_followed_through_ten_files() -> None:
    walk = (
        PAGE.split("## The decode step")[1].split("\n7. ")[0]
        + PAGE.split("\n7. **`program/generation")[1].split("\n\n")[0]
    )
    files = set(re.findall(r"`([\w/]+\.(?:py|cpp))`", walk)) | {"program/generation/generator.py"}
    assert [name for name in sorted(files) if not (SOURCES / name).exists()] == []
    assert len(files) == 10


def test_every_package_is_a_layer() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.strip() for line in contract["layers"] for name in line.split("|")}
    assert layers >= {f"headway.{name}" for name in PACKAGES}
    assert layers - {f"headway.{name}" for name in PACKAGES} == {"headway.batch", "headway.testing"}


def test_only_the_cluster_imports_ray() -> None:
    importing = re.compile(r"^\s*(?:import ray\b|from ray\b)", re.MULTILINE)
    found = [path.relative_to(SOURCES) for path in SOURCES.rglob("*.py") if importing.search(path.read_text())]
    assert {path.parts[0] for path in found} == {"cluster"}


def test_packages_are_small() -> None:
    folders = {path.parent for path in SOURCES.rglob("*.py")} - {SOURCES / "models" / "families"}
    modules = {str(folder): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {name: count for name, count in modules.items() if count > 16} == {}


def test_no_two_classes_have_one_name() -> None:
    names = [
        name for path in SOURCES.rglob("*.py") for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.M)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []
