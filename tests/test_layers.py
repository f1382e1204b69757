"""The house itself: layer order, lint and format are part of the suite; types are in test_typing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "each layer imports only layers below it": ("lint-imports", "--no-cache"),
    "ruff finds nothing": ("ruff", "check", "."),
    "every file is formatted": ("ruff", "format", "--check", "."),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_the_house_is_in_order(what: str) -> None:
    command, *arguments = COMMANDS[what]
    found = shutil.which(command, path=sysconfig.get_path("scripts")) or shutil.which(command)
    assert found is not None, f"{command} is not installed; the test extra has it"
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{what}:\n{done.stdout}{done.stderr}"


def test_no_module_but_config_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT / "src/headway"))
        for path in (ROOT / "src/headway").rglob("*.py")
        if "os.environ" in (text := path.read_text()) or "os.getenv" in text
    }
    assert readers <= {"base/config.py"}


def test_a_class_name_stands_for_one_thing() -> None:
    names = Counter(
        name
        for path in (ROOT / "src/headway").rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in names.items() if count > 1] == []
