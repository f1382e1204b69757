"""A real server on a loopback port, in a thread of this process, and the engine behind it for comparing."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI

import headway as hw
from headway.server.app import create_app
from headway.server.pooling import PoolingModels
from headway.server.run import configure
from headway.server.settings import ServerSettings

PATIENCE = 120.0  # seconds until a test gives up; nothing is asserted about times


class Answer:
    """An HTTP answer, read to its end."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must end as streams do."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Asker:
    """Where a server is, and how it is asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, **body: Any) -> Answer:
        return self.ask("POST", path, body)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **fields)
        assert answer.status == 200, answer.body
        return answer.json

    def chat(self, messages: Any, **fields: Any) -> Any:
        """A chat completion that must succeed; a text is one user message."""
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        answer = self.post("/v1/chat/completions", messages=listed, **fields)
        assert answer.status == 200, answer.body
        return answer.json

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that must get a 400."""
        answer = self.post(path, **body)
        assert answer.status == 400, (answer.status, answer.body)
        return answer.error

    def until(self, condition: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.01)
        raise AssertionError("it never came to hold")


class Live(Asker):
    """A server and its engine."""

    def __init__(self, port: int, engine: hw.Engine) -> None:
        super().__init__(port)
        self.engine = engine

    def is_quiet(self) -> bool:
        """Whether nobody holds a page and nothing is queued."""
        stats = self.engine.stats()
        return stats.pages_held == 0 and stats.queued == 0


def _tasks() -> list[str]:
    """What the event loops of this process wait for."""
    tasks = [task for task in gc.get_objects() if isinstance(task, asyncio.Task) and not task.done()]
    return [f"{task.get_coro()} at {task.get_stack(limit=3)}" for task in tasks]


def _stacks() -> str:
    """Where the threads of this process are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {names.get(i, str(i)): traceback.format_stack(frame, 12) for i, frame in sys._current_frames().items()}
    return "\n".join(f"{name}:\n{''.join(lines)}" for name, lines in stacks.items())


@contextmanager
def live(
    engine: hw.Engine,
    pooling_models: PoolingModels | None = None,
    drafter: hw.Drafter | None = None,
    *,
    routers: Sequence[APIRouter] = (),
    **settings: Any,
) -> Iterator[Live]:
    """Serve an engine, which is closed at the end, and models beside it."""
    how = ServerSettings(**{"model": "smollm2", "port": 0, **settings})
    models: dict[str, Any] = {"pooling_models": pooling_models, "routers": routers}
    if drafter is not None:
        models["open_drafter"] = lambda: drafter
    with serving(how, create_app(how, lambda: engine, **models)) as port:
        yield Live(port, engine)


@contextmanager
def serving(how: ServerSettings, app: FastAPI) -> Iterator[int]:
    """Serve an application in a thread; gives its port when it is ready."""
    server = uvicorn.Server(configure(how, app))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="served", daemon=True)
    thread.start()
    try:
        end = time.monotonic() + PATIENCE
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        asker = Asker(port)
        asker.until(lambda: asker.get("/health").status == 200)
        yield port
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"the server did not end: {_tasks()}\n{_stacks()}"
