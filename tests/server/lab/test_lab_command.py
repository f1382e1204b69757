"""`headway lab` starts the page and shows it; the page's files are in what is installed; the guide's call works."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from headway.server.lab.page import STATIC
from support.forked import forked
from support.live import Live

ROOT = Path(__file__).parents[3]
LAB = ("-m", "headway.cli.main", "lab")
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def test_it_serves_the_page_and_opens_a_browser(smollm2_path: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/bash\necho "$1" >{tmp_path}/shown\n')
    browser.chmod(0o755)
    environment = os.environ | QUIET | {"BROWSER": str(browser)}
    with subprocess.Popen(
        forked(*LAB, "--threads", "1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/lab/", address)
        result: dict[str, object] = {}
        end = time.monotonic() + 120
        while "vocab_size" not in result and time.monotonic() < end:
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(address + "api/model") as response:
                    result = json.load(response)
            except OSError:
                continue  # it listens before it answers
        assert result["name"] == "smollm2"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "shown").read_text().strip() == address


@pytest.mark.parametrize(("arguments", "words"), [(["--port", "99999"], "65535"), (["--colour"], "--help")])
def test_mistakes_are_one_sentence(arguments: list[str], words: str) -> None:
    done = subprocess.run(forked(*LAB, *arguments), capture_output=True, text=True, check=False, env=os.environ | QUIET)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_the_pages_files_are_in_what_is_built(builder: type[WheelBuilder] | type[SdistBuilder]) -> None:
    packed = {Path(file.distribution_path).name for file in builder(str(ROOT)).recurse_included_files()}
    assert {path.name for path in STATIC.rglob("*") if path.is_file()} <= packed


def test_the_call_of_the_guide_works(lab_server: Live) -> None:
    page = (ROOT / "docs" / "lab.md").read_text()
    (call,) = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command, url, flag, body = shlex.split(call)
    assert (command, flag) == ("curl", "-d")
    requested = json.loads(body)
    response = lab_server.ask("POST", url.removeprefix("http://127.0.0.1:8000"), body.encode())
    assert response.status == 200, response.body
    assert {"logits", *requested} - {"prompt"} <= set(response.json)
    fields = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    schema = lab_server.get("/openapi.json").json["components"]["schemas"]["TraceRequest"]["properties"]
    assert fields == set(schema) - {"model", "priority"}
