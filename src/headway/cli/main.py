"""The `headway` command: its commands, and one place where every mistake becomes one sentence.

A command line that names a command imports that one alone, and a plain one is read without typer (`plain`), so that
`headway run` is quick.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from headway.base.config import default_environment
from headway.base.errors import HeadwayError
from headway.base.system.extras import explain_missing
from headway.base.system.gc_paused import gc_paused
from headway.cli.flags import plain
from headway.cli.flags.declare import Command, Option, for_typer
from headway.cli.terminal.render import be_quiet, emit_json

if TYPE_CHECKING:
    import typer

# numpy's threads, of which nothing here has much use, wait for work asleep: they would spin as soon as it is imported.
SLEEPY_BLAS = {"OPENBLAS_THREAD_TIMEOUT": "4"}
EXIT_MISTAKE = 2
EXIT_INTERRUPT = 130
EXIT_BROKEN_PIPE = 141
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
MEANT = {  # commands of other tools
    "ls": "models list",
    "list": "models list",
    "pull": "models pull",
    "download": "models pull",
    "fetch": "models pull",
    "show": "models show",
    "info": "models show",
    "rm": "models rm",
    "remove": "models rm",
    "delete": "models rm",
    "generate": "run",
    "complete": "run",
    "ask": "run",
    "repl": "chat",
    "server": "serve",
    "start": "serve",
    "api": "serve",
    "ps": "top --url URL",
    "stats": "top --url URL",
    "check": "doctor",
    "env": "doctor",
    "version": "--version",
    "embed": "pipeline sentence-embedding",
    "ui": "lab",
    "programs": "program list",
}

COMMANDS = (
    "run",
    "chat",
    "serve",
    "lab",
    "models",
    "pipeline",
    "batch",
    "program",
    "quantize",
    "doctor",
    "bench",
    "top",
)
GROUPS = ("models", "bench", "program")  # commands with commands of their own
# What follows the script's name belongs to the script, options included.
OPTIONS = {"top": {"allow_interspersed_args": False, "ignore_unknown_options": True}}


def build_app(*names: str) -> typer.Typer:
    """The command line with these commands; without a name, with all of them."""
    import typer

    app = typer.Typer(
        name="headway",
        help="A programmable inference engine for transformer models: the forward pass is the API.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=for_typer(root),
        invoke_without_command=True,
    )
    for name in names or COMMANDS:
        if name in GROUPS:
            app.add_typer(_group(import_module(f"headway.cli.{name}")), name=name)
        else:
            app.command(name, context_settings=OPTIONS.get(name))(for_typer(_function(name)))
    return app


def _function(name: str) -> Command:
    return getattr(import_module(f"headway.cli.{name}"), name)


def _group(module: Any) -> typer.Typer:
    import typer

    group = typer.Typer(help=module.HELP, pretty_exceptions_enable=False)
    for name, command in module.COMMANDS.items():
        group.command(name)(for_typer(command))
    return group


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code."""
    _open_missing_streams()
    default_environment(SLEEPY_BLAS)
    code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _abandon_stdout()
    except OSError as error:
        code = _unwritable(error)
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Run one command line; its exit code."""
    arguments = _completed(arguments)
    try:
        return _run(arguments) or 0
    except HeadwayError as error:
        return _mistake(type(error).__name__, str(error), arguments)
    except ModuleNotFoundError as error:
        return _missing(error, arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        return _abandon_stdout()
    except SystemExit as end:  # how typer leaves a closed pipe, with a meaningless code
        if isinstance(end.__context__, BrokenPipeError):
            return _abandon_stdout()
        raise
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return _unwritable(error)
    except Exception as error:
        return _typer_code(error, arguments)
    finally:
        be_quiet(False)  # --quiet was this command's alone


def _run(arguments: list[str]) -> int | None:
    name = arguments[0] if arguments else ""
    if name in COMMANDS and name not in GROUPS and name not in OPTIONS:
        with gc_paused():
            command = _function(name)
            values = plain.values(command, arguments[1:])
            gc.freeze()  # what is imported stays, and need not be looked at
        if values is not None:
            return command(**values)
    return _command(arguments).main(arguments, prog_name="headway", standalone_mode=False)


def _typer_code(error: Exception, arguments: list[str]) -> int:
    """The exit code for an error of typer's; others go on."""
    import typer

    # The import path of its class for usage errors differs between versions, its place in the MRO does not.
    if isinstance(error, typer.BadParameter.__mro__[1]):
        return _mistake("UsageError", _usage_sentence(error), arguments)
    if isinstance(error, typer.Abort):
        return EXIT_INTERRUPT
    raise error


