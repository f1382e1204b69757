"""What people get wrong on their first day, and what a shell does to a command: hints, closed pipes, ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest

from headway.cli.terminal.answer import weights
from headway.cli.terminal.profile import show_profile
from headway.models.hub import store
from headway.runtime.profile import Phase, Profile
from support.forked import forked

Run = Callable[..., CompletedProcess[str]]
STORY = ("run", "--raw", "--threads", "1", "--max-tokens", "4000", "Once upon a time")


@pytest.fixture(scope="module")
def model() -> Path:
    """The default model, pulled once."""
    return store.resolve("smollm2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "Name", "the", "capital"), "a prompt of several words needs quotes: headway run 'Name the capital of"),
        (("rnu", "hi"), "No such command 'rnu'; you may mean `headway run`"),
        (("run", "hi", "--top-k", "3"), "--top-k is 3 and has no effect at temperature 0"),
        (("run", "hi", "--top-p", "0.9"), "set --temperature 1, or leave --top-p out"),
        (("serve", "--limit", "max_n"), "--limit 'max_n' has ''; it must be NAME=N, where N is an integer"),
        (("serve", "--limit", "max_n=x"), "--limit 'max_n=x' has 'x'; it must be NAME=N, where N is an integer"),
        (("serve", "--limit", "body_timeout=x"), "--limit 'body_timeout=x' has 'x'; it must be NAME=N"),
        (("bench", "overhead", "--rows", "x"), "--rows has 'x'; it must be integers in [1, 512]"),
        (("bench", "overhead", "--rows", "1,0"), "--rows has '0'; it must be integers in [1, 512]"),
        (("top", "--url", "http://127.0.0.1:1"), "Connection refused; start one with `headway serve`"),
        (("pipeline", "fill-mask", "-i", "/no.jsonl", "-o", "-"), "--input is '/no.jsonl', which does not exist"),
    ],
)
def test_a_mistake_says_what_to_do(
    headway: Run, empty_cache: dict[str, str], arguments: tuple[str, ...], words: str
) -> None:
    done = headway(*arguments, env=empty_cache)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_sampling_flags_work_with_a_temperature(headway: Run, model: Path) -> None:
    done = headway("run", "hi", "--temperature", "1", "--top-k", "1", "--max-tokens", "2", "--threads", "1")
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [("--help",), STORY], ids=["help", "a story"])
def test_a_closed_pipe_ends_the_command_without_a_word(arguments: tuple[str, ...], model: Path) -> None:
    process = Popen(forked("-m", "headway.cli.main", *arguments), stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    if arguments == STORY:
        process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("options", [("-m",), ("-u", "-m")], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_one_sentence(options: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, *options, "headway.cli.main", "models", "list"]
    environment = os.environ | {"PYTHONUNBUFFERED": "", "HEADWAY_CACHE": str(tmp_path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=PIPE, timeout=60, check=False)
        sentence = b"headway: the output cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (2, sentence)
        done = subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=60, check=False)
        assert done.returncode == 2


def test_streams_that_are_closed_from_the_start_are_none(model: Path) -> None:
    """Their numbers are not those of the model's files either."""
    for closed in (">&-", "<&- >&- 2>&-"):
        command = shlex.join(
            [sys.executable, "-m", "headway.cli.main", "run", "hi", "--max-tokens", "2", "--threads", "1"]
        )
        done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, (closed, done.stderr)
        assert b"Traceback" not in done.stderr


def test_ctrl_c_ends_the_line(model: Path) -> None:
    process = Popen(forked("-m", "headway.cli.main", *STORY), stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown.endswith(b"\n")
    assert said == b""


def test_weights_are_named_in_few_words() -> None:
    assert weights("int4 in groups of 32, int8 in groups of 32") == "int4, int8"
    assert weights("int8 in groups of 16, int4 in groups of 32, int8 in groups of 32") == "int8, int4"
    assert [weights(one) for one in ("f32", "bf16", "float32")] == ["float32", "bfloat16", "float32"]


def test_a_phase_too_short_to_time_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    phases = (Phase("head", 3e-3, 30_000_000, 3), Phase("sample", 3e-7, 600_000, 3))
    show_profile(Profile(samples=(), phases=phases, bandwidth_limit=20e9))
    *_, head, sample = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert head[-2:] == ["10.00", "50%"]
    assert sample[-2:] == ["–", "–"]
