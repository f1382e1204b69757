"""The layout of a step's numbers in device memory: one int32 buffer, filled by the host, read by every kernel.

First come FIELDS columns of `rows` numbers, one for each row of the step (field f of row r is at f * rows + r), then
four more columns for each mask set of the model (one for each attention window that occurs). Page tables and runs,
which columns point at, follow anywhere in the buffer:

    TOKEN, POSITION   the row's token and position id
    WRITE             the physical slot for its keys and values, -1 for a row that is not cached
    PAGE_AT           the start of its sequence's page table: the physical page of every page number, 0 if missing
    WHOLE             1 if that table has no holes
    RUN_AT, RUN_COUNT the start of its mask, and its number of runs: slot ranges [first, end), ascending; a row
                      without runs attends to nothing, and its result is zero
    FIRST, END        the first slot of its first run, and the end of its last
"""

from __future__ import annotations

TOKEN, POSITION, WRITE, PAGE_AT, WHOLE = range(5)
FIELDS = 5
RUN_AT, RUN_COUNT, FIRST, END = range(4)  # within the columns of a mask set
RUN_FIELDS = 4


def run_field(mask_set: int) -> int:
    """The first column of a mask set."""
    return FIELDS + RUN_FIELDS * mask_set


def columns(mask_sets: int) -> int:
    """The number of columns."""
    return FIELDS + RUN_FIELDS * mask_sets
