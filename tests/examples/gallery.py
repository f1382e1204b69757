"""Writes what the examples print into the gallery: run it when an example has changed.

    python tests/examples/gallery.py [NAME …]

It runs every example that has a heading of its own there, or those named, on the default model, and replaces the block
below it.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import headway as hw

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gallery.md"
FLOATS = {"grpo", "tree_speculation"}  # examples whose claim holds for float weights
BLOCK = re.compile(r"^(### `(\w+)\.py`\n.*?^```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def printed(engine: hw.Engine, name: str) -> str:
    """What the example prints, without spaces at line ends."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine.run(runpy.run_path(str(ROOT / f"examples/{name}.py"))["program"])
    return re.sub(r" +$", "", out.getvalue().strip("\n"), flags=re.MULTILINE) + "\n"


if __name__ == "__main__":
    names = sys.argv[1:]

    def block(found: re.Match[str]) -> str:
        name = found[2]
        if names and name not in names:
            return found[0]
        return found[1] + printed(floats if name in FLOATS else engine, name) + found[4]

    with hw.Engine("smollm2") as engine, hw.Engine("smollm2", dtype="float32", pages=256) as floats:
        page = BLOCK.sub(block, PAGE.read_text())
    PAGE.write_text(page)
