"""Plain command lines are read without typer, to the values that typer gives."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from contextlib import redirect_stdout
from functools import wraps
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cli import main
from headway.cli.flags import plain
from headway.cli.flags.declare import Command, for_typer
from headway.cli.terminal import render
from support.properties import examples

NAMES = [name for name in main.COMMANDS if name not in main.GROUPS and name not in main.OPTIONS]
FUNCTIONS = {name: main._function(name) for name in NAMES}
WORDS = [
    *("hi", "two words", "-", "--", "", "5", "0.5", "-1", "x", "cpu", "a=b", "--raw", "-q", "--quiet", "--json", "-h"),
    *(
        "--max-tokens",
        "--max-tokens=3",
        "-n",
        "-n3",
        "--temperature",
        "-t",
        "--seed=-4",
        "--stop",
        "--stop=",
        "--top-k",
    ),
    *("--threads", "--model", "-m", "--profile", "--profile-json", "--memory-fraction", "--memory", "--lora", "-qn"),
    *("--port", "--no-browser", "--browser", "--limit", "--check", "--context", "--froz", "--raw=1", "--json=no"),
    *("--stream", "--input", "--output", "--batch-size", "--on-error", "--keys", "--pages", "--embed"),
]


@pytest.fixture(autouse=True)
def _loud() -> Any:
    yield
    render.be_quiet(False)


def recorder(name: str, calls: list[dict[str, Any]]) -> Command:
    """A command with the flags of this one that records what it is called with."""

    @wraps(FUNCTIONS[name])
    def record(**values: Any) -> None:
        calls.append(values)

    record.__signature__ = inspect.signature(FUNCTIONS[name])  # type: ignore[attr-defined]
    return record


CALLS: list[dict[str, Any]] = []
APP = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
for each in NAMES:
    APP.command(each)(for_typer(recorder(each, CALLS)))
COMMAND = typer.main.get_command(APP)


def typer_values(name: str, arguments: list[str]) -> dict[str, Any] | None:
    """What typer calls a command with; None where it refuses the line or shows the help."""
    CALLS.clear()
    try:
        with redirect_stdout(io.StringIO()):
            COMMAND.main([name, *arguments], standalone_mode=False)
    except Exception:
        return None
    return CALLS[0] if CALLS else None


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(WORDS), max_size=7))
def test_a_plain_command_line_has_the_values_that_typer_reads(name: str, arguments: list[str]) -> None:
    found = plain.values(FUNCTIONS[name], arguments)
    if found is not None:
        expected = typer_values(name, arguments)
        assert expected is not None, f"typer refuses {arguments}"
        assert found == expected


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run", ["Name a color."]),
        ("run", ["--max-tokens", "1", "-q", "--stop", "a", "--stop=b", "--", "--raw"]),
        ("run", ["--profile-json", "x.json", "-m", "smollm2", "-t", "0.7"]),
        ("chat", []),
        ("doctor", ["--json"]),
    ],
)
def test_the_usual_command_lines_are_plain(name: str, arguments: list[str]) -> None:
    found = plain.values(FUNCTIONS[name], arguments)
    assert found is not None
    assert found == typer_values(name, arguments)


def test_a_plain_run_imports_neither_typer_nor_rich() -> None:
    code = (
        "import sys; from headway.cli import main; from headway.cli.flags import plain\n"
        "assert plain.values(main._function('run'), ['hi', '--max-tokens', '1'])\n"
        "print({'typer', 'rich', 'pydantic', 'torch', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
