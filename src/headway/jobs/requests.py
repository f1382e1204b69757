"""Rows as requests of the server's API, many in flight, results in order.

A `RowFormat` turns a record into a request and a response into a result. Two formats exist: `OpenAIRows`, the lines of
OpenAI's batch files, and `PlainRows`, a prompt, a conversation or a text for scoring in each row. A request that draws
and has no seed gets one from its key and the job's seed, so that results do not depend on who computes them when.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import field
from typing import Any, Protocol

from headway.base.dataclass import dataclass
from headway.base.errors import Closed, HeadwayError, InvalidInput
from headway.base.text import short_repr
from headway.jobs.records import Record, item_of
from headway.jobs.run import RowFailed, RowResult

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings", "/v1/rerank", "/v1/score", "/classify")
SEEDED = (CHAT, COMPLETIONS, RESPONSES)
LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_KEY = 512  # characters of a key
PLAIN_TASKS = ("generate", "chat", "score")
READ_AHEAD = 8  # finished rows that wait for an earlier one, as a multiple of those in flight
STOPPED = ("dead", "failed", "closed", "draining")  # codes of responses after which no row can be computed


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one row asks of the server: a path and a JSON body."""

    key: str
    url: str
    body: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RowResponse:
    """The status and the JSON body of a response."""

    status: int
    body: Any = field(repr=False)
    request_id: str = ""

    @property
    def error(self) -> Mapping[str, Any]:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return error if isinstance(error, dict) else {}


class RowFormat(Protocol):
    """How records become requests, and responses results."""

    def key_of(self, value: Any) -> str | None:
        """The key that a record names itself by, None if it has none."""
        ...

    def request(self, record: Record) -> RowRequest:
        """The request of a record; raises an error that says what is wrong with it."""
        ...

    def item(self, record: Record) -> Any:
        """What of a record is written with its result."""
        ...

    def result(self, request: RowRequest, response: RowResponse) -> Any:
        """The result of a response; raises `RowFailed`."""
        ...

    def failure(self, record: Record, error: Exception) -> Exception:
        """The failure of a record that has no response."""
        ...


class RequestWorker:
    """Sends the requests of records, at most `concurrency` at a time."""

    def __init__(self, send: Callable[[RowRequest], Future[RowResponse]], rows: RowFormat, concurrency: int) -> None:
        self._send, self._rows, self._concurrency = send, rows, concurrency

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        pending: deque[_Pending] = deque()
        free, limit = threading.Semaphore(self._concurrency), self._concurrency * READ_AHEAD
        try:
            for record in todo:
                while pending and (pending[0].done or len(pending) >= limit):
                    yield self._result(pending.popleft())
                pending.append(self._started(record, free))
            while pending:
                yield self._result(pending.popleft())
        finally:
            for one in pending:
                if one.future is not None:
                    one.future.cancel()

    def _started(self, record: Record, free: threading.Semaphore) -> _Pending:
        try:
            if record.error is not None:
                raise InvalidInput(record.error)
            request = self._rows.request(record)
        except HeadwayError as error:
            return _Pending(record, error=self._rows.failure(record, error))
        free.acquire()
        future = self._send(request)
        future.add_done_callback(lambda _: free.release())
        return _Pending(record, request, future)

    def _result(self, pending: _Pending) -> RowResult:
        record, key = pending.record, self._rows.key_of(pending.record.value)
        if pending.future is None or pending.request is None:
            return RowResult(record, pending.error, None, key)
        response = pending.future.result()
        if response.status == 503 and response.error.get("code") in STOPPED:
            raise Closed(f"the job has stopped at line {record.line}: {response.error.get('message')}")
        try:
            result = self._rows.result(pending.request, response)
        except RowFailed as error:
            result = error
        return RowResult(record, result, self._rows.item(record), key)


@dataclass(slots=True)
class _Pending:
    record: Record
    request: RowRequest | None = None
    future: Future[RowResponse] | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.future is None or self.future.done()


