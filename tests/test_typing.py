"""pyright on the package and on what users write: `typing/*.py` and the examples must pass, marked lines of
`typing/must_fail` must not.

A marked line ends in `# expect: rule`. pyright runs once for all files.
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
PASSING = sorted([*(ROOT / "tests/typing").glob("*.py"), *(ROOT / "examples").glob("*.py")])
FAILING = sorted((ROOT / "tests/typing/must_fail").glob("*.py"))
MARK = re.compile(r"# expect: (\w+)$")

Found = dict[Path, dict[int, list[tuple[str, str]]]]  # by file and line: (rule, message)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Every error that pyright sees. The project's own settings leave the files that must fail out."""
    settings = tmp_path_factory.mktemp("pyright") / "pyrightconfig.json"
    stubs, *files = [os.path.relpath(file, settings.parent) for file in (STUBS, SOURCE, *PASSING, *FAILING)]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    how = {name: ours[name] for name in ("pythonVersion", "typeCheckingMode")}
    settings.write_text(json.dumps(how | {"include": files, "extraPaths": files[:1], "stubPath": stubs}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)]
    run = subprocess.run(command, text=True, capture_output=True, timeout=500, check=False)
    assert run.returncode in (0, 1), run.stderr or run.stdout
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(PASSING) + len(FAILING)
    errors: Found = {}
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            line = entry["range"]["start"]["line"] + 1
            place = errors.setdefault(Path(entry["file"]), {}).setdefault(line, [])
            place.append((entry.get("rule", "none"), entry["message"].splitlines()[0]))
    return errors


def test_the_package_passes(found: Found) -> None:
    assert {file: errors for file, errors in found.items() if file.is_relative_to(SOURCE)} == {}


def ids(files: Iterable[Path]) -> list[str]:
    return [file.stem for file in files]


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
