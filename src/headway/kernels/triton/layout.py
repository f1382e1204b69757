"""The numbers of a step in device memory: one buffer of int32, filled by the host, read by every kernel.

First come FIELDS columns of `rows` numbers each, one number a row of the step (field f of row r is at f * rows + r),
then, for each set of masks a model needs (one for each window that occurs in it), four columns more. What a column says
to be elsewhere follows behind, anywhere in the buffer:

    TOKEN, POSITION   the row's token and position id
    WRITE             the physical slot its keys and values go to, -1 for a row that is not kept
    PAGE_AT           where the page table of its sequence begins: the physical page of every page number, 0 for one
                      that is not there
    WHOLE             1 when that table has no holes
    RUN_AT, RUN_COUNT where its mask begins, and how many runs it has: (first slot, slot behind the last) each,
                      in rising order; no run: the row attends to nothing, and its result is zero
    FIRST, BEHIND     the first slot of its first run, and the slot behind the last
"""

from __future__ import annotations

TOKEN, POSITION, WRITE, PAGE_AT, WHOLE = range(5)
FIELDS = 5
RUN_AT, RUN_COUNT, FIRST, BEHIND = range(4)  # in the columns of a set of masks
RUN_FIELDS = 4


def run_field(mask_set: int) -> int:
    """The first column of a mask set."""
    return FIELDS + RUN_FIELDS * mask_set


def columns(mask_sets: int) -> int:
    """How many numbers a row has."""
    return FIELDS + RUN_FIELDS * mask_sets
