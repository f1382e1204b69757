"""What this machine allows: bytes a second read from memory and cache, float32 and int8 products a second.

    python benchmarks/bandwidth.py                    # some seconds; JSON on standard output
    python benchmarks/bandwidth.py --out limits.json

A limit is the best of its tries, and of two ways to read: a sum and a product of a matrix and a vector. The share of a
limit that something reaches means little when the limit was taken in another sitting: `cpu.py` takes them first.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headway.base.system.machine import read_machine

TRIES = 7
WIDTH = 4096  # of the matrix that a vector is multiplied with, in floats
CUBE = 2048  # rows, columns and depth of the products
CACHE = 32 << 20  # where the system does not say how large the last cache is


@dataclass(frozen=True)
class Rate:
    """Units a second: the best try, the middle one, and how it was reached."""

    best: float
    median: float
    way: str


@dataclass(frozen=True)
class Limits:
    """What one and all threads reach. Reads are in bytes a second, products in operations a second."""

    threads: int
    memory_bytes: int
    cache_bytes: int
    read_memory: Rate
    read_memory_one_thread: Rate
    read_cache: Rate
    read_cache_one_thread: Rate
    float32_product: Rate
    int8_product: Rate


def measure(threads: int, megabytes: int = 1024, tries: int = TRIES, cube: int = CUBE) -> Limits:
    """Take all limits, with this many threads."""
    before = torch.get_num_threads()
    cache = min(last_cache() // 2, megabytes << 20)
    try:
        alone, all_of_them = _reads(1, megabytes << 20, cache, tries), _reads(threads, megabytes << 20, cache, tries)
        floats, integers = _products(cube, tries)
    finally:
        torch.set_num_threads(before)
    return Limits(threads, megabytes << 20, cache, all_of_them[0], alone[0], all_of_them[1], alone[1], floats, integers)


def last_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache of the first core."""
    found = [re.fullmatch(r"(\d+)K\s*", path.read_text()) for path in root.glob("index*/size")]
    return max((int(match[1]) << 10 for match in found if match), default=CACHE)


def _reads(threads: int, memory: int, cache: int, tries: int) -> list[Rate]:
    """How fast a large buffer is read, and one that the last cache holds."""
    torch.set_num_threads(threads)
    rates = []
    for size, rounds in ((memory, 1), (cache, 8)):
        data = torch.ones(max(1, size // (4 * WIDTH)), WIDTH)
        vector = torch.ones(WIDTH)
        ways: dict[str, Callable[[], Any]] = {"sum": data.sum, "matrix times vector": lambda d=data, v=vector: d @ v}
        timed = [_rate(way, name, rounds * data.nbytes, rounds, tries) for name, way in ways.items()]
        rates.append(max(timed, key=lambda rate: rate.best))
    return rates


def _products(cube: int, tries: int) -> tuple[Rate, Rate]:
    a, b = torch.randn(cube, cube), torch.randn(cube, cube)
    operations = 2 * cube**3
    floats = _rate(lambda: a @ b, "torch.mm", operations, 1, tries)
    x, w = (torch.randint(-127, 128, (cube, cube), dtype=torch.int8) for _ in range(2))
    return floats, _rate(lambda: torch._int_mm(x, w.t()), "torch._int_mm", operations, 1, tries)


def _rate(work: Callable[[], Any], way: str, units: int, rounds: int, tries: int) -> Rate:
    work()
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        seconds.append(time.perf_counter() - began)
    return Rate(units / min(seconds), units / statistics.median(seconds), way)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=read_machine().fair_threads)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the buffer that no cache holds")
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--cube", type=int, default=CUBE, help="rows, columns and depth of the products")
    parser.add_argument("--out", type=Path, help="a file for the JSON; standard output otherwise")
    options = parser.parse_args()
    for name in ("threads", "megabytes", "tries", "cube"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be an integer of at least 1")
    limits = measure(options.threads, options.megabytes, options.tries, options.cube)
    text = json.dumps({"machine": asdict(read_machine()), "limits": asdict(limits)}, indent=2) + "\n"
    print(text, end="") if options.out is None else options.out.write_text(text)


if __name__ == "__main__":
    main()
