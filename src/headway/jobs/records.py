"""Files of items, read one record at a time: .jsonl, .csv, .parquet, or JSON lines from a pipe.

A record knows its number in the file and how far it reaches; one that cannot be read carries the reason instead of a
value, so that whoever reads decides whether that is the end. Nothing is read ahead of what is asked for.
"""

from __future__ import annotations

import csv
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headway.base.errors import InvalidInput, Unsupported

KINDS = (".jsonl", ".csv", ".parquet")
PIPE = "-"
PARQUET = "parquet files need pyarrow, which is not installed: pip install 'headway[parquet]'"
FIELD_BYTES = 1 << 30  # of one field of a CSV file; the library's own limit is 128 kB


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a file: its number from 1, what it says or why that cannot be read, and a check of its bytes.

    `reached` is the share of the file up to its end, or None where the end is not known.
    """

    line: int
    value: Any
    crc: int
    reached: float | None = None
    error: str | None = None


def kind_of(name: str, what: str) -> str:
    """The kind of file a name stands for."""
    kind = ".jsonl" if name == PIPE else Path(name).suffix.lower()
    if kind not in KINDS:
        raise InvalidInput(f"{what} is {name!r}; it takes a file that ends in {', '.join(KINDS)}, or - for a pipe")
    return kind


def check_input(name: str) -> None:
    """Refuse a file that is not there."""
    if name != PIPE and not Path(name).is_file():
        raise InvalidInput(f"--input is {name!r}, and there is no such file")


def records(name: str) -> Iterator[Record]:
    """The records of a file, or of standard input."""
    kind = kind_of(name, "--input")
    check_input(name)
    if kind == ".parquet":
        return _parquet(name)
    if name == PIPE:
        return _json_lines(sys.stdin.buffer, None)
    return _csv(Path(name)) if kind == ".csv" else _opened(Path(name))


def _opened(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        yield from _json_lines(file, path.stat().st_size)


def _json_lines(file: BinaryIO, size: int | None) -> Iterator[Record]:
    read = 0
    for line, raw in enumerate(file, start=1):
        read += len(raw)
        if not raw.strip():
            continue  # an empty line is no item
        reached = read / size if size else None
        value = error = None
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as problem:
            error = f"no JSON: {problem}"
        yield Record(line, value, zlib.crc32(raw.strip()), reached, error)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(FIELD_BYTES)
    size, counted = path.stat().st_size, _Counted()
    with path.open("rb") as file:
        reader = csv.reader(counted.lines(file), strict=True)
        header = next(reader, None)
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
                yield Record(line, None, 0, counted.bytes / size, f"no CSV: {problem}")
                continue
            if fields:
                yield _row(line, header, fields, counted.bytes / size)


def _row(line: int, header: list[str], fields: list[str], reached: float) -> Record:
    crc = zlib.crc32("\x1f".join(fields).encode("utf-8", "surrogateescape"))
    error = None
    if len(fields) != len(header):
        error = f"{len(fields)} fields, and the header has {len(header)}"
    elif any("\udc80" <= char <= "\udcff" for field in fields for char in field):
        error = "no UTF-8 text"
    return Record(line, None if error else dict(zip(header, fields)), crc, reached, error)


class _Counted:
    """Lines of text for the csv module, and how many bytes they took."""

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
    for batch in file.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            line += 1
            yield Record(line, row, zlib.crc32(repr(row).encode()), line / total)


def pyarrow_parquet() -> Any:
    """pyarrow's parquet module, or an error that names the extra that brings it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise Unsupported(PARQUET) from None
    return pyarrow.parquet


# -- items -------------------------------------------------------------------------------------------------------------


def item_of(value: Any, columns: tuple[str, ...]) -> Any:
    """What a task is given of a record: its one column, its text, or all of it."""
    if not columns:
        plain = isinstance(value, dict) and "text" in value and "text_pair" not in value
        return value["text"] if plain else next(iter(value.values())) if _single(value) else value
    if not isinstance(value, dict):
        raise InvalidInput(f"--column {columns[0]} was given, and this is {type(value).__name__}, not an object")
    for column in columns:
        if column not in value:
            raise InvalidInput(f"there is no column {column!r}; there are {', '.join(map(str, value)) or 'none'}")
    return value[columns[0]] if len(columns) == 1 else {column: value[column] for column in columns}


def _single(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1
