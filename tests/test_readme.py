"""What the pages say is true: their snippets print what they show, their commands run, their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from support.forked import forked
from support.live import Live, live
from support.pages import check_batch, check_lm_eval, check_pipeline, check_serve, check_top

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
# A make above this test must not hand its own variables to the makes that are tested.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS")}
CLIENTS = ("anthropic", "ollama")
SERVED = "http://127.0.0.1:8000"  # in the pages; a server of the tests stands in for it
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# Runs a page's snippets in one namespace, as a reader would type them; prints what each of them printed, as JSON.
# It has one core, and so one thread: beside other workers the threads of a step wait for each other most of the time.
RUNNER = """
import contextlib, io, json, os, random, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})
names, printed = {"__name__": "__main__"}, []
for line, code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\\n" * line + code, sys.argv[1], "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


@dataclass(frozen=True)
class Fence:
    """A code block: its language, its text, and how many lines of the page stand before it."""

    language: str
    text: str
    line: int


def fences(page: Path) -> list[Fence]:
    text = page.read_text()
    return [
        Fence(m[2], textwrap.dedent(m[3]), text.count("\n", 0, m.start(3)))  # the block's first line
        for m in FENCE.finditer(text)
    ]


def with_output(page: Path) -> list[tuple[Fence, str | None]]:
    """The page's python blocks, each with the `text` block that follows it, if one does."""
    blocks = [*fences(page), Fence("", "", 0)]
    return [
        (block, after.text if after.language == "text" else None)
        for block, after in pairwise(blocks)
        if block.language == "python"
    ]


