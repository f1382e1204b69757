"""`headway run` and `headway chat` on the default model: streams, figures, tables, JSON, pipes, interrupts."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import headway as hw
from headway.base.config import settings
from headway.base.specs.samplers import Sampling
from headway.cli import chat
from headway.cli.flags.shared import Decoding
from headway.cli.terminal.render import WordWrapper, visible
from headway.models.hub import store
from headway.program.generation.defaults import GenerationDefaults
from support.forked import forked

Run = Callable[..., CompletedProcess[str]]
PODS = "Kubernetes pods are scheduled by the"


@pytest.fixture
def headway(headway: Run) -> Run:
    """The command with one thread: a thread more than there are free cores makes every one of them wait."""

    def run(command: str, *arguments: str, **given: str) -> CompletedProcess[str]:
        threads = () if "--threads" in arguments else ("--threads", "1")
        return headway(command, *threads, *arguments, **given)

    return run


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    """The default model, pulled once."""
    return store.resolve("smollm2")


def test_answers_with_figures_on_standard_error(headway: Run) -> None:
    done = headway("run", "What is the capital of France?", "--max-tokens", "16", "--dtype", "float32")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert done.stdout.endswith("\n")
    assert re.fullmatch(
        r"smollm2 · float32 · cpu · \d+ prompt tokens · \d+ tokens? · first token [\d.]+ s · [\d.]+ tokens/s\n",
        done.stderr,
    )


def test_raw_continues_and_shows_the_likeliest_tokens(headway: Run) -> None:
    done = headway("run", "--raw", "--logprobs", "8", "--max-tokens", "1", PODS)
    assert done.returncode == 0
    answer, title, header, *rows = done.stdout.splitlines()
    cells = [row.split("\t") for row in rows]
    assert header.split("\t") == ["rank", "token", "id", "probability", "logprob"]
    assert [row[0] for row in cells] == [str(rank) for rank in range(1, 9)]
    probabilities = [float(row[3]) for row in cells]
    assert probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(probabilities) <= 1.001
    assert title == f"step 1: {cells[0][1]}"
    assert json.loads(cells[0][1]) == answer


def test_json_is_one_object(headway: Run) -> None:
    done = headway("run", "--raw", "--json", "--logprobs", "3", "--max-tokens", "4", PODS)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert len(answer["tokens"]) == 4
    assert answer["finish_reason"] == "length"
    assert [step["id"] for step in answer["logprobs"]] == answer["tokens"]
    assert all(step["top"][0]["id"] == step["id"] for step in answer["logprobs"])  # greedy takes the likeliest
    assert [len(step["top"]) for step in answer["logprobs"]] == [3] * 4
    figures = answer["figures"]
    assert (figures["model"], figures["tokens"]) == ("smollm2", 4)
    assert 0 < figures["first_token_seconds"] <= figures["seconds"]


def answer_of(headway: Run, *arguments: str, input: str = "") -> dict:
    done = headway("run", "--json", "--max-tokens", "8", *arguments, input=input)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def test_a_log_probability_stays_where_its_probability_underflows() -> None:
    from headway.cli.terminal.answer import Candidate

    assert Candidate(5, "a", -2422.0).to_json() == {"id": 5, "text": "a", "probability": 0.0, "logprob": -2422.0}


def test_a_prompt_and_a_pipe_are_joined_by_a_blank_line(headway: Run) -> None:
    joined = answer_of(headway, "--raw", "One two", input="three four\n")
    written = answer_of(headway, "--raw", "One two\n\nthree four")
    assert joined["tokens"] == written["tokens"]
    assert joined["figures"]["prompt_tokens"] == written["figures"]["prompt_tokens"]


def test_a_pipe_alone_is_the_prompt(headway: Run) -> None:
    written = answer_of(headway, "--raw", PODS)
    assert answer_of(headway, "--raw", input=PODS)["tokens"] == written["tokens"]
    assert answer_of(headway, "--raw", "-", input=PODS + "\n")["tokens"] == written["tokens"]


def test_the_template_and_the_system_message_are_used(headway: Run) -> None:
    raw = answer_of(headway, "--raw", "Hello")["figures"]["prompt_tokens"]
    chat = answer_of(headway, "Hello")["figures"]["prompt_tokens"]
    system = answer_of(headway, "--system", "You answer in one short word and nothing more than that, always.", "Hello")
    assert raw < chat
    assert system["figures"]["prompt_tokens"] != chat


def test_the_same_seed_draws_the_same_tokens(headway: Run) -> None:
    drawn = [answer_of(headway, "--temperature", "1.5", "--seed", seed, "Tell a story")["tokens"] for seed in "778"]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_stops_before_the_text(headway: Run) -> None:
    plain = answer_of(headway, "--raw", "1, 2, 3, 4, 5,")
    assert ", 7" in plain["text"]
    stopped = answer_of(headway, "--raw", "1, 2, 3, 4, 5,", "--stop", "zebra", "--stop", ", 7")
    assert stopped["text"] == plain["text"][: plain["text"].index(", 7")]
    assert stopped["finish_reason"] == "stop"


def test_profile_as_a_table_and_as_a_file(headway: Run, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    done = headway("run", "--raw", PODS, "--max-tokens", "3", "--profile", "--profile-json", str(file))
    assert done.returncode == 0
    for phase in ("embed", "norm", "qkv", "rope", "attention", "feed-forward", "head", "sample"):
        assert re.search(rf"^{phase}\t", done.stdout, re.MULTILINE), phase
    profile = json.loads(file.read_text())
    assert profile["bandwidth_limit"] > 0
    assert {phase["name"] for phase in profile["phases"]} >= {"attention", "feed-forward"}
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_prompt_longer_than_the_context_is_refused(headway: Run) -> None:
    done = headway("run", "--raw", "--max-tokens", "1", input="word " * 9000)
    assert done.returncode == 2
    assert "8192" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--dtype", "int7"),
        ("--device", "tpu"),
        ("--threads", "0"),
        ("--top-p", "1.5"),
        ("--top-k", "-2"),
        ("--min-p", "-1"),
        ("--mirostat", "2"),
        ("--xtc-threshold", "0.3"),
    ],
)
def test_values_that_make_no_sense(headway: Run, flag: str, value: str) -> None:
    done = headway("run", "hi", flag, value)
    assert done.returncode == 2
    assert value in done.stderr
    assert done.stderr.startswith("headway: ")
    assert done.stderr.count("\n") == 1


def test_dry_and_xtc_are_those_of_a_sampler(headway: Run) -> None:
    prompt = ("run", "--raw", "The sea, the sea, the sea,", "--max-tokens", "8")
    rules = ("--dry-multiplier", "9", "--dry-sequence-breaker", "!", "--xtc-probability", "1")
    assert headway(*prompt, *rules).stdout not in ("", headway(*prompt).stdout)


def test_an_interrupt_ends_cleanly() -> None:
    command = forked("-m", "headway.cli.main", "run", "--threads", "1", "--raw", "Count:", "--max-tokens", "4000")
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in out + err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = forked("-m", "headway.cli.main", "run", "--threads", "1", "--raw", "Count:", "--max-tokens", "40")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(timeout=60) != 0


class TestChat:
    def test_every_piped_line_is_a_turn_in_one_context(self, headway: Run) -> None:
        done = headway("chat", "--json", "--max-tokens", "24", input="My name is Ada.\n\nWhat is my name?\n")
        assert done.returncode == 0, done.stderr
        first, second = [json.loads(line) for line in done.stdout.splitlines()]

        async def at_once(engine: hw.Engine) -> list[int]:
            async with engine.context() as ctx:
                ctx.user("My name is Ada.").assistant(first["text"]).user("What is my name?")
                return await ctx.generate(hw.Argmax(), max_tokens=24).tokens()

        with hw.Engine("smollm2", threads=1) as engine:
            assert second["tokens"] == engine.run(at_once)
        # The second turn computes its own message only, not the conversation again.
        assert second["figures"]["prompt_tokens"] < first["figures"]["prompt_tokens"] + len(first["tokens"])

    def test_reset_forgets(self, headway: Run) -> None:
        lines = "Say hi.\n/reset\nSay hi.\n"
        done = headway("chat", "--json", "--max-tokens", "8", input=lines)
        first, second = [json.loads(line) for line in done.stdout.splitlines()]
        assert first["tokens"] == second["tokens"]
        assert first["figures"]["prompt_tokens"] == second["figures"]["prompt_tokens"]

    def test_commands_and_mistakes(self, headway: Run) -> None:
        done = headway("chat", input="/help\n/system\n/system Be brief.\n/system\n/tokens\n/exit\nnever read\n")
        assert (done.returncode, done.stdout) == (0, "")
        assert "/reset" in done.stderr
        assert "there is no system message" in done.stderr
        assert "Be brief." in done.stderr
        assert re.search(r"^\d+ tokens$", done.stderr, re.MULTILINE)
        done = headway("chat", input="/frobnicate\n")
        assert done.returncode == 2
        assert "there is no command /frobnicate" in done.stderr

    def test_on_a_terminal_an_interrupt_stops_the_answer_and_the_end_of_input_ends(self, tmp_path: Path) -> None:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "headway.cli.main", "chat", "--threads", "1", "--max-tokens", "2000"]
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_own_terminal,  # noqa: PLW1509  ctrl-C reaches only the owner of a terminal
            env=os.environ | {"TERM": "xterm", "HEADWAY_CACHE": str(self.cache(tmp_path))},
        )
        os.close(theirs)
        screen = _Screen(ours)
        screen.until(b"> ")
        os.write(ours, b"Write a very long story about the sea, in great detail.\n")
        screen.until(b"\n")
        screen.until(b" ")  # between two words of the answer
        os.write(ours, b"\x03")
        screen.until(b"keeps this part of the answer")
        screen.until(b"> ")
        os.write(ours, b"/tok\t\n")  # completed
        screen.until(b" tokens")
        screen.until(b"> ")
        os.write(ours, b"/system One\nTwo\nThree\n")  # pasted
        screen.until(b"> ")
        os.write(ours, b"/system\n")
        for line in (b"One", b"Two", b"Three"):
            screen.until(line)
        screen.until(b"> ")
        os.write(ours, b"\x03")
        if not screen.shows(b"ctrl-C again", 20):  # Python's readline loses it until it listens
            os.write(ours, b"\x03")
        screen.until(b"ctrl-C again")
        screen.until(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=120) == 0
        os.close(ours)
        history = tmp_path / "chat_history"
        assert "/tokens" in history.read_text()
        assert history.stat().st_mode & 0o077 == 0

    @staticmethod
    def cache(folder: Path) -> Path:
        """A cache with the models of the real one and nothing else."""
        for entry in settings().cache.iterdir():
            if entry.name != "chat_history":
                (folder / entry.name).symlink_to(entry)
        return folder

    def test_tokens_are_drawn_as_the_models_files_say(self) -> None:
        file = GenerationDefaults(do_sample=True, temperature=0.6, top_p=0.95)
        assert Decoding(8, temperature=None).sampler(file) == Sampling(temperature=0.6, top_p=0.95)
        assert Decoding(8, temperature=None, top_k=5).sampler(file) == Sampling(temperature=0.6, top_p=0.95, top_k=5)
        assert Decoding(8, temperature=0.0).sampler(file) == Sampling(temperature=0.0)
        assert Decoding(8, temperature=None).sampler(GenerationDefaults()) == Sampling(temperature=0.0)

    def test_an_empty_answer_says_why_and_a_long_message_that_it_is_read(
        self, smollm2: hw.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(chat, "LONG_PROMPT", 40)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        session = chat.ChatSession(smollm2, "smollm2", Decoding(4, 0.0, stop=["The"]), None, as_json=False)
        try:
            session.take("Name a fruit.")
            shown = capsys.readouterr().err
            assert "the answer is empty: it began with a --stop text" in shown
            assert "reading" not in shown
            session.take("fox " * 60)
            assert re.search(r"^reading \d\d tokens …$", capsys.readouterr().err, re.MULTILINE)
        finally:
            session.close()


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_words_are_wrapped_whole(pieces: int) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\nEnd 漢字漢字 x"
    wrapper, size = WordWrapper(True, width=12), -(-len(text) // pieces)
    shown = "".join(wrapper.push(text[i : i + size]) for i in range(0, len(text), size)) + wrapper.flush()
    lines = [line.rstrip() for line in shown.split("\n")]
    assert lines == ["The quick", "brown fox", "jumps over", "the lazy", "dog.", "", "End 漢字漢字", "x"]
    assert WordWrapper(False).push(text) == text


def test_control_characters_of_a_model_never_reach_a_terminal() -> None:
    assert visible("a\x1b[2Jb\x07\n\tc\x7f\x9bd") == "a␛[2Jb␇\n\tc␡�d"


def _own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class _Screen:
    """What a terminal showed: reads up to some words, and keeps what came after them."""

    def __init__(self, handle: int) -> None:
        self._handle, self._seen = handle, b""

    def until(self, words: bytes) -> None:
        assert self.shows(words, 120), self._seen
        self._seen = self._seen.split(words, 1)[1]

    def shows(self, words: bytes, seconds: float) -> bool:
        """Whether it comes to show these words."""
        deadline = time.monotonic() + seconds
        while words not in self._seen:
            ready, _, _ = select.select([self._handle], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self._seen += os.read(self._handle, 4096)
        return True


def test_drafts_change_no_answer(headway: Run) -> None:
    arguments = ("run", "--raw", 3 * "One fish, two fish, red fish.\n", "--max-tokens", "8", "-q")
    plain = headway(*arguments)
    for drafter in ("prompt-lookup", "layers:28", "smollm2"):
        drafted = headway(*arguments, "--speculate", drafter)
        assert (drafted.returncode, drafted.stdout) == (0, plain.stdout), drafted.stderr


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("layers:x", "--speculate is 'layers:x'; layers:N takes a number of layers"),
        ("layers:0", "--speculate is 'layers:0'; layers:N takes a number of layers"),
        ("layers:30", "OwnLayers(30): this model has 30 layers; give 1 to 29"),
        ("nothing-like-it", "nothing-like-it"),
    ],
)
def test_a_drafter_that_there_is_not_is_named(headway: Run, drafter: str, message: str) -> None:
    done = headway("run", "Hello", "--max-tokens", "4", "--speculate", drafter)
    assert done.returncode == 2
    assert message in done.stderr
