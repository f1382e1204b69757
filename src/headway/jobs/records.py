"""Files of items, read one record at a time: .jsonl, .csv, .parquet, .txt, or JSON lines from a pipe.

A record knows its line number and how much of the file is read; one that cannot be read carries the error instead of a
value, so that the caller decides what to do. Nothing is read ahead.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported

KINDS = (".jsonl", ".csv", ".parquet")
TEXT = ".txt"  # a text on each line; only read, as results are not plain text
PIPE = "-"
PARQUET = "parquet files need pyarrow, which is not installed: pip install 'headway[parquet]'"
FIELD_BYTES = 1 << 30  # limit of a CSV field; the default of the csv module is 128 kB


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a file: its number from 1, its value or the error of reading it, and a checksum.

    `reached` is the share of the file that is read, or None if the size is unknown.
    """

    line: int
    value: Any
    crc: int
    reached: float | None = None
    error: str | None = None


def kind_of(name: str, what: str) -> str:
    """The format of a file, from its name."""
    kind = ".jsonl" if name == PIPE else Path(name).suffix.lower()
    kinds = KINDS if what == "--output" else (*KINDS, TEXT)
    if kind not in kinds:
        raise InvalidInput(f"{what} is {name!r}; it must end in {', '.join(kinds)}, or be - for a pipe")
    return kind


def check_input(name: str) -> None:
    """Raise InvalidInput if the file does not exist."""
    if name != PIPE and not Path(name).is_file():
        raise InvalidInput(f"--input is {name!r}, which does not exist")


def watched(name: str) -> Iterator[Record]:
    """The records of a file that must not change meanwhile; InvalidInput if it does."""
    if name == PIPE:
        yield from records(name)
        return
    before = _stamp(name)
    for record in records(name):
        _check_stamp(name, before)
        yield record
    _check_stamp(name, before)


def file_digest(name: str) -> str:
    """The SHA-256 of a file's bytes."""
    with Path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(name: str) -> tuple[int, int, int]:
    facts = Path(name).stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _check_stamp(name: str, before: tuple[int, int, int]) -> None:
    try:
        same = _stamp(name) == before
    except OSError:
        same = False
    if not same:
        raise InvalidInput(f"{name} has changed while the job reads it; restore it, and the same command resumes")


def records(name: str) -> Iterator[Record]:
    """The records of a file, or of standard input."""
    kind = kind_of(name, "--input")
    check_input(name)
    if kind == ".parquet":
        return _parquet(name)
    if name == PIPE:
        return _json_lines(sys.stdin.buffer, None)
    if kind == TEXT:
        return _text_lines(Path(name))
    return _csv(Path(name)) if kind == ".csv" else _opened(Path(name))


def _opened(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        yield from _json_lines(file, path.stat().st_size)


def _json_lines(file: BinaryIO, size: int | None) -> Iterator[Record]:
    read = 0
    for line, given in enumerate(file, start=1):
        read += len(given)
        raw = given.removeprefix(codecs.BOM_UTF8) if line == 1 else given
        if not raw.strip():
            continue  # an empty line is not an item
        reached = read / size if size else None
        value = error = None
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as problem:
            error = f"not valid JSON: {problem}"
        yield Record(line, value, zlib.crc32(raw.strip()), reached, error)


def _text_lines(path: Path) -> Iterator[Record]:
    size, read = path.stat().st_size, 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            read += len(raw)
            value = error = None
            try:
                value = raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as problem:
                error = f"not valid UTF-8 at byte {problem.start}"
            if error is not None or (value and value.strip()):  # an empty line is not an item
                yield Record(line, value, zlib.crc32(raw.strip()), read / size, error)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(FIELD_BYTES)
    size, counted = path.stat().st_size, _CountedLines()
    with path.open("rb") as file:
        reader = csv.reader(counted.lines(file), strict=True)
        header = _header(path, reader)
        if header is None:
            return
        if len(set(header)) != len(header):
            raise InvalidInput(f"{path}: the header names a column twice: {', '.join(header)}")
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                yield Record(line, None, 0, counted.bytes / size, f"not valid CSV: {problem}")
                continue
            if fields:
                yield _row(line, header, fields, counted.bytes / size)


def _header(path: Path, reader: Iterator[list[str]]) -> list[str] | None:
    """The first line that is not empty; None if there is none."""
    try:
        header = next((fields for fields in reader if fields), None)
    except csv.Error as problem:
        raise InvalidInput(
            f"{path}: the header is not valid CSV: {problem}; lines must end in \\n or \\r\\n, and quotes in fields be "
            "doubled"
        ) from None
    if header is not None and _has_bad_bytes(header):
        raise InvalidInput(f"{path}: the header is not valid UTF-8; save the file in UTF-8")
    return header


def _has_bad_bytes(fields: list[str]) -> bool:
    return any("\udc80" <= char <= "\udcff" for field in fields for char in field)


def _row(line: int, header: list[str], fields: list[str], reached: float) -> Record:
    crc = zlib.crc32("\x1f".join(fields).encode("utf-8", "surrogateescape"))
    error = None
    if len(fields) != len(header):
        error = f"{len(fields)} fields, but the header has {len(header)}"
    elif _has_bad_bytes(fields):
        error = "not valid UTF-8"
    return Record(line, None if error else dict(zip(header, fields)), crc, reached, error)


class _CountedLines:
    """Lines of text for the csv module, and the number of bytes read."""

    bytes = 0

    def lines(self, file: BinaryIO) -> Iterator[str]:
        for number, raw in enumerate(file):
            self.bytes += len(raw)
            yield raw.decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape")


def _parquet(name: str) -> Iterator[Record]:
    parquet = pyarrow_parquet()
    try:
        file = parquet.ParquetFile(name)
    except (OSError, ValueError) as problem:
        raise InvalidInput(f"{name} cannot be read as parquet: {problem}") from problem
    total, line = max(file.metadata.num_rows, 1), 0
    if len(set(names := file.schema_arrow.names)) != len(names):
        raise InvalidInput(f"{name}: the schema names a column twice: {', '.join(names)}")
    batches = file.iter_batches(batch_size=1024)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as problem:
            raise InvalidInput(f"{name} cannot be read as parquet after row {line}: {problem}") from problem
        if batch is None:
            return
        for row in batch.to_pylist():
            line += 1
            yield Record(line, _plain_values(row), zlib.crc32(repr(row).encode()), line / total)


def _plain_values(value: Any) -> Any:
    """A value of a parquet file as JSON has it, or bytes; dates and decimals are texts."""
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, dict):
        return {str(name): _plain_values(part) for name, part in value.items()}
    return [_plain_values(part) for part in value] if isinstance(value, list | tuple) else str(value)


def pyarrow_parquet() -> Any:
    """pyarrow.parquet, or an error that names the extra to install."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise Unsupported(PARQUET) from None
    return pyarrow.parquet


# -- items -------------------------------------------------------------------------------------------------------------


def item_of(value: Any, columns: tuple[str, ...]) -> Any:
    """The item of a record: the given columns, its only column, its text, or all of it."""
    if not columns:
        plain = isinstance(value, dict) and "text" in value and "text_pair" not in value
        return value["text"] if plain else next(iter(value.values())) if _single(value) else value
    if not isinstance(value, dict):
        raise InvalidInput(f"--column {columns[0]} was given, but this is a {type(value).__name__}, not an object")
    for column in columns:
        if column not in value:
            raise InvalidInput(f"there is no column {column!r}; the record has {', '.join(map(str, value)) or 'none'}")
    return value[columns[0]] if len(columns) == 1 else {column: value[column] for column in columns}


def _single(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1
