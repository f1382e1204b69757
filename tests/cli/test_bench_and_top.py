"""`headway bench overhead` measures what it says; `headway top` runs a script as Python would and shows its engines."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from headway.base.errors import InvalidInput
from headway.bench.overhead import STEPS, GapTimer, Overhead
from headway.cli import top
from headway.program.engine import engines
from headway.runtime.batch import pack
from headway.testing import ScriptedRunner, scripted_engine

Run = Callable[..., CompletedProcess[str]]

SCRIPT = """
import asyncio, sys, time
import headway as hw
from headway.testing import scripted_engine

async def program(engine):
    end = time.monotonic() + 2.5
    async with engine.context() as ctx:
        await ctx.fill(range(40)).flush()
        while time.monotonic() < end:
            await asyncio.gather(*(ctx.fork().generate(hw.Argmax(), max_tokens=8).tokens() for _ in range(3)))

print("arguments:", sys.argv[1:])
with scripted_engine(pages=64) as engine:
    engine.run(program)
print("finished")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_overhead_prints_a_line_for_every_number_of_rows(headway: Run) -> None:
    done = headway("bench", "overhead", "--rows", "1,3")
    assert done.returncode == 0, done.stderr
    title, headers, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert "120 steps" in title[0]
    assert headers == ["rows", "median µs", "p95 µs", "µs per row", "allowed µs", "within"]
    assert [(row[0], row[4]) for row in rows] == [("1", "120"), ("3", "140")]
    assert [row[5] == "yes" for row in rows] == [float(row[1]) <= float(row[4]) for row in rows]
    assert done.stderr.splitlines() == ["1 rows, 1 of 2", "3 rows, 2 of 2"]


def test_overhead_as_json_says_on_which_machine(headway: Run) -> None:
    found = json.loads(headway("bench", "overhead", "--rows", "2", "--json").stdout)
    (result,) = found["results"]
    assert found["machine"]["cpu"]
    assert (result["rows"], result["steps"], result["allowance_us"]) == (2, STEPS, 130)
    assert result["us_per_row"] == pytest.approx(result["median_us"] / 2, abs=0.1)
    assert 0 < result["median_us"] <= result["p95_us"]


@pytest.mark.parametrize(
    ("rows", "why"), [("0", "--rows has '0'"), ("1,900", "--rows has '900'"), ("8,", "--rows has ''")]
)
def test_bad_numbers_of_rows_are_refused(headway: Run, rows: str, why: str) -> None:
    done = headway("bench", "overhead", "--rows", rows)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_the_allowance_is_a_part_for_the_step_and_one_for_each_row() -> None:
    assert Overhead(64, 100, median=750.0, p95=9000.0).within
    assert not Overhead(64, 100, median=751.0, p95=9000.0).within


def test_the_stop_watch_counts_what_lies_between_steps_and_not_the_edits() -> None:
    took = []

    class Slow(ScriptedRunner):
        def execute(self, batch):  # type: ignore[no-untyped-def]
            return []

        def edit(self, edits):  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            time.sleep(0.05)
            took.append(time.perf_counter() - began)

    step = pack([])
    watch = GapTimer(Slow(97, 16), 0, 0.0, lambda step: None)
    began = time.perf_counter()
    watch.begin(step).result()
    time.sleep(0.02)
    watch.edit(())
    watch.begin(step).result()
    (gap,) = watch.gaps
    assert 0.02 <= gap <= time.perf_counter() - began - took[0]  # however long the machine takes for each


# -- top ---------------------------------------------------------------------------------------------------------------


