"""How many tokens a batch holds: as asked, or what measured best here, kept in the cache for the next time.

While the best is not known, full batches of real work are computed at each candidate size in turn; whichever gave the
most tokens a second is kept. Nothing is computed for measuring alone, and sizes never change results.
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

CPU_SIZES = (256, 512, 1024, 2048, 4096)
DEVICE_SIZES = (2048, 4096, 8192, 16384, 32768)  # larger ones fill a GPU no better, and leave too few to follow them
ROUNDS = 4  # full batches measured at each size
FULL = 0.75  # the share of its size from which a batch counts as full
ROWS = 4096  # the most rows of one batch in any case


class Budget:
    """The size of the next batch: `tokens` and `rows`, told what each batch took."""

    def __init__(self, batch_size: int | str, *, cpu: bool, key: str | None = None) -> None:
        self._key, self._measured = key, dict[int, list[float]]()
        self._sizes: tuple[int, ...] = ()
        self.rows = ROWS
        if batch_size == "auto":
            self._sizes = CPU_SIZES if cpu else DEVICE_SIZES
            self.tokens = remembered(key, self._sizes) or 0
            if not self.tokens:
                self._measured = {size: [] for size in self._sizes}
                self.tokens = self._sizes[1]
        elif isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1:
            self.rows, self.tokens = batch_size, 1 << 62
        else:
            raise InvalidInput(f"batch_size is {batch_size!r}; it takes 'auto' or a whole number of rows from 1")

    @property
    def searching(self) -> bool:
        """Whether the best size is not known yet."""
        return bool(self._measured)

    def record(self, tokens: int, seconds: float, budget: int | None = None) -> None:
        """A batch of `tokens` (padding counted) took `seconds`; it might have had `budget`, the current one if None."""
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
        """Batches of `tokens` were too large for memory: none as large any more."""
        smaller = max(tokens // 2, 1)
        self.tokens = min(self.tokens, smaller)
        self._measured = {size: rates for size, rates in self._measured.items() if size <= smaller}
        if self.searching:
            self.tokens = min(self.tokens, max(self._measured))

    def _settle(self) -> None:
        rates = {size: statistics.median(found[1:]) for size, found in self._measured.items()}
        self.tokens = max(rates, key=lambda size: rates[size])
        self._measured = {}
        if self._key is not None:
            remember(self._key, self.tokens, rates)


def key_of(**facts: Any) -> str:
    """A name for one model computed in one way on one machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def remembered(key: str | None, sizes: tuple[int, ...]) -> int | None:
    """The size that was best for `key`, if that is known and one of `sizes`."""
    found = _read().get(key or "", {})
    size = found.get("tokens") if isinstance(found, dict) else None
    return size if size in sizes else None


def remember(key: str, tokens: int, rates: dict[int, float]) -> None:
    """Keep the best size for `key`; a cache that cannot be written is left alone, only this process knows then."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _read() | {key: {"tokens": tokens, "tokens_per_second": {str(k): round(v) for k, v in rates.items()}}}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".budgets-", delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return


def _file() -> Path:
    return settings().cache / "pipelines" / "budgets.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
