"""`headway pipeline`: files in and out, bad lines by their number, and a job that nothing can break."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import headway as hw
from headway.cli.main import dispatch
from headway.jobs.journal import Journal
from headway.jobs.records import records
from support import encoders
from support.forked import forked

COMMAND = ("-m", "headway.cli.main", "pipeline")
TEXTS = encoders.texts(40, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small classifier."""
    folder = tmp_path_factory.mktemp("classifier")
    encoders.model("bert", "classify", num_labels=3).save_pretrained(folder)
    encoders.tokenizer("bert").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> list[dict[str, Any]]:
    with hw.pipeline("text-classification", model, device="cpu") as classify:
        return classify(TEXTS)


# Loads what the command needs once, then lets it live and die several times: each life is a process, ended by SIGKILL
# once its journal has grown.
KILLER = """
import json, os, signal, sys
import headway.pipelines.factory
from headway.cli.main import dispatch
from headway.jobs.journal import Journal
from transformers import AutoTokenizer, BertForSequenceClassification
journal, arguments = sys.argv[1], json.loads(sys.argv[2])
ends, sizes, add = [], [], Journal.add
for _ in range(4):
    before = os.path.getsize(journal) if os.path.exists(journal) else 0
    def kill(self, *entry):
        add(self, *entry)
        if os.path.getsize(journal) >= before + 9000:
            os.kill(os.getpid(), signal.SIGKILL)
    life = os.fork()
    if life == 0:
        Journal.add = kill
        sys.stderr = open(os.devnull, "w")
        os._exit(dispatch(arguments))
    ends.append(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]))
    sizes.append(os.path.getsize(journal))
print(json.dumps([ends, sizes]))
"""


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def job(model: str, tmp_path: Path) -> Callable[..., int]:
    """Run the command in this process; its exit code. `output` is out.jsonl unless told otherwise."""

    def run(input: Path | str, *more: str, output: str = "out.jsonl") -> int:
        target = output if output == "-" else str(tmp_path / output)
        asked = ["--model", model, "--device", "cpu", "--input", str(input), "--output", target, *more]
        return dispatch(["pipeline", "text-classification", *asked])

    return run