def left_out(rows: RowFormat | None, record: Record, reason: Any, key: str | None) -> RowResult:
    """The failure of a row that cannot be computed, as the file of errors has it."""
    failed: Exception = RowFailed(reason)
    return RowResult(record, failed if rows is None else rows.failure(record, failed), None, key)


def row_seed(seed: int, key: str) -> int:
    """The seed of a row, the same in every run of the job."""
    digest = hashlib.sha256(f"headway row seed {seed} {key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def with_seed(body: dict[str, Any], seed: int, key: str) -> dict[str, Any]:
    """A request's body with the seed of its row, unless it has one."""
    return body if body.get("seed") is not None else body | {"seed": row_seed(seed, key)}


def unique(source: Iterable[Record], key_of: Callable[[Any], str | None], what: str) -> Iterator[Record]:
    """The records; one whose key an earlier one has carries that as its error."""
    lines: dict[bytes, int] = {}
    for record in source:
        key = key_of(record.value)
        if key is not None:
            digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if (first := lines.setdefault(digest, record.line)) != record.line:
                error = record.error or f"{what} {short_repr(key)} is also that of line {first}; each must be unique"
                yield Record(record.line, record.value, record.crc, record.reached, error)
                continue
        yield record


# -- OpenAI's batch files ----------------------------------------------------------------------------------------------


def is_openai_line(value: Any) -> bool:
    """Whether a record looks like a line of OpenAI's batch files."""
    return isinstance(value, dict) and {"custom_id", "url", "body"} <= value.keys()


class OpenAIRows:
    """Lines {"custom_id", "method", "url", "body"}; results and failures are lines of OpenAI's output files."""

    def __init__(self, seed: int = 0, *, endpoint: str | None = None, priority: float | None = None) -> None:
        """With an `endpoint`, every line must be for it; `priority` is that of generations that name none."""
        self._seed, self._endpoint, self._priority = seed, endpoint, priority

    def key_of(self, value: Any) -> str | None:
        key = value.get("custom_id") if isinstance(value, dict) else None
        return key if isinstance(key, str) else None

    def item(self, record: Record) -> Any:
        return record.value

    def request(self, record: Record) -> RowRequest:
        value = record.value
        if not isinstance(value, dict):
            raise InvalidInput(f"this is {short_repr(value)}; it must be an object with {', '.join(LINE_FIELDS)}")
        if unknown := sorted(value.keys() - set(LINE_FIELDS)):
            raise InvalidInput(f"the field {unknown[0]!r:.80} is unknown; the fields are {', '.join(LINE_FIELDS)}")
        key, url, body = self._key(value), value.get("url"), value.get("body")
        if value.get("method", "POST") != "POST":
            raise InvalidInput(f"method is {short_repr(value['method'])}; it must be POST")
        allowed = ENDPOINTS if self._endpoint is None else (self._endpoint,)
        if not isinstance(url, str) or url not in allowed:
            raise InvalidInput(f"url is {short_repr(url)}; it must be {' or '.join(allowed)}")
        if not isinstance(body, dict):
            raise InvalidInput(f"body is {short_repr(body)}; it must be an object")
        for name in ("stream", "background"):
            if body.get(name):
                raise InvalidInput(f"body.{name} is {short_repr(body[name])}; a row is computed whole: remove it")
        return RowRequest(key, url, self._complete(body, key) if url in SEEDED else body)

    def _complete(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        if self._priority is not None and body.get("priority") is None:
            body = body | {"priority": self._priority}
        return with_seed(body, self._seed, key)

    def _key(self, value: dict[str, Any]) -> str:
        key = value.get("custom_id")
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY:
            raise InvalidInput(f"custom_id is {short_repr(key)}; it must be a string of 1 to {MAX_KEY} characters")
        return key

    def result(self, request: RowRequest, response: RowResponse) -> Any:
        whole = {"status_code": response.status, "request_id": response.request_id, "body": response.body}
        line = {"id": f"batch_{response.request_id}", "custom_id": request.key, "response": whole, "error": None}
        if response.status != 200:
            raise RowFailed(line, str(response.error.get("message", f"status {response.status}")))
        return line

    def failure(self, record: Record, error: Exception) -> Exception:
        reason = {"code": "invalid_line", "message": f"line {record.line}: {error}", "line": record.line}
        key = self.key_of(record.value)
        return RowFailed({"id": None, "custom_id": key, "response": None, "error": reason}, str(error))


# -- plain rows --------------------------------------------------------------------------------------------------------


class PlainRows:
    """A prompt (`generate`), a conversation (`chat`) or a text to score (`score`) in each row.

    `options` are fields of the request, the same for all rows.
    """

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any],
        *,
        columns: tuple[str, ...] = (),
        key_column: str | None = None,
        seed: int = 0,
    ) -> None:
        self._task, self._options, self._seed = task, dict(options), seed
        self._key_column = key_column
        if len(columns) > 1:
            raise InvalidInput(f"{task} takes one column; {len(columns)} were given: {', '.join(columns)}")
        self._columns = columns
        own = {"prompt", "messages", "stream", "stream_options", "n", "echo", "model", "seed"}
        if task == "score":
            own |= set(options) - {"priority", "truncate_prompt_tokens"}
        if clash := sorted(own & set(options)):
            raise InvalidInput(f"{clash[0]!r} is not an option of the rows of {task}; rows for which it should differ "
                               "go in OpenAI's batch format")  # fmt: skip

    def key_of(self, value: Any) -> str | None:
        return key_in_column(value, self._key_column)

    def item(self, record: Record) -> Any:
        if self._columns or not isinstance(record.value, dict):
            return item_of(record.value, self._columns)
        name = "messages" if self._task == "chat" else "prompt"
        return record.value[name] if name in record.value else item_of(record.value, ())

    def request(self, record: Record) -> RowRequest:
        if self._key_column is not None and self.key_of(record.value) is None:
            raise InvalidInput(f"there is no key in the column {self._key_column!r}")
        key, item = self.key_of(record.value) or str(record.line), self.item(record)
        match self._task:
            case "chat":
                fields: dict[str, Any] = {"messages": _messages(item)}
            case "score":
                shown = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
                fields = {"prompt": _prompt(item), "temperature": 1.0, **shown}
            case _:
                fields = {"prompt": _prompt(item)}
        return RowRequest(key, self.url, with_seed(self._options | fields, self._seed, key))

    @property
    def url(self) -> str:
        return CHAT if self._task == "chat" else COMPLETIONS

    def result(self, request: RowRequest, response: RowResponse) -> Any:
        if response.status != 200:
            raise RowFailed(str(response.error.get("message", f"status {response.status}")))
        choice, usage = response.body["choices"][0], response.body["usage"]
        if self._task == "score":
            values = choice["logprobs"]["token_logprobs"]
            total = sum(value for value in values if value is not None)
            return {"logprob": total, "token_ids": choice["prompt_token_ids"], "token_logprobs": values}
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        more = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
        if self._task == "chat":
            message = choice["message"]
            more |= {name: message[name] for name in ("reasoning_content", "tool_calls") if message.get(name)}
            return {"text": message["content"], "finish_reason": choice["finish_reason"], **counts, **more}
        return {"text": choice["text"], "finish_reason": choice["finish_reason"], **counts, **more}

    def failure(self, record: Record, error: Exception) -> Exception:
        return error


def key_in_column(value: Any, column: str | None) -> str | None:
    """The key of a row: the text of this column."""
    key = value.get(column) if column is not None and isinstance(value, dict) else None
    return None if key is None or key == "" else str(key)


def _prompt(item: Any) -> Any:
    ids = isinstance(item, list) and bool(item) and all(isinstance(one, int) for one in item)
    if not isinstance(item, str) and not ids:
        raise InvalidInput(f"the prompt is {short_repr(item)}; it must be a text or a list of token ids")
    return item


def _messages(item: Any) -> Any:
    if isinstance(item, str) and item.lstrip().startswith("[{"):  # a conversation in a CSV file
        try:
            item = json.loads(item)
        except ValueError as error:
            raise InvalidInput(f"the messages are not valid JSON: {error}") from None
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    if not isinstance(item, list):
        raise InvalidInput(f"messages is {short_repr(item)}; it must be a list of messages, or a text")
    return item
