"""Progress below a notebook's cell: fetching and loading a model. Elsewhere, a pipe included, nothing is shown.

It is IPython's own display, updated in place; no widget package is needed. Commands have their own bars.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUICK_SECONDS = 0.5  # work shorter than this shows no bar
UPDATE_SECONDS = 0.1  # between two updates


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar for (done, total, label). Each new label begins a bar; `form` writes an amount, such as bytes."""

    def __init__(self, form: Callable[[float], str] = str) -> None:
        self._form = form
        self._label: str | None = None
        self._handle: Any = None
        self._next = 0.0

    def __call__(self, done: float, total: float | None, label: str) -> None:
        now = time.monotonic()
        if label != self._label:
            self._label, self._handle, self._next = label, None, now + QUICK_SECONDS
        is_last = total is not None and done >= total and self._handle is not None
        if now >= self._next or is_last:
            self._next = now + UPDATE_SECONDS
            self._show(done, total, label)

    def _show(self, done: float, total: float | None, label: str) -> None:
        import html

        from IPython.display import display  # type: ignore[reportMissingImports]

        amount = self._form(done) if total is None or done == total else f"{self._form(done)} of {self._form(total)}"
        value = "" if total is None else f' value="{min(done, total)}" max="{total}"'
        shown = {
            "text/plain": f"{label}: {amount}",
            "text/html": f"{html.escape(label)} <progress{value}></progress> {html.escape(amount)}",
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


@contextmanager
def working_in_notebook(label: str) -> Iterator[None]:
    """A bar without an end for the time of a `with`, where this is a notebook and it takes a while."""
    if not in_notebook():
        yield
        return
    bar, began = NotebookBar(lambda seconds: f"{seconds:.1f} s"), time.monotonic()
    bar(0, None, label)
    timer = threading.Timer(QUICK_SECONDS, lambda: bar(time.monotonic() - began, None, label))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    seconds = time.monotonic() - began
    bar(seconds, seconds, label)
