"""How programs are confined: the arguments of the worker that runs them, and what people are told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.sandbox.artifact import compiled_guest

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
PACKAGE = Path(__file__).parents[2]
TRIAL_SECONDS = 20


@dataclass(frozen=True)
class Confinement:
    """What confines programs, in words, and the worker's arguments."""

    name: str
    command: list[str]


def confinement(kind: str, *, unconfined: bool = False, log: Callable[[str], None] = lambda text: None) -> Confinement:
    """The confinement of a kind, sandbox or process; raises where it is not to be had. The first one may compile."""
    if kind == "sandbox":
        return Confinement("WebAssembly", ["wasm", str(compiled_guest(log))])
    runner = [sys.executable, "-m", "headway.sandbox.process"]
    bubblewrap = shutil.which("bwrap")
    why = "bubblewrap is not installed (Debian: apt install bubblewrap)"
    if bubblewrap is not None:
        why = _failure([bubblewrap, *wrapped()])
        if why is None:
            return Confinement("bubblewrap", ["process", json.dumps([bubblewrap, *wrapped(), *runner])])
    if unconfined:
        return Confinement("none", ["process", json.dumps(runner)])
    raise Unsupported(
        f"programs in processes are confined by bubblewrap, and {why}; use --allow-programs for the WebAssembly "
        "sandbox, or --unconfined to let programs do everything that this user may"
    )


def wrapped() -> list[str]:
    """bubblewrap's arguments: Python and its packages, read only; an empty /tmp; no network, no other processes."""
    folders = {*SYSTEM, sys.prefix, sys.base_prefix, str(PACKAGE), str(Path(sys.executable).resolve().parents[1])}
    shown = [arg for folder in sorted(folders) if Path(folder).exists() for arg in ("--ro-bind", folder, folder)]
    return [
        *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *shown,  # after /tmp, in which they may lie
        *("--chdir", "/tmp"),
        *("--setenv", "PYTHONPATH", str(PACKAGE), "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
    ]


def _failure(command: list[str]) -> str | None:
    """Why this machine does not let bubblewrap work, if it does not."""
    try:
        done = subprocess.run([*command, "/bin/true"], capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not work here ({error})"
    if done.returncode == 0:
        return None
    return f"it does not work here ({done.stderr.decode(errors='replace').strip()[-200:]})"
