"""`headway program`: run a program in a sandbox beside a model, here or on a server; list, stop and install them."""

from __future__ import annotations

import asyncio
import json as json_text
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from headway.base.errors import HeadwayError, InvalidInput
from headway.cli.flags.declare import Argument, Option, with_flags
from headway.cli.flags.shared import (
    DEFAULT_MODEL,
    ComputeOptions,
    EngineOptions,
    Json,
    Quiet,
    engine_flag,
    open_engine,
)
from headway.cli.program_client import DEFAULT_URL, ProgramClient
from headway.cli.terminal.render import emit_json, note, show_table

if TYPE_CHECKING:
    import headway as hw

HELP = "Run programs in a sandbox beside a model."
FAILED = 1  # exit code of a program that raised or was stopped

Url = Annotated[str, Option("--url", metavar="URL", help="The server, one with --allow-programs.")]
Id = Annotated[str, Argument(metavar="ID", help="The program's id, as `headway program list` shows it.")]
Args = Annotated[
    list[str] | None,
    Option("--arg", metavar="K=V", help="An argument of main; V is JSON, or text. May be repeated."),
]
Limits = Annotated[
    list[str] | None,
    Option("--limit", metavar="NAME=N", help="Without --url: a limit, e.g. max_program_cpu=600. May be repeated."),
]


