"""How many tokens a batch holds: as requested, or the size that measured fastest here, cached for the next time.

Until the fastest size is known, full batches of real work run at each candidate size in turn; the one with the most
tokens per second is kept. Nothing is computed only to be measured, and sizes never change results.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from headway.base.config import settings
from headway.base.errors import InvalidInput
from headway.base.text import short_repr

CPU_SIZES = (256, 512, 1024, 2048, 4096)
GPU_SIZES = (2048, 4096, 8192, 16384, 32768)  # larger ones use a GPU no better and leave too few batches to overlap
ROUNDS = 4  # full batches measured at each size
FULL = 0.75  # the share of its budget from which a batch counts as full
MAX_ROWS = 4096  # of one batch, whatever its budget


class TokenBudget:
    """The limits of the next batch, `tokens` and `rows`; `record` is called with the time of each batch."""

    def __init__(self, batch_size: int | str, *, cpu: bool, key: str | None = None) -> None:
        self._key, self._measured = key, dict[int, list[float]]()
        self._sizes: tuple[int, ...] = ()
        self.rows = MAX_ROWS
        if batch_size == "auto":
            self._sizes = CPU_SIZES if cpu else GPU_SIZES
            self.tokens = cached_budget(key, self._sizes) or 0
            if not self.tokens:
                self._measured = {size: [] for size in self._sizes}
                self.tokens = self._sizes[1]
        elif isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1:
            self.rows, self.tokens = batch_size, 1 << 62
        else:
            raise InvalidInput(f"batch_size is {short_repr(batch_size)}; it must be 'auto' or an integer of at least 1")

    @property
    def searching(self) -> bool:
        """Whether the fastest size is still unknown."""
        return bool(self._measured)

    def record(self, tokens: int, seconds: float, budget: int | None = None) -> None:
        """Record that a batch of `tokens` (padding counts) took `seconds` under `budget` (None: the current one)."""
        size = self.tokens if budget is None else budget
        if size not in self._measured or tokens < FULL * size or seconds <= 0:
            return
        self._measured[size].append(tokens / seconds)
        short = min(self._measured.values(), key=len)
        if len(short) >= ROUNDS:
            self._settle()
        else:
            self.tokens = min(self._measured, key=lambda size: (len(self._measured[size]), size))

    def shrink(self, tokens: int) -> None:
        """Batches of `tokens` did not fit into memory: use smaller ones from now on."""
        smaller = max(tokens // 2, 1)
        self.tokens = min(self.tokens, smaller)
        self._measured = {size: rates for size, rates in self._measured.items() if size <= smaller}
        if self.searching:
            self.tokens = min(self.tokens, max(self._measured))

    def _settle(self) -> None:
        rates = {size: statistics.median(measured[1:]) for size, measured in self._measured.items()}
        self.tokens = max(rates, key=lambda size: rates[size])
        self._measured = {}
        if self._key is not None:
            cache_budget(self._key, self.tokens, rates)


def budget_key(**facts: Any) -> str:
    """Identifies one model with one backend on one machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def cached_budget(key: str | None, sizes: tuple[int, ...]) -> int | None:
    """The fastest size for `key`, if it is known and one of `sizes`."""
    entry = _read().get(key or "", {})
    size = entry.get("tokens") if isinstance(entry, dict) else None
    return size if size in sizes else None


def cache_budget(key: str, tokens: int, rates: dict[int, float]) -> None:
    """Store the fastest size for `key`; does nothing if the cache cannot be written."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = _read() | {key: {"tokens": tokens, "tokens_per_second": {str(k): round(v) for k, v in rates.items()}}}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".budgets-", delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return


def _file() -> Path:
    return settings().cache / "pipelines" / "budgets.json"


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
