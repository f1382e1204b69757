"""`headway batch` and `headway.batch.run` with the default model: every kind of row, and a process that is killed."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import headway as hw
import headway.batch
from headway.cli.main import dispatch
from headway.cli.terminal.render import is_quiet
from headway.jobs.job import BatchJob
from support import encoders

pytestmark = pytest.mark.usefixtures("smollm2_path")
MESSAGES = [{"role": "user", "content": "Name a color."}]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def drawn(count: int, tokens: int = 12) -> list[dict[str, Any]]:
    """Lines of OpenAI's format that draw, without seeds."""
    body = {"max_tokens": tokens, "temperature": 1.0}
    return [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"Number {i}"}}
        for i in range(count)
    ]


def texts(folder: Path) -> dict[str, str]:
    found = lines(folder / "results.jsonl")
    choices = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in found}
    return {key: choice["text"] for key, choice in choices.items() if "text" in choice}


def test_rows_of_openais_format(smollm2: hw.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    rows = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "unknown", "url": "/v1/chat/completions", "body": chat | {"tempreature": 1}},
        *drawn(4),
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert (
        dispatch(["batch", str(source), "--output", str(tmp_path / "out"), "--json", "--quiet", "--threads", "1"]) == 0
    )
    assert not is_quiet()  # it was that command's alone
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["failed"], report["errors"]) == (6, 1, str(tmp_path / "out/errors.jsonl"))
    found = lines(tmp_path / "out/results.jsonl")
    assert [one["custom_id"] for one in found] == ["chat", *(f"row-{i}" for i in range(4))]
    assert {tuple(one) for one in found} == {("id", "custom_id", "response", "error")}
    (failed,) = lines(tmp_path / "out/errors.jsonl")
    assert failed["response"]["status_code"] == 400
    assert "tempreature" in failed["response"]["body"]["error"]["message"]

    async def alone(engine: hw.Engine) -> str:
        async with engine.context() as context:
            context.user(MESSAGES[0]["content"])
            return await context.generate(hw.Argmax(), max_tokens=6).text()

    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == smollm2.run(alone)
    # One row at a time, in another order, from Python: the same draws.
    again = write_lines(tmp_path / "again.jsonl", rows[:1:-1])
    headway.batch.run(again, tmp_path / "again", concurrency=1, threads=1)
    assert texts(tmp_path / "again") == texts(tmp_path / "out")


def test_plain_rows_of_every_kind(smollm2: hw.Engine, tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], ["a", "The sky is blue."], ["b", ""], ["c", "Blue is the sky."]])
    seen: list[tuple[int, float | None]] = []
    done = headway.batch.run(
        tmp_path / "in.csv", tmp_path / "scores", task="score", columns=["text"], key="id", format="parquet",
        threads=1,         progress=lambda rows, share: seen.append((rows, share)),
    )  # fmt: skip
    assert (done.rows, done.failed, done.errors) == (3, 1, tmp_path / "scores/errors.jsonl")
    assert [rows for rows, _ in seen] == [1, 2, 3]
    assert seen[-1][1] == 1.0
    assert [(one["line"], one["key"]) for one in lines(done.errors)] == [(3, "b")]
    table = pyarrow.parquet.read_table(done.results).to_pylist()
    assert [row["key"] for row in table] == ["a", "c"]

    async def score(engine: hw.Engine) -> list[float]:
        ids = engine.tokenizer.encode("The sky is blue.")
        async with engine.context() as context:
            forward = context.forward().input(ids)
            handles = [forward.probe(i, hw.Logprob(token)) for i, token in enumerate(ids[1:])]
            output = await forward.execute()
            return [float(output.logprobs(handle)[0]) for handle in handles]

    expected = smollm2.run(score)
    assert table[0]["result"]["token_logprobs"][0] is None
    assert table[0]["result"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert table[0]["result"]["logprob"] == pytest.approx(sum(expected), abs=1e-3)


def test_a_task_of_pipelines(tmp_path: Path) -> None:
    encoders.model("bert", "classify", num_labels=3).save_pretrained(tmp_path / "model")
    encoders.tokenizer("bert").save_pretrained(tmp_path / "model")
    items = encoders.texts(6, seed=1)
    source = write_lines(tmp_path / "in.jsonl", [*items, 3])
    arguments = ["--task", "text-classification", "--model", str(tmp_path / "model"), "--device", "cpu", "--quiet"]
    assert dispatch(["batch", str(source), "-o", str(tmp_path / "out"), *arguments]) == 0
    with hw.pipeline("text-classification", str(tmp_path / "model"), device="cpu") as classify:
        expected = classify(list(items))
    found = lines(tmp_path / "out/results.jsonl")
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5, 6]
    for one, want in zip(found, expected):
        assert one["result"]["score"] == pytest.approx(want["score"], rel=1e-5)
    assert [one["line"] for one in lines(tmp_path / "out/errors.jsonl")] == [7]


