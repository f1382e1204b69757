"""Runs driver.cpp on ARM64's kernels under emulation, and compares what they give with this machine's, to the bit.

Called by `make test-all`. Needs a cross compiler (Debian's g++-aarch64-linux-gnu) and qemu-user; without, it says so
and passes. Every instruction set, of either kind of machine, must give the same digest.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys

from check import ROOT, _build_module, _driver

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def main() -> int:
    """1 if a digest differs or something fails."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing or platform.machine() not in ("x86_64", "AMD64"):
        print(f"== ARM64 kernels need {' and '.join(missing) or 'an x86-64 machine'}: skipped")
        return 0
    native = _build_module()
    tools = native.Toolchain.detect(os.environ, platform.machine())
    cross = native.Toolchain.detect({**os.environ, "CXX": COMPILER}, "aarch64")
    cross = cross._replace(flags=(*cross.flags, "-O1"), link=(*cross.link, "-static"))
    here = _digests([str(_driver(native, tools, ROOT / "build/native")), "1"])
    there = _digests([EMULATOR, "-cpu", "max", str(_driver(native, cross, ROOT / "build/arm64")), "1"])
    print(f"x86-64: {here}; ARM64: {there}")
    same = len({*here, *there}) == 1 and len(there) == len(native.ARM_SETS)
    print("== ARM64: " + ("the same bits" if same else "FAILED, other bits"))
    return 0 if same else 1


def _digests(command: list[str]) -> list[str]:
    """What each instruction set gave."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    return re.findall(r"instruction set \d+: ([0-9a-f]{16})", done.stdout)


if __name__ == "__main__":
    sys.exit(main())
