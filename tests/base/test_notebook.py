"""Bars in notebooks, and silence everywhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headway as hw
from headway.base.system import notebook
from headway.base.system.notebook import NotebookBar, in_notebook, working_in_notebook
from support.hf import random_hf, save_hf

LAYERS = 3


def saved(folder: Path) -> Path:
    return save_hf(folder, random_hf("llama", 0, num_hidden_layers=LAYERS)[1])


class Cell:
    """The output below a notebook's cell, by the calls that IPython's display gets."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.updates = 0

    def display(self, shown: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.outputs.append(shown)
        at = len(self.outputs) - 1

        def update(newer: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[at] = newer
            self.updates += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """This process as a kernel, with no waiting before a bar."""
    cell, ipython, display = Cell(), ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(notebook, "UPDATE_SECONDS", 0.0)
    return cell


def test_an_engine_shows_the_layers_it_loads(cell: Cell, tmp_path: Path) -> None:
    path = saved(tmp_path)
    hw.Engine(path, pages=8).close()
    (bar,) = cell.outputs
    assert bar["text/plain"] == f"loading the layers of {path}: {LAYERS}"
    assert f'<progress value="{LAYERS}" max="{LAYERS}">' in bar["text/html"]
    assert cell.updates == LAYERS - 1


def test_own_progress_replaces_the_bar(cell: Cell, tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    hw.Engine(saved(tmp_path), pages=8, progress=lambda done, total: seen.append((done, total))).close()
    assert seen == [(i + 1, LAYERS) for i in range(LAYERS)]
    assert not cell.outputs


def test_a_bar_escapes_its_label_and_has_one_line_for_each(cell: Cell) -> None:
    bar = NotebookBar()
    bar(1, None, "<b>")
    bar(2, 4, "<b>")
    bar(1, 4, "next")
    assert [shown["text/plain"] for shown in cell.outputs] == ["<b>: 2 of 4", "next: 1 of 4"]
    assert "&lt;b&gt;" in cell.outputs[0]["text/html"]


def test_quick_work_shows_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "QUICK_SECONDS", 60.0)
    with working_in_notebook("loading"):
        pass
    NotebookBar()(4, 4, "loading")
    assert not cell.outputs


def test_work_without_an_end_shows_how_long_it_took(cell: Cell) -> None:
    with working_in_notebook("loading"):
        pass
    (bar,) = cell.outputs
    assert bar["text/plain"].startswith("loading: 0.")
    assert " max=" in bar["text/html"]


def test_a_failure_is_raised_and_its_bar_stays_open(cell: Cell) -> None:
    with pytest.raises(ZeroDivisionError), working_in_notebook("loading"):
        _ = 1 / 0
    (bar,) = cell.outputs
    assert " max=" not in bar["text/html"]


def test_outside_of_a_notebook_nothing_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not in_notebook()
    path = saved(tmp_path)
    capfd.readouterr()
    hw.Engine(path, pages=8).close()
    with working_in_notebook("loading"):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_real_notebook_has_the_bar(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = saved(tmp_path)
    code = (
        "import headway as hw, headway.base.system.notebook as n\n"
        "n.QUICK_SECONDS = n.UPDATE_SECONDS = 0.0\n"
        f"hw.Engine({str(path)!r}, pages=8).close()"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (output,) = book.cells[0].outputs
    assert output.data["text/plain"] == f"loading the layers of {path}: {LAYERS}"