@pytest.mark.parametrize(
    ("rows", "more", "why"),
    [
        ([{"id": 1, "body": "x"}], [], "neither messages nor prompt; name the task"),
        ([{"prompt": "x"}], ["--set", "n=2"], "'n' is not an option of the rows of generate"),
        ([{"prompt": "x"}], ["--task", "score", "--set", "top_k=2"], "'top_k' is not an option of the rows of score"),
        ([{"prompt": "x"}], ["--task", "nonsense"], "nonsense"),
        ([{"prompt": "x"}], ["--format", "xml"], "format is 'xml'; it must be jsonl, csv, parquet"),
        ([{"prompt": "x"}], ["--concurrency", "0"], "concurrency is 0"),
        (drawn(1), ["--set", "max_tokens=3"], "whole requests with keys of their own"),
        ([{"prompt": "x"}], ["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_one_sentence_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], more: list[str], why: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert dispatch(["batch", str(source), "-o", str(tmp_path / "out"), "--json", "--quiet", *more]) == 2
    assert why in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rows_for_other_models_and_routes(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "embed", "url": "/v1/embeddings", "body": {"input": "A cat sleeps."}},
        {"custom_id": "response", "url": "/v1/responses", "body": {"input": "Name a color.", "max_output_tokens": 16}},
        {"custom_id": "score", "url": "/v1/score", "body": {"text_1": "A cat sleeps.", "text_2": "A dog sleeps."}},
        {"custom_id": "classify", "url": "/classify", "body": {"input": "A cat sleeps."}},
    ]
    source, found = write_lines(tmp_path / "in.jsonl", rows), []
    for folder in (tmp_path / "out", tmp_path / "again"):
        done = headway.batch.run(source, folder, pooling={"embed": "minilm"}, threads=1, device="cpu")
        assert (done.rows, done.failed) == (4, 1)
        found.append([one["response"]["body"] for one in lines(done.results)])
    with hw.pipeline("sentence-embedding", "minilm", device="cpu") as embed:
        expected = [float(value) for value in embed("A cat sleeps.")]
    assert found[0][0]["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
    assert found[0][1]["output"][0]["content"] == found[1][1]["output"][0]["content"]  # drawn from the row's seed
    (failed,) = lines(tmp_path / "out/errors.jsonl")
    assert "start it with --classify" in failed["response"]["body"]["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_process_resumes(tmp_path: Path, seed: int) -> None:
    source, draw, kills = write_lines(tmp_path / "in.jsonl", drawn(150, 24)), random.Random(seed), 0
    source.write_text(source.read_text() + "a poison row\n")
    command = [sys.executable, "-m", "headway.cli.main", "batch", str(source), "-o", str(tmp_path / "out"), "--quiet"]
    journal = tmp_path / "out/results.jsonl.partial"
    code = -9
    while code == -9:
        before = journal.stat().st_size if journal.exists() else 0
        process = subprocess.Popen([*command, "--concurrency", str(draw.choice((1, 7, 64)))])
        more = draw.randrange(1000, 12_000)
        while process.poll() is None:
            if kills < 6 and journal.exists() and journal.stat().st_size > before + more:
                process.kill()
                kills += 1
                break
            time.sleep(0.01)
        code = process.wait()
    assert code == 0
    assert kills >= 3
    headway.batch.run(source, tmp_path / "whole")
    assert texts(tmp_path / "out") == texts(tmp_path / "whole")
    assert list(texts(tmp_path / "out")) == [f"row-{i}" for i in range(150)]
    assert [one["error"]["line"] for one in lines(tmp_path / "out/errors.jsonl")] == [151]


def test_options_that_change_results_make_another_job(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])

    def identity(**engine: Any) -> dict[str, Any]:
        return BatchJob(source, tmp_path / "out", engine=engine).identity("generate")

    usual = identity()
    assert identity(tensor_parallel=1, deterministic=False, dtype="auto", threads=2) == usual
    changed = [{"tensor_parallel": 2}, {"deterministic": True}, {"dtype": "float32"}, {"kv_dtype": "float16"}]
    assert all(identity(**one) == usual | one for one in changed)
