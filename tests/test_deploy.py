"""The systemd unit and the container file: what they name exists, and they give away nothing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headway.cli.main import build_app
from headway.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy" / "headway.service"
IMAGE = ROOT / "deploy" / "Containerfile"
GUIDE = (ROOT / "docs" / "serving.md").read_text()
ANALYZE = shutil.which("systemd-analyze")


def unit(key: str) -> list[str]:
    """The values of a key of the unit."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def instructions(name: str) -> list[str]:
    """What stands after an instruction of the container file, its lines joined."""
    text = re.sub(r"\\\n\s*", "", IMAGE.read_text())
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def check_options(arguments: list[str]) -> dict[str, str]:
    """Options of `headway serve`, all of which it knows; the values of those that have one."""
    command = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", list(arguments))
    assert not context.args
    return {name: str(value) for name, value in context.params.items() if value is not None}


def test_the_unit_serves_with_options_that_exist() -> None:
    (start,) = unit("ExecStart")
    program, verb, *arguments = shlex.split(start)
    given = check_options(arguments)
    assert verb == "serve"
    assert f"{Path(program).parent}/pip install" in GUIDE
    (loaded,) = unit("LoadCredential")
    name, source = loaded.split(":")
    assert given["keys"] == f"%d/{name}"
    assert f"{program} serve --keys {source} --new-key" in GUIDE
    (stop,) = unit("TimeoutStopSec")
    assert int(stop) > ServerSettings().drain_timeout


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd here")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    """Nothing unknown in it, and an exposure of at most 2 of 10."""
    assert ANALYZE is not None
    copy, here = tmp_path / UNIT.name, Path(sys.executable).with_name("headway")
    copy.write_text(UNIT.read_text().replace("/opt/headway/bin/headway", str(here)))
    for check in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=20"]):
        done = subprocess.run([ANALYZE, *check, copy], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr
        assert UNIT.name not in done.stderr, done.stderr


def test_the_unit_gives_away_nothing() -> None:
    assert unit("DynamicUser") == ["yes"]
    assert unit("ProtectSystem") == ["strict"]
    assert unit("NoNewPrivileges") == ["yes"]
    assert unit("CapabilityBoundingSet") == [""]
    (cache,) = unit("CacheDirectory")
    assert f"HEADWAY_CACHE=%C/{cache} " in unit("Environment")[0]


def test_the_image_is_made_of_files_that_are_there() -> None:
    copied = [words.split()[:-1] for words in instructions("COPY") if not words.startswith("--from")]
    assert copied
    assert [path for paths in copied for path in paths if not (ROOT / path).exists()] == []
    (install,) = [line for line in instructions("RUN") if "pip install" in line]
    assert "-c constraints.txt" in install
    needed = {"pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE", "src"}
    assert needed == {path for paths in copied for path in paths}


def test_the_image_serves_with_options_that_exist() -> None:
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    assert json.loads(entry) == ["headway", "serve"]
    given = check_options(json.loads(command))
    volumes = json.loads(instructions("VOLUME")[0])
    assert str(Path(given["keys"]).parent) in volumes
    assert f"HEADWAY_CACHE={volumes[1]} " in instructions("ENV")[0]
    assert instructions("EXPOSE") == [given["port"]]
    for volume in volumes:
        assert f":{volume}" in GUIDE
    assert f":{given['port']} headway" in GUIDE


def test_the_image_runs_without_root() -> None:
    assert re.fullmatch(r"[1-9]\d*", instructions("USER")[-1])
    text = IMAGE.read_text()
    assert text.index("USER ") > text.rindex("RUN ")
    assert f"--uid {instructions('USER')[-1]} " in text
    assert "--read-only" in GUIDE


def test_the_image_asks_for_its_own_health() -> None:
    (check,) = instructions("HEALTHCHECK")
    (port,) = instructions("EXPOSE")
    program = json.loads(check.split("CMD ", 1)[1])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "health", "exec")
    assert f"http://127.0.0.1:{port}/health" in program[2]
