"""Builds the guest: CPython for WebAssembly with Headway's client in it. `make programs` runs this file.

    python -m headway.sandbox.build FOLDER      program.wasm in it, and a wheel that carries it

It needs componentize-py, which it installs into an environment of its own there. A guest that was built from the same
sources is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from headway.base.version import VERSION
from headway.sandbox.artifact import compiled_guest

COMPONENTIZE = "0.25.1"
PACKAGE = Path(__file__).parents[1]
HERE = PACKAGE / "sandbox/guest"
WHEEL_NAME = "headway_guest"


# The modules that the client imports where there are no packages, with every public name that can be had then.
LIST = """
import sys
class NoPackages:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"headway", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoPackages())
import headway
from headway.remote.connection import guest
from headway.sandbox import source
for name in headway.__all__:
    try:
        getattr(headway, name)
    except (ImportError, headway.HeadwayError):
        pass
for name, module in sys.modules.items():
    if name.partition(".")[0] == "headway":
        print(module.__file__)
"""


def sources() -> dict[str, bytes]:
    """The Python files of the guest by their path, and its interface."""
    command = ["env", f"PYTHONPATH={PACKAGE.parent}", sys.executable, "-c", LIST]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = sorted({PACKAGE / "__init__.pyi", *map(Path, listed.split())})
    sources = {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in files}
    return sources | {file.name: file.read_bytes() for file in sorted(HERE.iterdir()) if file.is_file()}


def fingerprint(files: dict[str, bytes]) -> str:
    """The same for the same sources and the same tools."""
    digest = hashlib.sha256(f"componentize-py {COMPONENTIZE}".encode())
    for name, data in files.items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def build(folder: Path) -> Path:
    """The guest in a folder, built unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files, wasm, about = sources(), folder / "program.wasm", folder / "program.json"
        mark = {"version": VERSION, "sources": fingerprint(files)}
        if not (wasm.exists() and about.exists() and json.loads(about.read_text()) == mark):
            _build(folder, files)
            about.write_text(json.dumps(mark))
            _wheel(folder, wasm, about)
    return wasm


def _build(folder: Path, files: dict[str, bytes]) -> None:
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    print(f"Building the guest of programs in {folder}; this takes half a minute.", flush=True)
    part = folder / "program.part.wasm"
    _componentize(folder, "-d", tree / "program.wit", "-w", "program", "componentize", "-p", tree, "app", "-o", part)
    os.replace(part, folder / "program.wasm")


def _componentize(folder: Path, *args: str | Path) -> None:
    environment = folder / f"venv-{COMPONENTIZE}"
    tool = environment / "bin/componentize-py"
    if not tool.exists():
        venv.create(environment, with_pip=True)
        pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, f"componentize-py=={COMPONENTIZE}"], check=True)
    empty = folder / "empty"  # otherwise the packages of the running environment would be searched
    (empty / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages").mkdir(
        parents=True, exist_ok=True
    )
    subprocess.run(["env", f"VIRTUAL_ENV={empty}", tool, *args], check=True)


def _wheel(folder: Path, wasm: Path, about: Path) -> None:
    """A wheel with the guest alone, for machines that cannot build it."""
    dist = f"{WHEEL_NAME}-{VERSION}.dist-info"
    texts = {
        f"{WHEEL_NAME}/__init__.py": '"""The guest of Headway\'s programs: program.wasm."""\n',
        f"{WHEEL_NAME}/program.json": about.read_text(),
        f"{dist}/METADATA": f"Metadata-Version: 2.1\nName: headway-guest\nVersion: {VERSION}\n",
        f"{dist}/WHEEL": "Wheel-Version: 1.0\nGenerator: headway\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*texts, f"{WHEEL_NAME}/program.wasm", f"{dist}/RECORD"))
    path = folder / f"{WHEEL_NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        wheel.write(wasm, f"{WHEEL_NAME}/program.wasm")
        for name, text in (*texts.items(), (f"{dist}/RECORD", record)):
            wheel.writestr(name, text)


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
    if importlib.util.find_spec("wasmtime") is not None:
        compiled_guest(print)  # so that the first program does not wait for it