def commands(page: Path) -> list[str]:
    """Every shell command on the page, without comments."""
    lines = [line for block in fences(page) if block.language == "sh" for line in block.text.splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[Live]:
    """What `headway serve` serves, on a free port."""
    import headway as hw
    from headway.server.pooling import PoolingModels

    with live(hw.Engine("smollm2", pages=1024, threads=1), PoolingModels({"embed": "minilm"}, device="cpu")) as server:
        yield server


@pytest.fixture(scope="module")
def running_programs(smollm2_path: Path, guest: Path) -> Iterator[Live]:
    """What `headway serve --allow-programs` serves."""
    import headway as hw

    with live(hw.Engine("smollm2", pages=256, threads=1), programs="sandbox") as server:
        yield server


def at_server(text: str, request: pytest.FixtureRequest, server: str = "served") -> str:
    """Text with the address of a server that is there, if it has one at all."""
    return text.replace(SERVED, request.getfixturevalue(server).url) if SERVED in text else text


@pytest.mark.parametrize("page", [p for p in PAGES if with_output(p)], ids=name)
def test_snippets_print_what_the_page_shows(page: Path, smollm2_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = [(block, shown) for block, shown in with_output(page) if not _needs_client(block)]
    done = subprocess.run(
        forked("-c", RUNNER, str(page)),
        input=json.dumps([(block.line, at_server(block.text, request)) for block, _ in blocks]),
        text=True,
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (block, shown), printed in zip(blocks, json.loads(done.stdout), strict=True):
        if shown is not None:
            assert_alike(printed, shown, f"{name(page)}, line {block.line}")


def _needs_client(block: Fence) -> bool:
    """Whether a snippet is about a client that is not installed here; continuous integration has them all."""
    return any(f"import {client}\n" in block.text and find_spec(client) is None for client in CLIENTS)


MEASURED = re.compile(r"\d+\.\d+|\d+(?=%)")


def assert_alike(printed: str, shown: str, where: str) -> None:
    """The same words; fractions may differ by a tenth and percentages by two more: rounding of another kernel."""
    assert MEASURED.sub("#", printed) == MEASURED.sub("#", shown), where
    pairs = zip(MEASURED.findall(printed), MEASURED.findall(shown), strict=True)
    far = [(a, b) for a, b in pairs if abs(float(a) - float(b)) > 0.02 + 0.1 * abs(float(b)) + 2 * ("." not in b)]
    assert far == [], where


@pytest.mark.parametrize(
    ("page", "command"), [pytest.param(p, c, id=f"{name(p)}: {c}") for p in PAGES for c in dict.fromkeys(commands(p))]
)
def test_commands_run(page: Path, command: str, smollm2_path: Path, request: pytest.FixtureRequest) -> None:
    if command.startswith("headway program"):
        request.getfixturevalue("guest")
    server = "running_programs" if page.name == "programs.md" else "served"
    match shlex.split(at_server(command, request, server)):
        case ["make", *arguments]:
            _run("make", "-n", *arguments)
        case ["headway", "serve", *arguments]:
            check_serve(*arguments)
        case ["headway", "lab", *arguments]:
            _run(*forked("-m", "headway.cli.main", "lab", *arguments, "--help"))
        case ["headway", "pipeline", *arguments]:
            check_pipeline(arguments)
        case ["headway", "batch", *arguments]:
            check_batch(arguments)
        case ["headway", "top", "--url", url]:
            check_top(url)
        case ["curl", *arguments]:
            _run("curl", "-sS", "--fail-with-body", *arguments)
        case ["lm_eval", *arguments]:
            check_lm_eval(arguments)
        case ["sudo" | "docker", *arguments]:
            assert [path for path in arguments if path.startswith("deploy/") and not (ROOT / path).is_file()] == []
        case ["headway", *arguments]:
            _run(*forked("-m", "headway.cli.main", *arguments))
        case ["pip" | ".venv/bin/pip", "install", *arguments]:
            _check_install(arguments)
        case [".venv/bin/pre-commit", "install"]:
            assert (ROOT / ".pre-commit-config.yaml").is_file()
        case ["python", script] if script.startswith("examples/"):
            assert (ROOT / script).is_file()
        case _:
            pytest.fail(f"{name(page)} has a command that nothing here checks: {command}")


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _check_install(arguments: list[str]) -> None:
    """The files and extras that a pip line names are there."""
    assert arguments[0] == "-c"
    assert (ROOT / arguments[1]).is_file()
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[-1])
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set((extras[1] or "").split(",")) - {""} <= set(known)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    local = [link for link in LINK.findall(prose) if not re.match(r"https?:|#", link)]
    assert [link for link in local if not (page.parent / link.split("#")[0]).exists()] == []


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_the_readme_is_short_and_starts_with_two_commands() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert commands(README)[:2] == ["make run", "make test"]
    assert len(with_output(README)[0][0].text.splitlines()) == 12


def test_the_readme_shows_the_files_that_are_there() -> None:
    tree = next(block.text for block in fences(README) if "src/headway/base/" in block.text)
    shown = [line.split()[0] for line in tree.splitlines()]
    assert [path for path in shown if not (ROOT / path).exists()] == []
    packages = {f"src/headway/{p.parent.name}/" for p in (ROOT / "src/headway").glob("*/__init__.py")}
    assert packages <= set(shown)


def test_the_first_example_is_the_program_of_the_readme(smollm2_path: Path) -> None:
    shown = with_output(README)[0][1]
    assert shown is not None
    assert_alike(_run(*forked("examples/hello.py")), shown, "README.md")


def test_the_guide_shows_a_family_as_it_is() -> None:
    shown = [block.text for block, _ in with_output(ROOT / "docs/add-a-family.md")]
    assert (ROOT / "src/headway/models/families/starcoder2.py").read_text() in shown


# -- make --------------------------------------------------------------------------------------------------------------


EDITABLE = "install|--no-compile|--no-build-isolation|-c|constraints.txt|-e"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


@dataclass(frozen=True)
class Made:
    """make with a Python that only notes what it is asked to do."""

    folder: Path

    def __call__(self, *arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
        stubs = [f"VENV={self.folder}", f"PYTHON={self._script('system', python)}", f"PY={self._script('venv')}"]
        command = ["make", *stubs, "HEADWAY_NO_BROWSER=1", *arguments]
        return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False)

    @property
    def asked(self) -> list[str]:
        log = self.folder / "asked"
        return log.read_text().splitlines() if log.exists() else []

    def _script(self, kind: str, body: str = "") -> Path:
        path = self.folder / kind
        # In one write: the library is built in the background, and asks at the same time.
        path.write_text(
            f'#!/bin/bash\n{body}\nline=$(printf "%s|" "$@")\nprintf "%s\\n" "$line" >>{self.folder}/asked\n'
        )
        path.chmod(0o755)
        return path


def test_make_run_installs_once_and_passes_the_prompt_as_it_is(made: Made) -> None:
    prompt = """What's "$HOME" `and` $(shell echo) -- 5 < 6; ?"""
    assert made("run", f"PROMPT={prompt}").returncode == 0
    needed, own = [line for line in made.asked if "|install|" in line]
    assert needed.startswith("-m|pip|--disable-pip-version-check|install|--no-compile|-c|constraints.txt|-r|")
    assert own == f"-m|pip|--disable-pip-version-check|{EDITABLE}|.|"
    assert made.asked[-1] == f"-m|headway.cli.main|run|--|{prompt}|"
    before = len(made.asked)
    assert made("run").returncode == 0
    assert len(made.asked) == before + 1  # the answer, and no installation


def test_make_test_installs_the_test_extra_and_runs_the_suite(made: Made) -> None:
    assert made("test").returncode == 0
    assert any(line.endswith(f"|{EDITABLE}|.[test]|") for line in made.asked)
    assert made.asked[-1].startswith("-m|pytest|-n|")


def test_make_test_all_builds_llama_cpp_for_the_tests_that_need_it(made: Made) -> None:
    assert made("llama").returncode == 0
    venv, install = (line for line in made.asked if "llama" in line)
    assert venv == f"-m|venv|--without-pip|{made.folder}/llama|"
    assert f"--python|{made.folder}/llama/bin/python|install|--quiet|numpy|llama-cpp-python==" in install
    before = len(made.asked)
    assert made("llama").returncode == 0
    assert len(made.asked) == before  # once
    for left_out, wanted in (("0", f"{made.folder}/llama/bin/python"), ("1", "")):
        shown = made(f"HEADWAY_NO_LLAMA={left_out}", "-n", "test-all").stdout
        assert f"HEADWAY_TEST_LLAMA_PYTHON='{wanted}'" in shown


def test_a_python_that_cannot_make_environments_is_named(made: Made, tmp_path: Path) -> None:
    (tmp_path / "venv-broken").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "venv-broken").chmod(0o755)
    done = made("run", f"PY={tmp_path}/venv-broken", python='[[ "$2" != *ensurepip* ]] || exit 1')
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr
    old = made("run", f"PY={tmp_path}/venv-broken", python='[[ "$2" != *version_info* ]] || exit 1')
    assert old.returncode != 0
    assert "needs Python 3.11 or later" in old.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_ci_makes_the_tests_and_fails_with_them(status: int, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/bash\necho "$@"\nexit {status}\n')
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / ".ci/run"], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == ("test\n", status)