def _missing(error: ModuleNotFoundError, arguments: list[str]) -> int:
    """Say which extra a command needs; another missing module is a fault of the installation."""
    try:
        extra = "pipelines" if arguments[:1] in (["pipeline"], ["batch"]) else "torch"
        explain_missing(error, f"headway {arguments[0] if arguments else ''}".rstrip(), extra)
    except HeadwayError as explained:
        return _mistake(type(explained).__name__, str(explained), arguments)
    raise error


def _completed(arguments: list[str]) -> list[str]:
    """The command line with what it leaves out: `headway` is its help, `headway models` lists them."""
    match arguments:
        case [] | ["bench"] | ["program"]:
            return [*arguments, "--help"]
        case ["help", *rest]:
            return [*rest, "--help"]
        case ["models"] | ["models", "--json"]:
            return ["models", "list", *arguments[1:]]
        case ["serve", *_]:  # an option whose value may be left out
            return ["--allow-programs=sandbox" if each == "--allow-programs" else each for each in arguments]
    return arguments


def _command(arguments: list[str]) -> Any:
    """The command tree, with flags that show no type in their help."""
    import typer

    named = [name for name in arguments[:1] if name in COMMANDS]
    if named:
        # A group of one command would not expect its name.
        named.append(next(name for name in ("run", "chat") if name not in named))
    command = typer.main.get_command(build_app(*named))
    _hide_flag_types(command)
    return command


def _hide_flag_types(command: Any, parent: Any = None) -> None:
    context = command.context_class(command, parent=parent, **command.context_settings)
    for parameter in (*command.params, command.get_help_option(context)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _hide_flag_types(inner, context)


def root(
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before any command."""
    if version:
        import typer

        from headway.cli.facts import headway_version

        print(f"headway {headway_version()}")
        raise typer.Exit


def _mistake(kind: str, message: str, arguments: list[str]) -> int:
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    sentence = " ".join(message.split())
    if "--json" in flags:
        emit_json({"error": {"type": kind, "message": sentence}})
    else:
        with suppress(OSError):  # on a full disk the exit code alone says it
            print(f"headway: {sentence}", file=sys.stderr)
    return EXIT_MISTAKE


def _usage_sentence(error: Exception) -> str:
    message = getattr(error, "format_message", lambda: str(error))().rstrip(".?")
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "headway")
    if match := re.fullmatch(r"No such command '([^']*)'.*", message, re.DOTALL):
        return f"No such command '{match[1]}'; {_hint(match[1], context)}"
    if command == "headway run" and message.startswith("Got unexpected extra argument"):
        return f"{message}; a prompt of several words needs quotes: headway run 'Name the capital of France.'"
    has_model = any("--model" in each.opts for each in getattr(getattr(context, "command", None), "params", ()))
    if has_model and (extra := re.fullmatch(r"Got unexpected extra argument\(?s?\)? \((\S+)\)", message)):
        return f"{message}; a model is named with --model: {command} --model {extra[1]}"
    listed = "commands" if hasattr(getattr(context, "command", None), "commands") else "options"
    return f"{message}; `{command} --help` lists the {listed}"


def _hint(name: str, context: Any) -> str:
    """What somebody may have meant by a command that does not exist."""
    import difflib

    command = getattr(context, "command_path", "headway")
    known = list(getattr(getattr(context, "command", None), "commands", {}))
    if command == "headway" and name in MEANT:
        return f"you may mean `headway {MEANT[name]}`"
    if command == "headway models" and MEANT.get(name, "").startswith("models "):
        return f"you may mean `headway {MEANT[name]}`"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"you may mean `{command} {near[0]}`"
    return f"`{command} --help` lists the commands"


def _open_missing_streams() -> None:
    """What was closed by whoever started this goes nowhere; else a model's file could get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _unwritable(error: OSError) -> int:
    """Say that the output cannot be written, if that at least can be: it may be standard error's."""
    where = "" if error.filename is None else f" to {error.filename}"
    with suppress(OSError):
        print(f"headway: the output cannot be written{where}: {error.strerror}", file=sys.stderr, flush=True)
    for number in (1, 2):  # nothing more is tried at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return EXIT_MISTAKE


def _abandon_stdout() -> int:
    # The reader is gone: what is still buffered must not be flushed into the broken pipe at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    main()
