"""Several models in one process: each answers as it does alone, and is loaded, unloaded and listed as it is used."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway as hw
from headway.base.errors import BadModelFile
from headway.cli.flags.shared import ComputeOptions
from headway.cli.main import dispatch
from headway.cli.serve.models import SeveralModels
from headway.models.adapters.source import AdapterSource
from headway.server.adapters import ServedAdapter
from headway.server.keys import add_key
from headway.server.models import ModelSources
from headway.server.settings import ServerSettings
from support.adapter_files import saved_adapter
from support.holds import HoldMeter, copy_seconds
from support.many_models import ASKED, MIB, PAGES, POSITIONS, Loader, Many, alone, enlarge, many, model_folders

NAMES = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_folders(tmp_path_factory.mktemp("models"), *NAMES)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    return {name: alone(path) for name, path in folders.items()}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[Many]:
    """Three models, of which the first is kept; there is memory for all."""
    loader = Loader()
    sources = tuple(loader.source(path, is_kept=name == "ada") for name, path in folders.items())
    with many(ModelSources(sources, budget=1 << 30), loader) as server:
        yield server


def two_at_a_time(folders: dict[str, Path]) -> int:
    """A budget that two of the models fit in, with their KV caches, and three do not."""
    from headway.server.models.memory import allowance
    from headway.server.models.sources import read_sizes

    sizes = read_sizes(folders["ada"])
    budget = 3 * (sizes.weight_bytes + sizes.context_length * sizes.kv_values_per_token * 4) - 1
    one = allowance(sizes, budget, None)
    assert one is not None
    assert 2 * one <= budget < 3 * one
    return budget


# -- answers -----------------------------------------------------------------------------------------------------------


def test_each_model_says_what_it_says_alone(served: Many, expected: dict[str, str]) -> None:
    assert len(set(expected.values())) == 3
    assert served.said(None) == expected["ada"]
    for name in (*NAMES, *NAMES):
        answer = served.complete(**ASKED, model=name)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    assert sorted(served.loader.opened) == sorted(NAMES)  # each once


def test_every_api_takes_the_name(served: Many) -> None:
    message = [{"role": "user", "content": "hi"}]
    for name in NAMES:
        chat = served.chat(message, model=name, max_tokens=4)
        response = served.post("/v1/responses", model=name, input="hi", max_output_tokens=16)
        claude = served.post("/v1/messages", model=name, messages=message, max_tokens=4)
        tags = served.post(
            "/api/chat", model=f"{name}:latest", messages=message, stream=False, options={"num_predict": 4}
        )
        answers = [response, claude, tags]
        assert [answer.status for answer in answers] == [200, 200, 200], [answer.body for answer in answers]
        assert {chat["model"], response.json["model"], claude.json["model"]} == {name}
        assert served.post("/tokenize", model=name, prompt="hi").status == 200
        assert served.get(f"/props?model={name}").json["model_alias"] == name
        assert served.get(f"/tokenizer_info?model={name}").status == 200
        assert served.get(f"/stats?model={name}").json["model"]["name"] == name
    assert served.get("/props?model=dora").status == 404


def test_a_conversation_goes_on_with_another_model(served: Many) -> None:
    first = served.post("/v1/responses", model="ada", input="hi", max_output_tokens=16).json
    for name, is_warm in (("ada", True), ("bob", False)):
        asked = {"input": "and then?", "previous_response_id": first["id"], "max_output_tokens": 16}
        second = served.post("/v1/responses", model=name, **asked).json
        assert second["model"] == name
        assert (second["usage"]["input_tokens_details"]["cached_tokens"] > 16) == is_warm, name


def test_sessions_have_a_model_each(served: Many, expected: dict[str, str]) -> None:
    async def program(engine) -> str:
        async with engine.context() as ctx:
            return await ctx.fill(ASKED["prompt"]).generate(hw.Argmax(), max_tokens=8, stop_only=True).text()

    for name in (None, *NAMES):
        with hw.connect(served.url, model=name) as engine:
            assert engine.info.name == (name or "ada")
            assert engine.run(program) == expected[name or "ada"]
    with pytest.raises(hw.HeadwayError, match="model 'dora' does not exist; this server has 'ada', 'bob', 'cleo'"):
        hw.connect(served.url, model="dora")
    with pytest.raises(hw.HeadwayError, match="model is 7"):
        hw.connect(served.url, model=7)  # type: ignore[arg-type]


BESIDE = """
import headway as hw
async def main(engine):
    async with engine.context() as ctx:
        text = await ctx.fill("PROMPT").generate(hw.Argmax(), max_tokens=8, stop_only=True).text()
    return [engine.info.name, text]
