"""The package builds from its sdist, with a C++ compiler and without one, and the build decides what its file says."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.kernels.native.library import ISAS, available_isas, open_library

ROOT = Path(__file__).parents[1]
NATIVE = "headway/kernels/native"
# What an installation without its dependencies can say of its native library.
ASK = """
from headway.kernels.native.library import NAME, VERSION, open_library
library = open_library()
print(library.missing or f"{NAME} version {library.calls.hw_version() - VERSION} set {library.calls.hw_best_isa()}")
"""


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def noting_compiler(folder: Path) -> Path:
    """A compiler that writes down what it is told and leaves an empty output."""
    body = f'echo "$@" >>{folder}/told\nwhile [[ $1 != -o ]]; do shift; done; : >"$2"'
    return program(folder / "bin" / "noting", body)


def small_tree(folder: Path) -> Path:
    """A tree with all native sources, empty."""
    native = folder / "src" / NATIVE
    native.mkdir(parents=True)
    for source in (ROOT / "src" / NATIVE).iterdir():
        if source.suffix in (".cpp", ".h"):
            (native / source.name).write_text("")
    return folder


# -- which compiler ----------------------------------------------------------------------------------------------------


def test_cxx_decides_and_may_carry_arguments(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "mine", "")
    program(tmp_path / "c++", "")
    assert hook.compiler({"CXX": "mine -m64", "PATH": str(tmp_path)}) == ("mine", "-m64")
    assert hook.compiler({"CXX": "", "PATH": str(tmp_path)}) == (str(tmp_path / "c++"),)


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_usual_compiler_on_the_path_is_found(name: str, hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / name, "")
    assert hook.compiler({"PATH": str(tmp_path)}) == (str(tmp_path / name),)


def test_no_compiler_is_none_and_a_named_one_that_is_missing_is_refused(hook: ModuleType, tmp_path: Path) -> None:
    assert hook.compiler({"PATH": str(tmp_path)}) is None
    assert hook.Toolchain.detect({"PATH": str(tmp_path)}, "x86_64") is None
    with pytest.raises(hook.BuildError, match=r"'icpx'.*unset CXX"):
        hook.compiler({"CXX": "icpx", "PATH": str(tmp_path)})


def test_the_native_build_can_be_turned_off(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "c++", "")
    found = {"PATH": str(tmp_path)}
    assert hook.Toolchain.detect(found, "x86_64") is not None
    assert hook.Toolchain.detect(found | {"HEADWAY_NATIVE_BUILD": "off"}, "x86_64") is None
    with pytest.raises(hook.BuildError, match=r"'no'.*auto, all or off"):
        hook.Toolchain.detect(found | {"HEADWAY_NATIVE_BUILD": "no"}, "x86_64")


def test_a_compiler_that_cannot_compile_counts_as_none(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "c++", "exit 1")
    tools = hook.Toolchain.detect({"PATH": str(tmp_path)}, "x86_64")
    assert not tools.works()
    working = noting_compiler(tmp_path)
    assert tools._replace(command=(str(working),)).works()
    assert "-mavx512vnni" in (tmp_path / "told").read_text()


# -- what is compiled --------------------------------------------------------------------------------------------------


def test_every_instruction_set_is_compiled_and_the_plain_one_is_linked_first(hook: ModuleType) -> None:
    sources = hook.native_sources(ROOT)
    units = hook.units(sources, tools_for(hook, x86=True))
    assert [unit.name for unit in units[:2]] == ["hw_plain_step", "hw_plain_matmul"]
    assert not [flag for unit in units[:2] for flag in unit.flags if flag.startswith("-m")]
    steps = [unit for unit in units if unit.source == "step.cpp"]
    assert [unit.flags[:2] for unit in steps] == [
        ("-DHW_ISA=0", "-DHW_NS=hw_plain"),
        ("-DHW_ISA=1", "-DHW_NS=hw_avx2"),
        ("-DHW_ISA=2", "-DHW_NS=hw_avx512"),
        ("-DHW_ISA=3", "-DHW_NS=hw_vnni"),
        ("-DHW_ISA=4", "-DHW_NS=hw_bf16"),
    ]
    assert [unit.flags for unit in units if unit.source == "matmul.cpp"] == [unit.flags for unit in steps]
    assert {unit.source for unit in units} == {source.name for source in sources if source.suffix == ".cpp"}


def tools_for(hook: ModuleType, **kind: bool) -> Any:
    return hook.Toolchain(("c++",), (), **kind)


def test_an_installation_compiles_the_machines_best_set_and_the_plain_one(hook: ModuleType) -> None:
    sources = hook.native_sources(ROOT)
    units = hook.units(sources, tools_for(hook, x86=True)._replace(level=3))
    steps = [unit for unit in units if unit.source == "step.cpp"]
    assert [unit.name for unit in steps] == ["hw_plain_step", "hw_vnni_step"]
    assert steps[0].flags[-1] == "-Og"
    assert "-DHW_SETS=9" in next(unit.flags for unit in units if unit.source == "api.cpp")
    (alone,) = [u for u in hook.units(sources, tools_for(hook, x86=True)._replace(level=0)) if u.source == "step.cpp"]
    assert "-Og" not in alone.flags


def test_the_machine_is_asked_for_its_best_set(hook: ModuleType, tmp_path: Path) -> None:
    tools = hook.Toolchain.detect(os.environ, platform.machine())
    if tools is None or open_library().calls is None:
        pytest.skip("there is no compiler here")
    asked = tools.for_this_machine(ROOT)
    assert ISAS[asked.level] == available_isas()[-1]
    broken = tools._replace(command=(str(program(tmp_path / "broken", "exit 1")),))
    assert broken.for_this_machine(ROOT).level is None


def test_arm_gets_neon_with_dotprod_and_with_i8mm(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "c++", "")
    for machine in ("aarch64", "arm64"):
        tools = hook.Toolchain.detect({"PATH": str(tmp_path)}, machine)
        assert (tools.x86, tools.arm) == (False, True)
    units = hook.units(hook.native_sources(ROOT), tools_for(hook, arm=True))
    steps = {unit.name.removesuffix("_step"): unit.flags for unit in units if unit.source == "step.cpp"}
    assert list(steps) == ["hw_plain", "hw_neon", "hw_i8mm"]
    assert units[0].name == "hw_plain_step"
    assert not [flag for flag in steps["hw_plain"] if flag.startswith(("-m", "-DHW_NEON"))]
    assert {"-DHW_ISA=0", "-DHW_NEON=2", "-march=armv8.2-a+dotprod+i8mm"} <= set(steps["hw_i8mm"])
    assert all("-DHW_ARM" in unit.flags for unit in units if unit.source not in hook.EACH)


def test_other_machines_get_the_plain_set_alone(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "c++", "")
    assert hook.Toolchain.detect({"PATH": str(tmp_path)}, "AMD64").x86
    assert not any(hook.Toolchain.detect({"PATH": str(tmp_path)}, "riscv64")[3:])
    units = hook.units(hook.native_sources(ROOT), tools_for(hook))
    assert [unit.name for unit in units if unit.source == "step.cpp"] == ["hw_plain_step"]
    assert not [flag for unit in units for flag in unit.flags if flag.startswith("-m") or flag == "-DHW_X86"]


def test_flags_from_outside_are_used_and_cannot_change_what_a_sum_rounds_to(hook: ModuleType, tmp_path: Path) -> None:
    program(tmp_path / "c++", "")
    outside = {"PATH": str(tmp_path), "CXXFLAGS": "-g '-DX=a b' -ffast-math", "LDFLAGS": "-Wl,--as-needed"}
    tools = hook.Toolchain.detect(outside, "x86_64")
    assert tools.flags[:4] == ("-O3", "-g", "-DX=a b", "-ffast-math")
    assert {"-fno-fast-math", "-ffp-contract=off"} <= set(tools.flags[4:])
    assert tools.link == ("-Wl,--as-needed",)


def test_nothing_is_compiled_twice_and_a_changed_source_is(hook: ModuleType, tmp_path: Path) -> None:
    root, told = small_tree(tmp_path / "tree"), tmp_path / "told"
    tools = hook.Toolchain((str(noting_compiler(tmp_path)),), ("-O3",), x86=True)

    def compiled() -> int:
        told.write_text("")
        hook.build(root, tools)
        assert (root / hook.LIBRARY).exists()
        return sum(" -c " in f" {line} " for line in told.read_text().splitlines())

    everything = len(hook.units(hook.native_sources(root), tools))
    assert compiled() == everything
    assert compiled() == 0
    (root / hook.LIBRARY).unlink()
    assert compiled() == 0  # linked again
    (root / hook.NATIVE / "simd.h").write_text("// changed")
    assert compiled() == everything
    tools = tools._replace(flags=("-O1",))
    assert compiled() == everything
    assert compiled() == 0


def test_code_that_does_not_compile_stops_the_build_and_names_the_way_out(hook: ModuleType, tmp_path: Path) -> None:
    broken = program(tmp_path / "bin" / "broken", 'echo "step.cpp:1: no such thing" >&2; exit 1')
    tools = hook.Toolchain((str(broken),), ())
    with pytest.raises(hook.BuildError, match=r"(?s)step\.cpp:1: no such thing.*HEADWAY_NATIVE_BUILD=off"):
        hook.build(small_tree(tmp_path / "tree"), tools)


# -- the whole way -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], dict(os.environ))
    (made,) = folder.glob("*.tar.gz")
    return made


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(sdist: Path, folder: Path, environment: dict[str, str]) -> tuple[Path, str, str]:
    """A clean environment makes the sdist a wheel and installs it: the wheel, what was said, what the result says."""
    run([sys.executable, "-m", "venv", str(folder / "venv")], environment)
    python = str(folder / "venv/bin/python")
    said = run([python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(folder), str(sdist)], environment)
    (wheel,) = folder.glob("*.whl")
    run([python, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)], environment)
    return wheel, said, run([python, "-I", "-c", ASK], environment)


def test_the_sdist_has_the_sources_and_nothing_built(sdist: Path, hook: ModuleType) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in hook.native_sources(ROOT)} <= names
    assert {"hatch_build.py", "pyproject.toml", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".o", ".whl"))]


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_with_a_compiler_the_wheel_has_the_library_and_the_tag_of_the_machine(sdist: Path, tmp_path: Path) -> None:
    wheel, _, says = installed(sdist, tmp_path, dict(os.environ))
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith((".so", ".dylib"))]
    assert [Path(name).stem for name in libraries] == ["_headway"]
    assert Path(libraries[0]).parent == Path(NATIVE)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o")) or name.startswith("hatch_build")]
    assert re.fullmatch(r"_headway\.\w+ version 0 set [0-3]", says.strip())


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_plain_python_and_says_so(sdist: Path, tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    wheel, said, says = installed(sdist, tmp_path, bare | {"PATH": str(tmp_path / "nothing")})
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".dylib"))]
    assert "built without its native library" in said
    assert "without a C++ compiler" in says
