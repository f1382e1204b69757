"""Jobs over files without a model: order, exactly one result for each row, folders, and what changes under a job."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import Closed, InvalidInput
from headway.jobs.folder import JobFolder
from headway.jobs.records import Record, file_digest, records, watched
from headway.jobs.requests import (
    OpenAIRows,
    PlainRows,
    RequestWorker,
    RowRequest,
    RowResponse,
    row_seed,
    unique,
)
from headway.jobs.run import RowFailed, RowResult, run_records


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(count)))
    return path


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Upper:
    """A worker that fails every fifth row; `log` gets a line for each row that it computes."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        with self._log.open("a") as log:
            for record in todo:
                log.write(f"{record.line}\n")
                log.flush()
                failed = record.line % 5 == 0
                yield RowResult(record, RowFailed("a poison row") if failed else record.value["prompt"].upper())


def run(source: Path, folder: Path, log: Path, **more: Any) -> JobFolder:
    with JobFolder(folder, {"task": "upper", "input": file_digest(str(source))}, ".jsonl", **more) as job:
        if job.done is None:
            run_records(Upper(log), watched(str(source)), job.journal)
            job.finish()
    return job


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestFolder:
    def test_every_row_is_in_one_of_two_files(self, tmp_path: Path) -> None:
        job = run(write(tmp_path / "in.jsonl", 12), tmp_path / "out", tmp_path / "log")
        assert job.done == {"rows": 12, "failed": 2}
        assert sorted(contents(tmp_path / "out")) == ["errors.jsonl", "job.json", "results.jsonl"]
        assert [one["line"] for one in lines(job.results)] == [1, 2, 3, 4, 6, 7, 8, 9, 11, 12]
        assert lines(job.errors) == [{"line": line, "error": "a poison row"} for line in (5, 10)]

    @pytest.mark.parametrize("seed", range(3))
    def test_killed_at_any_moment_it_resumes(self, tmp_path: Path, seed: int) -> None:
        source, log, draw = write(tmp_path / "in.jsonl", 60), tmp_path / "log", random.Random(seed)
        ends: list[int] = []
        while not ends or ends[-1] != 0:
            left = draw.randrange(1, 30)
            if (life := os.fork()) == 0:

                def die(record: Record) -> None:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

                with JobFolder(tmp_path / "out", {"input": file_digest(str(source))}, ".jsonl") as job:
                    run_records(Upper(log), watched(str(source)), job.journal, progress=die)
                    job.finish()
                os._exit(0)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]))
        assert ends.count(-signal.SIGKILL) >= 2
        done = [one["line"] for name in ("results", "errors") for one in lines(tmp_path / "out" / f"{name}.jsonl")]
        assert sorted(done) == list(range(1, 61))
        assert log.read_text().split() == [str(line) for line in range(1, 61)]  # none was computed twice

    def test_a_complete_job_is_left_as_it_is(self, tmp_path: Path) -> None:
        source, log = write(tmp_path / "in.jsonl", 12), tmp_path / "log"
        run(source, tmp_path / "out", log)
        before = contents(tmp_path / "out")
        assert run(source, tmp_path / "out", log).done == {"rows": 12, "failed": 2}
        assert contents(tmp_path / "out") == before
        assert len(log.read_text().split()) == 12

    def test_another_job_a_changed_input_and_foreign_files_are_refused(self, tmp_path: Path) -> None:
        source, log = write(tmp_path / "in.jsonl", 12), tmp_path / "log"
        run(source, tmp_path / "out", log)
        before = contents(tmp_path / "out")
        with (
            pytest.raises(InvalidInput, match="was started with task 'upper', and this is 'lower'"),
            JobFolder(tmp_path / "out", {"task": "lower"}, ".jsonl"),
        ):
            pass
        with pytest.raises(InvalidInput, match="another input, or its input has changed"):
            run(write(tmp_path / "in.jsonl", 13), tmp_path / "out", log)
        assert contents(tmp_path / "out") == before
        with pytest.raises(InvalidInput, match=r"holds 'in\.jsonl', which is not a batch job's"):
            run(source, tmp_path, log)
        assert run(source, tmp_path / "out", log, restart=True).done == {"rows": 13, "failed": 2}

    def test_a_job_that_never_began_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError), JobFolder(tmp_path / "out", {}, ".jsonl"):
            raise RuntimeError
        assert not (tmp_path / "out").exists()

    def test_a_job_that_was_killed_before_its_first_row_binds_nobody(self, tmp_path: Path) -> None:
        if (life := os.fork()) == 0:
            with JobFolder(tmp_path / "out", {"task": "lower"}, ".csv"):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(life, 0)
        assert sorted(contents(tmp_path / "out")) == ["job.json", "results.csv.partial"]
        assert run(write(tmp_path / "in.jsonl", 3), tmp_path / "out", tmp_path / "log").done == {"rows": 3, "failed": 0}
        assert sorted(contents(tmp_path / "out")) == ["job.json", "results.jsonl"]

    def test_another_format_takes_over_the_rows_that_are_done(self, tmp_path: Path) -> None:
        source, log = write(tmp_path / "in.jsonl", 4), tmp_path / "log"
        job = {"task": "upper", "input": file_digest(str(source))}
        results = [{"a": 1}, {"a": 2}, {"a": 3, "b": 4}, {"a": 5}]  # a CSV file has one set of columns
        with JobFolder(tmp_path / "out", job, ".csv") as folder:
            for record, result in zip(watched(str(source)), results):
                folder.journal.add(record, result)
            with pytest.raises(InvalidInput, match=r"only \.jsonl can hold results that differ"):
                folder.finish()
        assert run(source, tmp_path / "out", log).done == {"rows": 4, "failed": 0}
        assert [one["result"] for one in lines(tmp_path / "out/results.jsonl")] == results
        assert log.read_text() == ""
        with (
            pytest.raises(InvalidInput, match=r"is complete, in another format than results\.csv"),
            JobFolder(tmp_path / "out", job, ".csv"),
        ):
            pass

    def test_a_folder_has_one_writer(self, tmp_path: Path) -> None:
        with (
            JobFolder(tmp_path / "out", {}, ".jsonl"),
            pytest.raises(InvalidInput, match="another process is writing"),
            JobFolder(tmp_path / "out", {}, ".jsonl"),
        ):
            pass

    @pytest.mark.parametrize("change", ["append", "remove"])
    def test_an_input_that_changes_ends_the_job(self, tmp_path: Path, change: str) -> None:
        source = write(tmp_path / "in.jsonl", 12)

        def changed(record: Record) -> None:
            if record.line == 6:
                source.open("a").write("{}\n") if change == "append" else source.unlink()

        with JobFolder(tmp_path / "out", {}, ".jsonl") as job:
            with pytest.raises(InvalidInput, match=r"in\.jsonl has changed while the job reads it"):
                run_records(Upper(tmp_path / "log"), watched(str(source)), job.journal, progress=changed)
            assert job.journal.count == 6
        assert not job.results.exists()