class TestFiles:
    def test_lines_in_lines_out(self, job: Any, tmp_path: Path, expected: list[Any]) -> None:
        assert job(write_lines(tmp_path / "in.jsonl", list(TEXTS))) == 0
        found = lines(tmp_path / "out.jsonl")
        assert [one["line"] for one in found] == list(range(1, 41))
        for one, want in zip(found, expected):
            assert one["result"]["label"] == want["label"]
            assert one["result"]["score"] == pytest.approx(want["score"], rel=1e-5)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".out"))] == ["out.jsonl"]

    @pytest.mark.parametrize("kind", ["csv", "parquet"])
    def test_other_kinds_say_the_same(self, job: Any, tmp_path: Path, expected: list[Any], kind: str) -> None:
        source = tmp_path / f"in.{kind}"
        rows = [{"id": i, "text": f'{text}\n"quoted", and more' if i == 3 else text} for i, text in enumerate(TEXTS)]
        if kind == "csv":
            with source.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["id", "text"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        assert job(source, "--with-input", output=f"out.{kind}") == 0
        if kind == "csv":
            with (tmp_path / "out.csv").open(newline="") as file:
                found = [row | {"score": float(row["score"])} for row in csv.DictReader(file)]
            assert [int(row["line"]) for row in found[:6]] == [2, 3, 4, 5, 7, 8]  # the fourth record has two lines
        else:
            found = [
                {**row, **row["result"]} for row in pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
            ]
            assert [row["line"] for row in found] == list(range(1, 41))
        assert [row["input"] for row in found] == [row["text"] for row in rows]
        for i, (row, want) in enumerate(zip(found, expected)):
            if i != 3:
                assert (row["label"], row["score"]) == (want["label"], pytest.approx(want["score"], rel=1e-5))

    def test_every_line_of_a_text_file_is_an_item(self, tmp_path: Path) -> None:
        file = tmp_path / "in.txt"
        file.write_bytes(b"\xef\xbb\xbfone, two\r\n\n{not json}\nbad \xff\nlast")
        read = [(record.line, record.value, record.error) for record in records(str(file))]
        assert read == [
            (1, "one, two", None),
            (3, "{not json}", None),
            (4, None, "not valid UTF-8 at byte 4"),
            (5, "last", None),
        ]

    @pytest.mark.slow
    def test_from_a_pipe_to_a_pipe(self, model: str, expected: list[Any]) -> None:
        asked = ("--model", model, "--device", "cpu", "--input", "-", "--output", "-")
        done = subprocess.run(
            forked(*COMMAND, "text-classification", *asked),
            input="".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS[:5]),
            capture_output=True,
            text=True,
            check=True,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["line"] for one in found] == [1, 3, 5, 7, 9]
        assert [one["result"]["label"] for one in found] == [one["label"] for one in expected[:5]]
        assert "5 lines in" in done.stderr  # in a pipe progress is plain lines
        assert "\x1b" not in done.stderr

    def test_options_and_columns(self, job: Any, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "in.jsonl", [{"a": "the film", "b": "was great", "n": 1}] * 3)
        assert job(source, "--column", "b", "--set", "top_k=2", "--set", "function_to_apply=sigmoid") == 0
        with hw.pipeline("text-classification", encoders.model("bert", "classify", num_labels=3),
                         tokenizer=encoders.tokenizer("bert"), device="cpu") as peer:  # fmt: skip
            want = peer("was great", top_k=2, function_to_apply="sigmoid")
        for one in lines(tmp_path / "out.jsonl"):
            assert [part["label"] for part in one["result"]] == [part["label"] for part in want]

    def test_without_pyarrow(
        self, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        source = write_lines(tmp_path / "in.jsonl", ["film"])
        assert job(source, output="out.parquet") == 2
        assert "pip install 'headway[parquet]'" in capsys.readouterr().err

    @pytest.mark.slow
    def test_on_a_terminal_there_is_a_bar(self, model: str, tmp_path: Path, on_terminal: Any) -> None:
        source = write_lines(tmp_path / "in.jsonl", TEXTS)
        asked = ("--model", model, "--device", "cpu", "--input", str(source), "--output", str(tmp_path / "out.jsonl"))
        code, shown = on_terminal("pipeline", "text-classification", *asked)
        assert code == 0
        assert "40 lines in" in shown
        assert "/s" in shown


class TestBadLines:
    def test_are_told_by_number_and_left_out(
        self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: list[Any]
    ) -> None:
        source = tmp_path / "in.jsonl"
        good = [json.dumps(text).encode() for text in TEXTS[:6]]
        bad = [b'{"half', b"3", b"\xff\xfe", b'"' + b"film " * 100 + b'"']
        source.write_bytes(b"\n".join([bad[0], *good[:3], b"", bad[1], bad[2], *good[3:], bad[3]]) + b"\n")
        assert job(source, "--on-error", "skip") == 0
        said = capsys.readouterr().err
        assert [one["line"] for one in lines(tmp_path / "out.jsonl")] == [2, 3, 4, 8, 9, 10]
        assert [one["result"]["label"] for one in lines(tmp_path / "out.jsonl")] == [e["label"] for e in expected[:6]]
        for number, why in (
            (1, "not valid JSON"),
            (6, "got 3"),
            (7, "not valid JSON"),
            (11, "the limit is 64"),
        ):
            assert f"line {number}: " in said
            assert why in said.split(f"line {number}: ")[1].splitlines()[0]
        assert "4 lines failed and were left out: 1, 6, 7, 11" in said

    def test_end_the_job_where_asked_which_goes_on_once_they_are_mended(
        self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_lines(tmp_path / "in.jsonl", [*TEXTS[:5], 7, *TEXTS[5:]])
        assert job(source) == 2
        assert "line 6: expected a string" in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl").exists()
        write_lines(source, [*TEXTS[:5], "mended", *TEXTS[5:]])
        assert job(source) == 0
        assert "resuming after the 5 lines" in capsys.readouterr().err
        assert len(lines(tmp_path / "out.jsonl")) == 41

    def test_of_a_csv_file(self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = tmp_path / "in.csv"
        source.write_bytes(b"\xef\xbb\xbftext,n\nthe film,1\ntoo,many,fields\nfew\nbad \xff bytes,2\n\ndull,3\n")
        assert job(source, "--on-error", "skip") == 0
        assert [one["line"] for one in lines(tmp_path / "out.jsonl")] == [2, 7]
        said = capsys.readouterr().err
        assert "line 3: 3 fields, but the header has 2" in said
        assert "line 4: 1 fields" in said
        assert "line 5: not valid UTF-8" in said


MISTAKES = [
    (("--on-error", "ignore"), "--on-error is 'ignore'; it must be stop or skip"),
    (("--set", "top_k"), "--set is 'top_k'; it must be NAME=VALUE"),
    (("--set", "top_k=1", "--set", "top_k=2"), "--set top_k was given twice"),
    (("--set", "frob=1"), "'frob' is not an option of this task"),
    (("--set", "device=cpu"), "--set device is not a task option; use the flag"),
    (("--batch-size", "many"), "batch_size is 'many'"),
    (("--quantize", "int3"), "quantize is 'int3'"),
    (("--device", "tpu"), "there is no TPU backend"),
    (("--input", "/nowhere.jsonl"), "does not exist"),
    (("--input", "in.pdf"), "--input is 'in.pdf'; it must end in .jsonl, .csv, .parquet, .txt, or be -"),
    (("--output", "out.txt"), "--output is 'out.txt'; it must end in .jsonl, .csv, .parquet, or be -"),
    (("--column", "frob"), "line 1: --column frob was given, but this is a str"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes_are_one_sentence(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["film"])
    assert job(source, *arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert words in said[-1]


def test_an_unknown_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["film"])
    assert dispatch(["pipeline", "text-clasification", "-i", str(source), "-o", str(tmp_path / "o.jsonl")]) == 2
    assert "did you mean text-classification" in capsys.readouterr().err


class TestGoingOn:
    @pytest.mark.slow
    def test_after_being_killed_again_and_again(self, model: str, tmp_path: Path) -> None:
        """SIGKILL in the middle, four times; in the end the same bytes as without."""
        source = write_lines(tmp_path / "in.jsonl", [text for _ in range(75) for text in TEXTS])
        asked = ["pipeline", "text-classification", "--model", model, "--device", "cpu", "--batch-size", "1"]
        asked += ["--input", str(source), "--output"]
        target, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
        killed = subprocess.run(
            [sys.executable, "-c", KILLER, str(journal), json.dumps([*asked, str(target)])],
            check=True,
            capture_output=True,
            text=True,
        )
        ends, sizes = json.loads(killed.stdout)
        assert ends == [-signal.SIGKILL] * 4
        assert sizes == sorted({*sizes}), "every life got further"
        assert not target.exists()
        with journal.open("ab") as file:
            file.write(b'{"line": 99')  # and a line that was cut in the middle
        alone = [sys.executable, "-m", "headway.cli.main", *asked]  # with as many threads as those that were killed
        subprocess.run([*alone, str(target)], check=True, capture_output=True)
        assert not journal.exists()
        assert [one["line"] for one in lines(target)] == list(range(1, 3001))
        subprocess.run([*alone, str(tmp_path / "whole.jsonl")], check=True, capture_output=True)
        assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_from_a_journal_that_was_cut_anywhere(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "in.jsonl", ["a", "b", "ü", 3, "e"])
        output, job = tmp_path / "out.jsonl", {"task": "t", "options": {"k": (1, 2)}}

        def work(*, upto: int | None = None) -> list[int]:
            with Journal(output, job) as journal:
                todo = [record for record in records(str(source)) if not journal.has(record)]
                for record in todo[:upto]:
                    if record.value == 3:
                        journal.add_failure(record, "a number")
                    else:
                        journal.add(record, {"of": record.value})
                if upto is None:
                    journal.check_complete()
                    journal.finish()
            return [record.line for record in todo]

        work(upto=5)
        partial = output.with_name("out.jsonl.partial")
        whole = partial.read_bytes()
        want = [{"line": n, "result": {"of": v}} for n, v in ((1, "a"), (2, "b"), (3, "ü"), (5, "e"))]
        ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
        for cut in range(len(whole) + 1):
            partial.write_bytes(whole[:cut])
            done = max(sum(1 for end in ends if end <= cut) - 1, 0)
            assert work() == list(range(done + 1, 6))
            assert lines(output) == want
            assert not partial.exists()

    def test_only_the_same_job_goes_on(self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = write_lines(tmp_path / "in.jsonl", [*TEXTS[:5], 7])
        assert job(source) == 2
        assert job(source, "--set", "top_k=2") == 2
        assert "was started with options {}, and this is {'top_k': 2}" in capsys.readouterr().err
        write_lines(source, ["other", *TEXTS[1:6]])
        assert job(source) == 2
        assert "line 1 of the input has changed" in capsys.readouterr().err
        write_lines(source, TEXTS[:3])
        assert job(source) == 2
        assert "has line 4, which the input no longer has" in capsys.readouterr().err
        assert job(source, "--restart") == 0
        assert len(lines(tmp_path / "out.jsonl")) == 3

    def test_a_finished_output_is_never_lost(
        self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_lines(tmp_path / "in.jsonl", TEXTS[:3])
        assert job(source) == 0
        before = (tmp_path / "out.jsonl").read_bytes()
        assert job(source) == 2
        assert "exists; choose another, or give --overwrite" in capsys.readouterr().err
        write_lines(source, [*TEXTS[:3], 7])
        assert job(source, "--overwrite") == 2  # fails on its last line
        assert (tmp_path / "out.jsonl").read_bytes() == before
        assert job(source, "--overwrite", "--on-error", "skip") == 0
        assert (tmp_path / "out.jsonl").read_bytes() == before
        assert job(tmp_path / "out.jsonl", "--overwrite") == 2
        assert "are both" in capsys.readouterr().err

    def test_a_mistake_before_the_first_line_binds_nobody(
        self, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_lines(tmp_path / "in.jsonl", TEXTS[:3])
        assert job(source, "--set", "frob=1") == 2
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
        (tmp_path / "out.jsonl.partial").write_text('{"job": {"task": "killed before it had done anything"}}\n')
        assert job(source) == 0
        assert len(lines(tmp_path / "out.jsonl")) == 3
        (tmp_path / "out.jsonl.partial").write_text('{"of": "somebody else"}\n')
        assert job(source) == 2
        assert "is not the journal of a job" in capsys.readouterr().err
        assert (tmp_path / "out.jsonl.partial").exists()

    def test_two_at_once_are_refused(self, tmp_path: Path) -> None:
        with (
            Journal(tmp_path / "out.jsonl", {}),
            pytest.raises(hw.InvalidInput, match="another process is writing"),
            Journal(tmp_path / "out.jsonl", {}),
        ):
            pass

    def test_ctrl_c_leaves_what_was_done(self, model: str, tmp_path: Path) -> None:
        asked = ["text-classification", "--model", model, "--device", "cpu", "--input", "-"]
        target = tmp_path / "out.jsonl"
        process = subprocess.Popen(
            forked(*COMMAND, *asked, "--output", str(target)), stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin is not None
        os.write(process.stdin.fileno(), b"".join(json.dumps(text).encode() + b"\n" for text in TEXTS[:7]))
        journal = tmp_path / "out.jsonl.partial"
        while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):  # the job's own line, and a result
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read().decode()  # its input stays open: nothing but the signal ends it
        assert process.wait() == 130
        process.stdin.close()
        assert "the same command resumes" in said
