"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from headway.base.errors import BadModelFile

T = TypeVar("T", dict[str, Any], list[Any])


def read_json(path: Path, kind: type[T] = dict) -> T:
    """The object in a JSON file (or, with `kind=list`, the array); empty if there is no such file."""
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise BadModelFile(f"{path} holds a {type(value).__name__}; it must hold a {kind.__name__}")
    return value
