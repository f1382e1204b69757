"""Commands of the pages that need more than running: servers that are started and stopped, and what watches one."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from support.forked import forked
from support.many_models import model_folders

DOCS = Path(__file__).parents[2] / "docs"
HEADWAY = ("-m", "headway.cli.main")
PATIENCE = 120.0  # seconds until a test gives up; nothing is asserted about times


@cache  # several pages begin with the same line
def check_serve(*arguments: str) -> None:
    """A line of `headway serve` makes a key, or a server that becomes ready and ends with 0 when it is told to stop."""
    with tempfile.TemporaryDirectory() as folder:
        if "--new-key" in arguments:
            return _make_key(folder, arguments)
        if "--keys" in arguments:
            _make_key(folder, ["--keys", arguments[arguments.index("--keys") + 1], "--new-key", "ada"])
        if "--replicas" in arguments:
            return _miss_cluster(folder, "serve", *arguments)
        if "./models" in shlex.join(arguments):
            model_folders(Path(folder) / "models", "llama-8b")
        if "--mcp" in arguments:  # the file that the page shows
            shown = re.findall(r"```json\n(.*?)```", (DOCS / "mcp.md").read_text(), re.DOTALL)
            (Path(folder) / "mcp.json").write_text(shown[0])
        with _process(forked(*HEADWAY, "serve", *arguments, "--port", "0", "--json"), cwd=folder) as server:
            assert server.stdout is not None
            assert any(json.loads(line)["message"] == "ready" for line in server.stdout), server.communicate()
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=PATIENCE)
            assert server.returncode == 0


def _make_key(folder: str, arguments: Sequence[str]) -> None:
    command = forked(*HEADWAY, "serve", *arguments)
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert made.stdout.startswith("hw-")


def _miss_cluster(folder: str, *arguments: str) -> None:
    """A line for a Ray cluster is understood: only the cluster is missing."""
    where = [] if "--ray" in arguments else ["--ray", "HOST:6379"]
    command = forked(*HEADWAY, *arguments, *where)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "there is no Ray cluster at HOST:6379" in done.stderr
    assert done.returncode != 0


def check_pipeline(arguments: Sequence[str]) -> None:
    """A line of `headway pipeline` computes the files that it names, which have a few lines here."""
    texts = ["A cat sleeps.", "The tax rate rose."]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        (Path(folder) / "table.csv").write_text("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
        command = forked(*HEADWAY, "pipeline", *arguments)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=PATIENCE)
        output = arguments[arguments.index("--output") + 1]
        assert len(done.stdout.splitlines()) == 2 if output == "-" else (Path(folder) / output).stat().st_size > 0


def check_batch(arguments: Sequence[str]) -> None:
    """A line of `headway batch` computes the rows of the file that it names, of which there are two here."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.csv").write_text("prompt\nThe sky is\nThe sea is\n")
        (Path(folder) / "prompts.jsonl").write_text('{"prompt": "The sky is"}\n')
        if "--ray" in arguments:
            return _miss_cluster(folder, "batch", *arguments)
        command = forked(*HEADWAY, "batch", *arguments, "--json", "--threads", "1")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=PATIENCE)
        assert json.loads(done.stdout)["rows"] == 2
        assert json.loads(done.stdout)["failed"] == 0


def check_top(url: str) -> None:
    """`headway top --url` shows the server's model."""
    with _process(forked(*HEADWAY, "top", "--url", url)) as top:
        assert top.stderr is not None
        assert "smollm2" in top.stderr.readline()


def check_lm_eval(arguments: Sequence[str]) -> None:
    """The client that a line of `lm_eval` makes scores a text; the line's task would be fetched from elsewhere."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert set(given) == {"--model", "--model_args", "--tasks"}, shlex.join(arguments)
    client = get_model(given["--model"]).create_from_arg_string(given["--model_args"])
    pair = Instance("loglikelihood", {}, ("Paris is the capital of", " France"), 0)
    ((score, is_best),) = client.loglikelihood([pair])
    assert score < 0
    assert isinstance(is_best, bool)


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended at the end."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
