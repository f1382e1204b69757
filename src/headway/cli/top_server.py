"""A running server, watched through its /stats."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import fields
from typing import Any

from headway.base.config import settings
from headway.base.errors import InvalidInput
from headway.cli.top import Figures

ASK_SECONDS = 0.5  # between two questions, however often the view is drawn
PATIENCE = 5.0


class ServerWatch(Figures):
    """A server's engine, asked twice a second."""

    def __init__(self, url: str) -> None:
        from headway.program.engine import EngineStats

        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"--url is {url!r}; it takes an address such as http://127.0.0.1:8000")
        self._url, self._asked = url.rstrip("/") + "/stats", 0.0
        self._known = {field.name for field in fields(EngineStats)}
        try:
            first = self._ask()
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"no server answers at {url}: {_reason(error)}; start one with `headway serve`"
            ) from None
        model = first["model"]
        super().__init__(f"{model['name']} · {model['dtype']} · {model['device']} · {url}", self._stats(first))

    def look(self) -> None:
        """Ask again, unless that was just now; a server that answers no more is over."""
        if self.over or time.monotonic() - self._asked < ASK_SECONDS:
            return
        try:
            answer = self._ask()
        except (OSError, ValueError):
            self.over = True
            return
        self.stats, self.batch = self._stats(answer), answer["steps"]["batch"]
        self.seconds.clear()
        self.seconds.extend(answer["steps"]["seconds"])
        self.mark()

    def _ask(self) -> dict[str, Any]:
        self._asked = time.monotonic()
        key = settings().api_key
        request = urllib.request.Request(self._url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def _stats(self, answer: dict[str, Any]) -> Any:
        from headway.program.engine import EngineStats

        return EngineStats(**{name: value for name, value in answer["stats"].items() if name in self._known})


def _reason(error: Exception) -> str:
    """What the server said, if it said anything."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            return json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"HTTP {error.code}"
    cause = getattr(error, "reason", error)
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
