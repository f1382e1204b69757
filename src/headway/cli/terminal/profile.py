"""An engine profile as a table of phases or a JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import InvalidInput
from headway.cli.terminal.render import show_table, size

if TYPE_CHECKING:
    from headway.runtime.profile import Profile

LEAST_SECONDS = 1e-4  # shorter phases show no rate: it would be noise


def show_profile(profile: Profile) -> None:
    """The phases of a run: time, share, bytes, and bandwidth against the measured memory bandwidth."""
    total = sum(phase.seconds for phase in profile.phases) or 1.0
    rows = []
    for phase in profile.phases:
        rate = phase.bytes / phase.seconds if phase.seconds else 0.0
        timed = phase.seconds >= LEAST_SECONDS
        share = f"{rate / profile.bandwidth_limit:.0%}" if timed and profile.bandwidth_limit else "–"
        rows.append(
            (
                phase.name,
                str(phase.calls),
                f"{phase.seconds * 1e3:.1f}",
                f"{phase.seconds / total:.0%}",
                f"{phase.seconds * 1e3 / max(profile.tokens, 1):.2f}",
                f"{phase.bytes / 1e6:.1f}",
                f"{rate / 1e9:.2f}" if timed else "–",
                share,
            )
        )
    headers = ("phase", "calls", "ms", "share", "ms/token", "MB", "GB/s", "of limit")
    title = f"{profile.tokens} tokens, {total:.2f} s in phases; measured memory limit {size(profile.bandwidth_limit)}/s"
    show_table(headers, rows, title=title, numbers=range(1, len(headers)))


def check_target(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work is done."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "it is a folder" if path.is_dir() else f"{folder} is not a folder that can be written to"
        raise InvalidInput(f"cannot write the profile to {str(path)!r}: {reason}")


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile as JSON, atomically."""
    text = json.dumps(profile.to_json(), indent=2) + "\n"
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise InvalidInput(f"cannot write the profile to {str(path)!r}: {error.strerror}") from error
