"""`headway top --url`: a running server, polled through its /stats."""

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
from headway.cli.top import EngineFigures

POLL_SECONDS = 0.5  # between two requests, however often the view is drawn
TIMEOUT = 5.0


class ServerWatch(EngineFigures):
    """A server's engine, polled twice a second."""

    def __init__(self, url: str) -> None:
        from headway.program.engine import EngineStats

        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"--url is {url!r}; it must be an address like http://127.0.0.1:8000")
        self._url, self._polled_at = url.rstrip("/") + "/stats", 0.0
        self._known = {field.name for field in fields(EngineStats)}
        try:
            first = self._poll()
        except urllib.error.HTTPError as error:
            raise InvalidInput(_refusal(error, url)) from None
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"no server answers at {url}: {_reason(error)}; start one with `headway serve`"
            ) from None
        model = first["model"]
        super().__init__(f"{model['name']} · {model['dtype']} · {model['device']} · {url}", self._stats(first))

    def refresh(self) -> None:
        """Poll the server, unless that was just done; a server that no longer answers is over."""
        if self.over or time.monotonic() - self._polled_at < POLL_SECONDS:
            return
        try:
            response = self._poll()
        except (OSError, ValueError):
            self.over = True
            return
        self.stats, self.batch = self._stats(response), response["steps"]["batch"]
        self.seconds.clear()
        self.seconds.extend(response["steps"]["seconds"])
        self.mark()

    def _poll(self) -> dict[str, Any]:
        self._polled_at = time.monotonic()
        key = settings().api_key
        request = urllib.request.Request(self._url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return json.load(response)

    def _stats(self, response: dict[str, Any]) -> Any:
        from headway.program.engine import EngineStats

        return EngineStats(**{name: value for name, value in response["stats"].items() if name in self._known})


def _refusal(error: urllib.error.HTTPError, url: str) -> str:
    """What to do about a server that answers with an error."""
    if error.code == 401:
        wrong, missing = "the key in HEADWAY_API_KEY is not one of its keys", "HEADWAY_API_KEY is not set"
        given = wrong if settings().api_key else missing
        return f"the server at {url} requires an API key, and {given}; set it to a key from `headway serve --new-key`"
    return f"the server at {url} answers {error.code}: {_reason(error)}"


def _reason(error: Exception) -> str:
    """The server's error message, if it sent one."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            return json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"HTTP {error.code}"
    cause = getattr(error, "reason", error)
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
