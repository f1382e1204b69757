"""Settings from environment variables. The only module that reads them; everything else takes arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput

PREFILL_MODES = ("off", "on", "validate")
NATIVE_MODES = ("auto", "off", "require", "triton")


@dataclass(frozen=True)
class Settings:
    """The values of the environment variables.

    `HEADWAY_CACHE`, `HF_HUB_OFFLINE`, `HEADWAY_BATCHED_PREFILL`, `HEADWAY_NATIVE` (auto; off; require, which makes a
    missing native library an error; triton, which uses its kernels on any device, on a CPU in Triton's interpreter),
    `HEADWAY_ISA` (the instruction set of the native kernels), `HEADWAY_WEIGHT_CACHE` (megabytes of repacked weights
    that are kept on disk, or off), `HEADWAY_API_KEY` (what commands send to a server) and `HEADWAY_STARTUP_MARKS` (a
    file to which `headway run` adds when the phases of its start were over).
    """

    cache: Path
    hub_offline: bool
    batched_prefill: str  # off | on | validate
    native: str = "auto"  # auto | off | require | triton
    isa: str | None = None
    weight_cache: int = 0  # bytes
    api_key: str | None = field(default=None, repr=False)
    startup_marks: str | None = None


def settings() -> Settings:
    """Read the environment now."""
    env = os.environ
    home = env.get("HEADWAY_CACHE")
    xdg = env.get("XDG_CACHE_HOME")
    cache = Path(home) if home else (Path(xdg) if xdg else Path.home() / ".cache") / "headway"
    return Settings(
        cache=cache,
        hub_offline=env.get("HF_HUB_OFFLINE", "").strip().lower() in {"1", "true", "yes", "on"},
        batched_prefill=_prefill_mode(env.get("HEADWAY_BATCHED_PREFILL", "on")),
        native=_native_mode(env.get("HEADWAY_NATIVE", "auto")),
        isa=env.get("HEADWAY_ISA") or None,
        weight_cache=_weight_cache(env.get("HEADWAY_WEIGHT_CACHE", "2048")),
        api_key=env.get("HEADWAY_API_KEY") or None,
        startup_marks=env.get("HEADWAY_STARTUP_MARKS") or None,
    )


def child_environment(*, only: Sequence[str] | None = None, **changes: str) -> dict[str, str]:
    """The environment of this process, or the variables named in `only`, with changes, for a process that it starts."""
    kept = os.environ if only is None else {name: os.environ[name] for name in only if name in os.environ}
    return {**kept, **changes}


def _prefill_mode(text: str) -> str:
    mode = {"0": "off", "1": "on", "": "on"}.get(text.strip().lower(), text.strip().lower())
    if mode not in PREFILL_MODES:
        raise InvalidInput(
            f"HEADWAY_BATCHED_PREFILL is {text!r}; it must be one of {', '.join(PREFILL_MODES)} (or 0, 1)"
        )
    return mode


def _weight_cache(text: str) -> int:
    size = {"off": "0", "": "2048"}.get(text.strip().lower(), text.strip())
    if not (size.isascii() and size.isdigit()):
        raise InvalidInput(f"HEADWAY_WEIGHT_CACHE is {text!r}; it must be a number of megabytes, or off")
    return int(size) << 20


def _native_mode(text: str) -> str:
    mode = {"0": "off", "1": "require", "": "auto"}.get(text.strip().lower(), text.strip().lower())
    if mode not in NATIVE_MODES:
        raise InvalidInput(f"HEADWAY_NATIVE is {text!r}; it must be one of {', '.join(NATIVE_MODES)} (or 0, 1)")
    return mode


def default_environment(values: Mapping[str, str]) -> None:
    """Set variables that other libraries read, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
