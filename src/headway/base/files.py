"""Small files that come with a model."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from headway.base.errors import BadModelFile

LIMIT = 64 << 20  # bytes


def read_json(path: Path, *, required: bool = False, kind: type = dict) -> Any:
    """The object in a JSON file, or what else `kind` says; empty where there is no such file, unless it is required."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise BadModelFile(f"{path} is not a regular file; a model folder needs one")
        if state.st_size > LIMIT:
            raise BadModelFile(f"{path} is larger than {LIMIT >> 20} MB; that is not a config file")
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise BadModelFile(f"{path.parent} has no {path.name}; a model folder needs one") from None
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise BadModelFile(f"{path} holds a {type(value).__name__}; it should hold {_NAMES[kind]}")
    return value


_NAMES = {dict: "an object", list: "a list"}
