"""Compiles the native library when a wheel or an editable installation is built.

Calls the compiler itself: a few files and one library need no second build system. One library holds kernels for
several instruction sets, and the one to use is picked at run time. HEADWAY_NATIVE_BUILD says which are compiled: `auto`
the best of this machine and the plain one, `all` every set (for wheels and tests), `off` none. Without a compiler the
package is built without the library, with a warning, and needs torch to compute. `python hatch_build.py` compiles its
objects alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
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

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself, to compile while others install
    BuildHookInterface = object

NATIVE = Path("src/headway/kernels/native")
LIBRARY = NATIVE / ("_headway.dylib" if sys.platform == "darwin" else "_headway.so")
COMPILERS = ("c++", "g++", "clang++")
OPTIMIZE = ("-O3",)
# After CXXFLAGS, so that no outside flag changes rounding or symbol visibility.
ALWAYS = ("-std=c++17", "-fPIC", "-pthread", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
# GCC 12 may leave out the rounding between two multiply-adds through double where it vectorizes straight-line code.
PLAIN = ("-fno-tree-slp-vectorize",)
EACH = ("step.cpp", "matmul.cpp")  # compiled once for each instruction set
SETS = {
    "hw_plain": PLAIN,
    "hw_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "hw_avx512": AVX512,
    "hw_vnni": (*AVX512, "-mavx512vnni"),
    "hw_bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
}
ARM_SETS = {
    "hw_plain": PLAIN,
    "hw_neon": ("-march=armv8.2-a+dotprod",),
    "hw_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
HIDDEN = "-fvisibility=hidden"
LEVEL = '#include <cstdio>\n#include "machine.h"\nint main() { std::printf("%d", hw::machine_isa()); }\n'
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
    level: int | None = None  # of the one set that is compiled besides the plain one; None for all of them

    @classmethod
    def detect(cls, environment: Mapping[str, str], machine: str) -> Toolchain | None:
        """The compiler that CXX names, or the first on PATH; None without one, or with HEADWAY_NATIVE_BUILD=off."""
        wanted = environment.get("HEADWAY_NATIVE_BUILD", "auto")
        if wanted not in ("auto", "all", "off"):
            raise BuildError(f"HEADWAY_NATIVE_BUILD is {wanted!r}; it must be auto, all or off")
        command = None if wanted == "off" else compiler(environment)
        if command is None:
            return None
        flags = (*OPTIMIZE, *shlex.split(environment.get("CXXFLAGS", "")), *ALWAYS)
        link = tuple(shlex.split(environment.get("LDFLAGS", "")))
        kind = machine.lower()
        return cls(command, flags, link, kind in ("x86_64", "amd64"), kind in ("aarch64", "arm64"))

    def for_this_machine(self, root: Path) -> Toolchain:
        """The same for this machine's best instruction set; for all of them where it cannot be asked."""
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder, "level.cpp"), Path(folder, "level")
            source.write_text(LEVEL)
            try:
                self.run([*self.machine, f"-I{root / NATIVE}", source, "-o", program, *self.link])
                level = subprocess.run([program], capture_output=True, text=True, check=True).stdout
            except (BuildError, OSError, subprocess.CalledProcessError):
                return self
        return self._replace(level=int(level))

    @property
    def machine(self) -> tuple[str, ...]:
        """What tells the sources which kind of machine this is."""
        return ("-DHW_X86",) if self.x86 else ("-DHW_ARM",) if self.arm else ()

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


def units(sources: Sequence[Path], tools: Toolchain) -> list[Unit]:
    """The object files, in link order.

    The plain instruction set comes first: of inline functions that several objects define, the linker keeps the first,
    which must run on every machine. Where another set is meant for this machine, it is compiled quickly.
    """
    sets = list((SETS if tools.x86 else ARM_SETS if tools.arm else {"hw_plain": PLAIN}).items())
    wanted = range(len(sets)) if tools.level is None else sorted({0, tools.level})
    plain, *levels = [set_units(level, *sets[level], tools) for level in wanted]
    machine = (*tools.machine, f"-DHW_SETS={sum(1 << level for level in wanted)}")
    others = [source.name for source in sources if source.suffix == ".cpp" and source.name not in EACH]
    rest = [Unit(Path(name).stem, name, (*machine, visibility(name))) for name in others]
    return [*plain, *rest, *(unit for level in levels for unit in level)]


def set_units(level: int, name: str, flags: tuple[str, ...], tools: Toolchain) -> list[Unit]:
    """The objects of one instruction set."""
    quickly = ("-Og",) if tools.level and not level else ()
    every = (*level_flags(level, tools.arm), f"-DHW_NS={name}", HIDDEN, *flags, *quickly)
    return [Unit(f"{name}_{Path(source).stem}", source, every) for source in EACH]


def level_flags(level: int, arm: bool) -> tuple[str, ...]:
    """What tells simd.h its instruction set."""
    return ("-DHW_ISA=0", *((f"-DHW_NEON={level}",) if level else ())) if arm else (f"-DHW_ISA={level}",)


