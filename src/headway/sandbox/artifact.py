"""The guest's files: where program.wasm is found, and its machine code, compiled once and kept in a private folder.

The machine code is run as it is: a folder that somebody else may write to is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import stat
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.config import settings
from headway.base.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from wasmtime import Engine

BUILT = Path(__file__).parents[3] / "build/programs/program.wasm"  # by `make programs`, in a checkout
HOW = "build it with `make programs` in a checkout, or install the wheel headway-guest that it makes"


def find_guest() -> Path:
    """program.wasm: that of the installed wheel, or of this checkout."""
    package = importlib.util.find_spec("headway_guest")
    places = [BUILT] if package is None or package.origin is None else [Path(package.origin).with_name("program.wasm")]
    for place in places:
        if place.is_file():
            return place
    raise Unsupported(f"sandboxed programs need their guest, which is not here; {HOW}")


def wasm_engine() -> Engine:
    """The settings that the machine code is made for."""
    try:
        from wasmtime import Config, Engine
    except ImportError:
        raise Unsupported("sandboxed programs need wasmtime; pip install 'headway[programs]'") from None
    config = Config()
    config.epoch_interruption = True
    return Engine(config)


def compiled_guest(log: Callable[[str], None] = lambda text: None) -> Path:
    """The guest's machine code for this machine, compiled unless it was; that takes some 15 seconds."""
    wasm, folder = find_guest(), private_folder(settings().cache / "programs")
    engine = wasm_engine()
    path = folder / f"{_key(wasm)}.cwasm"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            from wasmtime.component import Component

            log("compiling the guest of programs, once; this takes some 15 seconds")
            begun = time.monotonic()
            data = Component.from_file(engine, str(wasm)).serialize()
            part = path.with_suffix(".part")
            part.write_bytes(data)
            os.replace(part, path)
            log(f"compiled the guest in {time.monotonic() - begun:.0f} s")
        os.utime(path)
        _forget_others(folder)
    return path


def private_folder(folder: Path) -> Path:
    """A folder that is its owner's alone, created if need be; refused if others may write to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInput(
            f"{str(folder)!r} holds machine code that is run as it is, and others may write to it; "
            "make it yours alone (chown, chmod 700), or set HEADWAY_CACHE to another folder"
        )
    return folder


def _key(wasm: Path) -> str:
    """Machine code belongs to a guest, a version of wasmtime and a kind of processor."""
    digest = hashlib.sha256(f"{version('wasmtime')} {platform.machine()} {_processor()}".encode())
    with open(wasm, "rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()[:32]


def _processor() -> str:
    """The processor's features, on which the machine code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _forget_others(folder: Path) -> None:
    """Machine code of earlier guests that was not used for a week."""
    for path in folder.glob("*.cwasm"):
        if path.stat().st_mtime < time.time() - 7 * 86_400:
            path.unlink(missing_ok=True)
