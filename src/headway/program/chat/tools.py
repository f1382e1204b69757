"""Tools that a chat may use: Python functions that are run, or schemas whose calls are handed back.

Arguments are checked against the schema before the function gets them. A function that is not async runs in a daemon
thread of its own, so that it cannot block the event loop. One that takes too long is cancelled or, in a thread,
abandoned: what it does then has no effect on the chat.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from headway.base.checks import check_list
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr
from headway.program.constraints.grammar import Grammar
from headway.text.replies.parts import ToolCall
from headway.text.tools import bind_arguments, tool_schema

TOOLS = 128  # at most
GRACE = 1.0  # seconds that a cancelled async function has to clean up
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

Function = Callable[..., Any]


@dataclass(frozen=True)
class ToolOutcome:
    """The result of a call: the text for the model, the error, if any, and whether the call itself was wrong."""

    text: str
    error: BaseException | None = None
    misused: bool = False


@dataclass(frozen=True)
class ToolResult:
    """The result of a call that was made: the text for the model, and the error, if it failed."""

    call: ToolCall
    text: str
    error: BaseException | None = None


@dataclass(frozen=True)
class ToolSpec:
    """One tool; without a function its calls are handed back."""

    name: str
    schema: Mapping[str, Any]
    function: Function | None

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", **self.schema["function"].get("parameters", {})}

    @cached_property
    def arguments(self) -> Grammar:
        """A grammar of the JSON texts that are arguments of this tool."""
        return Grammar.json_schema(self.parameters)


class ToolSet:
    """The tools of one reply, by name."""

    def __init__(self, tools: Iterable[Function | Mapping[str, Any]]) -> None:
        what = "a list of functions or of JSON schemas as dicts"
        if isinstance(tools, Mapping):
            raise WrongType(f"tools is {short_repr(tools)}; it must be {what}")
        specs = [_spec(tool) for tool in check_list(tools, "tools", what)]
        if len(specs) > TOOLS:
            raise InvalidInput(f"{len(specs)} tools were given; at most {TOOLS} are allowed")
        self._tools = {tool.name: tool for tool in specs}
        if len(self._tools) < len(specs):
            names = [tool.name for tool in specs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"two tools have the name {twice!r}; a model knows tools by their names: rename one")

    def __bool__(self) -> bool:
        return bool(self._tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.schema for tool in self._tools.values())

    def get(self, name: str) -> ToolSpec:
        """The tool of that name, which must exist."""
        return self._tools[name]

    def can_run(self, calls: Sequence[ToolCall]) -> bool:
        """Whether every call can be answered: by a function, or because there is no such tool."""
        known = [self._tools.get(call.name) for call in calls]
        return all(tool is None or tool.function is not None for tool in known)

    async def run(self, call: ToolCall, timeout: float | None) -> ToolOutcome:
        """Make one call. It raises only when the caller is cancelled."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = InvalidInput(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
            return ToolOutcome(f"error: {known}", known, misused=True)
        assert tool.function is not None
        try:
            arguments = bind_arguments(tool.function, call.arguments)
        except InvalidInput as error:
            return ToolOutcome(f"error: {error}", error, misused=True)
        try:
            return ToolOutcome(as_text(await _call(tool.function, arguments, timeout)))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _failed(error, "the tool was cancelled")
        except Exception as error:  # a tool's error goes to the model, or to the caller as ToolFailed
            return _failed(error)


def as_text(value: Any) -> str:
    """A tool's result for the model: text as it is, other values as JSON, what JSON lacks by its `str`."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _failed(error: BaseException, text: str | None = None) -> ToolOutcome:
    """The outcome of a call that failed, with the error as the model reads it."""
    return ToolOutcome(f"error: {text or f'{type(error).__name__}: {error}'.removesuffix(': ')}", error)


def _spec(tool: Function | Mapping[str, Any]) -> ToolSpec:
    if not isinstance(tool, Mapping):
        schema = tool_schema(tool)
        return ToolSpec(schema["function"]["name"], schema, tool)
    match tool:
        case {"function": {"name": str(name), **rest}} if isinstance(rest.get("parameters", {}), Mapping):
            if not NAME.fullmatch(name):
                raise InvalidInput(f"a tool has the name {short_repr(name)}; names have 1 to 64 of A–Z a–z 0–9 _ . -")
            return ToolSpec(name, {"type": "function", **tool}, None)
    raise InvalidInput(
        f"the tool {short_repr(tool)} is not a schema; a schema is a dict "
        "{'type': 'function', 'function': {'name': …, 'description': …, 'parameters': …}}"
    )


async def _call(function: Function, arguments: dict[str, Any], timeout: float | None) -> Any:
    """What the function returns, or TimeoutError when that takes too long."""
    task = asyncio.ensure_future(_invoke(function, arguments))
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
    await asyncio.wait({task}, timeout=GRACE)  # time to clean up
    if task.done() and not task.cancelled():
        task.exception()  # retrieved: nobody needs what it raised while it was cancelled
    raise TimeoutError(f"the call took longer than {timeout:g} seconds and was abandoned")


async def _invoke(function: Function, arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    value = await _in_thread(function, arguments)
    return await value if inspect.isawaitable(value) else value


def _in_thread(function: Function, arguments: dict[str, Any]) -> Awaitable[Any]:
    """Run a function in a daemon thread: it can be abandoned, and never keeps the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    inherited = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        value, failed = None, None
        try:
            value = inherited.run(function, **arguments)
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name=f"headway-tool-{function.__name__}", daemon=True).start()
    return _unpacked(done)


async def _unpacked(done: asyncio.Future[tuple[Any, BaseException | None]]) -> Any:
    value, error = await done
    if error is None:
        return value
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        raise error
    raise RuntimeError(f"the tool raised {type(error).__name__}: {error}".removesuffix(": ")) from error
