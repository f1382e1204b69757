"""Runs driver.cpp with the native library under sanitizers (address, undefined behavior, threads), then valgrind.

Called by `make native-sanitize` and `make test-all`; ends with 1 when one of them finds something. What this machine
lacks is skipped, and said. Valgrind knows no AVX-512 and tells programs so: under it the plain and the AVX2 kernels
run, as they are shipped.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.cpp")
SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-O1", "-g", "-fsanitize=thread")
VALGRIND = ("valgrind", "--quiet", "--error-exitcode=1", "--leak-check=full", "--fair-sched=yes")


def main() -> int:
    """Build and run all of them; the number of failures."""
    native = _build_module()
    tools = native.Toolchain.detect(os.environ, platform.machine())
    if tools is None or not tools.works():
        print("native-sanitize needs a C++17 compiler; install g++ or clang++, or name one with CXX", file=sys.stderr)
        return 1
    watched = tools._replace(flags=(*tools.flags, *SANITIZE))
    failures = _run("sanitizers, 1 to 8 threads", [_driver(native, watched, ROOT / "build/sanitize"), "8"])
    failures += _races(native, tools)
    if shutil.which("valgrind") is None:
        print("== valgrind is not installed: skipped")
        return failures
    return failures + _run("valgrind, 1 to 3 threads", [*VALGRIND, _driver(native, tools, ROOT / "build/native"), "3"])


def _races(native: ModuleType, tools) -> int:
    """Under the thread sanitizer, which must be installed beside the compiler and cannot run at every address."""
    watched = tools._replace(flags=(*tools.flags, *RACES))
    fixed = ("setarch", platform.machine(), "-R") if shutil.which("setarch") else ()
    if not watched.works() or not _starts(watched, fixed):
        print("== the thread sanitizer does not work here: skipped")
        return 0
    return _run("thread sanitizer, 1 to 4 threads", [*fixed, _driver(native, watched, ROOT / "build/threads"), "4"])


def _starts(tools, prefix: tuple[str, ...]) -> bool:
    """Whether a program that starts a thread runs."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
        tools.run([source, "-o", program, *tools.link])
        return subprocess.run([*prefix, program], capture_output=True, check=False).returncode == 0


def _build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _driver(native: ModuleType, tools, folder: Path) -> Path:
    """The program, with the library's objects in it."""
    objects, output = native.compile_objects(ROOT, folder, tools), folder / "driver"
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")  # what a shape leaves out is zero
    tools.run([*warnings, "-g", f"-I{ROOT / native.NATIVE}", DRIVER, *objects, *tools.link, "-o", output])
    return output


def _run(title: str, command: list[str | Path]) -> int:
    print(f"== {title}: {shlex.join(map(str, command))}", flush=True)
    code = subprocess.run(command, check=False).returncode
    print(f"== {title}: {'failed' if code else 'passed'}", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
