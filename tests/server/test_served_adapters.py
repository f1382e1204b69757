"""Adapters over HTTP: each a model name; loaded and unloaded by admin keys, from below one folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.server.keys import add_key
from support.adapter_files import saved_adapter
from support.live import Answer, Live, live
from support.small import PROMPT, small_folder

PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Served:
    """A server with two adapters, an admin key and another one."""

    def __init__(self, server: Live, folder: Path, keys: dict[str, str]) -> None:
        self.server, self.folder, self.keys = server, folder, keys

    def ask(self, path: str, key: str = "admin", method: str = "POST", **body: Any) -> Answer:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.keys[key]}"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        found = Answer(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return found

    def complete(self, model: str | None = None, **fields: Any) -> Any:
        named = {} if model is None else {"model": model}
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | named | fields
        answer = self.ask("/v1/completions", **asked)
        assert answer.status == 200, answer.body
        return answer.json

    def models(self) -> list[str]:
        return [card["id"] for card in self.ask("/v1/models", method="GET").json["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from headway.models.adapters.source import AdapterSource

    root = tmp_path_factory.mktemp("adapters")
    model = small_folder(root / "model")
    keys = {name: add_key(root / "keys.json", name, admin=name == "admin") for name in ("admin", "other")}
    engine = hw.Engine(model, threads=1, pages=256)
    folders = root / "loras"
    for seed, name in enumerate(("red", "blue", "green"), 1):
        saved_adapter(folders / name, engine.config, seed=seed)
    saved_adapter(root / "outside", engine.config, seed=9)
    sources = (AdapterSource("red", folders / "red"), AdapterSource("half-blue", folders / "blue", 0.5))
    with live(engine, adapters=sources, lora_dir=folders, key_file=root / "keys.json", max_loras=3) as server:
        yield Served(server, folders, keys)


def expected(served: Served, folder: str, scale: float) -> str:
    adapter, engine = hw.Adapter.load(served.folder / folder), served.server.engine

    async def program(engine: hw.Engine) -> str:
        async with engine.context() as context:
            generation = context.fill(PROMPT).generate(
                hw.Argmax(), max_tokens=12, stop_only=True, adapter=(adapter, scale)
            )
            return await generation.text()

    return engine.run(program)


def test_an_adapter_is_a_model_name(served: Served) -> None:
    plain = served.complete()
    for name, folder, scale in (("red", "red", 1.0), ("half-blue", "blue", 0.5)):
        found = served.complete(name)
        assert found["model"] == name
        assert found["choices"][0]["text"] == expected(served, folder, scale) != plain["choices"][0]["text"]
    assert plain["model"] not in ("red", "half-blue")


def test_several_choices_scores_and_chats_go_under_it(served: Served) -> None:
    """The prompt too: its log-probabilities are those of the adapter."""
    first, second = (served.complete(name, prompt_logprobs=0, n=2)["choices"][0] for name in ("red", "half-blue"))
    assert first["text"] == expected(served, "red", 1.0)
    assert first["prompt_logprobs"] != second["prompt_logprobs"] != served.complete(prompt_logprobs=0)["choices"][0]
    message = [{"role": "user", "content": "hi"}]
    answers = [
        served.ask("/v1/chat/completions", messages=message, model=name, max_tokens=8, temperature=0).json
        for name in ("red", "half-blue")
    ]
    assert [answer["model"] for answer in answers] == ["red", "half-blue"]
    streamed = served.ask(
        "/v1/chat/completions", messages=message, model="red", max_tokens=8, temperature=0, stream=True
    )
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed.events if event["choices"])
    assert text == (answers[0]["choices"][0]["message"]["content"] or "")
    assert {event["model"] for event in streamed.events} == {"red"}


def test_adapters_by_number_as_llama_server_has_them(served: Served) -> None:
    listed = served.ask("/lora-adapters", method="GET").json
    assert [(one["id"], one["path"], one["scale"]) for one in listed[:2]] == [(0, "red", 0.0), (1, "half-blue", 0.0)]
    fields = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True}
    for lora, folder in (([{"id": 0, "scale": 1}], "red"), ([{"id": 1, "scale": 0.25}, {"id": 0, "scale": 0}], "blue")):
        found = served.ask("/completion", **fields, lora=lora).json
        assert found["content"] == expected(served, folder, lora[0]["scale"])
        assert found["generation_settings"]["lora"] == lora
    plain = served.ask("/completion", **fields).json["content"]
    assert plain == served.complete()["choices"][0]["text"]
    for lora in ([{"id": 9, "scale": 1}], [{"id": 0, "scale": 1}, {"id": 0, "scale": 1}]):
        assert served.ask("/completion", **fields, lora=lora).error["param"] == "lora"
    assert served.ask("/completion", **fields, model="red", lora=[{"id": 0, "scale": 1}]).error["param"] == "lora"
    assert "pass lora in each" in served.ask("/lora-adapters").error["message"]


def test_models_lists_adapters_with_their_parent(served: Served) -> None:
    cards = {card["id"]: card for card in served.ask("/v1/models", method="GET").json["data"]}
    base = next(name for name, card in cards.items() if card["parent"] is None)
    assert cards["red"]["parent"] == base
    assert served.ask("/v1/models/red", method="GET").json == cards["red"]
    assert str(served.folder) not in json.dumps(cards)
    error = served.ask("/v1/completions", prompt="x", model="purple").error
    assert "'red'" in error["message"]
    assert served.ask("/tokenize", prompt="x", model="red").status == 200


def test_adapters_are_loaded_and_unloaded_while_others_generate(served: Served) -> None:
    async def all_of_them() -> list[Any]:
        async def load_again(i: int) -> None:
            name = f"green-{i}"
            assert (await asyncio.to_thread(served.ask, PATHS[0], lora_name=name, lora_path="green")).status == 200
            found = await asyncio.to_thread(served.complete, name)
            assert found["choices"][0]["text"] == green
            assert (await asyncio.to_thread(served.ask, PATHS[1], lora_name=name)).status == 200

        async def one() -> str:
            return (await asyncio.to_thread(served.complete, "red", max_tokens=40))["choices"][0]["text"]

        others = [asyncio.create_task(one()) for _ in range(4)]
        for i in range(3):
            await load_again(i)
        return await asyncio.gather(*others)

    green = expected(served, "green", 1.0)
    assert len({*asyncio.run(all_of_them())}) == 1
    assert "green-2" not in served.models()


def test_loading_twice_and_unloading_twice(served: Served) -> None:
    load = {"lora_name": "green", "lora_path": str(served.folder / "green")}
    answer = served.ask(PATHS[0], **load)
    assert (answer.status, answer.body.decode()) == (200, "Success: LoRA adapter 'green' added successfully.")
    assert served.ask(PATHS[0], **load).error["code"] == "name_taken"
    assert served.ask(PATHS[0], lora_name="more", lora_path="green").error["code"] == "too_many"
    assert served.ask(PATHS[0], **(load | {"lora_path": "blue", "load_inplace": True})).status == 200
    assert served.complete("green")["choices"][0]["text"] == expected(served, "blue", 1.0)
    answer = served.ask(PATHS[1], lora_name="green")
    assert (answer.status, answer.body.decode()) == (200, "Success: LoRA adapter 'green' removed successfully.")
    assert served.ask(PATHS[1], lora_name="green").status == 404
    assert served.ask("/v1/completions", prompt="x", model="green").status == 404
    assert served.complete("half-blue")["choices"][0]["text"] == expected(served, "blue", 0.5)


def test_only_admin_keys_change_adapters(served: Served) -> None:
    for path, body in zip(PATHS, ({"lora_name": "mine", "lora_path": "red"}, {"lora_name": "red"}), strict=True):
        answer = served.ask(path, key="other", **body)
        assert (answer.status, answer.error["code"]) == (403, "not_admin")
    assert "red" in served.models()


@pytest.mark.parametrize(
    "path", ["../outside", "/etc", ".", "", "nowhere", "red/../../outside", "link", "files", "a\0b"]
)
def test_paths_are_below_the_folder(served: Served, path: str) -> None:
    link, files = served.folder / "link", served.folder / "files"
    if not link.exists():
        link.symlink_to(served.folder.parent / "outside")
        files.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (files / name).symlink_to(served.folder.parent / "outside" / name)
    before = served.server.engine.stats().adapters
    answer = served.ask(PATHS[0], lora_name="sly", lora_path=path)
    assert answer.status == 400, answer.body
    assert answer.error["code"] in ("path_not_allowed", None)
    assert "sly" not in served.models()
    assert served.server.engine.stats().adapters == before
    absolute = served.ask(PATHS[0], lora_name="sly", lora_path=str(served.folder.parent / "outside"))
    assert absolute.error["code"] == "path_not_allowed"


def test_a_bad_adapter_is_refused_without_a_trace(served: Served) -> None:
    wide = served.folder / "wide"
    if not wide.exists():
        saved_adapter(wide, served.server.engine.config, seed=3, rank=300)
        (served.folder / "empty").mkdir()
    for name, words in (("wide", "rank 300"), ("empty", "adapter_model.safetensors")):
        error = served.ask(PATHS[0], lora_name="bad", lora_path=name).error
        assert (error["code"], error["param"]) == ("invalid_adapter", "lora_path")
        assert words in error["message"]
        assert str(served.folder) not in error["message"]
    assert "bad" not in served.models()


def test_metrics_count_adapters(served: Served) -> None:
    text = served.ask("/metrics", method="GET").body.decode()
    value = next(line for line in text.splitlines() if line.startswith("headway_adapters{"))
    assert float(value.split()[-1]) == served.server.engine.stats().adapters >= 2


def test_without_a_folder_there_are_no_such_routes(tmp_path: Path) -> None:
    with live(hw.Engine(small_folder(tmp_path), threads=1, pages=64)) as server:
        assert server.post(PATHS[0], lora_name="x", lora_path="x").status == 404