@with_flags
def run(
    program: Annotated[str, Argument(metavar="FILE", help="A Python file with async def main(engine, **args).")],
    *,
    url: Annotated[
        str | None, Option("--url", metavar="URL", help="Run it on this server, not beside a model here.")
    ] = None,
    model: Annotated[
        str | None,
        engine_flag(
            "--model",
            "-m",
            metavar="MODEL",
            help="A known name, a folder, a .gguf file or a hub id; with --url, one of the server's models.",
        ),
    ] = None,
    arg: Args = None,
    limit: Limits = None,
    options: ComputeOptions,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Run FILE in a sandbox beside a model, and show what it prints, sends and returns.

    With --url, FILE may also be the name of an installed program. Lines of standard input are messages to it.
    """
    given = _arguments(arg or ())
    show = _Shown(as_json=json)
    if url is None:
        from headway.sandbox.confinement import confinement

        source = _source(program)
        confinement("sandbox", log=note)  # before a model is loaded: it may not be there
        with open_engine(EngineOptions(model=model or DEFAULT_MODEL, **vars(options))) as engine:
            code = asyncio.run(_run_here(engine, source, given, limit or (), show))
    else:
        if limit:
            raise InvalidInput("--limit is for programs that run here; a server has its own limits")
        for name in options.changed():
            raise InvalidInput(f"--{name.replace('_', '-')} is for programs that run here; a server has its models")
        code = _run_there(ProgramClient(url), program, model, given, show)
    return code


def list_(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List the programs of your key that run or have ended, and those that are installed."""
    client = ProgramClient(url)
    runs, installed = client.ask("GET", "/v1/programs"), client.ask("GET", "/v1/installed_programs")
    if json:
        return emit_json({"programs": runs["data"], "installed": installed["data"], "confinement": runs["confinement"]})
    rows = [
        (one["id"], one["name"] or "", one["status"], f"{one['seconds']:.1f}", f"{one['cpu_seconds']:.1f}")
        for one in runs["data"]
    ]
    show_table(("id", "name", "status", "seconds", "CPU seconds"), rows, numbers=(3, 4))
    if installed["data"]:
        show_table(
            ("installed", "bytes"), [(one["name"], str(one["bytes"])) for one in installed["data"]], numbers=(1,)
        )
    note(f"confined by {runs['confinement']}")
    return None


def kill(program: Id, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """End a program now."""
    about = ProgramClient(url).ask("DELETE", f"/v1/programs/{quote(program)}")
    if json:
        emit_json(about)
    else:
        note(f"{about['id']}: {about['status']}")


def logs(program: Id, url: Url = DEFAULT_URL) -> None:
    """Show what a program has printed."""
    print(ProgramClient(url).text(f"/v1/programs/{quote(program)}/logs"), end="")


def install(
    name: Annotated[str, Argument(metavar="NAME", help="The name to run it by.")],
    file: Annotated[str, Argument(metavar="FILE", help="A Python file.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Keep a program on the server under a name; `headway program run NAME --url URL` runs it."""
    about = ProgramClient(url).ask("PUT", f"/v1/installed_programs/{quote(name)}", {"source": _source(file)})
    if json:
        emit_json(about)
    else:
        note(f"installed {about['name']} ({about['bytes']} bytes)")


def remove(
    name: Annotated[str, Argument(metavar="NAME", help="The name of an installed program.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Forget an installed program."""
    ProgramClient(url).ask("DELETE", f"/v1/installed_programs/{quote(name)}")
    note(f"removed {name}")


# -- running -----------------------------------------------------------------------------------------------------------


async def _run_here(
    engine: hw.Engine, source: str, args: dict[str, Any], limits: list[str] | tuple[()], show: _Shown
) -> int:
    """Run a program in a sandbox beside an engine of this process, without a server."""
    from headway.cli.serve.keys import named_limits
    from headway.server.errors import ApiError
    from headway.server.keys import ANYONE
    from headway.server.programs.programs import Programs
    from headway.server.serving import Serving
    from headway.server.settings import ServerSettings

    settings = ServerSettings(programs="sandbox", **named_limits(ServerSettings, limits))
    serving = await Serving.of_engine(settings, engine)
    programs = await Programs.prepared(serving, note)
    loop = asyncio.get_running_loop()
    try:
        try:
            started = programs.start(ANYONE, source, args)
        except ApiError as error:
            raise InvalidInput(error.message) from None
        _each_line(lambda line: asyncio.run_coroutine_threadsafe(started.inbox.put(line), loop).result())
        async for event in started.output.follow():
            show(json_text.loads(event))
    finally:
        await programs.close()
        await serving.sessions.close()
    return show.code


def _run_there(client: ProgramClient, program: str, model: str | None, args: dict[str, Any], show: _Shown) -> int:
    """Run a program on a server; one whose end nobody waits for is killed."""
    what = {"source": _source(program)} if _is_file(program) else {"name": program}
    if model is not None:
        what["model"] = model
    id = client.ask("POST", "/v1/programs", {**what, "args": args})["id"]
    note(f"{id} runs on the server")
    _each_line(lambda line: client.ask("POST", f"/v1/programs/{id}/messages", {"value": line}))
    try:
        for event in client.follow(id):
            show(event)
    except BaseException:
        with suppress(HeadwayError):
            client.ask("DELETE", f"/v1/programs/{id}")
        raise
    return show.code


class _Shown:
    """Shows a program's events: prints as they are, messages and its value as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self.code = as_json, 0

    def __call__(self, event: dict[str, Any]) -> None:
        if event["type"] == "end":
            self.code = 0 if event["status"] == "returned" else FAILED
        if self._as_json:
            return emit_json(event, indent=None)
        match event:
            case {"type": "print", "text": text}:
                sys.stdout.write(text.encode(errors="replace").decode())
                sys.stdout.flush()
            case {"type": "message", "value": value} | {"type": "end", "status": "returned", "value": value}:
                if event["type"] == "message" or value is not None:
                    emit_json(value, indent=None)
            case {"type": "dropped", "count": count}:
                note(f"{count} earlier events are no longer kept")
            case {"type": "end", "status": "raised", "error": error}:
                print(error, end="", file=sys.stderr)
            case {"type": "end", "error": error}:
                print(f"headway: the program was stopped: {error}", file=sys.stderr)
        return None


def _each_line(send: Callable[[str], Any]) -> None:
    """Send lines of standard input as they come, in a thread that ends with the process."""

    def read() -> None:
        try:
            for line in sys.stdin:
                send(line.rstrip("\n"))
        except (OSError, ValueError, RuntimeError, HeadwayError):
            return  # the program has ended, or there is no input

    if sys.stdin is None or (sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()):
        return  # in the background: reading from the terminal would stop the process
    threading.Thread(target=read, name="headway-stdin", daemon=True).start()


def _is_file(program: str) -> bool:
    return program.endswith(".py") or Path(program).is_file()


def _source(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = "" if _is_file(file) else "; an installed program is run with --url"
        raise InvalidInput(
            f"cannot read the program {file!r}: {getattr(error, 'strerror', None) or error}{hint}"
        ) from None


def _arguments(given: list[str] | tuple[()]) -> dict[str, Any]:
    """`K=V` as keyword arguments; V is JSON where it is valid JSON, and text otherwise."""
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInput(f"--arg {text!r} is not an argument; it must be K=V with K a name of Python")
        try:
            values[name] = json_text.loads(value)
        except ValueError:
            values[name] = value
    return values


COMMANDS = {"run": run, "list": list_, "kill": kill, "logs": logs, "install": install, "remove": remove}
