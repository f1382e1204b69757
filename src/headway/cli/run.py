"""`headway run`: one prompt, one answer."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.cli.flags import shared
from headway.cli.flags.declare import Argument, Option, with_flags
from headway.cli.flags.shared import Decoding, EngineOptions, open_drafter, open_engine
from headway.cli.startup_marks import mark
from headway.cli.terminal.answer import GeneratedAnswer, show_choices, stream
from headway.cli.terminal.profile import check_target, show_profile, write_profile
from headway.cli.terminal.render import emit_json, note, write_text

if TYPE_CHECKING:
    import headway as hw

PATIENCE_SECONDS = 3.0  # until a note says that standard input is being read


@dataclass(frozen=True)
class RunRequest:
    """A prompt and how to answer it."""

    prompt: str
    system: str | None
    raw: bool
    decoding: Decoding
    drafter: hw.Drafter | None = None


@with_flags
def run(
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="- or nothing reads standard input.")] = None,
    *,
    engine_options: EngineOptions,
    system: shared.System = None,
    raw: Annotated[bool, Option("--raw", help="Continue the text, without the chat template.")] = False,
    decoding: Decoding,
    speculate: shared.Speculate = None,
    profile: Annotated[bool, Option("--profile", help="Show where the time went.")] = False,
    profile_json: Annotated[
        Path | None, Option("--profile-json", metavar="FILE", help="Write the profile to a file.")
    ] = None,
    quiet: shared.Quiet = False,
    json: shared.Json = False,
) -> None:
    """Answer PROMPT through the model's chat template, or continue it with --raw.

    Piped input is the prompt, or is joined to it after a blank line.
    """
    decoding.check()
    check_target(profile_json)
    if raw and system is not None:
        raise InvalidInput("--system needs the chat template, which --raw does not use; leave one of them out")
    request = RunRequest(read_prompt(prompt), system, raw, decoding)
    mark("command")
    with open_engine(engine_options) as engine, open_drafter(speculate, engine_options) as drafter:
        request = replace(request, drafter=drafter)
        profiling = profile or profile_json is not None
        if profiling:
            engine.enable_profiling()
        answer = _generate(engine, request, engine_options.model, as_json=json)
        data = engine.profile() if profiling else None
        _show(answer, data if profile else None, as_json=json)
        if data is not None and profile_json is not None:
            write_profile(data, profile_json)


def _generate(engine: hw.Engine, request: RunRequest, model: str, *, as_json: bool) -> GeneratedAnswer:
    try:
        return engine.run(respond, request, model, _quiet if as_json else write_text)
    except KeyboardInterrupt:
        if not as_json:
            write_text("\n")  # so that the shell's prompt begins a new line
        raise


async def respond(engine: hw.Engine, request: RunRequest, name: str, write: Callable[[str], None]) -> GeneratedAnswer:
    """The program: fill a context with the prompt and stream the answer."""
    async with engine.context() as ctx:
        if request.raw or (engine.chat_template is None and request.system is None):
            ctx.fill(request.prompt)
        else:
            if request.system is not None:
                ctx.system(request.system)
            ctx.user(request.prompt)
            ctx.cue()
        mark("prompt")
        return await stream(engine, ctx, name, request.decoding, write, drafter=request.drafter)


def read_prompt(argument: str | None) -> str:
    """The prompt from the command line, from a pipe, or both joined by a blank line."""
    given = "" if argument in (None, "-") else argument or ""
    piped = _piped() if argument != "" else ""
    prompt = "\n\n".join(part for part in (given, piped) if part)
    if not prompt.strip():
        raise InvalidInput("the prompt is empty; write one after `headway run`, or pipe text into it")
    return prompt


def _piped() -> str:
    """The text of a pipe or file on standard input; empty on a terminal."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    kind = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    if not select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0]:
        note("headway: waiting for piped input; if there is none, start headway with </dev/null")
    data = sys.stdin.buffer.read()
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the piped input is not UTF-8 text (byte {error.start} is {data[error.start]:#04x})"
        ) from None


def _show(answer: GeneratedAnswer, profile: Any, *, as_json: bool) -> None:
    if as_json:
        emit_json(answer.to_json() | ({"profile": profile.to_json()} if profile is not None else {}))
        return
    if not answer.text.endswith("\n"):
        write_text("\n")
    show_choices(answer.choices)
    if profile is not None:
        show_profile(profile)
    note(answer.figures.line())


def _quiet(text: str) -> None:
    """Ignores streamed text: with --json the answer is printed at the end."""
