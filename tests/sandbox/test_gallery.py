"""Examples of the gallery run unchanged in the sandbox, and print what they print in process."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from headway.server.settings import ServerSettings
from support.examples import EVERYWHERE, FOLDER, load, words
from support.programs import run_beside

QUICK = ("hello", "reflexion")
OTHERS = sorted({*EVERYWHERE, "grammar_speculation", "verifier_rewind"}.difference(QUICK))


@pytest.mark.usefixtures("guest")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_an_example_runs_unchanged(name: str, smollm2: hw.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    smollm2.cache.clear()  # some print how many tokens were computed
    smollm2.run(load(name).program)
    expected = capsys.readouterr().out
    smollm2.cache.clear()
    source = Path(FOLDER / f"{name}.py").read_text()
    _, events = run_beside(smollm2, ServerSettings(programs="sandbox"), source)
    assert events[-1]["status"] in ("returned", "raised"), events[-1]
    if events[-1]["status"] == "raised":  # what some return is not JSON, and only that may be wrong
        assert "cannot be sent as JSON" in events[-1]["error"], events[-1]["error"]
    printed = "".join(event["text"] for event in events if event["type"] == "print")
    assert printed.splitlines()[:-1] == expected.splitlines()[:-1]
    assert last_line(name, printed) == last_line(name, expected)


def last_line(name: str, output: str) -> str | list[str]:
    """The last line; of two examples it counts steps, or tokens computed ahead, which depends on who comes when."""
    (line,) = output.splitlines()[-1:]
    return words([line]) if name in ("self_consistency", "skeleton_of_thought") else line
