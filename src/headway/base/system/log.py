"""Log events of an engine, through Python's logging.

`headway serve` writes them to its log, commands print them on standard error, and a program can add a handler to the
logger `headway.engine`. An event is a sentence with named values (`record.values`).
"""

from __future__ import annotations

import logging
from typing import Any

LOGGER = "headway.engine"


def log_event(message: str, **values: Any) -> None:
    """Log one event. Values are plain data, never a prompt or an answer."""
    logging.getLogger(LOGGER).info(message, extra={"values": values})
