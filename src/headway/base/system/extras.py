"""Packages that are optional, by the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from headway.base.errors import Unsupported


def has_torch() -> bool:
    """Whether torch is installed. It is not imported."""
    return find_spec("torch") is not None


def explain_missing(error: ModuleNotFoundError, what: str, extra: str = "torch") -> None:
    """Raise with the command that installs torch, if that is the module that could not be imported."""
    if (error.name or "").partition(".")[0] == "torch":
        need_torch(what, extra)


def need_torch(what: str, extra: str = "torch") -> None:
    """Raise, with the command that installs it, if torch is not there."""
    if not has_torch():
        raise Unsupported(f"{what} needs torch, which is not installed; run: pip install 'headway[{extra}]'")
