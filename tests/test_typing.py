"""pyright on what users write: `typing/*.py` and the examples must pass, marked lines of `typing/must_fail` must not.

A marked line ends in `# expect: rule`. The package itself is checked by `make lint`, and here with the slow tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
STUBS = ROOT / "typings"
PASSING = sorted((ROOT / "tests/typing").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FAILING = sorted((ROOT / "tests/typing/must_fail").glob("*.py"))
MARK = re.compile(r"# expect: (\w+)$")

Found = dict[Path, dict[int, list[tuple[str, str]]]]  # by file and line: (rule, message)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Every error that pyright sees in what the tests write."""
    return checked(tmp_path_factory.mktemp("pyright"), [*PASSING, *FAILING])


@pytest.fixture(scope="module")
def found_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same of the package and the examples, which takes long."""
    return checked(tmp_path_factory.mktemp("pyright"), [SOURCE, *EXAMPLES])


def checked(folder: Path, paths: list[Path]) -> Found:
    """pyright with the project's rules. Its own settings leave the files that must fail out."""
    settings = folder / "pyrightconfig.json"
    stubs, source, *files = [os.path.relpath(path, folder) for path in (STUBS, SOURCE, *paths)]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    how = {name: ours[name] for name in ("pythonVersion", "typeCheckingMode")}
    settings.write_text(json.dumps(how | {"include": files, "extraPaths": [source], "stubPath": stubs}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)]
    run = subprocess.run(command, text=True, capture_output=True, timeout=500, check=False)
    assert run.returncode in (0, 1), run.stderr or run.stdout
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(paths)
    errors: Found = {}
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            line = entry["range"]["start"]["line"] + 1
            place = errors.setdefault(Path(entry["file"]), {}).setdefault(line, [])
            place.append((entry.get("rule", "none"), entry["message"].splitlines()[0]))
    return errors


@pytest.mark.slow
def test_the_package_passes(found_elsewhere: Found) -> None:
    assert {file: errors for file, errors in found_elsewhere.items() if file.is_relative_to(SOURCE)} == {}


def ids(files: Iterable[Path]) -> list[str]:
    return [file.stem for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=ids(EXAMPLES))
def test_an_example_passes(file: Path, found_elsewhere: Found) -> None:
    assert found_elsewhere.get(file, {}) == {}


@pytest.mark.parametrize("file", PASSING, ids=ids(PASSING))
def test_what_is_right_passes(file: Path, found: Found) -> None:
    assert found.get(file, {}) == {}


@pytest.mark.parametrize("file", FAILING, ids=ids(FAILING))
def test_what_is_wrong_is_found_and_nothing_else(file: Path, found: Found) -> None:
    marks = {n: m[1] for n, line in enumerate(file.read_text().splitlines(), 1) if (m := MARK.search(line))}
    assert marks, "a file that must fail marks the lines that do"
    seen = {line: {rule for rule, _ in errors} for line, errors in found.get(file, {}).items()}
    assert {line: rules - {marks.get(line)} for line, rules in seen.items() if rules != {marks.get(line)}} == {}
    assert sorted(seen) == sorted(marks)