"""


@pytest.mark.usefixtures("guest")
def test_a_program_runs_beside_the_model_that_it_names(
    folders: dict[str, Path], expected: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = BESIDE.replace("PROMPT", ASKED["prompt"])
    (tmp_path / "beside.py").write_text(source)
    loader = Loader()
    sources = ModelSources(tuple(loader.source(folders[name]) for name in NAMES), budget=1 << 30)
    with many(sources, loader, programs="sandbox") as served:
        for name in (None, *NAMES):
            id = served.post("/v1/programs", source=source, model=name).json["id"]
            events = served.get(f"/v1/programs/{id}/events").body.decode()
            end = json.loads(events.strip().rpartition("data: ")[2])
            assert end["value"] == [name or "ada", expected[name or "ada"]], end
            assert served.get(f"/v1/programs/{id}").json["model"] == name
        missing = served.post("/v1/programs", source=source, model="dora")
        assert (missing.status, missing.error["param"]) == (404, "model")
        run = ["program", "run", str(tmp_path / "beside.py"), "--url", f"http://127.0.0.1:{served.port}"]
        capsys.readouterr()
        assert dispatch([*run, "--model", "bob"]) == 0
        assert json.loads(capsys.readouterr().out)[0] == "bob"
        assert dispatch([*run, "--dtype", "float32"]) == 2
        assert "--dtype is for programs that run here" in capsys.readouterr().err
        served.settled()


def test_batches_name_a_model_in_each_row(served: Many, expected: dict[str, str]) -> None:
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**ASKED, "model": name}}
        for name in (*NAMES, "dora")
    ]
    border, text = "x", "\n".join(map(json.dumps, rows))
    form = "".join(
        f'--{border}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
        for name, more, value in (("purpose", "", "batch"), ("file", '; filename="rows.jsonl"', text))
    )
    head = {"content-type": f"multipart/form-data; boundary={border}"}
    file = served.ask("POST", "/v1/files", f"{form}--{border}--\r\n".encode(), head).json["id"]
    batch = served.post("/v1/batches", input_file_id=file, endpoint="/v1/completions", completion_window="24h").json
    done = served.until(
        lambda: (now := served.get(f"/v1/batches/{batch['id']}").json)["status"] in ("completed", "failed") and now
    )
    assert (done["model"], done["request_counts"]) == ("ada", {"total": 4, "completed": 3, "failed": 1})
    lines = served.get(f"/v1/files/{done['output_file_id']}/content").body.splitlines()
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in map(json.loads, lines)}
    assert found == expected


# -- lists -------------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_state_size_and_context_length(folders: dict[str, Path]) -> None:
    loader = Loader()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader) as served:
        cards = served.get("/v1/models").json["data"]
        assert [(card["id"], card["state"], card["max_model_len"]) for card in cards] == [
            (name, "absent", POSITIONS) for name in NAMES
        ]
        assert all(card["size"] > 10_000 for card in cards)
        assert served.get("/api/ps").json == {"models": []}
        assert [model["name"] for model in served.get("/api/tags").json["models"]] == list(NAMES)
        assert served.get("/health").json == {"status": "ready"}
        served.said("bob")
        assert served.loaded() == {"bob"}
        (running,) = served.get("/api/ps").json["models"]
        assert running["name"] == "bob"
        assert running["expires_at"] > running["modified_at"]
        assert served.get("/stats?model=cleo").error["code"] == "absent"
        assert served.loaded() == {"bob"}  # looking loads nothing
        served.post("/api/show", model="cleo")
        assert served.loaded() == {"bob", "cleo"}


def test_metrics_carry_the_name_of_the_model(served: Many) -> None:
    for name in NAMES:
        served.said(name)
    text = served.get("/metrics").body.decode()
    for name in NAMES:
        assert f'headway_model_ready{{model="{name}"}} 1.0' in text
        assert f'headway_pages_total{{model="{name}"}} {PAGES}.0' in text
        for metric in ("headway_generated_tokens_total", "headway_request_seconds_count", "headway_model_bytes"):
            (line,) = [line for line in text.splitlines() if line.startswith(f'{metric}{{model="{name}"}}')]
            assert float(line.split()[-1]) > 0
    assert 'headway_model_memory_bytes{model="ada"} 1.073741824e+09' in text


def test_slots_are_those_of_one_model_or_of_all(served: Many) -> None:
    with Stream(served, "bob"):
        slots = served.until(lambda: served.get("/slots").json)
        assert [(slot["model"], slot["n_ctx"]) for slot in slots] == [("bob", POSITIONS)]
        assert len(served.get("/slots?model=bob").json) == 1
        assert served.get("/slots?model=ada").json == []


# -- loading and unloading ---------------------------------------------------------------------------------------------


class Stream:
    """A completion that goes on until its client leaves."""

    def __init__(self, served: Many, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        body = {**ASKED, "model": model, "max_tokens": POSITIONS - 64, "stream": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200

    def event(self) -> str:
        """The text of the next event."""
        while not (line := self._response.readline()).startswith(b"data: "):
            assert line
        return "" if b"[DONE]" in line else json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]

    def __enter__(self) -> Stream:
        self.event()
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()


def test_a_model_that_loads_shows_how_far_it_is_while_another_answers(folders: dict[str, Path]) -> None:
    loader = Loader()
    loader.gates["bob"] = gate = threading.Event()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader) as served:
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.append(served.said("bob")))
        with Stream(served, "ada") as stream:
            waiting.start()
            served.until(lambda: served.get("/v1/models/bob").json["progress"] is not None)
            card = served.get("/v1/models/bob").json
            assert (card["state"], card["progress"]) == ("loading", 0.25)
            for _ in range(8):
                stream.event()
            assert served.states()["bob"] == "loading"
            assert not found
        gate.set()
        waiting.join(120)
        assert found == [alone(folders["bob"])]


def test_loading_a_large_tokenizer_holds_no_other_model_up(tmp_path: Path) -> None:
    """The tokenizers package would read it in one piece, as long as a dozen copies of 64 MiB take."""
    folders = model_folders(tmp_path, "ada", "bob")
    enlarge(folders["bob"], 150_000)
    loader, longest, where = Loader(), [], ""
    with many(ModelSources(tuple(map(loader.source, folders.values()))), loader, idle_timeout=0.1) as served:
        served.said("ada")
        while len(longest) < 6 and min(longest, default=99.0) > 1.0:
            with HoldMeter() as meter:
                served.said("bob")
            longest.append(round(meter.longest / copy_seconds(), 2))
            where = meter.where
            served.until(lambda: not served.loaded())
    assert min(longest) <= 1.0, f"{longest} copies\n{where}"


def test_a_server_may_refuse_instead_of_holding_requests(folders: dict[str, Path]) -> None:
    loader = Loader()
    loader.gates["bob"] = gate = threading.Event()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader, on_load="refuse") as served:
        served.until(lambda: served.post("/v1/completions", **ASKED, model="ada").status == 200)
        answer = served.post("/v1/completions", **ASKED, model="bob")
        served.until(lambda: served.get("/v1/models/bob").json["progress"] is not None)
        again = served.post("/v1/completions", **ASKED, model="bob")
        assert (answer.status, answer.error["code"]) == (503, "loading")
        assert "the model 'bob' is loading: 1 of 4 layers; try again in" in again.error["message"]
        assert 1 <= int(again.headers["retry-after"]) <= 60
        gate.set()
        served.until(lambda: served.post("/v1/completions", **ASKED, model="bob").status == 200)


def test_the_least_recently_used_model_makes_room(folders: dict[str, Path], expected: dict[str, str]) -> None:
    loader = Loader()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=two_at_a_time(folders)), loader) as served:
        for name, left in (
            ("ada", {"ada"}),
            ("bob", {"ada", "bob"}),
            ("ada", {"ada", "bob"}),
            ("cleo", {"ada", "cleo"}),
        ):
            assert served.said(name) == expected[name]
            served.settled()
            assert served.loaded() == left
        assert served.models.unloads == 1


def test_a_model_with_requests_drains_before_it_makes_room(folders: dict[str, Path], expected: dict[str, str]) -> None:
    """Both models are busy; the third waits for one of them, whose stream ends as it would have."""
    loader = Loader()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=two_at_a_time(folders)), loader) as served:
        found: dict[str, str] = {}

        def ask(name: str) -> None:
            found[name] = served.said(name)

        threads = {name: threading.Thread(target=ask, args=(name,)) for name in ("cleo", "ada")}
        with Stream(served, "ada") as first, Stream(served, "bob"):
            threads["cleo"].start()
            served.until(lambda: served.states() == {"ada": "draining", "bob": "ready", "cleo": "loading"})
            threads["ada"].start()  # a new request waits until it is loaded again
            for _ in range(4):
                first.event()
            assert not found
        for thread in threads.values():
            thread.join(120)
        assert found == {name: expected[name] for name in found}
        assert set(found) == {"ada", "cleo"}


def test_idle_models_are_unloaded_and_kept_ones_are_not(folders: dict[str, Path], expected: dict[str, str]) -> None:
    loader = Loader()
    sources = tuple(loader.source(path, is_kept=name == "cleo") for name, path in folders.items())
    with many(ModelSources(sources, budget=1 << 30), loader, idle_timeout=0.5) as served:
        assert served.loaded() == {"cleo"}
        with hw.connect(served.url, model="bob"):
            assert served.said("ada") == expected["ada"]
            served.until(lambda: served.loaded() == {"bob", "cleo"})
            time.sleep(1.0)
            assert served.loaded() == {"bob", "cleo"}  # a session holds its model
        served.until(lambda: served.loaded() == {"cleo"})
        assert served.said("ada") == expected["ada"]
        assert loader.opened.count("ada") == 2


def test_a_stored_conversation_outlives_its_model(folders: dict[str, Path]) -> None:
    loader = Loader()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader, idle_timeout=0.4) as served:
        first = served.post("/v1/responses", model="bob", input="hi", max_output_tokens=16).json
        served.until(lambda: not served.loaded())
        asked = {"input": "and then?", "previous_response_id": first["id"], "max_output_tokens": 16}
        second = served.post("/v1/responses", model="bob", **asked)
        assert second.status == 200
        assert second.json["usage"]["input_tokens_details"]["cached_tokens"] == 0  # computed again


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_belong_to_their_model_and_come_back_with_it(folders: dict[str, Path], tmp_path: Path) -> None:
    with hw.Engine(folders["ada"], threads=1, pages=8) as engine:
        for seed, name in enumerate(("red", "blue"), 1):
            saved_adapter(tmp_path / "loras" / name, engine.config, seed=seed)
    key = add_key(tmp_path / "keys.json", "admin", admin=True)
    head = {"authorization": f"Bearer {key}"}
    loader, red = Loader(), AdapterSource("red", tmp_path / "loras" / "red")
    sources = tuple(loader.source(path, adapters=(red,) if name == "bob" else ()) for name, path in folders.items())
    how = {"lora_dir": tmp_path / "loras", "key_file": tmp_path / "keys.json", "idle_timeout": 0.4}
    with many(ModelSources(sources, budget=1 << 30), loader, **how) as served:

        def ask(path: str, **body: object) -> object:
            answer = served.ask("POST" if body else "GET", path, body or None, head)
            assert answer.status == 200, answer.body
            return answer.json if path.startswith("/v1/models") or "completions" in path else None

        def card(name: str) -> dict[str, object]:
            found = ask(f"/v1/models/{name}")
            return {key: found[key] for key in ("state", "size", "max_model_len")}  # type: ignore[index]

        def parents() -> dict[str, str | None]:
            return {card["id"]: card["parent"] for card in ask("/v1/models")["data"]}  # type: ignore[index]

        assert parents() == {"ada": None, "bob": None, "red": "bob", "cleo": None}
        on_disk = (tmp_path / "loras" / "red" / "adapter_model.safetensors").stat().st_size
        assert card("red") == {"state": "absent", "size": on_disk, "max_model_len": POSITIONS}
        said = {name: ask("/v1/completions", **ASKED, model=name) for name in ("bob", "red")}
        texts = {name: answer["choices"][0]["text"] for name, answer in said.items()}  # type: ignore[index]
        assert texts["bob"] != texts["red"]
        red_bytes = served.models._named["bob"].adapters.names["red"].adapter.nbytes
        assert card("red") == {"state": "ready", "size": red_bytes, "max_model_len": POSITIONS}
        assert 0 < red_bytes < card("bob")["size"]
        ask("/v1/load_lora_adapter", lora_name="blue", lora_path="blue", base_model_name="cleo")
        assert parents()["blue"] == "cleo"
        taken = {"lora_name": "red", "lora_path": "blue", "base_model_name": "cleo"}
        for body in (taken, {**taken, "lora_name": "ada"}, {**taken, "lora_name": "x", "base_model_name": "red"}):
            assert served.ask("POST", "/v1/load_lora_adapter", body, head).status == 400
        served.until(lambda: not any(model.loaded for model in served.models.all()))
        again = ask("/v1/completions", **ASKED, model="red")
        assert again["choices"][0]["text"] == texts["red"]  # type: ignore[index]
        assert ask("/v1/completions", **ASKED, model="blue")["model"] == "blue"  # type: ignore[index]
        ask("/v1/unload_lora_adapter", lora_name="blue")
        assert "blue" not in parents()
        with pytest.raises(hw.HeadwayError, match="'red' is an adapter; connect to 'bob'"):
            hw.connect(served.url, model="red", api_key=key)


def test_an_adapter_may_be_unloaded_while_its_model_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    with hw.Engine(folders["ada"], threads=1, pages=8) as engine:
        for seed, name in enumerate(("red", "blue"), 1):
            saved_adapter(tmp_path / name, engine.config, seed=seed)
    loader, key = Loader(), add_key(tmp_path / "keys.json", "admin", admin=True)
    adapters = tuple(AdapterSource(name, tmp_path / name) for name in ("red", "blue"))
    source = loader.source(folders["bob"], adapters=adapters)
    how = {"lora_dir": tmp_path, "key_file": tmp_path / "keys.json"}
    with many(ModelSources((source, loader.source(folders["ada"]))), loader, **how) as served:
        model = served.models._named["bob"]
        read = model.adapters._loaded

        def unloaded_while_read(engine: hw.Engine, source: AdapterSource) -> ServedAdapter:
            adapter = read(engine, source)
            if source.name == "red":
                head = {"authorization": f"Bearer {key}"}
                assert served.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "red"}, head).status == 200
            return adapter

        model.adapters._loaded = unloaded_while_read  # pyright: ignore
        head = {"authorization": f"Bearer {key}"}
        assert served.ask("POST", "/v1/completions", ASKED | {"model": "blue"}, head).status == 200
        assert served.ask("POST", "/v1/completions", ASKED | {"model": "red"}, head).status == 404
        assert model.adapters.known == ("blue",)
        assert model.engine is not None
        assert model.engine.stats().adapters == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_harms_no_other(folders: dict[str, Path], expected: dict[str, str]) -> None:
    loader = Loader()
    loader.failing["bob"] = BadModelFile(f"{folders['bob']}/model.safetensors: it is cut off")
    sources = tuple(loader.source(path, is_kept=name == "bob") for name, path in folders.items())
    with many(ModelSources(sources, budget=1 << 30), loader) as served:
        for _ in range(2):
            answer = served.post("/v1/completions", **ASKED, model="bob")
            assert (answer.status, answer.error["code"]) == (503, "load_failed")
            assert (
                "the model 'bob' could not be loaded: bob/model.safetensors: it is cut off" in answer.error["message"]
            )
            assert str(folders["bob"].parent) not in answer.error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert served.states()["bob"] == "failed"
        assert served.said("ada") == expected["ada"]
        del loader.failing["bob"]
        served.models._named["bob"].retry_at = 0.0  # its time has come
        assert served.said("bob") == expected["bob"]


def test_an_engine_that_dies_is_loaded_again(folders: dict[str, Path], expected: dict[str, str]) -> None:
    loader = Loader()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader) as served, Stream(served, "ada") as stream:
        served.said("bob")
        engine = served.models._named["bob"].engine
        assert engine is not None
        engine.close()
        served.until(lambda: served.post("/v1/completions", **ASKED, model="bob").status == 200)
        stream.event()
        assert served.said("bob") == expected["bob"]


def test_models_that_do_not_fit_are_refused_by_name_and_numbers(folders: dict[str, Path]) -> None:
    loader, budget = Loader(), two_at_a_time(folders)
    sources = tuple(loader.source(path, is_kept=name != "cleo") for name, path in folders.items())
    with many(ModelSources(sources, budget=budget), loader) as served:
        answer = served.post("/v1/completions", **ASKED, model="cleo")
        assert (answer.status, answer.error["code"]) == (503, "out_of_memory")
        assert "'ada', 'bob' are kept, loading or used by sessions" in answer.error["message"]
        served.said("ada")
    with many(ModelSources(sources[2:], loader.folder(folders["ada"].parent), budget=1000), loader) as served:
        answer = served.post("/v1/completions", **ASKED, model="cleo")
        assert "its weights take" in answer.error["message"]


def test_pages_that_were_asked_for_count_as_memory(folders: dict[str, Path], expected: dict[str, str]) -> None:
    """Pages of a given number are within the budget too, by what the engine takes and not by an estimate."""
    with hw.Engine(folders["ada"], threads=1, pages=PAGES) as engine:
        one, cache = engine.info.weight_bytes + engine.info.kv_bytes, engine.info.kv_bytes
        page = cache // PAGES
    several = SeveralModels.of([f"{name}={path}" for name, path in folders.items()], None, (), (), None)
    for pages, budget, fitting in ((PAGES, 2 * one, {"bob", "cleo"}), (2 * one // page + 1, 2 * one, set())):
        options = ComputeOptions(memory=str(budget), threads=1, device="cpu")
        sources = several.sources(ServerSettings(model=""), options, {"pages": pages}, hw.Engine)
        with many(sources, Loader()) as served:
            for name in folders:
                answer = served.post("/v1/completions", **ASKED, model=name)
                if fitting:
                    assert answer.json["choices"][0]["text"] == expected[name]
                else:
                    assert (answer.status, answer.error["code"]) == (503, "out_of_memory")
                    assert f"{pages} pages of {page} bytes need" in answer.error["message"]
            served.settled()
            assert served.loaded() == fitting
            assert sum(model.bytes for model in served.models.all()) == len(fitting) * one


def test_requests_at_once_for_an_unloaded_model_load_it_once(
    folders: dict[str, Path], expected: dict[str, str]
) -> None:
    """Some of them leave while it loads; a stream that is cut later lets the model idle out."""
    loader = Loader()
    loader.gates["bob"] = gate = threading.Event()
    sources = tuple(loader.source(path) for path in folders.values())
    with many(ModelSources(sources, budget=1 << 30), loader, idle_timeout=0.3) as served:
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(served.said("bob"))) for _ in range(6)]
        leaving = [http.client.HTTPConnection("127.0.0.1", served.port) for _ in range(6)]
        for thread, connection in zip(threads, leaving, strict=True):
            thread.start()
            body = json.dumps({**ASKED, "model": "bob", "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        model = served.models._named["bob"]
        served.until(lambda: len(model.waiters) == 12)
        for connection in leaving:
            connection.close()
        served.until(lambda: len(model.waiters) == 6)
        gate.set()
        for thread in threads:
            thread.join(120)
        assert found == [expected["bob"]] * 6
        with Stream(served, "bob") as stream:
            stream.event()
            time.sleep(0.6)
            assert served.states()["bob"] == "ready"  # a stream holds it
        served.until(lambda: not served.loaded())
        assert model.requests == 0
        assert loader.opened == ["bob"]


def test_requests_that_wait_for_a_model_are_bounded_and_may_leave(folders: dict[str, Path]) -> None:
    loader = Loader()
    loader.gates["bob"] = gate = threading.Event()
    sources = tuple(loader.source(path) for path in folders.values())
    limits = {"max_queue_requests": 3, "load_timeout": 1.0}
    with many(ModelSources(sources, budget=64 * MIB), loader, **limits) as served:
        codes: list[str] = []

        def ask() -> None:
            codes.append(served.post("/v1/completions", **ASKED, model="bob").error["code"])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(codes) == ["loading"] * 3 + ["queue_full"] * 5
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request(
            "POST", "/v1/completions", json.dumps({**ASKED, "model": "bob"}), {"content-type": "application/json"}
        )
        served.until(lambda: served.models._named["bob"].waiters)
        connection.close()
        served.until(lambda: not served.models._named["bob"].waiters)
        gate.set()
        served.until(lambda: served.states()["bob"] == "ready")
        assert served.models._named["bob"].requests == 0