class TestRequests:
    def test_results_are_in_order_and_few_rows_are_in_flight(self, tmp_path: Path) -> None:
        running, most, lock = 0, 0, threading.Lock()
        read: list[int] = []

        def compute(request: RowRequest) -> RowResponse:
            nonlocal running, most
            with lock:
                running, most = running + 1, max(most, running + 1)
            time.sleep(0.2 if request.key == "1" else 0.001)  # the first one holds up the others' results
            with lock:
                running -= 1
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            text = request.body["prompt"]
            return RowResponse(200, {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})

        def source() -> Iterable[Record]:
            for record in records(str(write(tmp_path / "in.jsonl", 400))):
                read.append(record.line)
                yield record

        with ThreadPoolExecutor(32) as pool:
            worker = RequestWorker(lambda request: pool.submit(compute, request), PlainRows("generate", {}), 4)
            found = []
            for row in worker.results(source()):
                found.append(row.result["text"])
                assert len(read) - len(found) <= 4 * 8 + 1  # what is read ahead is bounded
        assert found == [f"row {i}" for i in range(400)]
        assert most <= 4

    def test_a_dead_engine_ends_the_job_instead_of_failing_every_row(self, tmp_path: Path) -> None:
        error = {"error": {"code": "dead", "message": "the engine has stopped"}}
        with ThreadPoolExecutor(1) as pool:
            send = lambda request: pool.submit(lambda: RowResponse(503, error))  # noqa: E731
            worker = RequestWorker(send, PlainRows("generate", {}), 4)
            with pytest.raises(Closed, match="stopped at line 1: the engine has stopped"):
                list(worker.results(records(str(write(tmp_path / "in.jsonl", 9)))))

    def test_seeds_derive_from_keys(self) -> None:
        line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
        first, again = (OpenAIRows(7).request(Record(n, line, 0)).body["seed"] for n in (1, 2))
        assert first == again == row_seed(7, "a")
        other = OpenAIRows(7).request(Record(1, line | {"custom_id": "b"}, 0)).body["seed"]
        assert len({first, other, row_seed(8, "a")}) == 3
        given = OpenAIRows(7).request(Record(1, line | {"body": {"prompt": "x", "seed": 3}}, 0))
        assert given.body["seed"] == 3

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            (3, "it must be an object with custom_id, method, url, body"),
            ({"custom_id": "", "url": "/v1/completions", "body": {}}, "a string of 1 to 512 characters"),
            ({"custom_id": "a", "url": "/v1/files", "body": {}}, "url is '/v1/files'"),
            ({"custom_id": "a", "url": ["x"], "body": {}}, "url is ['x']"),
            ({"custom_id": "a", "url": "/v1/completions", "body": []}, "body is []; it must be an object"),
            ({"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}, "method is 'GET'"),
            ({"custom_id": "a", "url": "/v1/completions", "body": {"stream": True}}, "computed whole"),
            ({"custom_id": "a", "url": "/v1/completions", "body": {}, "seed": 3}, "the field 'seed' is unknown"),
        ],
    )
    def test_bad_lines_say_what_is_wrong(self, line: Any, why: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            OpenAIRows().request(Record(1, line, 0))
        assert why in str(caught.value)

    def test_a_key_is_unique(self, tmp_path: Path) -> None:
        values = [{"custom_id": key} for key in ("a", "b", "a", None)]
        found = list(unique((Record(i, v, 0) for i, v in enumerate(values, 1)), OpenAIRows().key_of, "custom_id"))
        assert [one.error for one in found[:2]] == [None, None]
        assert found[2].error == "custom_id 'a' is also that of line 1; each must be unique"
        assert found[3].error is None


# -- files that are not as they should be ------------------------------------------------------------------------------


def values(path: Path, data: bytes) -> list[tuple[int, Any]]:
    """Lines and values of a file with these bytes; the beginning of the error where there is no value."""
    path.write_bytes(data)
    return [(one.line, one.value if one.error is None else one.error[:14]) for one in records(str(path))]


def test_marks_blank_lines_and_line_ends_are_no_rows(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert values(tmp_path / "a.jsonl", mark) == []
    assert values(tmp_path / "a.jsonl", mark + b'\r\n{"a": 1}\r\n \r\n3') == [(2, {"a": 1}), (4, 3)]
    assert values(tmp_path / "a.csv", mark + b"\r\n\r\na,b\r\n1,2\r\n\r\n3,4") == [
        (4, {"a": "1", "b": "2"}),
        (6, {"a": "3", "b": "4"}),
    ]
    assert values(tmp_path / "a.csv", mark) == values(tmp_path / "a.csv", b"a,b\n") == []
    assert values(tmp_path / "a.csv", b'a\n"x"y\nz\n') == [(2, "not valid CSV:"), (3, {"a": "z"})]


@pytest.mark.parametrize("header", [b"a\rb\rc", b'"a"b\n', b"\xff\n1\n", b"a,a\n1,2\n"])
def test_a_header_that_cannot_be_read_is_one_sentence(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"in\.csv: the header (is not valid (CSV|UTF-8)|names a column twice)"):
        values(tmp_path / "in.csv", header)


def test_parquet_values_are_those_of_json_and_bytes(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    days = [datetime.date(2026, 1, 2), None]
    columns = {"t": ["a", None], "day": days, "n": [1.5, float("nan")], "raw": [b"\xff", None]}
    pairs = pyarrow.array(
        [[("k", decimal.Decimal("1.5"))], None], pyarrow.map_(pyarrow.string(), pyarrow.decimal128(3, 1))
    )
    parquet.write_table(pyarrow.table({**columns, "pairs": pairs}), tmp_path / "in.parquet")
    first, second = (one.value for one in records(str(tmp_path / "in.parquet")))
    assert first == {"t": "a", "day": "2026-01-02", "n": 1.5, "raw": b"\xff", "pairs": [["k", "1.5"]]}
    assert math.isnan(second.pop("n"))
    assert second == {"t": None, "day": None, "raw": None, "pairs": None}


def test_a_parquet_file_that_is_damaged_is_one_sentence(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"a": [f"text {i}" for i in range(5000)]}), path, row_group_size=1000)
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half : half + 2000] = bytes(2000)
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"in\.parquet cannot be read as parquet after row 1024: "):
        list(records(str(path)))
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, path)
    with pytest.raises(InvalidInput, match="names a column twice: a, a"):
        list(records(str(path)))
