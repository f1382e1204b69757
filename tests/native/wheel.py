"""Tries a wheel as a user gets it: installed into a new environment, on a PATH without a compiler, by the real command.

Called by `make wheel`; ends with 1 when something does not work. What it needs besides comes from pip's index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

PROGRAM = """
import headway as hw
from headway.kernels.native.library import available_isas

async def program(engine):
    async with engine.context() as ctx:
        ctx.user("Name a color.")
        out = await ctx.generate(hw.Argmax(), max_tokens=8).text()
        fwd = ctx.forward().input([1])
        entropy = fwd.probe(0, hw.Entropy())
        return out, (await fwd.execute()).entropy(entropy)

with hw.Engine("smollm2") as engine:
    text, entropy = engine.run(program)
    print(engine.info.runner, "|", ",".join(available_isas()), "|", text.strip(), "|", round(float(entropy), 3))
"""


def main() -> int:
    """Install, `headway run`, a program; the number of failures."""
    wheel = Path(sys.argv[1]).resolve()
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    if sys.platform == "linux" and not re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name):
        print("its tag is not that of any Linux; is objdump missing?", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "venv")
        venv.create(home, with_pip=True)
        # Nothing but the environment is on PATH: no compiler, and no other Python.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXX", "PYTHON", "LD_"))}
        environment = kept | {"PATH": str(home / "bin"), "HEADWAY_NATIVE": "require"}
        python = home / "bin" / "python"
        commands = [
            [python, "-m", "pip", "install", "--quiet", wheel],
            [home / "bin" / "headway", "run", "--max-tokens", "8", "Name a color."],
            [python, "-c", PROGRAM],
        ]
        return sum(_failed(command, environment, folder) for command in commands)


def _failed(command: list[str | Path], environment: dict[str, str], folder: str) -> bool:
    began = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, check=False)
    print(f"== {Path(command[0]).name} {command[1]}: {done.returncode}, {time.monotonic() - began:.1f} s", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
