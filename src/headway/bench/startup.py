"""The start of `headway run`, measured on the real command: seconds from process start until each phase is over."""

from __future__ import annotations

import compileall
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headway.base.config import child_environment
from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported

PROMPT = "Say hello."
PHASES = {
    "command": "command line read",
    "imported": "engine imported",
    "loaded": "weights loaded",
    "prompt": "tokenizer, chat template and prompt",
    "answered": "first token",
    "exited": "process over",
}


@dataclass(frozen=True)
class Startup:
    """Seconds from process start until each phase was over."""

    command: float
    imported: float
    loaded: float
    prompt: float
    answered: float
    exited: float


def measure_startup(flags: Sequence[str]) -> Startup:
    """Start `headway run` with these flags for one token."""
    compile_package()
    # -P: modules in the current folder must not shadow installed ones.
    command = [sys.executable, "-P", "-m", "headway.cli.main", "run", *flags, "-q", "--max-tokens", "1", "--", PROMPT]
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        file = Path(folder, "marks")
        began = time.monotonic()
        done = subprocess.run(
            command,
            env=child_environment(HEADWAY_STARTUP_MARKS=str(file)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        moments = {"exited": time.monotonic() - began}
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    moments |= {phase: float(moment) - began for phase, moment in map(str.split, lines)}
    if done.returncode or set(moments) != set(PHASES):
        why = done.stderr.strip()[-300:] or f"it noted {sorted(moments)} alone"
        raise Unsupported(f"`headway run` ended with {done.returncode}: {why}")
    return Startup(**moments)


def compile_package() -> None:
    """Compile Headway's bytecode, as installing a wheel does; an editable install may not have it."""
    compileall.compile_dir(Path(__file__).parents[1], quiet=2)
