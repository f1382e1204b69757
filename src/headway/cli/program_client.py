"""A server's programs over HTTP, for `headway program`."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from headway.base.config import settings
from headway.base.errors import ConnectionFailed, InvalidInput

TIMEOUT = 30.0
DEFAULT_URL = "http://127.0.0.1:8000"


class ProgramClient:
    """The programs of one key on a server."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"--url is {url!r}; it must be an address like {DEFAULT_URL}")
        self._url = url.rstrip("/").removesuffix("/v1")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request, and its answer as JSON."""
        with self._open(method, path, body) as response:
            return json.load(response)

    def text(self, path: str) -> str:
        """A page of text."""
        with self._open("GET", path) as response:
            return response.read().decode()

    def follow(self, id: str) -> Iterator[dict[str, Any]]:
        """A program's events to its end, over as many connections as it takes."""
        after = 0
        while True:
            with self._open(
                "GET", f"/v1/programs/{urllib.parse.quote(id)}/events?after={after}", timeout=None
            ) as stream:
                for line in stream:
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(line[6:])
                    after = event.get("n", after)
                    if "n" in event or event.get("type") == "dropped":
                        yield event
                    if event.get("type") == "end":
                        return

    def _open(self, method: str, path: str, body: Any = None, timeout: float | None = TIMEOUT) -> Any:
        key = settings().api_key
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise InvalidInput(_refusal(error)) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ConnectionFailed(
                f"no server answers at {self._url}: {reason}; start one with `headway serve --allow-programs`"
            ) from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        text = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = error.reason
    if error.code == 404 and "path" in str(text):
        return "this server does not allow programs; start it with `headway serve --allow-programs`"
    return f"the server answers {error.code}: {text}"
