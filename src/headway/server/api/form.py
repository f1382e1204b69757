"""A multipart/form-data body, parsed as clients of OpenAI send it: a few short fields and one file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.base.dataclass import dataclass
from headway.base.text import short_repr
from headway.server.errors import ApiError, bad_request

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
_BOUNDARY = re.compile(r"multipart/form-data\s*;\s*boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))\s*", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True)
class FormPart:
    """One part: its value, and its file name if it is a file."""

    name: str
    value: bytes
    filename: str | None = None

    @property
    def text(self) -> str:
        try:
            return self.value.decode()
        except UnicodeDecodeError:
            raise bad_request(f"the field {short_repr(self.name)} is not valid UTF-8", self.name[:80]) from None


def parse_form(content_type: str, body: bytes, *, lists: Sequence[str] = ()) -> dict[str, list[FormPart]]:
    """The parts of a body by name, one each except for `lists`; raises a 400 for a body that is not well-formed."""
    match = _BOUNDARY.fullmatch(content_type.strip())
    if match is None:
        raise bad_request("the upload must be multipart/form-data with a boundary", code="invalid_form")
    mark = b"\r\n--" + (match[1] or match[2]).encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise _broken(f"it needs 1 to {MAX_PARTS} parts and an end")
    parts: dict[str, list[FormPart]] = {}
    for piece in pieces[1:-1]:
        part = _part(piece)
        if part.name in parts and part.name not in lists:
            raise _broken(f"the field {short_repr(part.name)} is there twice")
        parts.setdefault(part.name, []).append(part)
    return parts


def _part(piece: bytes) -> FormPart:
    head, gap, value = piece.partition(b"\r\n\r\n")
    if not gap or not head.startswith(b"\r\n") or len(head) > MAX_HEADER_BYTES:
        raise _broken("a part has no headers of its own")
    for line in head[2:].decode("utf-8", "replace").split("\r\n"):
        title, _, rest = line.partition(":")
        if title.strip().lower() == "content-disposition":
            values = {name.lower(): re.sub(r"\\(.)", r"\1", text) for name, text in _PARAMETER.findall(rest)}
            if "name" in values:
                return FormPart(values["name"], value, values.get("filename"))
    raise _broken("a part has no name")


def _broken(why: str) -> ApiError:
    return bad_request(f"the upload is not valid multipart/form-data: {why}", code="invalid_form")
