"""Compiles the native library when a wheel or an editable installation is built.

Calls the compiler itself: a few files and one library need no second build system. It never looks at the machine it
runs on: one library holds kernels for every instruction set, and the one to use is picked at run time. Without a
compiler the package is built without the library, with a warning, and needs torch to compute.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/headway/kernels/native")
LIBRARY = NATIVE / ("_headway.dylib" if sys.platform == "darwin" else "_headway.so")
COMPILERS = ("c++", "g++", "clang++")
OPTIMIZE = ("-O3",)
# After CXXFLAGS, so that no outside flag changes rounding or symbol visibility.
ALWAYS = ("-std=c++17", "-fPIC", "-pthread", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
SETS = {  # step.cpp is compiled once for each
    "hw_plain": (),
    "hw_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "hw_avx512": AVX512,
    "hw_vnni": (*AVX512, "-mavx512vnni"),
}
ARM_SETS = {
    "hw_plain": (),
    "hw_neon": ("-march=armv8.2-a+dotprod",),
    "hw_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
PROBE = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"


class BuildError(Exception):
    """The library should have been built and cannot be."""


class Unit(NamedTuple):  # the way hatchling loads this file, dataclasses do not work
    """One object file and what it is compiled with."""

    name: str
    source: str
    flags: tuple[str, ...]


class Toolchain(NamedTuple):
    """A compiler and the flags for every call."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    link: tuple[str, ...] = ()
    x86: bool = False
    arm: bool = False

    @classmethod
    def detect(cls, environment: Mapping[str, str], machine: str) -> Toolchain | None:
        """The compiler that CXX names, or the first on PATH; None without one, or with HEADWAY_NATIVE_BUILD=off."""
        wanted = environment.get("HEADWAY_NATIVE_BUILD", "auto")
        if wanted not in ("auto", "off"):
            raise BuildError(f"HEADWAY_NATIVE_BUILD is {wanted!r}; it must be auto or off")
        command = None if wanted == "off" else compiler(environment)
        if command is None:
            return None
        flags = (*OPTIMIZE, *shlex.split(environment.get("CXXFLAGS", "")), *ALWAYS)
        link = tuple(shlex.split(environment.get("LDFLAGS", "")))
        kind = machine.lower()
        return cls(command, flags, link, kind in ("x86_64", "amd64"), kind in ("aarch64", "arm64"))

    def run(self, arguments: Sequence[str | Path]) -> None:
        command = [*self.command, *self.flags, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            way_out = "HEADWAY_NATIVE_BUILD=off installs Headway without its native library."
            raise BuildError(f"{shlex.join(command)}\n{done.stdout}\nThe native library does not compile. {way_out}")

    def works(self) -> bool:
        """Whether it compiles and links C++17 with threads for every instruction set."""
        flags = {flag for flags in SETS.values() for flag in flags} if self.x86 else ()
        flags = ARM_SETS["hw_i8mm"] if self.arm else flags
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(PROBE)
            try:
                self.run([*sorted(flags), source, "-o", Path(folder, "probe"), *self.link])
            except (BuildError, OSError):
                return False
        return True


def compiler(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The command of the C++ compiler, or None."""
    path = environment.get("PATH", "")
    if named := shlex.split(environment.get("CXX", "")):
        if shutil.which(named[0], path=path) is None:
            raise BuildError(f"CXX names {named[0]!r}, which does not exist; name a C++17 compiler, or unset CXX")
        return tuple(named)
    paths = (shutil.which(name, path=path) for name in COMPILERS)
    return next(((name,) for name in paths if name), None)


def units(sources: Sequence[Path], x86: bool, arm: bool = False) -> list[Unit]:
    """The object files, in link order.

    The plain instruction set comes first: of inline functions that several objects define, the linker keeps the first,
    which must run on every machine.
    """
    sets = SETS if x86 else ARM_SETS if arm else {"hw_plain": ()}
    levels = [
        Unit(name, "step.cpp", (*level_flags(level, arm), f"-DHW_NS={name}", "-fvisibility=hidden", *flags))
        for level, (name, flags) in enumerate(sets.items())
    ]
    machine = ("-DHW_X86",) if x86 else ("-DHW_ARM",) if arm else ()
    others = [source.name for source in sources if source.suffix == ".cpp" and source.name != "step.cpp"]
    rest = [Unit(Path(name).stem, name, (*machine, visibility(name))) for name in others]
    return [levels[0], *rest, *levels[1:]]


def level_flags(level: int, arm: bool) -> tuple[str, ...]:
    """What tells simd.h its instruction set."""
    return ("-DHW_ISA=0", *((f"-DHW_NEON={level}",) if level else ())) if arm else (f"-DHW_ISA={level}",)


def visibility(source: str) -> str:
    """Only the calls of api.cpp are visible outside the library."""
    return "-fvisibility=default" if source == "api.cpp" else "-fvisibility=hidden"


def native_sources(root: Path) -> list[Path]:
    """The library's sources and headers."""
    return sorted(path for path in (root / NATIVE).iterdir() if path.suffix in (".cpp", ".h"))


def key(sources: Sequence[Path], tools: Toolchain) -> str:
    """A hash of everything the library depends on."""
    digest = hashlib.sha256(repr((tools, units(sources, tools.x86, tools.arm))).encode())
    for source in sources:
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()


def compile_objects(root: Path, folder: Path, tools: Toolchain) -> list[Path]:
    """All objects in link order, compiled in parallel into `folder` unless they are up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = native_sources(root)
    stamp, wanted = folder / "key", key(sources, tools)
    parts = units(sources, tools.x86, tools.arm)
    objects = [folder / f"{unit.name}.o" for unit in parts]
    if stamp.exists() and stamp.read_text() == wanted and all(path.exists() for path in objects):
        return objects

    def one(unit: Unit, output: Path) -> None:
        tools.run([*unit.flags, "-c", root / NATIVE / unit.source, "-o", output])

    stamp.unlink(missing_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, parts, objects))
    stamp.write_text(wanted)
    return objects


def build(root: Path, tools: Toolchain) -> None:
    """Put an up-to-date library next to its sources."""
    folder = root / "build" / "native"
    objects = compile_objects(root, folder, tools)
    fresh, library = folder / LIBRARY.name, root / LIBRARY
    tools.run(["-shared", *objects, *only_calls(folder), *tools.link, "-o", fresh])
    fresh.replace(library)  # a rename: a process that has loaded the old one keeps it


def only_calls(folder: Path) -> list[str]:
    """Linker flags that hide all symbols but the calls of api.h: torch has its own copies of standard templates."""
    if sys.platform == "darwin":
        return ["-Wl,-exported_symbol,_hw_*"]
    script = folder / "exports"
    script.write_text("{ global: hw_*; local: *; };\n")
    return [f"-Wl,--version-script={script}"]


def platform_tag() -> str:
    """The wheel's tag: any Python 3, this kind of machine."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


class NativeBuildHook(BuildHookInterface):
    """Called by hatchling before it builds a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        try:
            tools = Toolchain.detect(os.environ, platform.machine())
            if tools is None or not tools.works():
                return self._without(root)
            self.app.display_info(f"Headway: compiling the native library with {shlex.join(tools.command)}")
            build(root, tools)
        except BuildError as error:
            self.app.abort(f"Headway: {error}")
        if version != "editable":
            build_data.update(pure_python=False, tag=platform_tag())
            build_data["artifacts"].append(f"/{LIBRARY.as_posix()}")

    def _without(self, root: Path) -> None:
        (root / LIBRARY).unlink(missing_ok=True)  # it may be from older sources
        self.app.display_warning(
            "Headway: built without its native library, because no C++17 compiler works here or HEADWAY_NATIVE_BUILD "
            "is off. It computes with torch (headway[torch]), which is slower. With g++, clang++ or CXX set, install "
            "it again."
        )