def visibility(source: str) -> str:
    """Only the calls of api.cpp are visible outside the library."""
    return "-fvisibility=default" if source == "api.cpp" else HIDDEN


def native_sources(root: Path) -> list[Path]:
    """The library's sources and headers."""
    return sorted(path for path in (root / NATIVE).iterdir() if path.suffix in (".cpp", ".h"))


def key(sources: Sequence[Path], tools: Toolchain) -> str:
    """A hash of everything the library depends on."""
    digest = hashlib.sha256(repr((tools, units(sources, tools))).encode())
    for source in sources:
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()


def compile_objects(root: Path, folder: Path, tools: Toolchain) -> list[Path]:
    """All objects in link order, compiled in parallel into `folder` unless they are up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = native_sources(root)
    wanted = key(sources, tools)
    parts = units(sources, tools)
    objects = [folder / f"{unit.name}.o" for unit in parts]

    def one(unit: Unit, output: Path) -> None:
        tools.run([*unit.flags, "-c", root / NATIVE / unit.source, "-o", output])

    with (folder / "key").open("a+", encoding="utf-8") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_EX)  # `make` compiles while pip installs: whoever is second finds them done
        stamp.seek(0)
        if stamp.read() != wanted or not all(path.exists() for path in objects):
            stamp.truncate(0)
            work = sorted(zip(parts, objects), key=lambda each: "-Og" in each[0].flags)  # what takes longest first
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(one, *zip(*work)))
            stamp.write(wanted)
    return objects


def build(root: Path, tools: Toolchain) -> None:
    """Put an up-to-date library next to its sources."""
    folder = root / "build" / "native"
    objects = compile_objects(root, folder, tools)
    fresh, library = folder / LIBRARY.name, root / LIBRARY
    # A wheel for other machines brings the compiler's own libraries along.
    own = ("-static-libstdc++", "-static-libgcc") if tools.level is None and sys.platform == "linux" else ()
    tools.run(["-shared", *objects, *only_calls(folder), *own, *tools.link, "-o", fresh])
    fresh.replace(library)  # a rename: a process that has loaded the old one keeps it


def only_calls(folder: Path) -> list[str]:
    """Linker flags that hide all symbols but the calls of api.h: torch has its own copies of standard templates."""
    if sys.platform == "darwin":
        return ["-Wl,-exported_symbol,_hw_*"]
    script = folder / "exports"
    script.write_text("{ global: hw_*; local: *; };\n")
    return [f"-Wl,--version-script={script}"]


def tools_here(root: Path, environment: Mapping[str, str]) -> Toolchain | None:
    """The compiler, set for what the environment asks for; None where the library is not built."""
    tools = Toolchain.detect(environment, platform.machine())
    if tools is None or not tools.works():
        return None
    return tools if environment.get("HEADWAY_NATIVE_BUILD") == "all" else tools.for_this_machine(root)


def platform_tag(library: Path, tools: Toolchain) -> str:
    """The wheel's tag: any Python 3, this kind of machine. With every instruction set it is meant for others: on Linux
    for any distribution whose C library has what ours calls."""
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    version = glibc_needed(library) if tools.level is None and here.startswith("linux_") else None
    return f"py3-none-{here if version is None else here.replace('linux', f'manylinux_2_{version}')}"


def glibc_needed(library: Path) -> int | None:
    """The x of the newest GLIBC_2.x that a library asks for; None where objdump is missing or other libraries are."""
    if shutil.which("objdump") is None:
        return None
    shown = subprocess.run(["objdump", "-p", library], stdout=subprocess.PIPE, text=True, check=False).stdout
    needs = set(re.findall(r"NEEDED +(\S+)", shown))
    versions = [int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", shown)]
    known = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    return max([17, *versions]) if versions and needs <= known else None


class NativeBuildHook(BuildHookInterface):
    """Called by hatchling before it builds a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        try:
            tools = tools_here(root, os.environ)
            if tools is None:
                return self._without(root)
            self.app.display_info(f"Headway: compiling the native library with {shlex.join(tools.command)}")
            build(root, tools)
        except BuildError as error:
            self.app.abort(f"Headway: {error}")
        if version != "editable":
            build_data.update(pure_python=False, tag=platform_tag(root / LIBRARY, tools))
            build_data["artifacts"].append(f"/{LIBRARY.as_posix()}")

    def _without(self, root: Path) -> None:
        (root / LIBRARY).unlink(missing_ok=True)  # it may be from older sources
        self.app.display_warning(
            "Headway: built without its native library, because no C++17 compiler works here or HEADWAY_NATIVE_BUILD "
            "is off. It computes with torch (headway[torch]), which is slower. With g++, clang++ or CXX set, install "
            "it again."
        )


if __name__ == "__main__":  # what fails or is missing is said by the installation that follows
    here = Path(__file__).resolve().parent
    with contextlib.suppress(BuildError):
        if (found := tools_here(here, os.environ)) is not None:
            compile_objects(here, here / "build" / "native", found)
