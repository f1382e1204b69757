"""The JavaScript client: a program gives what it gives in Python, over a WebSocket and a Unix socket, in Node.

What runs by default is the compiled client that the Lab serves, so no network is needed. `make test` installs node and
npm if it may; without them these tests fail, unless HEADWAY_NO_BROWSER=1 leaves them out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import headway as hw
from headway.server.lab.page import STATIC
from headway.testing import random_model
from support.javascript import FOLDER, V, program
from support.live import live
from support.small import small_engine

COMPILED = STATIC / "client"


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    """Fails without node and npm, which are part of the promise."""
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        if os.environ.get("HEADWAY_NO_BROWSER") == "1":
            pytest.skip(f"HEADWAY_NO_BROWSER=1, and there is no {missing[0]}")
        pytest.fail(f"there is no {missing[0]} here; apt-get install nodejs npm, or set HEADWAY_NO_BROWSER=1")


def run_node(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        ["node", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_a_program_in_node_gives_what_it_gives_in_python(tmp_path: Path) -> None:
    engine = hw.Engine(random_model(vocab_size=V), pages=128, threads=1)
    (tmp_path / "expected.json").write_text(json.dumps(engine.run(program)))
    shutil.copytree(COMPILED, tmp_path / "client")
    (tmp_path / "client" / "package.json").write_text('{"type": "module"}')  # which older versions of node must be told
    with live(engine, model="random", session_socket=tmp_path / "socket") as server:
        run_node(
            str(FOLDER / "test" / "client.test.mjs"),
            HEADWAY_URLS=f"{server.url} unix:{tmp_path / 'socket'}",
            HEADWAY_CLIENT=str(tmp_path / "client"),
            HEADWAY_EXPECTED=str(tmp_path / "expected.json"),
            HEADWAY_MODEL="random",
        )
        server.until(server.is_quiet)


VOCABULARY = """
import { connect } from "./client/index.js";
const engine = await connect(process.env.HEADWAY_URL);
const names = await engine.tokenizer.vocabulary();
console.log(JSON.stringify([names, (await engine.tokenizer.vocabulary()) === names]));
engine.close();
"""


def test_the_vocabulary_in_node_is_the_one_in_python(tmp_path: Path) -> None:
    shutil.copytree(COMPILED, tmp_path / "client")
    (tmp_path / "client" / "package.json").write_text('{"type": "module"}')
    (tmp_path / "vocabulary.mjs").write_text(VOCABULARY)
    with live(small_engine(tmp_path / "model")) as server:
        names, is_kept = json.loads(run_node(str(tmp_path / "vocabulary.mjs"), HEADWAY_URL=server.url))
        assert names == server.engine.tokenizer.vocabulary()
        assert is_kept


# --- the package


def npm(*arguments: str, folder: Path) -> str:
    done = subprocess.run(["npm", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def install_pack(package: Path, project: Path) -> Path:
    """A project that has installed what `npm pack` makes; it has no dependencies, so that needs no network."""
    (pack,) = json.loads(npm("pack", "--json", "--ignore-scripts", folder=package))
    (project / "package.json").write_text(json.dumps({"name": "project", "private": True, "type": "module"}))
    npm("install", "--offline", "--no-audit", "--no-fund", str(package / pack["filename"]), folder=project)
    return project


SNIPPETS = {  # of the client's README, and of the guide: what each prints
    FOLDER / "README.md": ('" Paris" of 3\n', "true\ntrue\n", "8 false\nstring\n"),
    FOLDER.parents[1] / "docs/remote.md": (r"(\d+) \[ \1, \d+, \d+ \]\n Paris\n(.*\n){7,}",),
}


def run_snippets(project: Path) -> None:
    """The snippets in JavaScript, as they are, in a project that has the package."""
    with live(hw.Engine("smollm2", pages=256, threads=1)) as server:
        for page, printed in SNIPPETS.items():
            snippets = page.read_text().split("```js\n")[1:]
            for number, (snippet, expected) in enumerate(zip(snippets, printed, strict=True)):
                text = snippet.split("```")[0].replace("http://127.0.0.1:8000", server.url)
                (project / f"snippet{number}.mjs").write_text(text)
                found = run_node(str(project / f"snippet{number}.mjs"))
                assert re.fullmatch(expected, found), (page.name, found)


def test_the_pack_is_installed_and_the_readme_s_snippets_run(tmp_path: Path) -> None:
    package, project = tmp_path / "package", tmp_path / "project"
    shutil.copytree(FOLDER, package, ignore=shutil.ignore_patterns("node_modules", "dist"))
    shutil.copytree(COMPILED, package / "dist")
    project.mkdir()
    run_snippets(install_pack(package, project))


# --- what its compiler is needed for, which npm fetches


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, compiled from its sources in a copy of its folder."""
    folder = tmp_path_factory.mktemp("js") / "package"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    npm("ci", "--no-audit", "--no-fund", folder=folder)
    npm("run", "build", folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_pack(built, tmp_path_factory.mktemp("project"))


@pytest.mark.slow
def test_the_lab_has_what_the_sources_compile_to(built: Path) -> None:
    fresh = {path.name: path.read_text() for path in (built / "dist").glob("*.js")}
    assert fresh == {path.name: path.read_text() for path in COMPILED.glob("*.js")}


@pytest.mark.slow
def test_the_pack_has_no_dependencies_and_the_readme_s_snippets_run(installed: Path) -> None:
    package = installed / "node_modules" / "headway-client"
    assert "dependencies" not in json.loads((package / "package.json").read_text())
    assert (package / "dist" / "index.d.ts").exists()
    run_snippets(installed)


@pytest.mark.slow
def test_types_reject_what_is_wrong(installed: Path, built: Path) -> None:
    right = """
        import { connect, Logits, Distribution, TopP, type Ranked } from "headway-client";
        const engine = await connect("http://127.0.0.1:8000");
        const fwd = engine.context().forward().input([1]);
        const [logits, top] = [fwd.probe(-1, Logits()), fwd.probe(-1, Distribution({ k: 2 }))];
        const out = await fwd.execute();
        const row: Float32Array = out.read(logits);
        const best: Ranked = out.read(top);
        const generation = engine.context().generate(TopP(0.9), { maxTokens: 3 });
        for await (const step of generation) console.log(step.text, row, best);
        export {};
    """
    wrong = ["out.read(logits).ids", "fwd.input('x')", "engine.context().generate(TopP('a'))", "out.token(logits)"]
    compiler = str(built / "node_modules" / "typescript" / "bin" / "tsc")
    options = {"strict": True, "module": "nodenext", "target": "es2022", "lib": ["es2022", "dom"], "noEmit": True}
    config = {"compilerOptions": {**options, "types": []}, "files": ["typed.mts"]}
    (installed / "tsconfig.json").write_text(json.dumps(config))

    def compiles(text: str) -> bool:
        (installed / "typed.mts").write_text(text)
        return subprocess.run(["node", compiler], cwd=installed, capture_output=True, check=False).returncode == 0

    assert compiles(right)
    for line in wrong:
        assert not compiles(right.replace("export {};", f"{line};\nexport {{}};")), line
