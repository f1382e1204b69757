"""`headway program`: beside a model here, and on a server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from headway.cli.main import dispatch
from headway.sandbox import artifact
from support.live import Live
from support.programs import ProgramServer
from support.small import small_folder

PROGRAM = """
import headway as hw

async def main(engine, n: int, who="nobody"):
    print("hello", who)
    async with engine.context() as ctx:
        tokens = await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=n, stop_only=True).tokens()
    engine.session.send(len(tokens))
    return await engine.session.receive()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a person\n"))


def code(*arguments: str) -> int:
    """The exit code of a command line, however it ends."""
    try:
        return dispatch(["program", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.usefixtures("guest")
def test_a_program_runs_beside_a_model_here(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(small_folder(tmp_path / "model"))
    capsys.readouterr()
    assert code("run", file, "--model", model, "--arg", "n=3", "--arg", "who=a person") == 0
    assert capsys.readouterr().out.splitlines() == ["hello a person", "3", '"from a person"']
    assert code("run", file, "--model", model, "--arg", "n=many", "--json") == 1
    *_, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert end["status"] == "raised"
    assert "max_tokens is 'many'" in end["error"]


def test_without_the_guest_a_program_run_says_how_to_get_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(artifact, "BUILT", tmp_path / "program.wasm")
    model = str(small_folder(tmp_path / "model"))
    capsys.readouterr()
    assert code("run", file, "--model", model) == 2
    told = capsys.readouterr().err
    assert "make programs" in told
    assert "wheel" in told
    assert "Traceback" not in told


def test_a_program_that_runs_is_listed_and_killed(
    tmp_path: Path,
    served: Live,
    keys: tuple[Path, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", keys[1])
    url, ann = ("--url", served.url), ProgramServer(served, keys[1])
    (tmp_path / "waits.py").write_text(
        "async def main(engine):\n    print('waits')\n    await engine.session.receive()"
    )
    assert code("install", "waits", str(tmp_path / "waits.py"), *url) == 0
    id = ann.ask("POST", "/v1/programs", name="waits").json["id"]
    served.until(lambda: b"waits" in ann.ask("GET", f"/v1/programs/{id}/logs").body)
    capsys.readouterr()
    assert code("list", *url) == 0
    listed = capsys.readouterr().out
    assert id in listed
    assert "running" in listed
    monkeypatch.setenv("HEADWAY_API_KEY", keys[2])
    assert code("kill", id, *url) == 2  # another key's
    assert "no program with this id" in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_API_KEY", keys[1])
    assert code("kill", id, *url) == 0
    assert ann.ask("GET", f"/v1/programs/{id}").json["error"] == "it was killed"
    assert code("remove", "waits", *url) == 0


def test_a_program_runs_on_a_server(
    file: str,
    served: Live,
    keys: tuple[Path, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", keys[1])
    url = ("--url", served.url)
    assert code("run", file, *url, "--arg", "n=2") == 0
    assert capsys.readouterr().out.splitlines() == ["hello nobody", "2", '"from a person"']
    assert code("install", "greets", file, *url) == 0
    assert code("list", *url, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["installed"]] == ["greets"]
    last = listed["programs"][-1]
    assert (last["status"], last["value"], listed["confinement"]) == ("returned", "from a person", "WebAssembly")
    assert code("logs", last["id"], *url) == 0
    assert capsys.readouterr().out == "hello nobody\n"
    assert code("run", "greets", *url) == 1  # n is missing
    assert "missing 1 required positional argument: 'n'" in capsys.readouterr().err
    assert code("kill", last["id"], *url) == 0  # it has ended: nothing happens
    assert code("remove", "greets", *url) == 0
    capsys.readouterr()
    for wrong, told in (
        (("run", "greets", *url), "no installed program"),
        (("run", f"{file}.none.py", *url), "cannot read the program"),
        (("run", file, *url, "--arg", "n"), "must be K=V"),
        (("kill", "nothing", *url), "no program with this id"),
        (("list", "--url", "http://127.0.0.1:1"), "no server answers"),
        (("list", "--url", "ftp://x"), "must be an address"),
    ):
        assert code(*wrong) == 2, wrong
        assert told in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_API_KEY", "wrong")
    assert code("list", *url) == 2
    assert "401" in capsys.readouterr().err
