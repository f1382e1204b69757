"""/v1/files and /v1/batches with OpenAI's own client, and what a key may not see or do."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.server.api.form import parse_form
from headway.server.app import create_app
from headway.server.batches.files import FileStore
from headway.server.errors import ApiError
from headway.server.keys import Tenant, TenantLimits
from headway.server.settings import ServerSettings
from support.live import PATIENCE, Live

ADA, BOB = (Tenant(name, name, TenantLimits()) for name in ("ada", "bob"))


@pytest.fixture
def client(served: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def lines(count: int, **body: Any) -> bytes:
    fields = {"model": "smollm2", "max_tokens": 6, "temperature": 1.0, **body}
    rows = [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": fields | {"prompt": f"No. {i}"}}
        for i in range(count)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def started(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> Any:
    file = client.files.create(file=(name, data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "tests"}
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    end = time.monotonic() + PATIENCE
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < end
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def content(client: openai.OpenAI, id: str | None) -> list[Any]:
    return [] if id is None else [json.loads(line) for line in client.files.content(id).text.splitlines()]


def test_a_batch_from_upload_to_results(client: openai.OpenAI, served: Live) -> None:
    data = lines(6) + lines(1, temperature=-1).replace(b"row-0", b"bad")
    name = "../../etc/passwd"  # only ever sent back
    file = client.files.create(file=(name, data), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == (name, len(data), "batch")
    assert client.files.content(file.id).content == data
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "tests"}
    )
    client.files.delete(file.id)  # the batch keeps its rows
    done = ended(client, batch)
    assert (done.status, done.metadata) == ("completed", {"of": "tests"})
    assert done.request_counts.model_dump() == {"total": 7, "completed": 6, "failed": 1}
    results = content(client, done.output_file_id)
    assert [one["custom_id"] for one in results] == [f"row-{i}" for i in range(6)]
    (failed,) = content(client, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    again = ended(client, started(client, lines(6)))
    texts = [one["response"]["body"]["choices"][0]["text"] for one in results]
    assert [one["response"]["body"]["choices"][0]["text"] for one in content(client, again.output_file_id)] == texts
    assert [one.id for one in client.batches.list(limit=1)][:2] == [again.id, batch.id]
    assert again.output_file_id in {one.id for one in client.files.list(purpose="batch_output")}
    for one in client.files.list():
        client.files.delete(one.id)
    assert list(client.files.list()) == []
    served.until(served.is_quiet)


def test_a_batch_that_is_cancelled_accounts_for_every_row(client: openai.OpenAI, served: Live) -> None:
    batch = started(client, lines(40, max_tokens=400, ignore_eos=True))
    served.until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    client.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.status == "cancelled"
    rows = [*content(client, done.output_file_id), *content(client, done.error_file_id)]
    assert sorted(one["custom_id"] for one in rows) == sorted(f"row-{i}" for i in range(40))
    assert rows[-1]["error"]["code"] == "batch_cancelled"
    served.until(served.is_quiet)


def test_a_file_that_is_not_valid_fails_before_anything_is_computed(client: openai.OpenAI) -> None:
    done = ended(client, started(client, lines(2) + b"{not json}\n" + lines(1) + lines(1).replace(b"row-0", b"")))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert [one.line for one in done.errors.data] == [3, 4, 5]
    assert "is also that of line 1" in done.errors.data[1].message
    assert ended(client, started(client, b"\n")).errors.data[0].code == "empty_file"


def test_bad_requests_are_refused(client: openai.OpenAI, served: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose is 'vision'"):
        client.files.create(file=("a", b"{}"), purpose="vision")
    for call in (client.files.retrieve, client.files.content, client.files.delete, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError, match="there is no"):
            call("..%2f..%2fetc")
    file = client.files.create(file=("a", b"{}"), purpose="batch", expires_after={
        "anchor": "created_at", "seconds": 3600})  # fmt: skip
    assert file.expires_at == file.created_at + 3600
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong, why in (
        ({"endpoint": "/v1/models"}, "endpoint is '/v1/models'"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata has 1 entries"),
        ({"input_file_id": "file-0"}, "there is no file 'file-0'"),
    ):
        answer = served.post("/v1/batches", **(body | wrong))
        assert answer.status in (400, 404)
        assert why in answer.error["message"]
    client.files.delete(file.id)


class TestForm:
    def test_values_are_bytes_as_they_were(self) -> None:
        value = b"\r\n--no\r\n--x y\x00\xff\r\n"
        body = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n'
            b"Content-Type: application/octet-stream\r\n\r\n" + value.replace(b"--x", b"--X") + b"\r\n--x--\r\n"
        )
        parts = parse_form('multipart/form-data; boundary="x"', body)
        [purpose], [file] = parts["purpose"], parts["file"]
        assert purpose.text == "batch"
        assert (file.value, file.filename) == (value.replace(b"--x", b"--X"), 'a "b".jsonl')

    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            ("application/json", b"{}"),
            ("multipart/form-data", b""),
            ("multipart/form-data; boundary=x", b""),
            ("multipart/form-data; boundary=x", b"--x--"),
            ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nunended'),
            ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--"),
            ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: x; name="a"\r\n\r\n\r\n' * 20 + b"--x--"),
        ],
    )
    def test_anything_else_is_refused(self, kind: str, body: bytes) -> None:
        with pytest.raises(ApiError, match="multipart/form-data") as caught:
            parse_form(kind, body)
        assert caught.value.status == 400


def test_files_belong_to_their_key_are_bounded_and_expire() -> None:
    async def check() -> None:
        files = FileStore(ServerSettings(max_files=2, max_file_bytes=100))
        first = files.add(ADA, "a", "batch", data=b"x" * 60)
        for what in (lambda: files.get(BOB, first.id), lambda: files.delete(BOB, first.id)):
            with pytest.raises(ApiError, match="there is no file"):
                what()
        assert (files.all(BOB), files.get(ADA, first.id)) == ([], first)
        with pytest.raises(ApiError, match=r"max_files 2 or max_file_bytes 100; delete some"):
            files.check_room(ADA, 41)
        files.check_room(BOB, 41)
        short = files.add(ADA, "b", "batch", data=b"x", seconds=0.05)
        assert {path.name for path in files.folder.iterdir()} == {first.id, short.id}
        assert files.folder.stat().st_mode & 0o77 == 0
        await asyncio.sleep(0.2)
        assert files.all(ADA) == [first]
        folder: Path = files.folder
        files.close()
        assert not folder.exists()

    asyncio.run(check())


def test_batches_belong_to_their_key_and_are_bounded() -> None:
    async def check() -> None:
        app = create_app(ServerSettings(max_batches=1, max_total_batches=2), lambda: pytest.fail("no engine"))
        batches = app.state.batches
        file = batches.files.add(ADA, "a", "batch", data=lines(3))
        mine = batches.start(ADA, file, "/v1/completions", None)  # waits for a model that never comes
        with pytest.raises(ApiError, match="this key has 1 batches under way, and may have 1"):
            batches.start(ADA, file, "/v1/completions", None)
        batches.start(BOB, file, "/v1/completions", None)
        with pytest.raises(ApiError, match="this server has 2 batches under way"):
            batches.start(Tenant("eve", "", TenantLimits()), file, "/v1/completions", None)
        with pytest.raises(ApiError, match="there is no batch"):
            batches.get(BOB, mine.id)
        folder: Path = batches.files.folder
        await batches.close()
        assert not folder.exists()

    asyncio.run(check())
