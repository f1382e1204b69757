"""Which passes are refused as soon as they are submitted: what can never run. Pure."""

from __future__ import annotations

import time

from headway.base.errors import DeadlineExceeded, OutOfPages, PassFailed, TokenBudgetExceeded
from headway.kv.table import PageTable


def check_admission(table: PageTable, base: int, tokens: int, *, pages: int) -> None:
    """Raise for a pass of this many tokens, from slot `base` on, that a pool of `pages` or its context cannot have."""
    gone = table.pages.count(None) if table.has_discards else 0
    need = max(len(table.pages), -(-(base + tokens) // table.page_size)) - gone
    if need > pages:
        raise OutOfPages(
            f"this pass needs {need} pages of {table.page_size} slots; the pool has {pages}; "
            "shorten it, or create the engine with a larger pages="
        )
    in_flight = base - table.length
    if table.token_budget is not None and tokens > table.token_budget - in_flight:
        raise TokenBudgetExceeded(
            f"this pass has {tokens} tokens and the context may compute {table.token_budget - in_flight} more; "
            "give it a larger token_budget="
        )
    if time.monotonic() > table.deadline:
        raise late()
    if table.lost is not None:
        raise PassFailed(f"this context's pages are lost; release it and create a new one: {table.lost}")


def late() -> DeadlineExceeded:
    """What a pass gets after its context's deadline."""
    return DeadlineExceeded("the context's deadline has passed; give it more time with deadline=, or create a new one")
