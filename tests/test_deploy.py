"""The systemd unit and the container file: what they name exists, and they give away nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headway.cli.main import build_app
from headway.program.engine import EngineStats
from headway.server.metrics import Metrics
from headway.server.models import ServedModels
from headway.server.settings import ServerSettings
from support.small import PROMPT, small_folder

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
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


def test_every_metric_of_the_dashboard_exists() -> None:
    """By name, and by the labels that its queries use; and all that the guide lists are on it, or named here."""
    board = json.loads((DEPLOY / "grafana" / "headway.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in board["templating"]["list"]]
    shown = set(re.findall(r"\b((?:headway|process)_[a-z_]+)", " ".join(queries)))
    figures = EngineStats(**{each.name: 1 for each in fields(EngineStats)})
    model = SimpleNamespace(name="m", state="ready", bytes=1, stats=lambda: figures)
    models = SimpleNamespace(default=model, all=lambda: [model], budget=1, loads=1, unloads=1, failed_loads=1)
    metrics = Metrics("headway", cast(ServedModels, models))
    metrics.of("m").finished("stop")
    metrics.rejected("queue_full")
    metrics.responded("GET", "/", 200)
    families = list(text_string_to_metric_families(metrics.text().decode()))
    samples = {sample.name: sample.labels for family in families for sample in family.samples}
    assert shown <= set(samples)
    listed = {re.sub("_bucket$", "", name) for name in shown}
    documented = set(re.findall(r"^\| `(headway_\w+)`", GUIDE, re.MULTILINE))
    assert documented - listed == {"headway_pages_total", "headway_adapters", "headway_cache_hit_pages_total"}
    for query in queries:
        (label,) = re.findall(r"by \((?!le)(\w+)\)", query) or [None]
        assert label is None or all(label in samples[name] for name in re.findall(r"headway_\w+", query))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_compose_starts_the_image_with_what_prometheus_and_grafana_need() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server, prometheus, grafana = (compose["services"][name] for name in ("headway", "prometheus", "grafana"))
    given = check_options(server["command"])
    assert server["command"] == json.loads(instructions("CMD")[0])
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).samefile(IMAGE)
    inside = [volume.split(":")[1] for volume in server["volumes"]]
    assert inside == json.loads(instructions("VOLUME")[0])
    for service in (server, prometheus, grafana):
        named = [volume.split(":")[0] for volume in service["volumes"]]
        assert [name for name in named if name not in compose["volumes"] and not (DEPLOY / name).is_file()] == []
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))

    (scraped,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"headway:{given['port']}"]}]
    (secret,) = prometheus["secrets"]
    assert scraped["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    key = compose["secrets"][secret]["file"]
    assert f"--new-key prometheus > {key}" in (DEPLOY / "compose.yaml").read_text()
    assert "--new-key prometheus" in GUIDE
    assert f"`deploy/{key}`" in GUIDE
    assert key in (ROOT / ".gitignore").read_text().split()

    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    board = json.loads((DEPLOY / "grafana" / "headway.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "provider.yml").read_text())["providers"]
    assert f"headway.json:{provider['options']['path']}/headway.json:ro" in " ".join(grafana["volumes"])
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(provider["options"]["path"])


def test_the_image_asks_for_its_own_health() -> None:
    (check,) = instructions("HEALTHCHECK")
    (port,) = instructions("EXPOSE")
    program = json.loads(check.split("CMD ", 1)[1])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "health", "exec")
    assert f"http://127.0.0.1:{port}/health" in program[2]


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_image_is_made_without_what_this_machine_compiled() -> None:
    copied = [path for words in instructions("COPY") if not words.startswith("--from") for path in words.split()[:-1]]
    assert {"**/*.so", "**/__pycache__", ".git", "deploy/metrics.key"} <= set(ignored())
    assert not set(copied) & set(ignored())


def test_the_files_that_are_copied_are_all_that_a_wheel_needs(tmp_path: Path) -> None:
    """What the image's `pip install .` does first, without a compiler, from what the image has."""
    for words in instructions("COPY"):
        for path in () if words.startswith("--from") else words.split()[:-1]:
            if (ROOT / path).is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
                shutil.copytree(ROOT / path, tmp_path / "source" / path, ignore=skip)
            else:
                (tmp_path / "source").mkdir(exist_ok=True)
                shutil.copy(ROOT / path, tmp_path / "source" / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    done = subprocess.run(
        command,
        cwd=tmp_path / "source",
        env=os.environ | {"HEADWAY_NATIVE_BUILD": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    (wheel,) = tmp_path.glob("headway-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"headway/cli/main.py", "headway/server/lab/static/index.html"} <= set(names)


# -- with a builder ----------------------------------------------------------------------------------------------------


def builder() -> tuple[str | None, str]:
    """A program that builds and runs images here; or why there is none."""
    reasons = []
    for name in ("docker", "podman"):
        if (found := shutil.which(name)) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            done = subprocess.run([found, "info"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if done.returncode == 0:
            return found, ""
        reasons.append(f"{name}: {(done.stderr.strip().splitlines() or ['it does not work'])[-1]}")
    return None, "; ".join(reasons)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_serves_as_the_guide_says(tmp_path: Path) -> None:
    """Built from the repository; run without root, capabilities and a writable file system, with a small model."""
    program, reason = builder()
    if program is None:
        pytest.skip(f"no image can be built here: {reason}")
    tag, volume = "headway-test", f"headway-test-{os.getpid()}"

    def run(*arguments: str, timeout: float = 300.0) -> str:
        command = [program, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout.strip()

    options = os.environ.get("PIP_OPTIONS", "")
    formats = ["--format", "docker"] if Path(program).name == "podman" else []
    built = ["-f", "deploy/Containerfile", "--build-arg", f"PIP_OPTIONS={options}", "-t", tag, "."]
    run("build", *formats, *built, timeout=3000)
    model = small_folder(tmp_path / "model")
    for path in (tmp_path, model, *model.iterdir()):
        path.chmod(0o755)
    safe = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    keys = "/etc/headway/keys.json"
    try:
        made = run("run", "--rm", "-v", f"{volume}:/etc/headway", tag, "--keys", keys, "--new-key", "ada")
        key = made.splitlines()[0]
        mounts = ["-v", f"{volume}:/etc/headway:ro", "-v", f"{model}:/model:ro", "-p", "127.0.0.1::8000"]
        serve = ["--host", "0.0.0.0", "--port", "8000", "--keys", keys, "--json", "--model", "/model", "--pages", "64"]
        container = run("run", "-d", *safe, *mounts, tag, *serve)
        try:
            url = f"http://{run('port', container, '8000/tcp').splitlines()[0]}"
            _wait_for_health(url, lambda: run("logs", container))
            assert run("exec", container, "id", "-u") == instructions("USER")[-1]
            body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).encode()
            asked = urllib.request.Request(f"{url}/v1/completions", body, {"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            run("stop", "-t", "40", container)
            assert run("inspect", "-f", "{{.State.ExitCode}}", container) == "0"
        finally:
            subprocess.run([program, "rm", "-f", container], capture_output=True, check=False)
    finally:
        subprocess.run([program, "volume", "rm", "-f", volume], capture_output=True, check=False)


def _wait_for_health(url: str, log: Callable[[], str]) -> None:
    end = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, log()[-2000:]
            time.sleep(0.5)


def test_without_a_builder_the_reason_is_said() -> None:
    program, reason = builder()
    assert program is not None or ("docker" in reason and "podman" in reason)
