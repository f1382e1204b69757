"""What an engine says about itself while it works, a line at a time, through Python's logging.

Nobody hears it unless they listen: `headway serve` writes it to its log, commands show it on standard error, a program
adds a handler to the logger `headway.engine`. A line has a sentence and named values (`record.values`).
"""

from __future__ import annotations

import logging
from typing import Any

LOGGER = "headway.engine"


def log_event(message: str, **values: Any) -> None:
    """One line. Values are plain data; never a prompt or an answer."""
    logging.getLogger(LOGGER).info(message, extra={"values": values})
