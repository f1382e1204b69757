"""Durable snapshots in storage that engines share: saved by one, opened by another."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import headway as hw
from headway.base.specs.samplers import Argmax

TEXT = "A lighthouse keeper counted the ships that passed every night."


async def save(engine: hw.Engine) -> list[int]:
    with engine.context() as ctx:
        ctx.fill(TEXT)
        await ctx.flush()
        ctx.save("shared", durable=True)
        return await ctx.generate(Argmax(), max_tokens=6).tokens()


async def resume(engine: hw.Engine) -> tuple[int, list[int]]:
    ctx = engine.open("shared")
    assert ctx is not None
    with ctx:
        return ctx.seq_len, await ctx.generate(Argmax(), max_tokens=6).tokens()


@pytest.mark.parametrize("place", ["folder", "url"])
def test_any_engine_opens_what_another_saved(place: str, tmp_path: Path):
    where = tmp_path / "snapshots" if place == "folder" else f"memory://headway-{uuid.uuid4().hex}/snapshots"
    with hw.Engine("smollm2", pages=64, snapshots=where) as first:
        expected = first.run(save)
    with hw.Engine("smollm2", pages=64, snapshots=where) as second:
        length, tokens = second.run(resume)
        assert length > 5
        assert tokens == expected
        assert second.delete("shared")
        assert second.open("shared") is None
        assert not second.delete("shared")


def test_a_url_that_nothing_can_open_is_one_sentence():
    with (
        hw.Engine("smollm2", pages=64, snapshots="nothing://there") as engine,
        pytest.raises(hw.SnapshotError, match="cannot be kept at 'nothing://there"),
    ):
        engine.open("shared")


def test_a_damaged_remote_file_is_refused():
    import fsspec

    where = f"memory://headway-{uuid.uuid4().hex}"
    files, path = fsspec.core.url_to_fs(where)
    files.pipe_file(f"{path}/shared.safetensors", b"not a snapshot")
    with hw.Engine("smollm2", pages=64, snapshots=where) as engine, pytest.raises(hw.SnapshotError, match="read"):
        engine.open("shared")