def test_in_a_pipe_top_writes_lines_beside_what_the_script_prints(headway: Run, script: Path) -> None:
    done = headway("top", str(script), "--json", "-h", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments: ['--json', '-h', 'x']\nfinished\n"
    *lines, last = done.stderr.splitlines()
    assert 1 <= len(lines) <= 6
    assert re.search(r"^1  llama in memory · float32 · cpu · queue \d+ · batch [1-4] ", lines[-1])
    assert re.search(r" [1-9]\d* tokens/s · .* held · .* free of 64 pages · ", lines[-1])
    assert re.search(r"last [\d.]+ ms, median [\d.]+ ms$", lines[-1])
    assert "closed" in last
    assert " 0 held " in last


def test_on_a_terminal_top_stays_below_the_scripts_output(on_terminal: Callable, script: Path) -> None:
    code, shown = on_terminal("top", str(script))
    assert code == 0
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert "arguments: []" in plain
    assert plain.rindex("finished") < plain.rindex("held")
    assert re.search(r"[█▒·]{48}  \d+ held · \d+ cached · \d+ free of 64 pages", plain)
    assert "llama in memory · float32 · cpu · closed" in plain


TABLES = """
import os, subprocess, sys, time
from rich.console import Console
from rich.table import Table
from headway.testing import scripted_engine

with scripted_engine(pages=8):
    table = Table("row")
    for row in range(12):
        table.add_row(f"cell {row}")
    Console().print(table)
    time.sleep(0.4)  # the view is drawn again meanwhile
    print("several\\nlines\\nat once")
    sys.stdout.write("begun, ")
    sys.stdout.flush()
    time.sleep(0.3)
    print("ended")
    subprocess.run(["echo", "from a child"], check=True)
    os.write(1, b"past the buffer\\n")
    print("an error", file=sys.stderr)
    time.sleep(0.3)
"""


def screen(shown: str) -> list[str]:
    """The lines that a terminal shows at the end: cursor movements and erased lines are carried out."""
    lines, row, column = [""], 0, 0
    for text, moves, command in re.findall(r"([^\x1b\r\n]+|\r|\n)|\x1b\[([\d;?]*)([A-Za-z])", shown):
        if command == "A":
            row = max(0, row - int(moves or 1))
        elif command == "K":
            lines[row] = ""
        elif command == "J":
            lines[row + 1 :], lines[row] = [], lines[row][:column]
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def test_nothing_that_a_script_prints_is_erased(on_terminal: Callable, tmp_path: Path) -> None:
    script = tmp_path / "tables.py"
    script.write_text(TABLES.replace("\\\\n", "\\n"))
    code, shown = on_terminal("top", str(script))
    assert code == 0
    lines = screen(shown)
    cells = [line for line in lines if "cell" in line]
    assert [int(re.findall(r"cell (\d+)", line)[0]) for line in cells] == list(range(12))
    at = lines.index("several")
    rest = ["several", "lines", "at once", "begun, ended", "from a child", "past the buffer", "an error"]
    assert lines[at : at + 7] == rest
    assert any("held" in line for line in lines[at + 7 :])  # the view is below


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no more')", 1, "no more\n"),
        ("import headway as hw; hw.Engine(object, dtype='auto', page_size=0)", 1, "page_size is 0"),
        ("1 /", 1, "SyntaxError"),
    ],
)
def test_a_script_ends_as_it_would_by_itself(headway: Run, tmp_path: Path, line: str, code: int, says: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{line}\n")
    done = headway("top", str(script))
    assert done.returncode == code
    assert says in done.stderr
    assert "runpy" not in done.stderr


def test_a_script_that_is_not_there_is_named(headway: Run) -> None:
    done = headway("top", "nothing.py")
    assert done.returncode == 2
    assert done.stderr.startswith("headway: there is no script 'nothing.py'")
    with pytest.raises(InvalidInput, match="address needs --url"):
        top.top(Path("http://127.0.0.1:8000"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either a Python file that creates an engine, or --url"),
        (("--url", "127.0.0.1:8000"), "it must be an address like http://127.0.0.1:8000"),
        (("--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
    ],
)
def test_nothing_to_watch_is_one_sentence(headway: Run, arguments: tuple[str, ...], says: str) -> None:
    done = headway("top", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_watched_engine_is_not_kept_alive() -> None:
    gc.collect()
    before = len(engines())
    view = top.TopView()
    engine = scripted_engine(pages=8)
    view.refresh()
    watch = next(w for w in view.watches if isinstance(w, top.EngineWatch) and w.engine() is engine)
    del engine
    gc.collect()
    view.refresh()
    assert watch.over
    assert len(engines()) == before
    assert "closed" in watch.line()
